"""A plain script runs unchanged; its optimizer steps become steps of a program."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from slipstream.technique import TechniqueSettings, parse
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.fused_optimizer import FusedOptimizer
from slipstream.workload import BuiltWorkload
from slipstream.workload.built import model_output
from slipstream.workload.script import ScriptRestarted

Run = Callable[..., Any]

_PARTS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(model, n=5):
    return nn.functional.mse_loss(model(torch.randn(n, 3)), torch.randn(n, 1))
def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
"""
_WEIGHTS = 4 * 4 + 5
_ENOUGH = 50


def script(text: str) -> str:
    return _PARTS + text


LOOP = script(f"train(model, optimizer, {_ENOUGH})\n")


def look(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
    """Return three steps: their losses, and the detected facts."""
    losses = []
    for _ in range(3):
        loss = yield
        losses.append(None if loss is None else float(loss.detach()))
    return {
        "losses": losses,
        "weights": sum(p.numel() for p in built.model.parameters()) if built.model else None,
        "samples": built.samples,
        "optimizer": type(built.optimizer).__name__,
        "model": type(built.model).__name__,
    }


def look_long(built: BuiltWorkload) -> Generator[None, Any, None]:
    """More steps than any script here has."""
    while True:
        yield


def test_model_optimizer_and_samples_are_found(drive_forked: Run) -> None:
    found = drive_forked(LOOP, look).result
    assert found["weights"] == _WEIGHTS
    assert found["samples"] == 5
    assert found["optimizer"] == "SGD"


def test_the_program_gets_the_loss_of_each_step(drive_forked: Run) -> None:
    losses = drive_forked(LOOP, look).result["losses"]
    assert all(loss > 0 for loss in losses)
    assert len(set(losses)) == 3


# The rate is 0, so that every batch has a separate loss, independent of earlier ones.
_FOUR_LOSSES = """
import torch
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
torch.nn.init.ones_(model.weight)
for step in range(400):
    x = torch.full((5, 1), float(step % 4))
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_edited_script_runs_instead_of_the_file(drive_forked: Run, tmp_path: Path) -> None:
    plain = drive_forked(_FOUR_LOSSES, look).result
    assert len(set(plain["losses"])) == 3
    assert set(plain["losses"]) < {0.0, 1.0, 2.0, 3.0}
    found = drive_forked(_FOUR_LOSSES, look, techniques=(Accumulation(2),)).result
    # A step is two batches, and its loss is the mean of both.
    assert set(found["losses"]) == {0.5, 2.5}
    assert (plain["samples"], found["samples"]) == (5, 10)
    assert (tmp_path / "user" / "train.py").read_text() == _FOUR_LOSSES


def test_an_error_in_an_edited_script_has_the_edited_line(drive_forked: Run) -> None:
    text = _FOUR_LOSSES + "    assert step < 9, 'enough'\n"
    found = drive_forked(text, look_long, techniques=(Accumulation(2),))
    assert "enough" in found.what
    assert found.error is not None
    # Two lines further down than in the file.
    assert str(found.error["where"]).endswith(f"train.py:{text.count(chr(10)) + 2}")


def test_an_edit_without_a_place_is_an_error_before_the_script_runs(drive_forked: Run) -> None:
    text = "print('ran')\n" + _FOUR_LOSSES.replace("for step in range(400)", "step = 0\nwhile 1")
    message = drive_forked(text, look, techniques=(Accumulation(2),)).what
    assert "not a for loop" in message


def test_the_same_seed_gives_the_same_losses(drive_forked: Run) -> None:
    text = script(
        "import random, numpy\nfor _ in range(50):\n"
        "    model[0].bias.data.fill_(random.random() + numpy.random.rand())\n"
        "    train(model, optimizer, 1)\n"
    )
    first = drive_forked(text, look).result
    # A fork begins with the states of this process.
    random.random()
    np.random.rand()
    assert drive_forked(text, look).result == first


SCRIPTS = {
    "wrapped in another module": script("train(nn.Sequential(model), optimizer, 50)"),
    "a function guarded by __main__": script(
        "def main(): train(model, optimizer, 50)\nif __name__ == '__main__': main()"
    ),
    "a scheduler, which wraps optimizer.step, warnings as errors": script(
        "import warnings; warnings.simplefilter('error')\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
        "for _ in range(50): train(model, optimizer, 1); scheduler.step()"
    ),
    "a disabled GradScaler": script(
        "scaler = torch.amp.GradScaler('cpu', enabled=False)\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad(); scaler.scale(loss_of(model)).backward()\n"
        "    scaler.step(optimizer); scaler.update()"
    ),
    "a closure": script(
        "def closure():\n"
        "    optimizer.zero_grad(); loss = loss_of(model); loss.backward(); return loss\n"
        "for _ in range(50): optimizer.step(closure)"
    ),
    "gradient clipping and accumulation": script(
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    for _ in range(2): loss_of(model).backward()\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
    ),
    "two optimizers in turn": script(
        "critic = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))\n"
        "other = torch.optim.Adam(critic.parameters())\n"
        "for _ in range(50): train(model, optimizer, 1); train(critic, other, 1)"
    ),
    "evaluation in between": script(
        "for _ in range(50):\n"
        "    train(model, optimizer, 1)\n"
        "    with torch.no_grad(): loss_of(model, n=64)"
    ),
    "a DataLoader without workers": script(
        "data = torch.utils.data.TensorDataset(torch.randn(250, 3), torch.randn(250, 1))\n"
        "for x, y in torch.utils.data.DataLoader(data, 5, num_workers=0):\n"
        "    optimizer.zero_grad(); nn.functional.mse_loss(model(x), y).backward()\n"
        "    optimizer.step()"
    ),
    "copies and files of the model": script(
        "import copy, pickle\nloss_of(model)\nfor _ in range(50):\n"
        "    copy.deepcopy(model); pickle.dumps(model); train(model, optimizer, 1)"
    ),
    "much printing": script(
        "import sys\nfor _ in range(50):\n"
        "    train(model, optimizer, 1); print('x' * 9999); print('y' * 9999, file=sys.stderr)"
    ),
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_scripts_of_common_forms_run(drive_forked: Run, text: str) -> None:
    outcome = drive_forked(text, look)
    assert outcome.error is None, outcome.error
    assert outcome.result["weights"] == _WEIGHTS


def test_a_transformed_model_can_be_copied_and_saved(drive_forked: Run) -> None:
    text = SCRIPTS["copies and files of the model"]
    outcome = drive_forked(text, look, techniques=parse("amp:bf16"))
    assert outcome.result["weights"] == _WEIGHTS


def test_samples_are_those_of_the_model_and_not_of_a_loss_module(drive_forked: Run) -> None:
    text = script(
        "criterion = nn.CrossEntropyLoss()\n"
        "model = nn.Linear(3, 7); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    logits = model(torch.randn(4, 10, 3)).view(-1, 7)\n"
        "    criterion(logits, torch.zeros(40, dtype=torch.long)).backward(); optimizer.step()"
    )
    found = drive_forked(text, look).result
    assert (found["samples"], found["model"]) == (4, "Linear")


def test_samples_of_a_call_that_no_backward_pass_reaches_do_not_count(drive_forked: Run) -> None:
    text = "for _ in range(50): train(model, optimizer, 1); grid = model(torch.randn(64, 3)).data\n"
    assert drive_forked(script(text), look).result["samples"] == 5


def test_samples_of_a_model_called_with_keywords_are_counted(drive_forked: Run) -> None:
    text = script(
        "class Labelled(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.inner = model\n"
        "    def forward(self, x=None, labels=None):\n"
        "        return {'loss': nn.functional.mse_loss(self.inner(x), labels)}\n"
        "whole = Labelled()\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    whole(x=torch.randn(6, 3), labels=torch.randn(6, 1))['loss'].backward()\n"
        "    optimizer.step()"
    )
    found = drive_forked(text, look).result
    assert (found["samples"], found["model"]) == (6, "Labelled")


def test_a_batch_of_keywords_keeps_its_names(drive_forked: Run) -> None:
    text = script(
        "class Labelled(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.inner = model\n"
        "    def forward(self, x, weights=None, labels=None):\n"
        "        assert weights is None\n"
        "        return {'loss': nn.functional.mse_loss(self.inner(x), labels)}\n"
        "whole = Labelled()\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    whole(x=torch.randn(6, 3), labels=torch.randn(6, 1))['loss'].backward()\n"
        "    optimizer.step()"
    )

    def call(built: BuiltWorkload) -> Generator[None, Any, list[str]]:
        yield
        return [*built.batch, *model_output(built)]

    assert drive_forked(text, call).result == ["x", "labels", "loss"]


def test_a_script_has_its_own_arguments_and_neighbouring_modules(
    drive_forked: Run, tmp_path: Path
) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "our_parts.py").write_text(_PARTS)
    text = (
        "import argparse, sys\nfrom our_parts import model, optimizer, train\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--steps', type=int)\n"
        "train(model, optimizer, parser.parse_args().steps)\n"
    )
    outcome = drive_forked(text, look, script_arguments=("--steps", "50"))
    assert outcome.result["weights"] == _WEIGHTS
    outcome = drive_forked(text, look, script_arguments=("--epochs", "50"))
    assert "unrecognized arguments: --epochs 50" in outcome.what
    assert outcome.error["remedy"] == "correct the arguments after --"


@pytest.mark.parametrize(("update", "calls"), [("pass", 100), ("optimizer.step()", 1000)])
def test_a_script_that_updates_its_weights_is_stopped_early(
    drive_forked: Run, update: str, calls: int
) -> None:
    text = _PARTS.replace("optimizer.step()", update) + "while True: loss_of(model).backward()\n"
    assert drive_forked(text, look).what == (
        f"train.py was stopped without an optimizer step, after {calls} calls of backward"
    )


def test_standard_input_is_a_terminal_at_its_end(drive_forked: Run) -> None:
    text = """
import os
assert os.popen("stty size").read().split() == ["24", "80"]
assert os.read(0, 1) == os.read(0, 1) == b""
"""
    assert drive_forked(text + LOOP, look).result["samples"] == 5


def test_experiment_trackers_are_off(drive_forked: Run) -> None:
    text = "import os\nassert os.environ['WANDB_MODE'] == 'disabled'\n"
    assert drive_forked(text + LOOP, look).result["samples"] == 5


def test_nothing_of_the_script_runs_after_the_program(drive_forked: Run, tmp_path: Path) -> None:
    late = tmp_path / "late"
    text = script(
        f"import atexit, pathlib\nlate = pathlib.Path({str(late)!r})\n"
        "atexit.register(lambda: late.write_text('at exit'))\n"
        "try:\n    train(model, optimizer, 50)\nfinally:\n    late.write_text('finally')\n"
    )
    assert drive_forked(text, look).error is None
    assert not late.exists()


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "optimizer step", "train.py:FUNCTION"),
        ("loss_of(model)", " 1 call ", " --"),
        (
            "for _ in range(7): loss_of(model).backward()",
            " 7 calls of backward",
            "a function that runs one step",
        ),
        ("import sys; steps = int(sys.argv[1])", "IndexError", "for example train.py -- "),
        ("open(0).readlines()[0]", "IndexError", "standard input is empty"),
        ("get_ipython().run_line_magic('pwd', '')", "NameError", "only IPython defines"),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'])",
            "processes",
            "train.py:FUNCTION",
        ),
        (
            "import subprocess, sys\nmodel.share_memory()\n"
            "subprocess.run([sys.executable, '-c', 'sum(range(4 * 10**7))'])\n"
            "with torch.no_grad():\n    for _ in range(50): model(torch.randn(5, 3))",
            "50 calls of a model, and started other processes",
            "train.py:FUNCTION",
        ),
        ("train(model, optimizer, 1)", " 1 optimizer step,", "epochs"),
        ("train(model, optimizer, 4)", " 4 optimizer steps,", "epochs"),
        ("with torch.no_grad():\n    for _ in range(2): model(torch.randn(5, 3))", " 2 calls ", ""),
        ("with torch.no_grad():\n    for _ in range(4): model(torch.randn(1, 3))", " 4 calls ", ""),
        ("import sys; sys.exit()", " sys.exit() ", " --"),
        ("print('no GPU here'); exit()", "its last output was:\n    no GPU here", " --"),
        (
            "from torch.func import functional_call, grad\n"
            "loss = lambda p: functional_call(model, p, (torch.randn(5, 3),)).sum()\n"
            "for _ in range(5): grad(loss)(dict(model.named_parameters()))",
            "torch.func",
            "one step: train.py:FUNCTION",
        ),
        ("raise SystemExit('no data')", ": no data", ""),
        ("train(model, optimizer, 3); exit(3)", " 3 optimizer steps with sys.exit(3)", ""),
        (
            "import argparse\np = argparse.ArgumentParser()\n"
            "p.add_argument('--data', required=True)\np.parse_args()",
            "--data",
            "train.py -- ",
        ),
    ],
)
def test_a_script_without_enough_steps_is_reported_with_a_remedy(
    drive_forked: Run, text: str, message: str, remedy: str
) -> None:
    outcome = drive_forked(script(text), look)
    assert message in outcome.what
    assert remedy in outcome.error["remedy"]


INFERENCE = """
with torch.inference_mode():
    for _ in range(20):
        model(torch.randn(5, 3))
"""


@pytest.mark.parametrize(
    "text",
    [
        # Only its end shows that the first one trains nothing.
        script(INFERENCE),
        "import torch\nfrom torch import nn\nmodel = nn.Linear(3, 4)\n" + INFERENCE,
        # Transforms of single samples have no weights.
        script("transform = nn.Flatten(0)\nfor _ in range(9): transform(torch.randn(3))\n")
        + INFERENCE,
    ],
)
def test_calls_of_the_model_are_the_steps_of_inference(drive_forked: Run, text: str) -> None:
    def calls(built: BuiltWorkload) -> Generator[None, Any, list[Any]]:
        output = yield
        return [built.training, built.samples, type(built.model).__name__, len(output)]

    assert drive_forked(text, calls).result[:2] == [False, 5]


def test_a_short_script_is_repeated_and_interrupts_the_step_in_between(
    drive_forked: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the calls of backward of one run.
    monkeypatch.setattr("slipstream.workload.script._MAX_BACKWARDS", (8, 8))

    def count(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
        whole = interrupted = 0
        while whole < 20:
            try:
                yield
                whole += 1
            except ScriptRestarted:
                interrupted += 1
        return {"interrupted": interrupted}

    text = script("train(model, optimizer, 10)")
    # Three of ten steps have run when the program begins.
    assert drive_forked(text, count, repeats=True).result == {"interrupted": 2}
    assert " 10 optimizer steps" in drive_forked(text, count).what


def test_the_program_may_call_the_model(drive_forked: Run) -> None:
    def call(built: BuiltWorkload) -> Generator[None, Any, int]:
        yield
        return len(built.step())

    assert drive_forked(script(INFERENCE), call).result == 5


ACCUMULATING = """
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(80, 3), torch.randn(80, 1)), batch_size=4)
for epoch in range(9):
    for step, (x, y) in enumerate(data, 1):
        nn.functional.mse_loss(model(x), y).backward()
        if step % 5 == 0:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for x, y in data: model(x)
