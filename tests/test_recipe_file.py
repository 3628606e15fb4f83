"""YAML 1.2 and command-line words into a recipe: every problem in one pass, each with its line and its fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pronghorn.errors import Problems, PronghornError, RecipeError
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import EXAMPLE, load_recipe, parse_recipe
from pronghorn.recipe_keys import all_keys
from pronghorn.recipe_parts import Share, steps_between
from tables import table

SMALLEST = "model: some/model\ndata: {train: a.jsonl}\n"


def problems(text: str, *words: str) -> list[PronghornError]:
    with pytest.raises(PronghornError) as caught:
        parse_recipe(text, words, name="r.yaml")
    return list(caught.value.problems) if isinstance(caught.value, Problems) else [caught.value]


def told(text: str, *words: str) -> list[tuple[str, str, str]]:
    return [(problem.where, problem.what, problem.fix) for problem in problems(text, *words)]


# YAML 1.2 ---------------------------------------------------------------------------------------------------------------


@table("written", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001"])
def test_a_number_is_a_number_however_it_is_written(written: str) -> None:
    assert parse_recipe(f"{SMALLEST}train: {{lr: {written}}}").train.lr == 1e-4


@table("word", ["no", "yes", "on", "off", "y", "n"])
def test_words_that_were_booleans_in_yaml_1_1_are_words(word: str) -> None:
    assert parse_recipe(f"model: {word}\ndata: {{train: [{word}, b]}}").data.train == (word, "b")
    assert parse_recipe(f"model: {word}\ndata: {{train: x}}").model == word


def test_a_key_that_stands_twice_is_an_error_with_both_lines() -> None:
    text = "model: a\ndata:\n  train: x\n  eval: 0.1\n  eval: 0.2\nmodel: b\n"
    assert told(text) == [
        ("r.yaml:5", "data.eval: this key appears twice", "remove one of the two"),
        ("r.yaml:6", "model: this key appears twice", "remove one of the two"),
    ]
    assert [problem.why for problem in problems(text)] == ["it is already set at r.yaml:4", "it is already set at r.yaml:1"]


def test_what_is_not_yaml_is_told_with_its_line() -> None:
    ((where, what, fix),) = told("model: a\ndata: {train: x\nlora: {r: 3}\n")
    assert where == "r.yaml:3"
    assert what.startswith("not YAML")
    assert "brackets" in fix


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_recipe(text: str) -> None:
    ((where, what, fix),) = told(text)
    assert (where, what) == ("r.yaml", "the recipe is empty")
    assert "pronghorn new" in fix


def test_a_tag_runs_nothing_and_is_refused_with_its_line() -> None:
    found = problems("model: !!python/name:os.system ''\ndata:\n  train: !!float abc\n")
    assert [problem.where for problem in found] == ["r.yaml:1", "r.yaml:3"]
    assert all("is not a value" in problem.what for problem in found)


def test_a_section_whose_lines_are_all_commented_out_is_the_default() -> None:
    assert parse_recipe(f"{SMALLEST}train:\n  # lr: 3\nlora:\n") == parse_recipe(SMALLEST)
    assert parse_recipe(f"{SMALLEST}train:\n  # lr: 3\n", ["train.lr=3"]).train.lr == 3


# Problems ---------------------------------------------------------------------------------------------------------------


def test_every_problem_in_one_pass_each_with_its_line() -> None:
    text = """\
method: lroa
lora:
  r: many
  targts: [q_proj]
data:
  max_length: 4096
  max_length: 2048
  eval: 1.5
