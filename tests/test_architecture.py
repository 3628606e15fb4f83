"""The arrows of the house, held by reading imports."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "pronghorn"
FILES = sorted(SOURCE.rglob("*.py"))
EVERYBODY = {"recipe", "errors", "folders", "digests", "hub", "model_files"}
# room -> rooms it may import; `cli`, `demo` and `bench` stand at the top.
ARROWS = {
    "cli": {"scripts", "process", "evaluation", "train", "memory", "model", "data", "report", "demo", "bench", "convert",
            "recipe_file", "recipe_keys"},
    "demo": {"train", "evaluation", "model", "data", "report", "recipe_file"},
    "bench": {"process", "train", "model", "data", "report", "kernels"},
    "train": {"evaluation", "memory", "model", "data", "report", "kernels"},
    "evaluation": {"model", "data"},
    "memory": {"model", "kernels"},
    "model": {"kernels"},
    "data": set(),
    "convert": {"data", "recipe_file"},
    "report": set(),
    "kernels": set(),
    "recipe_file": {"recipe", "recipe_keys"},
    "recipe_keys": {"recipe"},
    "recipe": set(),
    "errors": set(),
    "folders": set(),
    "digests": set(),
    "hub": set(),
    "model_files": set(),
    "process": set(),
    "scripts": {"dropin"},
    "unsloth": {"cli"},
    "dropin": {"model", "data", "kernels", "memory"},
    "chat_templates": {"dropin", "data"},
    "trainer": {"dropin"},
    "__init__": {"scripts", "dropin", "chat_templates", "trainer", "recipe_file"},
}
# Inside kernels/, the same by folder.
KERNEL_ARROWS = {
    "runtime": set(),
    "norm": {"runtime"},
    "quant": {"runtime", "norm"},
    "mlp": {"runtime", "quant"},
    "gemm": {"runtime", "mlp"},
    "lora": {"runtime", "gemm", "mlp", "quant"},
    "attention": {"runtime", "norm"},
    "moe": {"runtime", "quant"},
    "loss": {"runtime", "gemm"},
    "optim": {"runtime", "quant"},
    "embedding": {"runtime"},
}
MAY_BE_USED_BY_ALL = {"report": {"errors"}, "recipe": set(), "errors": set(), "folders": set(), "hub": {"errors", "folders"},
                      "model_files": {"errors"}, "kernels": {"errors"}}


def imports(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += [node.module or ""]
            if node.module == "pronghorn":
                names += [f"pronghorn.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
    return names


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_file_imports_only_along_the_arrows(file: Path) -> None:
    own = room(file)
    allowed = ARROWS[own] | {own} | MAY_BE_USED_BY_ALL.get(own, EVERYBODY)
    used = {name.split(".")[1] for name in imports(file) if name.startswith("pronghorn.")}
    assert used <= allowed, f"{own} may not import {sorted(used - allowed)}"


@pytest.mark.parametrize("file", sorted((SOURCE / "kernels").glob("*/*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_kernels_import_only_along_their_own_arrows(file: Path) -> None:
    own = file.parent.name
    used = {name.split(".")[2] for name in imports(file) if name.startswith("pronghorn.kernels.")}
    assert used <= KERNEL_ARROWS[own] | {own}, f"kernels/{own} may not import {sorted(used - KERNEL_ARROWS[own])}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_transformers_and_triton_stay_in_their_rooms(file: Path) -> None:
    used = {name.split(".")[0] for name in imports(file)}
    if "transformers" in used or "peft" in used:
        # bench/weights.py makes random models, bench/peers.py runs transformers as one of the other systems
        others = {SOURCE / "data" / "tokens.py", SOURCE / "bench" / "weights.py", SOURCE / "bench" / "peers.py"}
        assert room(file) == "model" or file in others
    if "triton" in used:
        assert room(file) == "kernels"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) < 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{file.name}:{node.lineno} {node.name}"


def test_nothing_is_ever_unpickled() -> None:
    """No file can make us run code."""
    for file in FILES:
        text = file.read_text()
        assert "pickle" not in {name.split(".")[0] for name in imports(file)}
        for forbidden in ("torch.load(", "trust_remote_code=True", "eval(", "exec("):
            if forbidden == "exec(" and file == SOURCE / "scripts" / "running.py":
                continue  # `pronghorn run` runs the script that it is given
            assert f" {forbidden}" not in text, f"{file}: {forbidden}"
            assert f"({forbidden}" not in text, f"{file}: {forbidden}"


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name cannot be imported by one process: pytest reports an error, and runs no test of the second."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
