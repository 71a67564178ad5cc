"""The edited file computes the same bits as the technique's `apply`."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import (
    CLOSURE,
    FUNCTION,
    FUNCTIONS,
    GAN,
    GROUPS,
    INFERENCE,
    SCRIPTS,
    STEPS,
    TWO_OPTIMIZERS,
    UNNAMED,
    function_losses,
    script_losses,
)

from slipstream.source import Source, locate, write
from slipstream.technique import parse
from slipstream.workload import Workload

_TECHNIQUES = ("amp:bf16", "fused_optimizer:fused", "fused_optimizer:foreach", "channels_last")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def edited(path: Path, text: str, techniques: str, function: str = "") -> str:
    """Write `text` with the techniques' edits; each must have one. Return the last one's note."""
    path.write_text(text)
    target = f"{path}:{function}" if function else str(path)
    source = Source.read(path)
    for technique in parse(techniques):
        change = technique.code(Workload.parse(target))
        assert change is not None
        assert change.diff, change.note
        assert change.edit is not None
        source = change.edit(locate(source, function or None)).reparse()
    write(source)
    return change.note


def noted(path: Path, technique: str) -> str:
    """Return the note of a technique that has no edit for the file."""
    change = parse(technique)[0].code(Workload.parse(str(path)))
    assert change is not None
    assert not change.diff
    return change.note


def added(path: Path, technique: str) -> list[str]:
    """Return the lines that a technique adds to the file."""
    change = parse(technique)[0].code(Workload.parse(str(path)))
    assert change is not None
    return [line[1:] for line in change.diff.splitlines()[3:] if line[0] == "+"]


def applied(path: Path, techniques: str, steps: int = STEPS) -> list[float]:
    path.write_text(FUNCTION)
    return function_losses(path, *(parse(techniques) if techniques else ()), steps=steps)


@pytest.mark.parametrize("technique", [*_TECHNIQUES, "amp:bf16+fused_optimizer+channels_last"])
@pytest.mark.parametrize("shape", FUNCTIONS)
def test_a_function(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(FUNCTIONS[shape])
    plain = function_losses(path)
    transformed = function_losses(path, *parse(technique))
    edited(path, FUNCTIONS[shape], technique, "make")
    assert function_losses(path) == transformed
    if "amp" in technique:
        assert transformed != plain


@pytest.mark.parametrize("technique", [*_TECHNIQUES, "amp:bf16+fused_optimizer+channels_last"])
@pytest.mark.parametrize("shape", SCRIPTS)
def test_a_script(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(SCRIPTS[shape])
    assert script_losses(path) == applied(tmp_path / "function.py", "")
    edited(path, SCRIPTS[shape], technique)
    assert script_losses(path) == applied(tmp_path / "function.py", technique)


@pytest.mark.parametrize("shape", GROUPS)
def test_a_script_with_groups_of_parameters(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "user.py"
    edited(path, GROUPS[shape], "amp:bf16+channels_last")
    assert script_losses(path) == applied(tmp_path / "function.py", "amp:bf16+channels_last")


@pytest.mark.parametrize("shape", UNNAMED)
def test_a_loss_without_a_name(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "user.py"
    edited(path, UNNAMED[shape], "amp:bf16+channels_last")
    expected = applied(tmp_path / "function.py", "amp:bf16+channels_last")
    assert script_losses(path) == pytest.approx(expected, rel=1e-6)
    assert "with torch.autocast" in path.read_text()


def test_every_forward_pass_of_a_script_with_two_models(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "user.py"
    path.write_text(GAN)
    plain = script_losses(path)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        expected = script_losses(path)
    note = edited(path, GAN, "amp:bf16")
    assert path.read_text().count("with torch.autocast") == 3
    assert "change one of 2 models" in note
    assert plain != script_losses(path) == expected


_CALL = "output = model(images)\n    loss = F.cross_entropy(output, labels)\n"


@pytest.mark.filterwarnings("ignore:.*autocast")
@pytest.mark.parametrize(
    ("context", "on"),
    [
        ('torch.autocast("cpu", enabled=len(losses) < 0)', False),
        ('torch.autocast("cuda")', False),
        ("torch.cpu.amp.autocast(len(losses) < 0)", False),
        ('torch.autocast("cpu", torch.bfloat16, True)', True),
    ],
)
def test_a_step_is_under_autocast_only_if_that_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str, on: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "user.py"
    block = _CALL.replace("\n    ", "\n        ")
    text = SCRIPTS["plain"].replace(_CALL, f"with {context}:\n        {block}")
    path.write_text(text)
    if on:
        assert noted(path, "amp:bf16").startswith("already so: it is under autocast")
        return
    edited(path, text, "amp:bf16")
    assert script_losses(path) == applied(tmp_path / "function.py", "amp:bf16")


@pytest.mark.parametrize("loss", ["nn.BCELoss()(", "F.binary_cross_entropy("])
def test_a_loss_that_fails_under_autocast_on_a_gpu_stays_outside(tmp_path: Path, loss: str) -> None:
    path = tmp_path / "user.py"
    text = (
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
        "model = nn.Linear(2, 1).to(device)\noptimizer = torch.optim.SGD(model.parameters())\n"
        f"for x, y in data:\n    loss = {loss}model(x).sigmoid(), y)\n"
        "    loss.backward()\n    optimizer.step()\n"
    )
    path.write_text(text)
    note = noted(path, "amp:bf16")
    assert "fails under autocast on a GPU" in note
    assert _HEADER in note
    assert "loss_function(output.float(), targets)" in note
    path.write_text(text.replace(".to(device)", ""))
    assert added(path, "amp:bf16")


def test_a_script_with_a_closure(tmp_path: Path) -> None:
    path, technique = tmp_path / "user.py", "amp:bf16+fused_optimizer+channels_last"
    for text in (CLOSURE, CLOSURE.replace("step(closure)", "step(closure=closure)")):
        edited(path, text, technique)
        assert script_losses(path) == applied(tmp_path / "function.py", technique)
        assert "steps with a closure" in noted(path, "accumulation:2")


def test_an_optimizer_that_a_method_of_the_model_makes(tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(
        "import torch\nmodel = Net()\n"
        "scaler = torch.amp.GradScaler(enabled=any(p.is_cuda for p in model.parameters()))\n"
        "opt = model.configure_optimizers(0.1)\nfor x in data:\n    loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(opt)\n"
    )
    assert "'model.configure_optimizers' makes the optimizer" in noted(path, "fused_optimizer")
    assert "    loss = model(x)" in "".join(added(path, "amp:bf16"))


_HEADER = "with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):"


def test_an_inference_script(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "user.py"
    path.write_text(INFERENCE)
    plain = script_losses(path)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = script_losses(path)
    edited(path, INFERENCE, "amp:bf16")
    assert _HEADER + "\n            scores = model(images).softmax(-1)\n" in path.read_text()
    assert plain != script_losses(path) == expected
    assert "under autocast" in noted(path, "amp:bf16")


_NO_GRAD = "@torch.no_grad()\ndef run(net, x):\n    return net(x)\nmodel.eval()\n"
_TWO = "def run(net, x):\n    with torch.no_grad():\n        a = net(x)\n        b = net(-x)\n"


@pytest.mark.parametrize(("text", "blocks"), [(_NO_GRAD, 1), (_TWO + "model = model.eval()\n", 2)])
def test_every_call_without_gradients_is_under_autocast(
    tmp_path: Path, text: str, blocks: int
) -> None:
    path = tmp_path / "user.py"
    path.write_text(f"import torch\nmodel = torch.nn.Linear(2, 2)\n{text}run(model, 1)\n")
    lines = [line.strip() for line in added(path, "amp:bf16")]
    assert lines[::2] == ['with torch.autocast("cpu", dtype=torch.bfloat16):'] * blocks


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("model(images)", "model(images).numpy()", "NumPy, which has no bfloat16"),
        (".eval()", "", "no model in evaluation mode"),
        ("inference_mode()", "enable_grad()", "no model in evaluation mode"),
        ("scores = model(images)", "scores = (lambda: model(images))()", "simple statement"),
        ("    for", "    other = Net().eval()\n    other(images)\n    for", "'other' and 'model'"),
    ],
)
def test_an_inference_script_of_another_form_is_left_alone(
    tmp_path: Path, before: str, after: str, reason: str
) -> None:
    path = tmp_path / "user.py"
    path.write_text(INFERENCE.replace(before, after))
    note = noted(path, "amp:bf16")
    assert reason in note
    assert "output = model(inputs)" in note
    assert "backward" not in note


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_script_with_two_optimizers(tmp_path: Path, kind: str) -> None:
    path, technique = tmp_path / "user.py", f"fused_optimizer:{kind}"
    edited(path, TWO_OPTIMIZERS, technique)
    assert path.read_text().count(f"lr=1e-2, {kind}=True)") == 2
    assert script_losses(path) == applied(tmp_path / "function.py", technique)
    path.write_text(path.read_text().replace(f", {kind}=True", "", 1))
    assert len(added(path, technique)) == 1, "the other has the flag"


def test_lines_to_write_name_the_optimizers_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(TWO_OPTIMIZERS.replace("lr=1e-2", "**settings"))
    assert noted(path, "fused_optimizer").splitlines()[1:] == [
        "    head = torch.optim.Adam(..., fused=True)",
        "    rest = torch.optim.Adam(..., fused=True)",
    ]
    assert "2 optimizers are made, on lines" in noted(path, "accumulation:2")
    path.write_text("model = ...\n")
    assert "torch.optim.AdamW(..., fused=True)" in noted(path, "fused_optimizer")


@pytest.mark.parametrize("shape", SCRIPTS)
@pytest.mark.parametrize("technique", ["accumulation:2", "accumulation:2+amp:bf16"])
def test_accumulation_in_a_script(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    edited(path, SCRIPTS[shape], technique)
    found = script_losses(path)
    # Every batch is equal, so that both batches of an update have the same loss.
    once = applied(tmp_path / "function.py", technique, steps=STEPS // 2)
    assert found == pytest.approx([loss for loss in once for _ in range(2)], rel=1e-5)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[1] != pytest.approx(found[2], rel=1e-3)