train: {epochs: 0, capacity: 1000, batch_tokens: 65536}
memory: {budget: a lot}
"""
    found = [(what.replace(":", " ").split(" ")[0], where, fix) for where, what, fix in told(text)]
    assert sorted(found) == sorted(
        [
            ("model", "r.yaml", "add `model: ...`; `pronghorn new -` shows an example"),
            ("method", "r.yaml:1", "did you mean `lora`? use one of: lora, qlora, fp8, full"),
            ("lora.r", "r.yaml:3", "write one such as 16"),
            ("lora.targts", "r.yaml:4", "did you mean `lora.targets`?"),
            ("data.train", "r.yaml:5", "add `train: ...`; `pronghorn new -` shows an example"),
            ("data.max_length", "r.yaml:6", "set train.capacity: 4096 or more"),
            ("data.max_length", "r.yaml:7", "remove one of the two"),
            ("data.eval", "r.yaml:8", "write a file name, or a fraction between 0 and 1"),
            ("train.epochs", "r.yaml:9", "write a number in range such as 1"),
            ("train.batch_tokens", "r.yaml:9", "set train.batch_tokens: 65000"),
            ("memory.budget", "r.yaml:10", "write auto, an amount such as 24GB, or a percentage such as 80%"),
        ]
    )


@table(
    ("line", "fix"),
    [
        ("train: {learning_rate: 3}", "did you mean `train.lr`?"),
        ("learning_rate: 3", "did you mean `train.lr`?"),
        ("lora: {rank: 3}", "did you mean `lora.r`?"),
        ("train: {max_length: 3}", "did you mean `data.max_length`?"),
        ("train: {nothing_like_it: 3}", "known keys: average, batch_rows, batch_tokens, betas,"),
        ("train: {batch_token: 3}", "did you mean `train.batch_tokens`?"),
        ("output-folder: x", "did you mean `output`?"),
        ("<<: {a: 1}", "known keys: checkpoint, compute, data,"),
        ("eval: {stop: {patince: 3}}", "did you mean `eval.stop.patience`?"),
    ],
)
def test_unknown_keys_are_answered_with_a_known_one(line: str, fix: str) -> None:
    ((where, what, hint),) = told(SMALLEST + line)
    assert where == "r.yaml:3"
    assert what.endswith("unknown key")
    assert fix in hint


@table(
    ("line", "fix"),
    [
        ("lora: {targets: 5}", "write all-linear, or a list"),
        ("train: {betas: [0.9]}", "write two numbers"),
        ("train: {schedule: cosinus}", "did you mean `cosine`? use one of: cosine, linear, constant, wsd"),
        ("train: {lr: fast}", "write one such as 0.0002"),
        ("train: {lr: -1}", "write a number in range such as 0.0002"),
        ("train: 3", "write its keys below it, any of: epochs, steps,"),
        ("memory: {budget: 24}", "write auto, an amount such as 24GB, or a percentage such as 80%"),
        ("train: {lr: }", "set train.lr, or remove the key"),
        ("output: 2024", 'put it in quotes: output: "2024"'),
        ("eval: {every: [1, 2]}", "write a number of steps, or a fraction of all steps such as 0.1"),
        ("train: {warmup: 1.5}", "write a fraction of all steps below 1, or a number of steps"),
        ("checkpoint: {keep: [1, 2]}", "write one such as 3"),
    ],
)
def test_a_wrong_value_is_told_once_with_what_to_write(line: str, fix: str) -> None:
    ((where, _, hint),) = told(SMALLEST + line)
    assert where == "r.yaml:3"
    assert fix in hint


@table("value", ["[a]", "3", "{random: 1.5}", "random:1.5", "{radnom: 0.5}"])
def test_a_selection_is_a_file_or_a_share(value: str) -> None:
    ((_, _, fix),) = told(SMALLEST, f"data.select={value}")
    assert fix == "write a file of `pronghorn data audit`, or {random: 0.5}, a share between 0 and 1"
    assert parse_recipe(SMALLEST, ["data.select.random=0.5"]).data.select == Share(random=0.5)


def test_aliases_that_never_end_or_make_billions_are_refused_at_once() -> None:
    ((where, what, _),) = told(SMALLEST + "lora: &a {r: *a}\n")
    assert (where, what) == ("r.yaml:3", "a YAML alias refers to itself")
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    ((_, what, _),) = told(bomb + SMALLEST)
    assert "over 5,000 values" in what
    ((_, what, _),) = told(SMALLEST + "lora: " + "{r: " * 2000 + "1" + "}" * 2000)
    assert what == "the recipe is nested too deeply"
    assert parse_recipe("model: some/model\ndata: {train: &f a.jsonl, eval: *f}\n").data.eval == "a.jsonl"


# Command line -----------------------------------------------------------------------------------------------------------


def test_words_of_the_command_line_override_the_file() -> None:
    recipe = parse_recipe(
        f"{SMALLEST}train: {{lr: 1.0, epochs: 5}}",
        [
            "train.lr=1e-4",
            "lora.targets=[q_proj, v_proj]",
            "data.eval=0.1",
            "eval.stop.patience=2",
            "output=runs/a=b",
            "data.train=b.jsonl",
            "train.steps=null",
            "lora.dora=true",
        ],
    )
    assert (recipe.train.lr, recipe.train.epochs, recipe.train.steps) == (1e-4, 5, None)
    assert recipe.lora.targets == ("q_proj", "v_proj")
    assert recipe.lora.dora is True
    assert recipe.data.eval == 0.1
    assert recipe.eval.stop is not None
    assert recipe.eval.stop.patience == 2
    assert (recipe.output, recipe.data.train) == ("runs/a=b", ("b.jsonl",))


# Files ------------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match="cannot read the recipe") as caught:
            load_recipe(path)
        assert caught.value.where == str(path)
        assert "pronghorn new" in caught.value.fix
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("model: café\n".encode("latin-1"))
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(latin)


def test_the_example_shows_the_defaults_it_claims_to_show() -> None:
    """All but the required keys, and held-out data, which it says is none by default."""
    shown = parse_recipe(EXAMPLE)
    default = Recipe.model_validate({"model": shown.model, "data": {"train": shown.data.train, "eval": shown.data.eval}})
    assert shown == default
    assert "(default: none)" in next(line for line in EXAMPLE.splitlines() if line.startswith("  eval:"))
    assert Recipe.model_validate({"model": "m", "data": {"train": "x"}}).data.eval is None


def test_the_example_has_every_key() -> None:
    """As a line of its own or inside a section's; one of the names in data.fields stands for all of them."""
    names = re.findall(r"(?:^|[{,] ?|# )(\w+): ", EXAMPLE, flags=re.M) + re.findall(r"(?m)^ *(\w+):", EXAMPLE)
    known = [key for key in all_keys() if not key.startswith(("data.fields.", "data.special_tokens."))]
    assert [key for key in known if key.split(".")[-1] not in names] == []


