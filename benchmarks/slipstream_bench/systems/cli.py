"""``slipstream bench cli``: time until the help, and until the first advice."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream_bench.advice import SLIPSTREAM, time_advice
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_most

_COMMAND = [*SLIPSTREAM, "--help"]
# A typical script; its step takes about 10 ms on two cores of a server.
_SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(1024, 3, 32, 32), torch.arange(1024) % 10)
for epoch in range(100):
    for images, labels in torch.utils.data.DataLoader(data, batch_size=12, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""
_HEAVY = ("torch", "numpy", "scipy")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield wall time of ``slipstream --help`` in fresh processes, and what it imports."""
    runs = 40 if options.full else 15
    name = "slipstream --help"
    if options.wants(name):
        options.progress(name)
        seconds = _seconds(runs)
        detail = f"median of {runs} fresh processes; minimum {seconds.min():.3f} s"
        yield at_most(name, float(np.median(seconds)), 0.3, "s", n=runs, detail=detail)
    name = "heavy libraries imported by --help"
    if options.wants(name):
        options.progress(name)
        found = [library for library in _HEAVY if library in _imported()]
        yield at_most(name, len(found), 0, "libraries", detail=", ".join(found) or "none")

    name = "first table of advise on a plain script with a 10 ms step"
    if options.wants(name):
        options.progress(name)
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
            Path(folder, "train.py").write_text(_SCRIPT)
            times = time_advice("train.py", folder)
        detail = f"{times.step} (nothing cached); final table after {times.final_s:.1f} s"
        yield at_most(name, times.first_s, 60, "s", detail=detail)


def _seconds(runs: int) -> npt.NDArray[np.float64]:
    """Return wall time of the command in separate processes, [runs]."""

    def run() -> None:
        subprocess.run(_COMMAND, check=True, capture_output=True)

    return times_s(run, runs, clock="wall", settle=0)


def _imported() -> set[str]:
    command = [_COMMAND[0], "-X", "importtime", *_COMMAND[1:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
