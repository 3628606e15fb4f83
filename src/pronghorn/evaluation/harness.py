"""Tasks of EleutherAI's lm-evaluation-harness, asked of a model that is loaded already: `pronghorn eval RUN --lm-eval TASKS`.

The harness is no part of Pronghorn and is imported only here, where it is installed. It reads the tasks' data from the hub.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.hf_types import HFModel, Tokenizer

INSTALL = 'pip install "lm-eval>=0.4.9"'


def require_harness(tasks: Sequence[str], own: Path | None = None) -> Any:
    """The harness's table of tasks, `own`: a folder of task files of one's own. Before a model is loaded for it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise CommandError(what="--lm-eval: lm-evaluation-harness is not installed", fix=INSTALL)
    if own is not None and not own.is_dir():
        raise CommandError(what="--lm-eval-path: folder not found", where=str(own), fix="name the folder of your task files")
    from lm_eval.tasks import TaskManager

    table = TaskManager(include_path=str(own) if own is not None else None)
    known = set(table.match_tasks(list(tasks)))
    missing = [task for task in tasks if not known & set(table.match_tasks([task]))]
    if missing or not tasks:
        raise CommandError(
            what=f"--lm-eval: lm-evaluation-harness has no task {', '.join(missing) or 'without a name'}",
            fix="`lm-eval ls tasks` lists them",
        )
    return table


def run_tasks(
    model: HFModel, tokenizer: Tokenizer, tasks: Sequence[str], table: Any, *, limit: int | None, chat: bool, batch_size: int
) -> dict[str, dict[str, float]]:
    """By task: what the harness measured, by its own names. `chat`: the questions go through the chat template."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    try:
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(tasks),
            task_manager=table,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
            bootstrap_iters=0,
        )
    except (OSError, ConnectionError) as error:  # what `datasets` raises where a hub does not answer, or has no such data
        raise EnvironmentFault(
            what="cannot read a task's data",
            where=", ".join(tasks),
            why=str(error).split("\n")[0],
            fix="check that the Hub is reachable, then run the same command again",
        ) from error
    results: dict[str, dict[str, Any]] = found["results"]
    return {
        task: {name.removesuffix(",none"): float(value) for name, value in values.items() if _is_figure(name, value)}
        for task, values in results.items()
    }


def _is_figure(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and "stderr" not in name and name != "sample_len"
