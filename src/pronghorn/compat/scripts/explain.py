"""`pronghorn run --explain`: what is adapted, and with a script, what of it that script uses and what it uses that is not here.

By reading only: nothing of the script runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pronghorn.compat.scripts.fronts import GONE, MOVED, SEEN_THROUGH
from pronghorn.compat.scripts.modules import IN_PLACE_OF_VLLM, OURS, STOOD_IN_FOR, not_here
from pronghorn.compat.scripts.notebooks import NOT_COMPILED, Cell, cannot_compile, read_cells
from pronghorn.compat.scripts.renames import BITSANDBYTES_ADAMW, LEFT_OUT, NEEDS_GPU, REFUSED, RENAMED, TRAINER_RENAMED
from pronghorn.errors import CommandError
from pronghorn.program import command

# Arguments that trainers took themselves, and that are part of their args now.
INTO_ARGS = (
    "max_seq_length",
    "dataset_text_field",
    "packing",
    "dataset_num_proc",
    "beta",
    "max_length",
    "dataset_kwargs",
    "eval_packing",
    "neftune_noise_alpha",
)
ENVIRONMENT = (
    "PYTORCH_ALLOC_CONF",
    "GOMP_SPINCOUNT",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_UPDATE_DOWNLOAD_COUNTS",
)
# What some classes still take of what others no longer do.
TAKEN = {"GRPOConfig": ("max_completion_length",), "RLOOConfig": ("max_completion_length",), "OnlineDPOConfig": (),
         "ORPOConfig": ("max_completion_length", "is_encoder_decoder", "padding_value", "generate_during_eval"),
         "CPOConfig": ("max_completion_length", "is_encoder_decoder", "generate_during_eval"),
         "DPOConfig": ("truncation_mode",), "SFTConfig": ("truncation_mode",)}  # fmt: skip
BF16_BY_DEFAULT = tuple(f"{name}Config" for name in ("SFT", "DPO", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "OnlineDPO"))
OFF = " (disabled by `if False`)"


def everything() -> str:
    """The adaptor, in words."""
    lines = ["Translations that apply inside `pronghorn run` only:", "", "modules"]
    lines += [f"  import {name:<24} gives {ours}" for name, ours in OURS.items() if ours]
    lines += [
        "  import unsloth_zoo...           imports; using anything of it raises an error",
        "  import vllm                     if it is not installed, in the script's own files: SamplingParams",
        f"  import {', '.join(SEEN_THROUGH):<24} in the script's own files: a view of the package with the classes",
        "                                  below; the package itself is not changed",
        "",
        "trainers",
    ]
    lines += [f"  Trainer({old}=) -> {new}=" for old, new in TRAINER_RENAMED.items()]
    lines += [
        f"  Trainer({', '.join(INTO_ARGS)}) -> moved into its args",
        "  SFTTrainer(args=TrainingArguments(...)) -> an SFTConfig with the same values; also for DPO, KTO, ...",
        "  SFTTrainer without max_length -> the model's max_seq_length, not TRL's default of 1024",
        "  SFTTrainer(formatting_func=) written for batches -> called with batches of one row",
        "  SFTTrainer(data_collator=DataCollatorForLanguageModeling(...)) is dropped: TRL's own trains on the same tokens",
        "  RewardTrainer's columns input_ids_chosen, input_ids_rejected -> chosen_ids, rejected_ids",
        "  DPOTrainer, ...: a column prompt of texts beside answers of messages -> messages, or removed if they contain it",
        "  Trainer with a language-modelling collator: a column labels that equals input_ids is removed, another one refused",
        "  SFTTrainer's dataset -> trains on the script's text column; a duplicate BOS token is removed",
        *(f"  from trl import {name} -> {home}" for name, home in MOVED.items()),
        *(f"  from trl import {name} is refused: {why}" for name, (why, _) in GONE.items()),
        "",
        "arguments",
    ]
    lines += [f"  {old}= -> {new}=" for old, new in RENAMED.items()]
    lines += [
        "  warmup_ratio= -> warmup_steps=, a fraction of all steps",
        '  group_by_length=True -> train_sampling_strategy="group_by_length"',
        f"  optim={', '.join(sorted(BITSANDBYTES_ADAMW))} -> adamw_torch_fused, if bitsandbytes is not installed",
        "  optim=adamw_hf -> adamw_torch",
        "  GRPOConfig(per_device_train_batch_size=) -> num_generations, if a batch does not hold whole groups",
        "  GRPOConfig(vllm_sampling_params=) -> temperature=, top_p=, top_k=, min_p=, max_completion_length=",
        "  GRPOConfig(use_vllm=True) -> False, unless vllm_mode is server: Pronghorn's layers generate",
        "  fp16=True, and bf16 if not set -> False, without a GPU",
    ]
    lines += [f"  {old}= is dropped: {why}" for old, why in LEFT_OUT.items()]
    lines += [f"  {old}= is refused: {why}" for old, (why, _) in REFUSED.items()]
    lines += [
        "",
        "tokenizers",
        "  apply_chat_template without return_dict= -> token ids that also support dict access",
        "",
        "environment variables, set by every pronghorn command unless already set",
        f"  {', '.join(ENVIRONMENT)}",
        "and by pronghorn run: PRONGHORN_SCRIPT, the script's path, for processes that it starts",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Finding:
    where: str
    what: str
    missing: bool = False
    late: bool = False  # in a call that runs, where the script ends after all that comes before it


def ahead(path: Path) -> str:
    """What to tell before a script runs: that it will end at something that is not supported."""
    try:
        late = [one for one in of_script(path) if one.late]
    except CommandError:  # the run itself tells
        return ""
    more = f", and at {len(late) - 1} more" * (len(late) > 1)
    explain = command("run", "--explain", str(path))
    return f"{late[0].where}: {late[0].what}; the script ends there{more} ({explain})" if late else ""


def of_script(path: Path) -> list[Finding]:
    """What of a script is adapted or missing, in its order."""
    if not path.is_file():
        raise CommandError(what="script not found", where=str(path), fix="pronghorn run --explain script.py")
    found: list[Finding] = []
    for name, source, cell in _sources(path):
        found += [Finding(name, f"skipped: {line}") for line in (cell.skipped if cell else ())]
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise CommandError(what=f"invalid Python: {error}", where=name, fix="fix the syntax error first") from error
        except NOT_COMPILED as error:
            raise cannot_compile(error, name) from error
        off = {id(node) for block in ast.walk(tree) if _is_off(block) for one in block.body for node in ast.walk(one)}
        for node in sorted((node for node in ast.walk(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno):
            runs = id(node) not in off
            found += [
                Finding(
                    f"{name}:{node.lineno}", what + OFF * (not runs), missing, missing and runs and isinstance(node, ast.Call)
                )
                for what, missing in _of_node(node)
            ]
    return found


def _is_off(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value


def _sources(path: Path) -> list[tuple[str, str, Cell | None]]:
    if path.suffix != ".ipynb":
        return [(path.name, path.read_bytes().decode("utf-8", errors="replace"), None)]
    return [(f"cell {cell.number}", cell.source, cell) for cell in read_cells(path)]


def _of_node(node: object) -> list[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        return [one for alias in node.names for one in _of_import(alias.name, "")]
    if isinstance(node, ast.ImportFrom):
        return [one for alias in node.names for one in _of_import(node.module or "", alias.name)]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return _of_call(name, [word for word in node.keywords if word.arg])
    return []


def _of_import(module: str, name: str) -> list[tuple[str, bool]]:
    top = module.partition(".")[0]
    if top == "vllm":
        ours = module in IN_PLACE_OF_VLLM and name in ("", "SamplingParams")
        said = f"Pronghorn's {name or 'SamplingParams'}, if vLLM is not installed"
        return [(f"{'from ' + module + ' ' if name else ''}import {name or module}: {said}" if ours else
                 _sentence(f"{module}.{name}".rstrip(".")), not ours)]  # fmt: skip
    if top == "trl" and name in MOVED:
        return [(f"from {module} import {name}: imported from {MOVED[name]}", False)]
    if top == "trl" and name in GONE:
        return [(f"from {module} import {name}: {'; instead: '.join(GONE[name])}", True)]
    if top not in STOOD_IN_FOR:
        return []
    if module not in OURS:
        return [(_sentence(module), True)]
    if not name or name == "*":
        return [(f"import {module}: {OURS[module]}", False)] if OURS[module] else []
    if f"{module}.{name}" in OURS:
        return [(f"import {module}.{name}: {OURS[f'{module}.{name}']}", False)]
    return _of_name(module, name)


def _of_name(module: str, name: str) -> list[tuple[str, bool]]:
    import pronghorn
    from pronghorn.compat.dropin.absent import ABSENT

    if name in ABSENT:
        why, fix = ABSENT[name]._why, ABSENT[name]._fix
        return [(f"{module}.{name} is not supported: {why}; instead: {fix}", True)]
    if not OURS[module] or name not in dir(pronghorn):
        return [(_sentence(f"{module}.{name}"), True)]
    return [(f"from {module} import {name}: Pronghorn's", False)]


def _sentence(name: str) -> str:
    error = not_here(name)
    return "; ".join(part for part in (error.what, error.why) if part)


def _of_call(name: str, words: list[ast.keyword]) -> list[tuple[str, bool]]:
    found = _of_model_call(name, {str(word.arg): word.value.value for word in words if isinstance(word.value, ast.Constant)})
    for word in words:
        old = str(word.arg)
        value = word.value.value if isinstance(word.value, ast.Constant) else None
        if name.endswith("Trainer") and old in TRAINER_RENAMED:
            found.append((f"{name}({old}=) -> {TRAINER_RENAMED[old]}=", False))
        elif name.endswith("Trainer") and old in INTO_ARGS:
            found.append((f"{name}({old}=) -> moved into its args as {RENAMED.get(old, old)}=", False))
        elif not name.endswith(("Trainer", "Config", "TrainingArguments")):
            continue
        elif old in LEFT_OUT and old not in TAKEN.get(name, ()):
            found.append((f"{name}({old}=) is dropped: {LEFT_OUT[old]}", False))
        elif old in REFUSED:
            found.append((f"{name}({old}=) is refused: {REFUSED[old][0]}; {REFUSED[old][1]}", True))
        elif old == "warmup_ratio" or old in RENAMED:
            found.append((f"{name}({old}=) -> {RENAMED.get(old, 'warmup_steps')}=", False))
        elif old == "use_vllm" and value is not False:
            found.append((f"{name}(use_vllm=) -> False, unless a vLLM server is asked: Pronghorn's layers generate", False))
        elif old == "vllm_sampling_params":
            found.append(
                (f"{name}(vllm_sampling_params=) -> temperature=, top_p=, top_k=, min_p=, max_completion_length=", False)
            )
        elif old in NEEDS_GPU and value is not False:
            found.append((f"{name}({old}=) -> False, without a GPU", False))
        elif old == "optim" and value in BITSANDBYTES_ADAMW:
            found.append((f'{name}(optim="{value}") -> adamw_torch_fused, if bitsandbytes is not installed', False))
    if name in BF16_BY_DEFAULT and "bf16" not in {word.arg for word in words}:
        found.append((f"{name}() -> bf16=False, without a GPU: TRL's default is True", False))
    return found + _of_sampled(name, {str(word.arg): word.value for word in words})


def _of_sampled(name: str, given: dict[str, ast.expr]) -> list[tuple[str, bool]]:
    """A trainer that samples answers: a batch without whole groups, and a seed that another replaces."""
    if name not in ("GRPOConfig", "RLOOConfig") or given.keys() & {"generation_batch_size", "steps_per_generation"}:
        return []
    found = []
    sizes = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant) and type(value.value) is int}
    batch, answers = sizes.get("per_device_train_batch_size", 0), sizes.get("num_generations", 0)
    known = "gradient_accumulation_steps" in sizes or "gradient_accumulation_steps" not in given
    if known and batch and answers > 0 and batch * sizes.get("gradient_accumulation_steps", 1) % answers:
        found.append((f"{name}(per_device_train_batch_size={batch}) -> {answers}: a batch holds all num_generations", False))
    params = given.get("vllm_sampling_params")
    if isinstance(params, ast.Call) and any(word.arg == "seed" for word in params.keywords):
        found.append((f"{name}(vllm_sampling_params=): its seed is dropped; answers are drawn by {name}(seed=)", False))
    return found


def _of_model_call(name: str, given: dict[str, Any]) -> list[tuple[str, bool]]:
    """What a call of FastLanguageModel, of a model, or of SamplingParams asks for that is refused."""
    from pronghorn.compat.dropin.accepted import ADAPTING, LOADING
    from pronghorn.compat.dropin.sampling_params import SamplingParams, is_refused
    from pronghorn.compat.dropin.saving import LATER

    if name == SamplingParams.__name__:
        refusals = [f"{key}={value!r}" for key, value in given.items() if is_refused(key, value)]
        return [(f"{name}({what}) is not supported", True) for what in refusals]

    if name in LATER:
        return [(f"{name}() is not supported: {LATER[name][0]}", True)]
    rows = {"from_pretrained": LOADING, "get_peft_model": ADAPTING}.get(name, {})
    refused = {
        f"{key}={value!r}": rows[key].why
        for key, value in given.items()
        if key in rows and rows[key].allowed is not None and value not in (rows[key].allowed or ())
    }
    for method, (why, _) in LATER.items():
        if method in str(given.get("save_method", "")):
            refused[f"save_method={given['save_method']!r}"] = why
    return [(f"{name}({what}) is not supported: {why}", True) for what, why in refused.items()]


def as_text(path: Path, found: list[Finding]) -> str:
    lines = []
    for title, missing in (("adapted", False), ("not supported", True)):
        rows = [one for one in found if one.missing is missing]
        lines += [f"{title}: {'nothing' if not rows else ''}".rstrip(), *(f"  {one.where}  {one.what}" for one in rows)]
    return "\n".join([str(path), *lines])
