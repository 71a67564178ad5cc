"""Every command in the pages exists, and runs.

The pages speak of the reader's files: train.py, run.slipgraph, a.py. Here these are small real
ones, in a folder that all commands share, and steps and budgets are short.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import ROOT, all_commands, blocks, pages

from forks import start_children_as_forks
from slipstream.cli._main import _assemble, _command
from slipstream.durations import Durations
from slipstream_bench.running import purposes
from technique_package import install

TRAIN = '''\
"""A function for slipstream, and a script with its training loop."""

import argparse

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_of = torch.nn.functional.mse_loss


def make_workload(batch_size=8):
    return model, (torch.randn(batch_size, 8), torch.randn(batch_size, 1)), loss_of, optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 1)
    for _ in range(400 * parser.parse_args().epochs):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
'''
# Options that make our examples small; their defaults are in their files.
SMALLER = {
    "hugging_face_style.py": (
        "width=64, heads=4, layers=2, length=32",
        "width=8, heads=2, layers=1, length=32",
    ),
    "language_model.py": ("batch_size=8, width=128, layers=4, context=64",
                          "batch_size=2, width=16, layers=1, context=8"),
    "image_classifier.py": ("batch_size=16, width=16", "batch_size=2, width=4"),
}  # fmt: skip
SHORT = {
    "--steps": "3", "--budget": "1s", "--quality-budget": "200ms", "--sizes": "2,4",
    "--time-limit": "5s",
}  # fmt: skip
# Commands that are not run here, with the reasons.
NOT_RUN = {
    "slipstream plan pretrain.toml": "tests/techniques/pretraining plans",
    "slipstream prove train.py:make_workload -t masked_head -t masked_head+unpad -t "
    "masked_head+unpad+amp:bf16": "needs an encoder; tests/techniques/pretraining has one",
    "slipstream pretrain pretrain.toml --resume": (
        "starts ranks; tests/techniques/pretraining trains on them"
    ),
    "slipstream cluster aggregate serve --listen 127.0.0.1:4700": (
        "until Ctrl-C; tests/cli/test_cli_aggregate.py runs it"
    ),
    "slipstream cluster aggregate bench --ranks 4 --lab 200mbit": (
        "starts ranks; tests/engines/aggregation measures in a lab"
    ),
    "slipstream netlab run --hosts 4 --rate 200mbit -- python train.py": (
        "needs root; tests/ranks/test_measured.py runs commands in a lab"
    ),
    "slipstream cluster measure --ranks 2 -o here.toml": (
        "refuses what a busy machine measures; tests/ranks/test_measured.py fits samples"
    ),
    **{
        f"slipstream prove train.py:make --cluster workers=2,link=100mbit,latency=50us -t {ddp} -t "
        f"{and_more}": "starts ranks; tests/cli/test_cli_prove.py does"
        for ddp, and_more in (
            ("ddp:workers=2", "ddp:workers=2+powersgd:4"),
            ("ddp:2", "ddp:2+topk:0.01"),
            ("ddp:2", "accumulation:4+ddp:2"),
        )
    },
    "slipstream prove train.py:make --cluster workers=2,link=40mbit,latency=50us -t ddp:2 -t "
    "priority_sync:2 --details --svg link.svg": (
        "starts ranks; tests/cli/test_cli_prove.py draws theirs"
    ),
    "slipstream prove train.py:make --cluster workers=2,link=10gbit,latency=50us -t spatial:2": (
        "starts ranks; tests/techniques/spatial trains on tiles"
    ),
    "slipstream prove train.py:make --cluster workers=2,link=1gbit,latency=50us -t "
    "pipeline:2,schedule=zero_bubble": "starts ranks; tests/techniques/pipeline runs stages",
    "slipstream prove train.py:make --cluster workers=2,link=200mbit,latency=50us -t "
    "burst:2,plan=2/1@classifier": "starts ranks; tests/techniques/burst runs bursts",
    "slipstream hfuse a.cu:reduce:block=256,n=4000 b.cu:scale:block=512 -o fused.cu --arch sm_90": (
        "needs sources and nvcc; tests/techniques/side_by_side/test_hfuse.py runs it"
    ),
    "slipstream hfuse a.py:softmax:grid=8,x=800xfp32,y=800xfp32,columns=100,BLOCK=128 "
    "b.py:adam:grid=4,w=1000xfp32,g=1000xfp32,n=1000,BLOCK=256 -o fused.py --arch sm_90": (
        "needs sources and Triton; tests/techniques/side_by_side/test_hfuse_triton.py runs it"
    ),
    "slipstream live train.py:make_workload": "until Ctrl-C; tests/cli/test_cli_live.py runs it",
    "slipstream live train.py --no-browser -- --epochs 1": (
        "until Ctrl-C; tests/cli/test_cli_live.py runs it"
    ),
    "slipstream profile train.py:make --record regions": (
        "compiles for a minute; tests/capture/test_capture_regions.py records regions"
    ),
    **{
        f"slipstream {command}": "needs a model; tests/cli/test_cli_serving.py puts one under load"
        for command in (
            "mlperf serve model.onnx --data digits --range 0,1",
            "mlperf serve model.tflite --data cifar10_jpeg --batch 8 --max-queue-delay 2ms",
            "mlperf serve serve.py:make --technique lowbit:w8a8 --scenario server --rate 40/s "
            "--latency-bound 20ms",
            "predict serve.py:make -t lowbit:w8a8 --rate 40/s --goal p99<20ms",
            "advise serve.py:make --goal p99<20ms --rate 40/s",
        )
    },
    **{
        f"slipstream xray {command}": "needs a model and images; tests/ship/test_xray.py has both"
        for command in (
            "record model.onnx --raw photos/ --preprocessing app.json -o edge.xr",
            "replay edge.xr --model model.onnx --preprocessing reference.json -o ref.xr",
            "compare ref.xr edge.xr --html report.html",
            "bisect model.onnx model_int8.onnx --inputs x.npy --labels y.npy",
            "latency model_int8.onnx --inputs x.npy",
        )
    },
    **{
        f"slipstream ship {command}": "needs a model; tests/ship exports, predicts and verifies"
        for command in (
            "export model.py:Net --calib inputs.npy --target cortex-m4 -o fw/",
            "export person_detect.tflite --ram 64KiB -o fw/",
            "predict person_detect.tflite --target cortex-m4 --ram 40KiB --flash 512KiB",
            "verify fw/ --inputs 200",
            "fit model.py:Net --calib inputs.npy --board stm32f446re --latency 50ms",
        )
    },
    **{
        f"slipstream stability {command}": "needs images; tests/ship/test_stability.py has some"
        for command in (
            "measure model.onnx --data images/ --sheet disputed.png",
            "explain model.onnx --data images/ --settings",
            "predict model.onnx --data images/ --sample 64",
            "harden train.py:make --data fashion_mnist -o hardened.pt",
            "harden train.py:make --data photos.npz --twins same --int8",
        )
    },
    **{
        f"slipstream search {command}": "needs a study; tests/cli/test_cli_search.py has one"
        for command in (
            "run digits.py:study --budget 15min --workers 2",
            "status digits.db",
            "top digits.db",
            "pareto digits.db --svg front.svg",
            "resume digits.db",
            "replay digits.db",
            "predict digits.py:study --gpus 1,8,64,1000 --price 2.5",
            "timeline digits.py:study --gpus 16 -o digits.json",
            "run digits.py:study --ray local --workers 4 --scheduler level",
        )
    },
    **{
        f"slipstream mlperf {command}": "trains for minutes; tests/mlperf/training trains less"
        for command in (
            "train fashion_cnn -t lowrank:0.25 --runs 5",
            "train digits --runs 10",
            "train digits -t lowbit:w3a3,train=yes",
            "train digits --against ddp:workers=2 -t adasum:workers=2",
            "train digits --against ddp:workers=2 -t ddp:workers=2+powersgd:4",
            "train digits --against ddp:workers=2 -t ddp:workers=2+sign",
            "train digits --against ddp:workers=2 -t ddp:workers=2+topk:0.01",
            "check fashion_cnn FOLDER/arm_0 --runs 5",
            "curve fashion_cnn --batches 64,128,256,512",
        )
    },
    **{
        f"slipstream {command}": "needs a model or study of some size; tests/nas has both"
        for command in (
            "nas space model.py:make_workload",
            "search pareto nas.db",
            "nas export nas.py:net --study nas.db -o small.py",
            "nas search examples/keyword_spotting.py:task --board stm32f446re --latency 60ms "
            "-o kws/",
            "nas codesign examples/codesign.py:task --hw edge --limit time<=1x --limit area<=1x",
        )
    },
    "slipstream results show ID": "ID is what `results ls` prints; see tests/cli/test_results.py",
}
# Benches take minutes or hours, so none is run as a test.
BENCH = ["slipstream", "bench"]
# Beginnings of lines in the shown outputs that the text explains.
NOTES = ("baseline:", "A/A guard:", "the transformed workload runs", "+++ b/examples/")
COMMANDS = {
    " ".join(shlex.split(command.text, comments=True)): command for command in all_commands()
}


@cache
def command_line() -> Any:
    """Return the command line, built once."""
    return typer.main.get_command(_assemble())


def context(arguments: Sequence[str]) -> Any:
    """Return `arguments` as parsed by the command line; raises its errors."""
    command, name = command_line(), "slipstream"
    made = command.make_context(name, list(arguments))
    while hasattr(command, "resolve_command") and made._protected_args:
        name, command, rest = command.resolve_command(made, [*made._protected_args, *made.args])
        made = command.make_context(name, rest, parent=made)
    return made


def shortened(arguments: list[str]) -> list[str]:
    """Return the same command with fewer steps and less time, if it has such options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours, script = arguments[:end], arguments[end:]
    options = {
        option for parameter in context(arguments).command.params for option in parameter.opts
    }
    for option, value in SHORT.items():
        if option in options:
            ours += [option, value]
    return ours + script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the reader's folder: a script, our small examples, a recording and a repository."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(TRAIN)
    for name in ("a.py", "b.py", "bench.py"):
        (folder / name).write_text("sum(range(1000))\n")
    (folder / "examples.jsonl").write_text('{"input": [3, -1], "output": [6]}\n')
    (folder / "corpus.jsonl").write_text('{"text": "a text"}\n{"text": "A text!"}\n')
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, (long, short) in SMALLER.items():
        text = (folder / "examples" / name).read_text("utf-8")
        assert long in text
        (folder / "examples" / name).write_text(text.replace(long, short))
    git = ["git", "-c", "user.name=reader", "-c", "user.email=reader@localhost"]
    for step in ("init -q -b main", "add -A", "commit -q -m one", "commit -q --allow-empty -m two"):
        subprocess.run([*git, *step.split()], cwd=folder, check=True)
    return folder


