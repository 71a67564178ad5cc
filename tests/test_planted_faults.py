"""The faults that the mutation gate plants by hand can be planted: code they change is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mutant_faults import planted

_WRITTEN = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("one", _WRITTEN["planted"], ids=lambda one: one["after"][:40])
def test_a_planted_fault_finds_its_code(one: dict[str, str]) -> None:
    assert one["before"] != one["after"]
    planted(one["file"], one["before"], one["after"])
