"""The script's view of trl and transformers; and that the packages themselves stay as they are."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl
from transformers import HfArgumentParser

from pronghorn.compat.scripts.adaptor import Adaptor
from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.running import run


def script(text: str, notes: Notes | None = None) -> dict[str, Any]:
    """The names that a script has in the end."""
    with Adaptor(notes or Notes(lambda text: None)):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(text, names)
    return names


def test_only_the_script_sees_other_classes() -> None:
    before = {name: getattr(trl, name) for name in ("SFTTrainer", "SFTConfig", "DPOTrainer")}
    inside = dict(vars(trl.SFTTrainer)), dict(vars(transformers.TrainingArguments))
    names = script(
        "from trl import SFTTrainer, SFTConfig\nimport trl, transformers\nfrom transformers import AutoConfig\n"
        "from trl.trainer.sft_trainer import SFTTrainer as Again"
    )
    assert issubclass(names["SFTTrainer"], trl.SFTTrainer)
    assert names["SFTTrainer"] is not trl.SFTTrainer
    assert names["SFTTrainer"] is names["trl"].SFTTrainer is names["trl"].trainer.SFTTrainer is names["Again"]
    assert names["SFTTrainer"].__name__ == "SFTTrainer"
    assert names["AutoConfig"] is transformers.AutoConfig
    assert {name: getattr(trl, name) for name in before} == before
    assert (dict(vars(trl.SFTTrainer)), dict(vars(transformers.TrainingArguments))) == inside


def test_what_trl_has_moved_or_dropped() -> None:
    names = script(
        "from trl import DataCollatorForCompletionOnlyLM, maybe_apply_chat_template\n"
        "from trl.trainer import DataCollatorForCompletionOnlyLM as Again"
    )
    assert names["Again"] is names["DataCollatorForCompletionOnlyLM"]
    with pytest.raises(ImportError, match="PPOTrainer is not in this TRL") as caught:
        script("from trl import PPOTrainer")
    assert "GRPOTrainer" in caught.value.fix  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        script("from trl import no_such_name")


def test_arguments_are_of_the_real_class() -> None:
    """A trainer saves them with torch.save, by the name of their class."""
    made = script(
        "from trl import SFTConfig\n"
        "made = SFTConfig('somewhere', max_seq_length=77, report_to='none')\nis_one = isinstance(made, SFTConfig)"
    )
    assert type(made["made"]) is trl.SFTConfig
    assert made["is_one"]
    assert (made["made"].max_length, made["made"].output_dir) == (77, "somewhere")
    assert pickle.loads(pickle.dumps(made["made"])).max_length == 77


def test_a_script_derives_its_own_arguments_and_parses_them() -> None:
    names = script("""
from dataclasses import dataclass, field
from transformers import TrainingArguments, HfArgumentParser

@dataclass
class Mine(TrainingArguments):
    extra: int = field(default=3)

mine = Mine(output_dir="somewhere", warmup_ratio=0.5, report_to="none", extra=4)
parsed, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "here", "--report_to", "none"])
""")
    assert type(names["mine"]) is names["Mine"]
    assert (names["mine"].extra, names["mine"].warmup_steps) == (4, 0.5)
    assert type(names["parsed"]) is transformers.TrainingArguments
    assert {field.name for field in dataclasses.fields(names["Mine"])} > {"extra", "output_dir"}
    assert HfArgumentParser is names["HfArgumentParser"]


def test_what_moved_inside_of_trl_is_found_where_it_was() -> None:
    notes = Notes(lambda text: None)
    names = script("from trl import ORPOTrainer, ORPOConfig", notes)
    from trl.experimental.orpo import ORPOTrainer

    assert issubclass(names["ORPOTrainer"], ORPOTrainer)
    assert "from trl import ORPOTrainer: imported from trl.experimental.orpo" in notes.said
    with pytest.raises(ImportError, match="NoSuchTrainer"):
        script("from trl import NoSuchTrainer")


def test_what_a_script_sets_in_a_package_is_set_there() -> None:
    script("import trl\ntrl.set_by_a_script = 3")
    assert trl.set_by_a_script == 3
    del trl.set_by_a_script


def test_data_sets_are_mapped_by_functions_that_use_a_package(tmp_path: Path) -> None:
    """In processes of their own: what they use is sent there."""
    file = tmp_path / "mine.py"
    file.write_text(
        """
import transformers
import trl
from datasets import Dataset

def length(row):
    assert trl.SFTConfig.__name__ == "SFTConfig"
    return {"name": transformers.Trainer.__name__ + row["text"]}

data = Dataset.from_dict({"text": ["a", "b"]}).map(length, num_proc=2)
again, once_more = (Dataset.from_dict({"text": ["a", "b"]}).map(length) for _ in range(2))
""",
        encoding="utf-8",
    )
    main = run(str(file), notes=Notes(lambda text: None))
    assert main.data["name"][:] == main.again["name"][:] == ["Trainera", "Trainerb"]
    assert main.again._fingerprint == main.once_more._fingerprint  # a function that cannot be read has a new one every time


def test_everything_of_a_package() -> None:
    names = script("from trl import *")
    assert names["SFTConfig"].__mro__[1] is trl.SFTConfig