"""
BOUNDARY = """
data = torch.randn(30, 3)
for epoch in range(20):
    optimizer.zero_grad()
    (model(data).square().mean() + model(data[:2]).square().mean()).backward()
    optimizer.step()
    with torch.no_grad(): model(torch.randn(99, 3))
"""


@pytest.mark.parametrize(("text", "samples"), [(ACCUMULATING, 20), (BOUNDARY, 30), (LOOP, 5)])
def test_samples_are_those_of_a_whole_step(drive_forked: Run, text: str, samples: int) -> None:
    text = text if text is LOOP else script(text)
    assert drive_forked(text, look).result["samples"] == samples


def test_optimizers_may_step_in_hooks_of_the_backward_pass(drive_forked: Run) -> None:
    text = script("""
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
for _ in range(20):
    loss_of(model).backward()
""")

    def in_backward(built: BuiltWorkload) -> Generator[None, Any, list[int]]:
        import torch

        yield
        return [torch._C._current_graph_task_id(), len(built.other_optimizers)]

    assert drive_forked(text, in_backward).result == [-1, 3]


_LBFGS = """
class Fit(torch.optim.LBFGS):
    pass
optimizer = {kind}(model.parameters(), max_iter=1000, tolerance_change=0, tolerance_grad=0)
x, y = torch.randn(5, 3), torch.randn(5, 1)
evaluated = []
def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    evaluated.append(float(loss))
    return loss
{around}optimizer.step(closure{named})
"""


def look_at_evaluations(built: BuiltWorkload) -> Generator[None, Any, list[Any]]:
    """Return, for three steps, the loss, the script's last one, and whether a hook ran once."""
    updates: list[int] = []
    built.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    yield
    found = []
    for _ in range(3):
        updates.clear()
        loss = yield
        found.append((float(loss), sys.modules["__main__"].evaluated[-1], len(updates)))
    return [built.evaluations, built.samples, found]