def test_every_commented_key_of_the_example_is_one() -> None:
    text = re.sub(r"(?m)^  # (\w+: )", r"  \1", EXAMPLE.replace("  # chat_template", "  ##"))  # one of two templates
    recipe = parse_recipe(text)
    written = re.search(r"or sources with options: (.*)", EXAMPLE)
    assert written
    first, second = parse_recipe(f"model: a\ndata:\n  train: {written[1]}\n").data.train
    assert (first.weight, second.max_rows, second.columns.prompt) == (2, 1000, "question")
    assert recipe.data.fields.messages == "dialogue"
    assert recipe.data.message_fields == {"role": "from", "content": "value"}
    assert recipe.data.roles == {"assistant": ("bot",), "user": ("customer",)}
    assert (recipe.data.max_rows, recipe.data.template, recipe.data.eot_tokens) == (1000, "chatml", ("<|im_end|>",))
    assert recipe.data.special_tokens.pad_token == "<|endoftext|>"


@table(
    ("text", "what", "fix"),
    [
        (
            "metrics: [exact_match, mine.py]",
            "mine.py is a file, and Pronghorn runs code only if it is named on the command line",
            "remove it here and add: --metric-file mine.py",
        ),
        ("metrics: folder/mine", "Pronghorn runs code only if it is named on the command line", "--metric-file folder/mine"),
        ("metric_file: mine.py", "Pronghorn runs code only if it is named on the command line", "--metric-file mine.py"),
        ("metrics: [exact]", "invalid value 'exact'", "did you mean `exact_match`?"),
        ("metrics: [regex]", "eval.regex: the metric `regex` needs a pattern", "set eval.regex"),
        ("regex: x", "eval.regex: no metric uses the pattern", "add regex to eval.metrics"),
        ("{metrics: regex, regex: '('}", "is not a valid regular expression", "fix the pattern"),
        ("best: rouge_l", "eval.best: rouge_l is not measured", "add rouge_l to eval.metrics"),
        ("best: multiple_choice_norm", "is not measured", "add multiple_choice to eval.metrics"),
    ],
)
def test_metrics_are_judged_and_no_recipe_runs_code(text: str, what: str, fix: str) -> None:
    section = text if text.startswith("{") else f"{{{text}}}"
    (problem,) = problems(f"model: m\ndata: {{train: a.jsonl, eval: 0.1}}\neval: {section}\n")
    assert problem.where == "r.yaml:3"
    assert what in f"{problem.what}; {problem.why}"
    assert fix in problem.fix


