"""Look-ups on CUDA devices: interpreted and compiled everywhere, run if a device is present."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from triton_children import run_tests

TESTS = Path(__file__).with_name("triton_robe.py")
Require = Callable[[str, bool, str], None]


def test_interpreted_kernels_equal_the_cpus(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS, tmp_path, require, interpreted=True)


def test_kernels_on_a_device_equal_the_cpus(tmp_path: Path, require: Require) -> None:
    require("cuda", torch.cuda.is_available(), "no CUDA device")
    run_tests(TESTS, tmp_path, require, interpreted=False)


def test_kernels_compile_for_an_absent_device(tmp_path: Path, require: Require) -> None:
    file = TESTS.with_name("triton_robe_compiled.py")
    run_tests(file, tmp_path, require, interpreted=False)