@pytest.mark.parametrize(
    ("kind", "around", "named"),
    [
        ("torch.optim.LBFGS", "", ""),
        ("Fit", "for _ in range(9): ", "=closure"),
    ],
)
def test_each_evaluation_of_lbfgs_is_a_step(
    drive_forked: Run, kind: str, around: str, named: str
) -> None:
    text = script(_LBFGS.format(kind=kind, around=around, named=named))
    evaluations, samples, steps = drive_forked(text, look_at_evaluations).result
    assert (evaluations, samples) == (True, 5)
    assert all(loss == last and updates == 1 for loss, last, updates in steps)
    assert len({loss for loss, _, _ in steps}) == 3


def test_all_optimizers_of_a_step_are_fused(drive_forked: Run) -> None:
    text = script("""
other = nn.Linear(3, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(20):
    (loss_of(model) + loss_of(other)).backward()
    optimizer.step()
    second.step()
""")

    def flags(built: BuiltWorkload) -> Generator[None, Any, list[bool]]:
        yield
        optimizers = [built.optimizer, *built.other_optimizers]
        return [optimizer.param_groups[0]["fused"] for optimizer in optimizers]

    outcome = drive_forked(text, flags, techniques=(FusedOptimizer(),))
    assert outcome.result == [True, True]


