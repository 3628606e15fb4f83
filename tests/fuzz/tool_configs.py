"""Configs of other tools with one thing wrong: a recipe that is valid and a word about every key, or a sentence."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

from ruamel.yaml import YAML

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from pronghorn.convert.converting import convert_file
from pronghorn.recipe_file import parse_recipe
from pronghorn.yaml_file import read_yaml

CONFIGS = sorted((Path(__file__).parent.parent / "convert").glob("*/*.y*ml"))
INFO = Path(__file__).parent.parent / "convert" / "llamafactory" / "data" / "dataset_info.json"


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally = Tally("tool_configs", count, seed)
    yaml = YAML(typ="safe", pure=True)
    file = folder / "config.yaml"
    for number in range(count):
        chance = tally.random(number)
        original = chance.choice(CONFIGS)
        if chance.random() < 0.3:
            content, what = mutated_bytes(original.read_bytes(), chance)
        else:
            changed, what = yaml.load(original.read_text()), ""
            for _ in range(chance.choice((1, 2, 5))):
                changed, one = mutated_value(changed, chance)
                what += one + "; "
            text = io.StringIO()
            yaml.dump(changed, text)
            content = text.getvalue().encode("utf-8", "surrogatepass")

        def work(content: bytes = content) -> str:
            file.write_bytes(content)
            found = convert_file(file, dataset_info=INFO)
            parse_recipe(found.recipe)
            values, _ = read_yaml(content.decode(), "c", [])
            known = {fate.key for fate in found.fates}
            unsaid = [key for key in values if str(key) not in known]
            return f"silent\nnothing is said of {unsaid}" if unsaid else "same"

        tally.add(number, f"{original.name}: {what}", work)
    return tally.outcomes
