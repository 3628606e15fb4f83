"""`pronghorn launch`: what a cluster needs to run `pronghorn train` on its nodes, as a file; for Slurm also submitted."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from pronghorn.cli.output import say
from pronghorn.cli.starting import own_files
from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.program import command

TEXT = "write what Slurm, Kubernetes (Kubeflow Trainer) or SkyPilot needs to train on several machines, or submit it"
NEXT = {"slurm": "sbatch", "kubernetes": "kubectl create -f", "skypilot": "sky jobs launch"}
FILES = ("metric_file", "reward_file", "episode_file")


def options(one: argparse.ArgumentParser) -> None:
    kind = one.add_mutually_exclusive_group(required=True)
    for name, example in (("slurm", "nodes=2 gpus=8 time=4h"), ("kubernetes", "nodes=2 gpus=8 image=... claim=..."),
                          ("skypilot", "nodes=2 gpus=8 gpu=H100 store=...")):  # fmt: skip
        kind.add_argument(f"--{name}", nargs="*", metavar="KEY=VALUE", help=f"{example} (docs/scale.md)")
    one.add_argument("-o", "--output", metavar="FILE", help="file to write (default: standard output)")
    one.add_argument("--submit", action="store_true", help="run sbatch (Slurm only)")
    own_files(one)


def launch(arguments: argparse.Namespace) -> None:
    from pronghorn.clusters import kubernetes, skypilot, slurm
    from pronghorn.clusters.keys import Training
    from pronghorn.recipe_file import load_recipe
    from pronghorn.train.dist.launch import require_packs

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    kinds = {"slurm": slurm.script, "kubernetes": kubernetes.script, "skypilot": skypilot.script}
    kind = next(name for name in kinds if getattr(arguments, name) is not None)
    words, paths = ["pronghorn", "train", arguments.recipe, *arguments.overrides], [arguments.recipe, recipe.output]
    for name in FILES:
        if (file := getattr(arguments, name)) is not None:
            if not file.is_file():
                raise CommandError(what=f"no such file: {file}", fix="check the path")
            words += [f"--{name.replace('_', '-')}", str(file)]
            paths.append(str(file))
    source = command(*arguments.given)
    for word in (*words, source, str(Path.cwd())):
        if not word.isprintable():  # a line break would end a comment, and start something else
            raise CommandError(what=f"a control character in {word!r}", fix="rename the file, or change the value")
    text, ranks = kinds[kind](
        getattr(arguments, kind), Training(tuple(words), tuple(paths), str(Path.cwd()), recipe.output, source)
    )
    require_packs(recipe, ranks)
    if arguments.submit and kind != "slurm":
        raise CommandError(what="--submit is for Slurm", fix=f"write a file with -o FILE, then: {NEXT[kind]} FILE")
    if arguments.output is not None:
        _write(Path(arguments.output), text)
    job = _submit(text, arguments.output) if arguments.submit else ""
    told = {"kind": kind, "ranks": ranks, **({"written": arguments.output} if arguments.output else {"script": text})}
    if job or arguments.output:
        after = f"{NEXT[kind]} {shlex.quote(arguments.output or '')}"
        say(
            arguments, told | {"job": job} if job else told | {"next": after}, job or f"wrote {arguments.output}; next: {after}"
        )
    elif arguments.json:
        say(arguments, told, "")
    else:
        print(text, end="")


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError("file already exists", where=str(path), fix="choose another name, or remove the file") from None
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot write", path, "choose another place") from error


def _submit(text: str, file: str | None) -> str:
    """What sbatch says, which is the job's number."""
    import subprocess

    if shutil.which("sbatch") is None:
        raise EnvironmentFault(
            "there is no sbatch here", fix="run this on a login node of the cluster, or write a file with -o FILE"
        )
    words = ["sbatch", *([file] if file else [])]
    ended = subprocess.run(words, input=None if file else text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EnvironmentFault(
            "sbatch refused the job", why=ended.stderr.strip(), fix="change the key=value words after --slurm"
        )
    return ended.stdout.strip()