@pytest.fixture
def reader(
    folder: Path,
    forked_children: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[Sequence[str]], str]:
    """Runs a command as the reader would, from the folder, and returns its output."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "160")
    # A reader has the environment with slipstream active; on some machines
    # Python itself is only `python3`.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("SLIPSTREAM_STORE", raising=False)

    def run(arguments: Sequence[str]) -> str:
        code = _command(list(arguments))
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    return run


@pytest.mark.parametrize("text", COMMANDS)
def test_the_command_line_parses_it(text: str) -> None:
    context(COMMANDS[text].arguments)


def test_commands_that_are_not_run_still_occur() -> None:
    named = {*COMMANDS, *(span for text in pages().values() for span in text.split("`"))}
    assert set(NOT_RUN) <= named


@pytest.fixture(scope="module")
def recording(folder: Path) -> Path:
    """Record the run.slipgraph of the pages."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        start_children_as_forks(patch)
        _command(["profile", "train.py:make_workload", "--steps", "3", "--threads", "1"])
    return folder / "run.slipgraph"


@pytest.mark.parametrize("text", [text for text in COMMANDS if text.split()[:2] == BENCH])
def test_a_named_bench_exists(text: str) -> None:
    names = context(COMMANDS[text].arguments).params["name"] or []
    # NAME is a placeholder for the names that `slipstream bench` lists.
    assert {*names} <= {*purposes(), "all", "NAME"}