def test_a_model_called_before_training_does_not_count_as_a_step(drive_forked: Run) -> None:
    text = script(INFERENCE + f"train(model, optimizer, {_ENOUGH})\n")
    assert drive_forked(text, look).result["optimizer"] == "SGD"


@pytest.mark.parametrize("reads", ["print(os.environ['LOCAL_RANK'])", ""])
def test_a_script_for_torchrun_runs_as_its_only_rank(
    drive_forked: Run, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def count(built: BuiltWorkload) -> Generator[None, Any, str]:
        whole = 0
        while whole < 20:  # in several runs of the script
            try:
                yield
                whole += 1
            except ScriptRestarted:
                pass
        return type(built.model).__name__

    text = script(f"""
import os
{reads}
torch.distributed.init_process_group("gloo")
train(nn.parallel.DistributedDataParallel(model), optimizer, 10)
""")
    found = drive_forked(text, count, repeats=True)
    assert found.result == "DistributedDataParallel", found.what


def test_an_error_of_the_script_names_its_line(drive_forked: Run) -> None:
    outcome = drive_forked("x = 1\nraise ValueError('bad \x1b[1mdata\x1b[0m')\n", look)
    assert "ValueError: bad data" in outcome.what
    assert outcome.error["where"].endswith("train.py:2")


def test_an_error_of_torch_without_cuda_is_explained(drive_forked: Run) -> None:
    # torch.cuda.set_device in a build for CPUs.
    missing = "module 'torch._C' has no attribute '_cuda_setDevice'"
    outcome = drive_forked(f"raise AttributeError({missing!r})\n", look)
    assert "asks for a GPU" in outcome.error["remedy"]


def test_our_errors_are_not_caught_by_handlers_of_the_script(drive_forked: Run) -> None:
    def failing(built: BuiltWorkload) -> Generator[None, Any, None]:
        yield
        raise RuntimeError("the program failed")

    text = script(
        "for _ in range(50):\n    try: train(model, optimizer, 1)\n    except BaseException: pass"
    )
    outcome = drive_forked(text, failing)
    assert "the program failed" in outcome.what
    assert outcome.exit_code == 1


def test_a_technique_is_applied_to_the_model_of_the_script(drive_forked: Run) -> None:
    class Frozen(TechniqueSettings):
        name: ClassVar[str] = "frozen"

        def apply(self, built: BuiltWorkload) -> None:
            for parameter in built.model.parameters():
                parameter.requires_grad_(False)

    outcome = drive_forked(LOOP, look, techniques=(Frozen(),))
    assert "does not require grad" in outcome.what


_TWO_LOOPS = script(
    """
def pretrain():
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
other = nn.Linear(3, 1)
adam = torch.optim.Adam(other.parameters())
pretrain()
for _ in range(40):
    adam.zero_grad()
    loss_of(other).backward()
    adam.step()
"""
)


def find_loops(built: BuiltWorkload) -> Generator[None, Any, list[Any]]:
    """Return what steps, where, and which other loops there are."""
    yield
    return [type(built.optimizer).__name__, built.stepped_at, built.other_loops]


def line_of(text: str, last: int = 0) -> int:
    lines = [n for n, line in enumerate(_TWO_LOOPS.splitlines(), 1) if text in line]
    return lines[last]


def test_the_first_of_several_loops_is_recorded_and_the_others_are_named(
    drive_forked: Run,
) -> None:
    first, second = line_of("optimizer.step()", 1), line_of("adam.step()")
    kind, at, others = drive_forked(_TWO_LOOPS, find_loops).result
    assert (kind, at) == ("SGD", f"train.py:{first}")
    assert f"train.py:{second}" in others
    assert f"train.py:{first}" not in others


@pytest.mark.parametrize("inside", ["adam.step()", "adam.zero_grad()"])
def test_a_line_selects_its_loop(drive_forked: Run, inside: str) -> None:
    named = str(line_of(inside))
    kind, at, others = drive_forked(_TWO_LOOPS, find_loops, function=named).result
    assert (kind, at) == ("Adam", f"train.py:{line_of('adam.step()')}")
    assert f"train.py:{line_of('optimizer.step()', 1)}" in others


def test_a_line_selects_the_loop_of_the_function_that_it_calls(drive_forked: Run) -> None:
    named = str(line_of("pretrain()", 1))
    assert drive_forked(_TWO_LOOPS, find_loops, function=named).result[0] == "SGD"


def test_a_line_without_steps_is_refused_with_those_that_have_some(drive_forked: Run) -> None:
    failed = drive_forked(_TWO_LOOPS, find_loops, function="3")
    assert failed.what == "no step ran on line 3 or in its loop"
    assert failed.error["remedy"].endswith(
        f"train.py:{line_of('optimizer.step()', 1)} and train.py:{line_of('adam.step()')}"
    )


def test_a_line_selects_the_loop_of_inference(drive_forked: Run) -> None:
    def samples(built: BuiltWorkload) -> Generator[None, Any, int]:
        yield
        return built.samples

    text = script(INFERENCE + INFERENCE.replace("5", "6"))
    named = str(len(text.splitlines()))
    assert drive_forked(text, samples, function=named).result == 6
    assert " calls of its model" in drive_forked(text, look_long, function=named).what
    failed = drive_forked(text, samples, function="3")
    assert failed.what == "no step ran on line 3 or in its loop"


def test_an_edited_script_keeps_the_selected_loop(drive_forked: Run) -> None:
    text = _TWO_LOOPS.replace(
        "    loss_of(other).backward()", "    loss = loss_of(other)\n    loss.backward()"
    )
    text = text.replace("for _ in range(40):\n    adam", "for x in [1] * 40:\n    adam")
    named = str(len(text.splitlines()))
    kind, at, _ = drive_forked(
        text, find_loops, function=named, techniques=(Accumulation(2),)
    ).result
    assert kind == "Adam"
    assert int(at.partition(":")[2]) > int(named)
