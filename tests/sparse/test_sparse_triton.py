"""Distances on CUDA devices: interpreted and compiled everywhere, run if a device is present."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import InvalidArgumentError
from slipstream.sparse.device import device_of
from triton_children import run_tests

TESTS = Path(__file__).with_name("triton_sparse.py")
Require = Callable[[str, bool, str], None]


def test_interpreted_kernels_equal_the_cpus(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS, tmp_path, require, interpreted=True)


def test_kernels_on_a_device_equal_the_cpus(tmp_path: Path, require: Require) -> None:
    require("cuda", torch.cuda.is_available(), "no CUDA device")
    run_tests(TESTS, tmp_path, require, interpreted=False)


def test_kernels_compile_for_an_absent_device(tmp_path: Path, require: Require) -> None:
    file = TESTS.with_name("triton_sparse_compiled.py")
    run_tests(file, tmp_path, require, interpreted=False)


def test_matrices_on_the_cpu_need_no_device() -> None:
    assert device_of(A=torch.ones(2, 2), B=None) is None
    assert device_of(A=np.ones((2, 2)), B=torch.ones(2, 2)) is None


def test_matrices_on_two_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeviceTensor(torch.Tensor):
        device = torch.device("cuda", 0)

    elsewhere = torch.ones(2, 2).as_subclass(DeviceTensor)
    assert device_of(A=elsewhere) == torch.device("cuda", 0)
    with pytest.raises(InvalidArgumentError, match=r"^B: .*\bcpu\b.*\bcuda:0\b"):
        device_of(A=elsewhere, B=np.ones((2, 2)))


def test_a_missing_triton_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from slipstream.errors import MissingExtraError\n"
        "from slipstream.sparse import device\n"
        "try:\n    device._kernels()\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'slipstream[triton]'" in run.stdout
