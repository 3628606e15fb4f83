"""What stays with an export: export.json (what was written, of what, and the verdict) and the model card."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pronghorn.export.checking import Verdict
from pronghorn.export.job import NOTE, Job
from pronghorn.export.usage import Usage, is_local, public_name
from pronghorn.model.heads import HEADS
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import named
from pronghorn.report.run_log import plain
from pronghorn.train.run.run_events import versions

RECORD = "export.json"
LIBRARIES = {"adapter": "peft"}  # the card's library_name; else transformers


def write_record(job: Job, name: str, figures: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    there = (file for file in sorted(job.folder.rglob("*")) if file.is_file() and file.name != NOTE)
    files = {file.relative_to(job.folder).as_posix(): file.stat().st_size for file in there}
    recipe = job.recipe
    record: dict[str, Any] = {
        "target": name,
        "checkpoint": job.checkpoint.name,
        "base_model": public_name(recipe.model),
        "method": recipe.method,
        "figures": figures,
        "check": verdict.as_dict(),
        "versions": versions(),
        "files": files,
        **job.facts,
    }
    (job.folder / RECORD).write_text(json.dumps(plain(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return record


def write_card(job: Job, name: str, figures: dict[str, Any], usages: list[Usage], verdict: Verdict | None = None) -> None:
    """The README.md that a hub shows."""
    (job.folder / "README.md").write_text(model_card(job.recipe, name, figures, usages, verdict), encoding="utf-8")


def model_card(recipe: Recipe, to: str, figures: dict[str, Any], usages: list[Usage], verdict: Verdict | None = None) -> str:
    """Paths are reduced to their last part."""
    base, local = public_name(recipe.model), is_local(recipe.model)
    data = ", ".join(public_name(named(one)) for one in recipe.data.train)
    rows = "\n".join(f"| {name} | {f'{value:.4f}' if isinstance(value, float) else value} |" for name, value in figures.items())
    blocks = "\n".join(f"\n{usage.program}:\n\n```{usage.language}\n{usage.text}\n```" for usage in usages)
    checked = f"\nCompared with the trained model: {verdict.sentence}.\n" if verdict is not None else ""
    library = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"""---
{"" if local else f"base_model: {base}{chr(10)}"}library_name: {LIBRARIES.get(to, "transformers")}
pipeline_tag: {HEADS[recipe.objective.kind.head].pipeline}
tags: [pronghorn, {recipe.method}]
---
# {Path(recipe.output).name}

{base}, fine-tuned with Pronghorn ({recipe.method}) on {data}.

| | |
|---|---|
{rows}
{checked}
## How to run it
{blocks}

## Recipe

```yaml
{public_recipe(recipe)}```

Made with {library}.
"""


def public_recipe(recipe: Recipe) -> str:
    """What differs from the defaults, paths reduced to their last part."""
    values = json.loads(recipe.model_dump_json(exclude_defaults=True))

    def public(value: object) -> Any:
        if isinstance(value, dict):
            return {key: public(one) for key, one in value.items()}
        if isinstance(value, list):
            return [public(one) for one in value]
        return public_name(value) if isinstance(value, str) and is_local(value) else value

    text = StringIO()
    YAML(typ="safe", pure=True).dump(public(values), text)
    return text.getvalue()