def test_metrics_need_held_out_data() -> None:
    (problem,) = problems(f"{SMALLEST}eval: {{metrics: rouge_l}}")
    assert problem.what.startswith("eval.metrics: metrics need held-out data")
    assert parse_recipe(f"{SMALLEST}eval: {{metrics: rouge_l}}", ["data.eval=0.1"]).eval.metrics == ("rouge_l",)


@table(
    ("line", "what", "fix"),
    [
        ("objective: dpoo", "objective.name: invalid value 'dpoo'", "did you mean `dpo`?"),
        ("objective: 3", "objective: invalid value 3", "write a name such as dpo"),
        ("objective: {name: dpo, betta: 1}", "objective.betta: unknown key", "did you mean `objective.beta`?"),
        ("objective: {name: dpo, rpo_alpha: 1}", "objective.rpo_alpha: unknown key", "did you mean `objective.sft_weight`?"),
        ("objective: {name: dpo, gamma: 1}", "objective.gamma: not a parameter of dpo but of simpo", "dpo has beta, loss,"),
        ("objective: {beta: 1}", "objective.beta: not a parameter of supervised but of dpo,", "has no parameters"),
        ("objective: {name: kto, loss: ipo}", "objective.loss: kto has no loss ipo", "one of: kto, apo_zero"),
        ("objective: {name: ipo, label_smoothing: 0.1}", "objective.label_smoothing: the loss ipo has no", "remove it"),
        ("objective: {name: dpo, beta: 0}", "objective.beta: 0 is out of range", "write a number in range"),
    ],
)
def test_an_objective_takes_its_own_parameters(line: str, what: str, fix: str) -> None:
    ((where, said, hint),) = told(SMALLEST + line)
    assert where == "r.yaml:3"
    assert said.startswith(what)
    assert fix in hint


def test_an_objective_is_a_name_or_a_section() -> None:
    assert parse_recipe(SMALLEST).objective.name == "supervised"
    short, long = parse_recipe(SMALLEST + "objective: dpo"), parse_recipe(SMALLEST + "objective: {name: dpo, beta: 0.1}")
    assert short == long
    assert (short.objective.beta, short.objective.share_prompt, short.objective.gamma) == (0.1, "auto", None)
    ipo = parse_recipe(SMALLEST + "objective: ipo", ["objective.beta=0.3"])
    assert (ipo.objective.name, ipo.objective.loss, ipo.objective.beta) == ("dpo", "ipo", 0.3)
    assert parse_recipe(SMALLEST, ["objective=kto", "objective.beta=0.2"]).objective.beta == 0.2
    assert Recipe.model_validate_json(ipo.model_dump_json()) == ipo
    rows = {
        name: parse_recipe(SMALLEST, [f"objective={name}"]).objective.kind.reads for name in ("supervised", "kto", "reward")
    }
    assert rows == {"supervised": "documents", "kto": "marked", "reward": "pairs"}


