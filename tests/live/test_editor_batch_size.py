"""Edits of the batch size: one token differs, or there is a reason for no edit."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.live.edits import batch_size_in, with_batch_size, with_technique
from slipstream.workload import Workload

_BODY = "    return None, batch_size\n"
_SURE = {
    "default": f"def make_workload(batch_size=32):\n{_BODY}",
    "annotated": f"def make_workload(batch_size: int = 32) -> tuple:  # 32 fits\n{_BODY}",
    "keyword only": f"def make_workload(*, seed=32, batch_size=32):\n{_BODY}",
    "constant": f"SIZE = 32  # samples\n\n\ndef make_workload(batch_size=SIZE):\n{_BODY}",
    "annotated constant": f"SIZE: int = 32\n\n\ndef make_workload(batch_size=SIZE):\n{_BODY}",
    "split over lines": (
        "def make_workload(\n    layers=32,\n    # how many at once\n    batch_size\n"
        f"    =\n    32,  # at once\n):\n{_BODY}"
    ),
    "decorator": (
        "import functools\n\n\n@functools.cache\n@functools.wraps(print)\n"
        f"def make_workload(batch_size=32):\n{_BODY}"
    ),
    "letters beyond": f"def make_workload(label='\U0001f600\u00e9', batch_size=32):\n{_BODY}",
    "returns and tabs": f"def make_workload(batch_size\t=\t32):\r\n{_BODY}".replace("\n", "\r\n"),
}
_UNSURE = {
    "an expression": (f"def make_workload(batch_size=4 * 8):\n{_BODY}", "not a plain number"),
    "a call": (f"def make_workload(batch_size=int('32')):\n{_BODY}", "not a plain number"),
    "text": (f"def make_workload(batch_size='32'):\n{_BODY}", "not a plain number"),
    "assigned twice": (f"N = 32\nN = 64\ndef make_workload(batch_size=N):\n{_BODY}", "2 times"),
    "set inside": (f"def make_workload(batch_size=32):\n    batch_size = 8\n{_BODY}", "sets"),
    "imported": (f"from sizes import N\ndef make_workload(batch_size=N):\n{_BODY}", "plain"),
    "no default": ("def make_workload(batch_size):\n    return None, 1\n", "default"),
    "no argument": ("def make_workload():\n    return None, 1\n", "batch_size"),
    "no Python": ("def make_workload(batch_size=32:\n", "parse"),
}


def tokens(text: str) -> list[str]:
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text, "").readline)]


def workload(path: Path, text: str) -> Workload:
    path.write_bytes(text.encode())
    return Workload(f"{path}:make_workload")


@pytest.mark.parametrize("case", _SURE)
def test_exactly_one_token_differs(case: str, tmp_path: Path) -> None:
    text = _SURE[case]
    target = workload(tmp_path / "train.py", text)
    assert batch_size_in(text, target).value == 32
    edited = with_batch_size(text, target, 1000)
    pairs = zip(tokens(text), tokens(edited.after), strict=True)
    assert [(a, b) for a, b in pairs if a != b] == [("32", "1000")]
    assert with_batch_size(edited.after, target, 32).after == text


@pytest.mark.parametrize("case", _UNSURE)
def test_uncertain_sizes_are_read_only_with_the_reason(case: str, tmp_path: Path) -> None:
    text, reason = _UNSURE[case]
    target = workload(tmp_path / "train.py", text)
    with pytest.raises(SlipstreamError, match=reason):
        with_batch_size(text, target, 64)
    assert (tmp_path / "train.py").read_bytes() == text.encode()


@pytest.mark.parametrize("family", ["skyline", "deepview"])
def test_the_input_provider_sets_the_size(family: str, tmp_path: Path) -> None:
    text = (
        f"def {family}_model_provider():\n    return None\n\n\n"
        f"def {family}_input_provider(batch_size=32):\n    return (None,)\n\n\n"
        f"def {family}_iteration_provider(model):\n    return print\n"
    )
    path = tmp_path / "entry.py"
    path.write_text(text)
    edited = with_batch_size(text, Workload(str(path)), 8)
    assert edited.after == text.replace("32", "8")


@pytest.mark.parametrize("samples", [0, -3, 10**9])
def test_an_invalid_number_of_samples_is_refused(samples: int, tmp_path: Path) -> None:
    text = _SURE["default"]
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        with_batch_size(text, workload(tmp_path / "train.py", text), samples)


def test_a_technique_is_written_into_the_open_text(tmp_path: Path) -> None:
    saved = (
        "import torch\n\n\ndef make_workload():\n    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.Adam(model.parameters())\n"
        "    return model, torch.ones(1, 2), None, optimizer\n"
    )
    target = workload(tmp_path / "train.py", saved)
    typed = "# typed, not saved: \U0001f600\n" + saved
    edited = with_technique(typed, target, "fused_optimizer")
    assert edited.after == typed.replace("parameters())", "parameters(), fused=True)")


def test_a_technique_already_in_use_is_refused(tmp_path: Path) -> None:
    text = (
        "import torch\n\n\ndef make_workload():\n    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.Adam(model.parameters(), fused=True)\n"
        "    return model, torch.ones(1, 2), None, optimizer\n"
    )
    with pytest.raises(SlipstreamError, match="already set"):
        with_technique(text, workload(tmp_path / "train.py", text), "fused_optimizer")
