"""The arrows of the house, held by reading imports."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pronghorn"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {
    ".".join(("pronghorn", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file for file in FILES
}
EVERYBODY = {
    "recipe",
    "recipe_objective",
    "recipe_parts",
    "recipe_rollouts",
    "errors",
    "program",
    "folders",
    "digests",
    "hub",
    "hf_types",
    "model_files",
    "small_files",
    "packs",
}
# room -> rooms it may import; `cli` and `demo` stand at the top.
ARROWS = {
    "cli": {
        "clusters",
        "compat",
        "process",
        "evaluation",
        "export",
        "serve",
        "sweep",
        "studio",
        "train",
        "memory",
        "model",
        "data",
        "report",
        "demo",
        "convert",
        "rewards",
        "recipe_file",
        "recipe_keys",
    },
    "export": {"train", "evaluation", "model", "data", "report", "kernels"},
    "serve": {"train", "generation", "model", "data"},
    "sweep": {"train", "memory", "model", "report"},
    # what it shows of a run and does to one are files and commands: of the rooms below it takes what reads and tells
    "studio": {"serve", "train", "memory", "data", "report", "process", "recipe_file", "recipe_keys", "yaml_file"},
    "clusters": set(),
    "demo": {"train", "evaluation", "model", "data", "report", "recipe_file"},
    "train": {"evaluation", "generation", "rewards", "memory", "model", "data", "report", "kernels"},
    "evaluation": {"generation", "model", "data"},
    "generation": {"model", "kernels"},
    "rewards": {"evaluation"},
    "memory": {"model", "kernels"},
    "model": {"kernels"},
    "data": set(),
    "convert": {"data", "recipe_file", "recipe_keys", "yaml_file"},
    "report": set(),
    "kernels": set(),
    "recipe_file": {"recipe", "recipe_keys", "yaml_file"},
    "recipe_keys": {"recipe", "recipe_section", "yaml_file"},
    "yaml_file": set(),
    "recipe": {"recipe_parts", "recipe_misfits", "recipe_objective"},
    "recipe_misfits": {"recipe_parts", "recipe_rollouts"},
    "recipe_parts": {"recipe_objective", "recipe_rollouts", "recipe_section"},
    "recipe_objective": {"recipe_section"},
    "recipe_rollouts": {"recipe_section"},
    "recipe_section": set(),
    "errors": set(),
    "program": set(),
    "folders": set(),
    "digests": set(),
    "hub": set(),
    "hf_types": set(),
    "model_files": set(),
    "small_files": set(),
    "packs": set(),
    "process": set(),
    "unsloth": {"cli"},
    "compat": {"export", "generation", "model", "data", "report", "kernels", "memory"},
    "chat_templates": {"compat", "data"},
    "trainer": {"compat"},
    "__init__": {"compat", "chat_templates", "trainer", "recipe_file"},
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
    "moe": {"runtime", "quant", "mlp"},
    "loss": {"runtime", "gemm"},
    "optim": {"runtime", "quant"},
    "embedding": {"runtime"},
    "conv": {"runtime"},
    "delta": {"conv", "runtime", "norm"},
    "sampling": {"runtime"},
}
# Imports inside functions: what a command needs is loaded when it runs, and some things only where there is a use for them.
LAZY = {
    "cli",
    "compat/scripts/explain.py",
    "compat/scripts/fronts.py",
    "compat/dropin/instance.py",
    "compat/dropin/saving.py",
    "data/stats.py",
    "kernels/runtime/dispatch.py",
    "hub.py",
    "__init__.py",
}
MAY_BE_USED_BY_ALL = {
    "report": {"errors", "program", "recipe", "recipe_parts"},
    "recipe": set(),
    "errors": set(),
    "program": set(),
    "folders": set(),
    "hub": {"errors", "folders"},
    "model_files": {"errors", "small_files"},
    "small_files": set(),
    "packs": set(),
    "kernels": {"errors"},
}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> list[str]:
    names = []
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += [node.module or ""]
            if node.module == "pronghorn":
                names += [f"pronghorn.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
    return names


@cache
def imported(file: Path) -> dict[str, bool]:
    """Our modules that a file imports -> whether inside a function. Also what only a type checker reads."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                for name in (child.module or "", *(f"{child.module}.{alias.name}" for alias in child.names)):
                    found[name] = found.get(name, True) and inside
            elif isinstance(child, ast.Import):
                found.update({alias.name: inside for alias in child.names})
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(parsed(file), False)
    return {name: lazy for name, lazy in found.items() if name in MODULES}


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def short(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_a_file_imports_only_along_the_arrows() -> None:
    wrong = {}
    for file in FILES:
        own = room(file)
        allowed = ARROWS[own] | {own} | MAY_BE_USED_BY_ALL.get(own, EVERYBODY)
        used = {name.split(".")[1] for name in imports(file) if name.startswith("pronghorn.")}
        wrong[short(file)] = sorted(used - allowed)
    assert {file: rooms for file, rooms in wrong.items() if rooms} == {}, "what these files import is not in ARROWS"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Also by imports inside functions and those of types, which hide a circle and do not break it. (`pronghorn` itself only
    has a version.)"""
    graph = {name: imported(file).keys() - {"pronghorn", name} for name, file in MODULES.items() if name != "pronghorn"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_imports_inside_functions_are_few() -> None:
    lazy = {short(file) for file in FILES if any(imported(file).values())}
    assert {name for name in lazy if not {name, name.split("/")[0]} & LAZY} == set(), "import at the top, or name it in LAZY"
    assert {name for name in LAZY if not any(name in (file, file.split("/")[0]) for file in lazy)} == set(), "LAZY has too many"


def test_kernels_import_only_along_their_own_arrows() -> None:
    wrong = {}
    for file in sorted((SOURCE / "kernels").glob("*/*.py")):
        own = file.parent.name
        used = {name.split(".")[2] for name in imports(file) if name.startswith("pronghorn.kernels.")}
        wrong[short(file)] = sorted(used - KERNEL_ARROWS[own] - {own})
    assert {file: folders for file, folders in wrong.items() if folders} == {}, "not in KERNEL_ARROWS"


def test_only_triton_kernels_have_no_types() -> None:
    """Their arguments are pointers, numbers and blocks of them; mypy, which is strict elsewhere, lets all of kernels/ off."""
    wrong = []
    for file in sorted((SOURCE / "kernels").rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(one) for one in node.decorator_list):
                continue
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            untyped = [one.arg for one in every if one.annotation is None and one.arg not in ("self", "cls")]
            if untyped or node.returns is None:
                wrong.append(f"{short(file)}:{node.lineno} {node.name}: {', '.join(untyped) or 'what it returns'}")
    assert wrong == []


def test_transformers_and_triton_stay_in_their_rooms() -> None:
    others = {"data/encode/tokens.py", "hf_types.py"}
    wrong = []
    for file in FILES:
        used = {name.split(".")[0] for name in imports(file)}
        if used & {"transformers", "peft"} and room(file) not in ("model", "compat") and short(file) not in others:
            wrong.append(f"{short(file)}: transformers or peft")
        if "triton" in used and room(file) != "kernels":
            wrong.append(f"{short(file)}: triton")
    assert wrong == []


def test_ranks_talk_in_one_place() -> None:
    """What ranks must agree on goes through a World (train/dist/world.py), and several of them through torch.distributed. FSDP2
    gathers and sums through it, too."""
    users = [short(file) for file in FILES if any(name.startswith("torch.distributed") for name in imports(file))]
    assert users == ["train/dist/fsdp.py", "train/dist/ranks.py"]


def test_files_and_functions_stay_small() -> None:
    long = []
    for file in FILES:
        text = file.read_text()
        if len(text.splitlines()) >= 500:
            long.append(f"{short(file)}: {len(text.splitlines())} lines, the limit is 499")
        for node in ast.walk(parsed(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 80:
                long.append(f"{short(file)}:{node.lineno} {node.name}: {(node.end_lineno or 0) - node.lineno + 1} lines of 80")
    assert long == []


def test_nothing_is_ever_unpickled() -> None:
    """No file can make us run code."""
    for file in FILES:
        text = file.read_text()
        assert "pickle" not in {name.split(".")[0] for name in imports(file)}
        for forbidden in ("torch.load(", "trust_remote_code=True", "eval(", "exec("):
            if forbidden == "exec(" and short(file) in ("compat/scripts/running.py", "compat/dropin/locked_child.py"):
                continue  # the script that `pronghorn run` is given; code that a script's model wrote, in a locked process
            assert f" {forbidden}" not in text, f"{file}: {forbidden}"
            assert f"({forbidden}" not in text, f"{file}: {forbidden}"


# Files of train/ that write, and how only the rank that writes gets there: world.py.
WRITERS = {
    "run/answers.py": "on_writer",
    "checkpoint/checkpoint.py": "saving.py",
    "checkpoint/checkpoint_writer.py": "saving.py",
    "checkpoint/fork.py": "a command of its own",
    "dist/folder_store.py": "the ranks' own folder",
    "dist/launch.py": "removes such folders, of launchers that were killed",
    "loop.py": "world.writes",
    "checkpoint/resume.py": "writer_first",
    "run/profiling.py": "a command of its own",
    "run/run_events.py": "world.writes",
    "run/row_losses.py": "on_writer",
    "run/run_evaluation.py": "a command of its own",
    "run/run_folder.py": "world.writes",
    "checkpoint/saving.py": "world.writes",
    "checkpoint/sharded_saving.py": "every rank its own files, in a folder that on_writer made; what else, on_writer",
    "source/served.py": "on_writer",
}
WRITING = {
    "RunLog",
    "fsync",
    "mkdir",
    "rename",
    "rmtree",
    "save_file",
    "save_model",
    "save_pretrained",
    "unlink",
    "write_answers",
    "write_base",
    "write_bytes",
    "write_html",
    "write_text",
}


def test_a_run_writes_in_few_places() -> None:
    """With several ranks one of them writes. A new file that writes goes through a World, and into the table above."""
    found = set()
    for file in sorted((SOURCE / "train").rglob("*.py")):
        calls = (node.func for node in ast.walk(parsed(file)) if isinstance(node, ast.Call))
        names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
        if names & WRITING:
            found.add(str(file.relative_to(SOURCE / "train")))
    assert found == set(WRITERS)


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name cannot be imported by one process: pytest reports an error, and runs no test of the second."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_an_installed_package_has_every_file() -> None:
    """setuptools leaves out folders without __init__.py, and files that are not Python and not in package-data."""
    packages = {file.parent for file in FILES}
    assert [str(folder) for folder in packages if not (folder / "__init__.py").is_file()] == []
    data = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pronghorn"]
    others = [file.relative_to(SOURCE) for file in SOURCE.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")]
    assert [str(file) for file in others if not any(file.match(pattern) for pattern in data)] == []
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=SOURCE.parents[1], capture_output=True, text=True, check=False)
    if tracked.stdout:  # a copy without its history has none
        names = {SOURCE.parents[1] / name for name in tracked.stdout.split()}
        assert [str(file) for file in FILES if file not in names] == []