@pytest.mark.parametrize(
    "text", [text for text in COMMANDS if text not in NOT_RUN and text.split()[:2] != BENCH]
)
def test_it_runs_and_prints_the_shown_output(
    text: str,
    reader: Callable[[Sequence[str]], str],
    recording: Path,
    gelu: Path,
    monkeypatch: pytest.MonkeyPatch,
    require: Callable[[str, bool, str], None],
) -> None:
    if text == "slipstream hw cosim":
        require("verilator", shutil.which("verilator") is not None, "verilator is not installed")
    if "gelu:" in text:
        monkeypatch.syspath_prepend(gelu)
    # Timing hundreds of operators takes minutes; untimed ones get assumed durations.
    monkeypatch.setattr(Durations, "measure", lambda *ignored, **how: None)
    command = COMMANDS[text]
    output = reader(shortened(command.arguments))
    assert set(headings(command.output)) <= set(headings(output))
    for note in NOTES:
        assert (note in output) >= (note in command.output), note


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the technique that some pages write."""
    return install(tmp_path_factory.mktemp("outside"))


def headings(output: str) -> list[str]:
    """Return the columns of the first table, below its title and what leads it."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines()[1:])
    return next((cells for cells in rows if len(cells) > 1), [])


@pytest.mark.parametrize("page", pages())
def test_python_code_in_the_pages_compiles(page: str) -> None:
    for block in blocks(pages()[page]):
        if block.language == "python":
            # Excerpts of function bodies are indented.
            inside = textwrap.indent(textwrap.dedent(block.text), "    ")
            ast.parse(f"def shown():\n{inside}", f"{page}:{block.line}")


@pytest.mark.full
def test_the_python_of_the_readme_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Durations, "measure", lambda *ignored, **how: None)
    shown = [block.text for block in blocks(pages()["README.md"]) if block.language == "python"]
    exec(compile(shown[-1], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("amp:bf16")


def test_a_foreign_command_is_detected() -> None:
    with pytest.raises(typer.TyperException, match="--no-such-option"):
        context(["profile", "train.py", "--no-such-option"])
