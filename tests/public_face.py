"""The public face: public names, commands with their options, and keys of ``--json``.

``python tests/public_face.py FILE`` records them; `test_public_face` holds the present against
the record in ``public_face.json``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
RENAMES = RECORD.with_name("renames.json")
"""Renames since the record: public names, options by command, and JSON keys."""
# Below these, keys are names of things: layers, provenances, facts of a machine.
_NAMED_BY_DATA = frozenset({"detail", "facts", "fields", "gate", "meta", "provenance", "shares"})
_MODULES = ("errors", "provenance", "tables", "technique", "units")

TRAIN = """\
import torch

def make_workload(batch_size=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    return model, batch, torch.nn.functional.mse_loss, optimizer
"""
COMMANDS = (
    "profile train.py:make_workload --steps 3 --threads 1 -o run.slipgraph",
    "profile train.py:make_workload --steps 3 --threads 1 --set batch_size=16 -o other.slipgraph",
    "explain run.slipgraph",
    "explain run.slipgraph --by module",
    "explain run.slipgraph --critical-path",
    "explain run.slipgraph --memory",
    "explain run.slipgraph --lines",
    "explain run.slipgraph --causal",
    "predict run.slipgraph -t fused_optimizer -t amp:bf16 -t conv_bn_fold",
    "predict run.slipgraph --cluster workers=4,link=10gbit,latency=50us -t ddp:4 -t amp:bf16+ddp:4",
    "apply train.py:make_workload -t fused_optimizer",
    "prove train.py:make_workload -t fused_optimizer --budget 1s",
    "results ls",
    "results show last",
    "results regress",
    "advise run.slipgraph",
    "advise run.slipgraph --goal memory<1KiB",
    "advise run.slipgraph --cluster workers=4,link=10gbit,latency=50us",
    "batch train.py:make_workload --sizes 2,4 --no-verify-largest",
    "devices run.slipgraph --device h100",
    "report run.slipgraph -o run.html",
    "export run.slipgraph --to perfetto -o run.json",
    "export run.slipgraph --to chakra -o run.et",
    "import run.et -o imported.slipgraph",
    "diff run.slipgraph other.slipgraph",
    "cluster show",
    "cluster show ethernet-10g",
    "cluster cost --cluster ethernet-10g --all-reduce 1MiB",
    "cluster simulate --cluster ethernet-10g --job devices=0-3,compute=5ms,all_reduce=1MB",
    "scale curve run.slipgraph --cluster ethernet-10g --workers 2,4",
    "measure gate",
    "measure ab --base-cmd true --head-cmd true --budget 1s",
    "data ls",
    "data show digits",
    "dedup corpus.jsonl",
    "bench",
    "doctor",
)


def names() -> dict[str, list[str]]:
    """Return public names by the module they are imported from."""
    import slipstream

    found = {"slipstream": sorted(slipstream.__all__)}
    for info in pkgutil.walk_packages(slipstream.__path__, "slipstream."):
        parts = info.name.split(".")
        private = any(part.startswith("_") for part in parts)
        alone = len(parts) == 2 and parts[1] in _MODULES
        if private or not (info.ispkg or alone) or parts[1] in ("cli", "native"):
            continue
        module = importlib.import_module(info.name)
        listed = getattr(module, "__all__", None)
        if listed is None and alone:
            listed = [
                name
                for name, value in vars(module).items()
                if not name.startswith("_") and getattr(value, "__module__", None) == info.name
            ]
        if listed:
            found[info.name] = sorted(listed)
    return found


def commands() -> dict[str, list[str]]:
    """Return every command with its arguments and options, each as its names."""
    import typer

    from slipstream.cli import _main

    root: Any = typer.main.get_command(_main._assemble())
    return dict(_walked("slipstream", root))


def _walked(path: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield (
            path,
            sorted("/".join([*param.opts, *param.secondary_opts]) for param in command.params),
        )
        return
    for name, child in inner.items():
        yield from _walked(f"{path} {name}", child)


def keys_of(value: Any, path: str = "") -> set[str]:
    """Return paths of the keys of a JSON value; items of lists appear as ``[]``."""
    if isinstance(value, dict):
        inner = ((f"{path}.{name}", name, item) for name, item in value.items())
        return {
            key
            for here, name, item in inner
            for key in ({here} if name in _NAMED_BY_DATA else {here} | keys_of(item, here))
        }
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item, f"{path}[]")}
    return set()


def empty_in(value: Any, path: str = "") -> set[str]:
    """Return paths of empty lists and nulls, whose keys are thus unknown."""
    if isinstance(value, dict):
        return {key for name, item in value.items() for key in empty_in(item, f"{path}.{name}")}
    if isinstance(value, list) and value:
        return {key for item in value for key in empty_in(item, f"{path}[]")}
    return {path} if value is None or value == [] or value == {} else set()


def answers(folder: Path, run: Callable[[Sequence[str]], str]) -> dict[str, Any]:
    """Return the ``--json`` output of each of `COMMANDS`, run in `folder` in order.

    Args:
        run: takes a command's arguments and returns what it prints.
    """
    (folder / "train.py").write_text(TRAIN)
    (folder / "corpus.jsonl").write_text('{"text": "a text"}\n{"text": "A text!"}\n')
    return {command: json.loads(run(with_json(command))) for command in COMMANDS}


def with_json(command: str) -> list[str]:
    """Return the arguments of a command, with ``--json`` before anything after ``--``."""
    arguments = command.split()
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], "--json", *arguments[at:]]


def _run(arguments: Sequence[str]) -> str:
    program = str(Path(sys.executable).parent / "slipstream")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{arguments}: {done.stderr}")
    return done.stdout


def main(file: Path) -> None:
    """Record the face of the installed package."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["XDG_CACHE_HOME"] = folder
        printed = {
            command: sorted(keys_of(it)) for command, it in answers(Path(folder), _run).items()
        }
        face = {"names": names(), "commands": commands(), "json": printed}
    file.write_text(json.dumps(face, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
