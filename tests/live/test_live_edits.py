"""Edits that the page requests, without a page: shown, written, undone, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_workloads import TRAIN

from slipstream.errors import WorkloadError
from slipstream.live import edits
from slipstream.live.edits import with_technique
from slipstream.source import AlreadyAppliedError, EditLocationError
from slipstream.workload import Workload

_FUSED = {"technique": "fused_optimizer:fused"}


def test_the_page_and_the_editor_write_the_same_text(train: Path) -> None:
    target = f"{train}:make_workload"
    shown = edits.preview(target, _FUSED)
    in_editor = with_technique(TRAIN, Workload(target), _FUSED["technique"])
    digests = edits.save(target, _FUSED, shown["digest"])
    assert train.read_text() == in_editor.after != TRAIN
    assert shown["note"] == in_editor.note
    assert "+" in shown["diff"]
    assert edits.take_back(target, digests["after"])["after"] == shown["digest"]
    assert train.read_text() == TRAIN


def test_a_technique_in_use_is_refused_by_both(train: Path) -> None:
    target = f"{train}:make_workload"
    edits.save(target, _FUSED, edits.preview(target, _FUSED)["digest"])
    with pytest.raises(WorkloadError, match="already so"):
        edits.preview(target, _FUSED)
    with pytest.raises(AlreadyAppliedError):
        with_technique(train.read_text(), Workload(target), _FUSED["technique"])


def test_the_page_shows_what_to_write_by_hand_without_an_edit(train: Path) -> None:
    text = "def make_workload():\n    return None\n"
    train.write_text(text)
    with pytest.raises(WorkloadError, match="by hand") as caught:
        edits.preview(f"{train}:make_workload", _FUSED)
    assert "fused" in str(caught.value)
    with pytest.raises(EditLocationError):
        with_technique(text, Workload(f"{train}:make_workload"), _FUSED["technique"])


def test_a_technique_without_an_edit_is_refused_by_both(train: Path) -> None:
    target = f"{train}:make_workload"
    with pytest.raises(WorkloadError, match="torchrun"):
        edits.preview(target, {"technique": "ddp:2"})
    with pytest.raises(WorkloadError, match="torchrun"):
        with_technique(TRAIN, Workload(target), "ddp:2")
