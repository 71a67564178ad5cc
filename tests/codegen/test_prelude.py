"""Functions of the prelude equal torch's in double precision."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.codegen import PRELUDE, load, why_no_compiler

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
_LOOP = """
extern "C" void all_%(name)s(const float* x, float* y, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] = f_%(name)s(x[i]);
}
"""
_THEIRS = {"exp": torch.exp, "erf": torch.erf, "tanh": torch.tanh}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path(tmp_path_factory.mktemp("cache"))))
        yield load(PRELUDE + "".join(_LOOP % {"name": name} for name in _THEIRS))


def _computed(library: ctypes.CDLL, name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    getattr(library, f"all_{name}")(*pointers, ctypes.c_int64(x.numel()))
    return y


@pytest.mark.parametrize(("name", "apart"), [("exp", 4e-7), ("erf", 4.5e-7), ("tanh", 3e-7)])
def test_every_size_of_number_is_near(library: ctypes.CDLL, name: str, apart: float) -> None:
    sizes = torch.logspace(-30, math.log10(85), 400_001)
    x = torch.cat((sizes, -sizes, torch.zeros(1)))
    theirs = _THEIRS[name](x.double())
    ours = _computed(library, name, x)
    assert torch.equal(ours == 0, theirs == 0)
    assert float(((ours - theirs) / theirs.where(theirs != 0, 1)).abs().max()) <= apart


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_nothing_is_beyond_one(library: ctypes.CDLL, name: str) -> None:
    x = torch.linspace(-12, 12, 1_000_001)
    ours = _computed(library, name, x)
    assert float(ours.abs().max()) == 1.0
    torch.testing.assert_close(ours, -_computed(library, name, -x), rtol=6e-7, atol=0)


@pytest.mark.parametrize("name", list(_THEIRS))
def test_what_is_not_a_number_stays_so(library: ctypes.CDLL, name: str) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf])
    torch.testing.assert_close(
        _computed(library, name, x), _THEIRS[name](x), equal_nan=True, rtol=5e-7, atol=0
    )
