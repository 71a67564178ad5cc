"""The rule chooses a kernel of this CPU; measuring kernels changes the choice and is stored."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from slipstream.errors import InvalidArgumentError, SlipstreamWarning
from slipstream.native import InstructionSet, cpu_features
from slipstream.techniques.lowbit import Shape, autotune, dispatch, matmul, pack_weights
from slipstream.techniques.lowbit.bindings import kernels

SHAPE = Shape(64, 48, 96, 2, 3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch.winners.cache_clear()
    return tmp_path


def test_every_pair_of_widths_has_a_kernel_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in cpu_features().levels:
        monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", str(level))
        for w, a, rows in itertools.product(range(1, 9), range(1, 9), (1, 64, None)):
            kernel = dispatch.choose(Shape(rows, 64, 64, w, a))
            assert cpu_features().levels.index(kernel.level) >= 0
            assert kernel.supports(w, a)
            assert rows != 1 or kernel.scheme == "dense"


def test_the_rule_chooses_the_fastest_at_a_level() -> None:
    def first(level: InstructionSet, w: int, a: int, k: int = 512) -> str:
        return dispatch.preferred(Shape(None, 512, k, w, a), level)[0]

    # Like the level below, because its own kernel is unmeasured.
    assert first(InstructionSet.AMX, 3, 3) == "dense"
    assert first(InstructionSet.AMX, 2, 2) == "bit_serial"
    assert first(InstructionSet.AVX512, 2, 2) == "bit_serial"
    assert first(InstructionSet.AVX512, 1, 8) == "word_table"
    assert first(InstructionSet.AVX512, 3, 3) == "dense"
    assert first(InstructionSet.AVX512VNNI, 2, 2) == "dense"
    assert first(InstructionSet.AVX512VNNI, 1, 1, k=2048) == "bit_serial"
    assert first(InstructionSet.AVXVNNI, 1, 4) == "byte_table"
    assert first(InstructionSet.AVXVNNI, 1, 8) == "dense"
    assert first(InstructionSet.AVX512BW, 1, 1) == "byte_table"
    assert first(InstructionSet.AVX512BW, 1, 1, k=2048) == "bit_serial"
    assert first(InstructionSet.AVX2, 3, 3) == "dense"
    assert first(InstructionSet.NEON, 3, 3) == "ulppack"
    assert first(InstructionSet.NEON_DOTPROD, 3, 3) == "dense"
    assert first(InstructionSet.SCALAR, 8, 8) == "dense"


def test_a_scheme_that_does_not_support_these_widths_is_refused() -> None:
    able = dispatch.candidates(Shape(None, 4, 4, 8, 8), cpu_features().levels)
    unable = sorted({kernel.scheme for kernel in kernels()} - able.keys())
    if not unable:
        pytest.skip("every scheme of this CPU supports all widths")
    with pytest.raises(InvalidArgumentError, match=r"^scheme: .*8-bit") as caught:
        dispatch.choose(Shape(None, 4, 4, 8, 8), scheme=unable[0])
    assert "dense" in str(caught.value)


def test_measured_kernels_are_chosen_and_stored(own_cache: Path) -> None:
    taken = autotune(SHAPE, budget_s=0.001)
    assert set(taken) == set(dispatch.candidates(SHAPE, cpu_features().levels))
    assert list(taken.values()) == sorted(taken.values())
    winner = next(iter(taken))
    assert dispatch.choose(SHAPE).scheme == winner
    dispatch.winners.cache_clear()
    assert (own_cache / "slipstream" / "lowbit.db").is_file()
    assert dispatch.choose(SHAPE).scheme == winner
    w = torch.randint(0, 4, (48, 96), dtype=torch.uint8)
    packed = pack_weights(w, 2, activation_bits=3, rows=50)
    assert packed.scheme == winner
    a = torch.randint(0, 8, (50, 96), dtype=torch.uint8)
    assert torch.equal(matmul(a, packed), a.int() @ w.int().T)


def test_an_unwritable_cache_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    dispatch.winners.cache_clear()
    with pytest.warns(SlipstreamWarning, match="cannot be stored"):
        taken = autotune(SHAPE, budget_s=0.001)
    assert dispatch.choose(SHAPE).scheme == next(iter(taken))


def test_the_table_names_every_pair_once() -> None:
    rows = dispatch.table()
    assert rows[-1][0] in ("all others", "all widths")
    named = [pair for pairs, _ in rows[:-1] for pair in pairs.split(", ")]
    assert len(named) == len(set(named))
