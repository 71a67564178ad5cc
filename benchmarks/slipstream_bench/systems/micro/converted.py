"""Operators of our files compared with those of LiteRT's converter for the same PyTorch models.

``litert-torch`` installs a gigabyte, including jax, and is in none of our extras. If it is
installed, its files are created here and counted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.ship.firmware import parse_network
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.micro.models import MODELS, seeded

_MOVING = ("TRANSPOSE", "PAD", "RESHAPE")


def converted_bars(options: BenchOptions, exported: Callable[[str], bytes]) -> Iterator[Bar]:
    """Yield a row per model.

    Args:
        exported: returns our int8 file of a model.
    """
    for name in MODELS:
        bar = f"{name} from PyTorch: operators over those of litert-torch"
        if not options.wants(bar, 10):
            continue
        options.progress(bar)
        try:
            theirs = _shorter_file(name)
        except ImportError:
            yield not_judged(bar, "x", "<= 1", "not installed: pip install litert-torch")
            continue
        ours = Counter(
            operator.kind.upper() for operator in parse_network(exported(name)).operators
        )
        detail = "; ".join(
            f"{whose}: {sum(kinds.values())}, of these "
            + (", ".join(f"{kinds[kind]} {kind}" for kind in _MOVING if kinds[kind]) or "none")
            + " only move numbers"
            for whose, kinds in (("ours", ours), ("litert-torch", theirs))
        )
        moving = sum(ours[kind] for kind in _MOVING)
        ratio = sum(ours.values()) / sum(theirs.values())
        yield Bar(bar, ratio, "x", "<= 1, none of which only moves", ratio <= 1 and not moving, 1,
                  detail, limit=1.0)  # fmt: skip


def _shorter_file(name: str) -> Counter[str]:
    """Count operators by kind in its shorter file, of the original or with channels last.

    Raises:
        ImportError: it is not installed.
    """
    litert_torch = importlib.import_module("litert_torch")
    model, inputs = seeded(name)
    sample = inputs[:1]
    ways: list[tuple[nn.Module, torch.Tensor]] = [(model, sample)]
    if sample.ndim == 4:
        last = litert_torch.to_channel_last_io(model, args=[0])
        ways.append((last, sample.permute(0, 2, 3, 1).contiguous()))
    with tempfile.TemporaryDirectory() as folder, _silence():
        files = []
        for number, (variant, example) in enumerate(ways):
            files.append(Path(folder, f"{number}.tflite"))
            litert_torch.convert(variant, (example,)).export(str(files[-1]))
        return min((_kinds(file.read_bytes()) for file in files), key=lambda kinds: kinds.total())


def _kinds(file: bytes) -> Counter[str]:
    schema: Any = importlib.import_module("ai_edge_litert.schema_py_generated")
    names = {number: kind for kind, number in vars(schema.BuiltinOperator).items()}
    model = schema.ModelT.InitFromPackedBuf(file, 0)
    codes = [max(code.builtinCode, code.deprecatedBuiltinCode) for code in model.operatorCodes]
    return Counter(
        names[codes[operator.opcodeIndex]]
        for graph in model.subgraphs
        for operator in graph.operators
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence the converter, which writes to the streams directly."""
    copies = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nothing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            for stream, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