def test_steps_may_be_a_share_of_all_steps() -> None:
    recipe = parse_recipe(f"{SMALLEST}eval: {{every: 0.25}}\ncheckpoint: {{every: 7}}\ntrain: {{warmup: 12}}")
    assert (recipe.eval.every, recipe.checkpoint.every, recipe.train.warmup) == (0.25, 7, 12)
    assert [steps_between(every, 30) for every in (7, 0.25, 0.1, 1 / 3, 1e-9, 1 / 30)] == [7, 8, 3, 10, 1, 1]


def test_two_templates_are_one_too_many() -> None:
    (problem,) = problems("model: m\ndata: {train: a.jsonl, template: chatml, chat_template: a.jinja}")
    assert problem.where == "r.yaml:2"
    assert "data.chat_template" in problem.what


def test_names_of_columns_and_roles_are_judged() -> None:
    text = "model: m\ndata:\n  train: a.jsonl\n  fields: {mesages: x}\n  roles: {boss: [x]}\n  message_fields: {role: }\n"
    assert sorted(where for where, _, _ in told(text)) == ["r.yaml:4", "r.yaml:5", "r.yaml:6"]
    assert "did you mean `data.fields.messages`" in told(text)[0][2]


@table("word", ["train.steps=" + "9" * 5000, "train.steps=2020-02-30", "train.lr=" + "[" * 5000])
def test_an_override_that_is_no_value_is_a_text_and_judged_as_one(word: str) -> None:
    """Python makes no number of more than 4,300 digits, YAML no 30 February, and neither nests without end."""
    text = "model: m\ndata: {train: a.jsonl}\n"
    with pytest.raises(RecipeError, match=word.partition("=")[0]):
        parse_recipe(text, [word])
    assert parse_recipe(text, ["output=2020-02-30"]).output == "2020-02-30"


@table(
    ("train", "what", "fix"),
    [
        ("[{path: a, weigth: 2}]", "data.train.0.weigth: unknown key", "did you mean `weight`?"),
        ("[b, {path: a, fields: {prompt: q}}]", "data.train.1.fields: unknown key", "did you mean `columns`?"),
        ("{weight: 2}", "data.train.0.path: missing", "add `path: ...`"),
        ("[{path: a, weight: 0}]", "data.train.0.weight: 0 is out of range", "write a number in range"),
        ("[[a]]", "data.train.0: invalid value ['a']", "sources such as {path: a.jsonl, weight: 2}"),
    ],
)
def test_a_source_with_something_wrong_is_told_as_a_source(train: str, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"model: m\ndata:\n  train: {train}\n")
    assert (caught.value.what, caught.value.where) == (what, "recipe:3")
    assert fix in caught.value.fix


def test_a_step_s_size_on_the_command_line_takes_the_place_of_the_file_s() -> None:
    """`check` suggests train.batch_rows, and a recipe that `new` has written says batch_tokens."""
    text = "model: m\ndata: {train: a.jsonl}\ntrain: {batch_tokens: 4096, capacity: 2048}\n"
    train = parse_recipe(text, ["train.batch_rows=4"]).train
    assert (train.batch_rows, train.batch_tokens) == (4, "auto")
    by_rows = text.replace("batch_tokens: 4096", "batch_rows: 4")
    assert parse_recipe(by_rows, ["train.batch_tokens=4096"]).train.batch_rows is None
    with pytest.raises(RecipeError, match="batch_tokens is set as well"):
        parse_recipe(text, ["train.batch_rows=4", "train.batch_tokens=4096"])
