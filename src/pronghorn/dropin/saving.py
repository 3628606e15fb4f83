"""What is written of a trained model, or sent to the hub, by the names that scripts call it by."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

from pronghorn.dropin.accepted import SAVING, check_others
from pronghorn.dropin.arguments import check_choice
from pronghorn.errors import CommandError, EnvironmentFault, ModelError, PronghornError
from pronghorn.hub import hub_errors, quiet
from pronghorn.model.hf_adapter import save_merged

METHODS = ("merged_16bit", "lora")
# What comes with the export, and what to do until then.
GGUF = ("files for llama.cpp come with the export", "model.save_pretrained_merged(folder, tokenizer), then llama.cpp's "
        "convert_hf_to_gguf.py on that folder")
LATER = {
    "merged_4bit": ("weights in 4 bits come with the export",
                    'save_method="merged_16bit" or "lora"; others load the first in 4 bits'),
    "mxfp4": ("weights in MXFP4 come with the export", 'save_method="merged_16bit" or "lora"'),
    "save_pretrained_gguf": GGUF,
    "push_to_hub_gguf": GGUF,
    "save_pretrained_torchao": ("torchao's formats come with the export",
                                "model.save_pretrained_merged(folder, tokenizer), then torchao on that folder"),
}  # fmt: skip


def _later(name: str, shown: str) -> NoReturn:
    why, fix = LATER[name]
    raise CommandError(what=f"{shown} is not in this version", why=why, fix=fix)


def save_pretrained_merged(
    model: Any, save_directory: str | Path, tokenizer: Any = None, save_method: str | None = "merged_16bit", **others: Any
) -> None:
    """merged_16bit: one model folder, adapter added in float32 and rounded once; lora: the adapter, as PEFT has it."""
    check_others(save_pretrained_merged, others, SAVING)
    method = _method(save_method)
    folder = Path(save_directory).expanduser()
    if method == "merged_16bit":
        save_merged(model, folder)
    else:
        save_lora(model, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _method(asked: str | None) -> str:
    method = str(asked or "merged_16bit").lower()
    for name in ("merged_4bit", "mxfp4"):
        if name in method:  # merged_4bit_forced is the same
            _later(name, f"save_method={asked!r}")
    check_choice("save_method", method, METHODS)
    return method


def save_lora(model: Any, save_directory: str | Path, **others: Any) -> None:
    """The adapter, in PEFT's layout."""
    check_others(save_lora, others, SAVING)
    if not hasattr(model, "peft_config"):
        raise CommandError(what="this model has no adapter to save", fix='save_method="merged_16bit", or get_peft_model first')
    model.save_pretrained(str(Path(save_directory).expanduser()))


def load_lora(model: Any, folder: str | Path, load_tensors: bool = True) -> Any:
    """Puts the adapter of a folder into the model's own, which has to be like it. Returns the model."""
    from pronghorn.model.stored_adapter import replace_weights

    if not hasattr(model, "peft_config"):
        raise CommandError(what="this model has no adapter", why="load_lora puts weights into the one it has",
                           fix="FastLanguageModel.from_pretrained(folder) loads the base model and the adapter")
    if not load_tensors:
        raise CommandError(what="load_tensors=False", why="there is no vLLM in here that would read the folder itself",
                           fix="leave it out")
    replace_weights(model, Path(folder).expanduser())
    return model


def push_to_hub_merged(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    save_method: str | None = "merged_16bit",
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Trained with Pronghorn",
    commit_description: str = "",
    revision: str | None = None,
    create_pr: bool = False,
    **others: Any,
) -> str:
    """Writes what `save_pretrained_merged` writes, sends it to the hub, and returns its address there."""
    check_others(push_to_hub_merged, others, SAVING)
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as folder:
        save_pretrained_merged(model, folder, tokenizer, save_method)
        from huggingface_hub import HfApi

        api: Any = HfApi(token=token or None)
        try:
            with quiet():
                repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                sent = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=commit_message,
                                         commit_description=commit_description, revision=revision, create_pr=create_pr)
        except hub_errors() as error:
            raise _not_sent(error, repo_id) from error
    return str(getattr(sent, "commit_url", sent))


def _not_sent(error: Exception, name: str) -> PronghornError:
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if status in (401, 403):
        return ModelError(what=f"the hub does not take this model ({status})", where=name, why=first,
                          fix="a token with the right to write there: token=..., or HF_TOKEN")
    if isinstance(error, ValueError) or 400 <= status < 500:
        return ModelError(what="the hub does not take this model", where=name, why=first, fix="check the name: account/model")
    return EnvironmentFault(what="the model could not be sent to the hub", where=name, why=first,
                            fix="check the network, then call it again")


def save_pretrained_gguf(_model: Any, *_: Any, **__: Any) -> NoReturn:
    _later("save_pretrained_gguf", "save_pretrained_gguf")


def push_to_hub_gguf(_model: Any, *_: Any, **__: Any) -> NoReturn:
    _later("push_to_hub_gguf", "push_to_hub_gguf")


def save_pretrained_torchao(_model: Any, *_: Any, **__: Any) -> NoReturn:
    _later("save_pretrained_torchao", "save_pretrained_torchao")


def fast_generate(_model: Any, *_: Any, **__: Any) -> NoReturn:
    raise CommandError(what="fast_generate is not in this version", why="it is vLLM's generate, and there is no vLLM in here",
                       fix='model.generate(**tokenizer(texts, return_tensors="pt", padding=True).to(model.device))')


METHODS_OF_A_MODEL = (save_pretrained_merged, push_to_hub_merged, save_pretrained_gguf, push_to_hub_gguf,
                      save_pretrained_torchao, save_lora, load_lora, fast_generate)
