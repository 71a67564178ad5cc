"""Scripts of new users: each works, or gives an error with a remedy."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

_START = """\
import os, sys, torch
from train import make_workload
model, (inputs, targets), loss, optimizer = make_workload()
def train(steps, step=None):
    for number in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        (step or optimizer.step)()
"""
_WORKS = {
    "two optimizers, much printing, another folder, sys.exit behind": """\
other = torch.optim.Adam(model[2].parameters())
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
print("x" * 100_000)
os.chdir("..")
train(40, lambda: (optimizer.step(), other.step()))
sys.exit(1)
""",
    "a wrapper that is no module, loader workers, a guard": """\
class Wrapper:
    def __init__(self): self.inner = model
    def __call__(self, x): return self.inner(x)
def main():
    data = torch.utils.data.TensorDataset(inputs.repeat(40, 1), targets.repeat(40, 1))
    wrapped = Wrapper()
    for x, y in torch.utils.data.DataLoader(data, 4, num_workers=1):
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
""",
    "DataParallel, a subclass of a subclass": """\
class Inner(torch.nn.Module):
    def __init__(self): super().__init__(); self.layers = model
class Outer(Inner):
    def forward(self, x): return self.layers(x)
inner, model = model, torch.nn.DataParallel(Outer())
train(40)
""",
}
_FAILS = {
    "never steps": ("train(9, lambda: None)", " 9 ", "optimizer.step()"),
    "reads stdin": ("name = input('data? ')", "EOFError", " --"),
    "reads argv": ("steps = int(sys.argv[1])", "IndexError", "script.py -- "),
    "leaves before": ("sys.exit(0)", "sys.exit()", " --"),
    "gives up": ("print('no data here'); sys.exit(1)", "no data here", ""),
    "leaves during": ("train(4); sys.exit(0)", " 4 ", "at least"),
    "raises in a step": (
        "train(2); raise ValueError('bad sample')",
        "bad sample",
        "without slipstream",
    ),
}


def within(shell: Any, **variables: str) -> Any:
    """Return the same shell with other environment variables."""
    return replace(shell, environment={**shell.environment, **variables})


@pytest.mark.parametrize("text", _WORKS.values(), ids=_WORKS.keys())
def test_supported_scripts_work(slipstream: Any, text: str) -> None:
    (slipstream.folder / "script.py").write_text(_START + text)
    run = slipstream("profile", "script.py", "--steps", 2, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["samples"] == 4
    assert "xxx" not in run.stderr


@pytest.mark.parametrize(("text", "message", "remedy"), _FAILS.values(), ids=_FAILS.keys())
def test_unsupported_scripts_are_explained(
    slipstream: Any, text: str, message: str, remedy: str
) -> None:
    (slipstream.folder / "script.py").write_text(_START + text + "\n")
    error = slipstream.refused(1, "profile", "script.py", "--steps", 2)
    assert message in error.what
    assert remedy in error.remedy
    assert not (slipstream.folder / "run.slipgraph").exists()


def test_a_hugging_face_loss_works_and_a_missing_return_is_reported(slipstream: Any) -> None:
    (slipstream.folder / "face.py").write_text("""\
import torch
from types import SimpleNamespace
class Labelled(torch.nn.Module):
    def __init__(self): super().__init__(); self.inner = torch.nn.Linear(8, 1)
    def forward(self, x, labels):
        return SimpleNamespace(loss=torch.nn.functional.mse_loss(self.inner(x), labels))
def make():
    model = Labelled()
    batch = {"x": torch.randn(4, 8), "labels": torch.randn(4, 1)}
    return model, batch, lambda out: out.loss, torch.optim.SGD(model.parameters(), lr=0.1)
def nothing():
    make()
""")
    run = slipstream("profile", "face.py:make", "--steps", 2, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["samples"] == 4
    error = slipstream.refused(1, "profile", "face.py:nothing")
    assert "nothing" in error.what
    assert "face.py:11" in error.where
    assert "(model, batch, loss, optimizer)" in error.remedy


def test_advise_shows_a_first_table_while_it_measures(recorded: Any, tmp_path: Path) -> None:
    shell, name = within(recorded.shell, XDG_CACHE_HOME=str(tmp_path)), recorded.path.name
    arguments = ("advise", name, "--no-combinations")
    run = shell(*arguments)
    assert run.returncode == 0, run.stderr
    assert re.search(r"\bfirst look\b.*\btrain\.py:make_workload\b", run.stderr)
    assert re.search(r"\bfinal table\b", run.stderr)
    assert "first look" not in run.stdout
    assert re.search(r"\bpredicted\b.*\btrain\.py:make_workload\b", run.stdout)
    assert "\x1b" not in run.stdout + run.stderr
    # Nothing remains to be measured now; the JSON output has a single table.
    again = shell(*arguments, "--json")
    assert json.loads(again.stdout)["predictions"]
    assert "first look at" not in again.stderr


def test_an_unwritable_cache_gives_a_warning(recorded: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    shell = within(recorded.shell, XDG_CACHE_HOME=str(tmp_path / "file"))
    run = shell("predict", recorded.path.name, "-t", "fused_optimizer")
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^warning: .*\btimings\b", run.stderr, re.MULTILINE)) == 1
    assert "XDG_CACHE_HOME" in run.stderr
    assert "fused_optimizer:fused" in run.stdout


def test_sixty_columns_are_enough(recorded: Any) -> None:
    shell = within(recorded.shell, COLUMNS="60")
    run = shell("predict", recorded.path.name, "-t", "channels_last", "-t", "fused_optimizer")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert "fused_optimizer:fused" in lines
    assert any(line.strip().startswith("speed-up ") for line in lines)
    assert "\x1b" not in run.stdout


def test_a_reader_of_one_line_of_a_table_causes_no_error(recorded: Any) -> None:
    process = recorded.shell.start("explain", recorded.path.name, "--top", 2)
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(600) == 0
    assert stderr == ""


def test_a_full_disk_gives_one_clear_line(recorded: Any) -> None:
    with open("/dev/full", "w") as full:
        process = recorded.shell.start("explain", recorded.path.name, stdout=full)
        stderr = process.stderr.read()
    assert process.wait(600) == 1
    first, remedy = stderr.splitlines()
    assert re.search(rf"^error: .*{os.strerror(errno.ENOSPC)}$", first)
    assert re.search(r"^ *try: .*\bdisk space\b", remedy)
    assert "Traceback" not in stderr


def test_a_recording_that_does_not_fit_keeps_the_old_one(recorded: Any, slipstream: Any) -> None:
    output = slipstream.folder / "run.slipgraph"
    output.write_bytes(b"mine")
    limit = recorded.path.stat().st_size // 2

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = slipstream.start(
        "profile", "train.py:make_workload", "--steps", 2, preexec_fn=little_room
    )
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 1
    assert "error: " in stderr
    assert "Traceback" not in stderr
    assert output.read_bytes() == b"mine"


_KERNEL = """\
import io, sys
class Cell(io.StringIO):
    def fileno(self): raise io.UnsupportedOperation("fileno")
sys.stdout, sys.stderr = Cell(), Cell()
import __main__
assert not hasattr(__main__, "__file__")
import torch, slipstream as ss
from slipstream.cli import _output
model = torch.nn.Linear(8, 4)
batch = torch.randn(16, 8), torch.randint(0, 4, (16,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
live = ss.Workload.of(model, batch, torch.nn.functional.cross_entropy, optimizer)
graph = ss.profile(live, steps=2)
other = ss.profile("train.py:make_workload", steps=2)
with _output.progress("advising") as report:
    found = ss.advise(other, combinations=False, report=report)
shown = sys.stdout.getvalue(), sys.stderr.getvalue()
sys.stdout = sys.__stdout__
print(repr((len(graph) > 1, len(found.predictions) > 5, *shown)))
"""


def test_a_notebook_kernel_without_a_terminal_or_a_main_file_works(slipstream: Any) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _KERNEL],
        cwd=slipstream.folder,
        env=slipstream.environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    recorded, advised, out, err = eval(run.stdout)
    assert recorded
    assert advised
    assert out == ""
    assert all(line.startswith("advising: ") for line in err.splitlines())
    assert "\r" not in err
    assert "\x1b" not in err
    # Output of torch's recorders.
    assert run.stderr == ""
