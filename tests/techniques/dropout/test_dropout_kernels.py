"""Every dropout kernel equals the reference bitwise, on every CPU we can run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from environments import check_choice
from sanitized import NATIVE, SANITIZERS, build
from slipstream.codegen.prelude import threshold_and_scale
from slipstream.errors import InvalidArgumentError
from slipstream.native import InstructionSet
from slipstream.techniques.dropout import kernels, reference

KERNELS = pytest.mark.parametrize("kernel", kernels.kernels().items(), ids=lambda k: str(k[0]))
DTYPES = pytest.mark.parametrize("dtype", list(kernels.KERNEL_DTYPES), ids=str)
SIZES = (0, 1, 15, 16, 63, 64, 65, 127, 1000, 65_536, 200_003)
# Probabilities at which the lower 16 bits of the threshold matter: almost never, always, and 0.1.
PROBABILITIES = (0.5, 0.1, 1 / 3, 0.9, 1e-12, 2.0**-32, 1 - 2.0**-33)


def seed_of(number: int) -> torch.Tensor:
    return kernels.draw_seed(torch.Generator().manual_seed(number))


def bits(x: torch.Tensor) -> bytes:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().tobytes()


def test_philox_equals_published_values() -> None:
    # From the known answers of Random123, the library of Salmon et al.
    zeros = reference.philox(np.zeros(1, np.uint64), 0, 0, rounds=10)[0]
    assert [f"{word:08x}" for word in zeros] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    seven = reference.philox(np.zeros(1, np.uint64), 0, 0, rounds=7)[0]
    assert [f"{word:08x}" for word in seven] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    ones = 2**64 - 1
    full = reference.philox(np.full(1, ones, np.uint64), ones, ones, rounds=10)[0]
    assert [f"{word:08x}" for word in full] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@KERNELS
@DTYPES
def test_equals_the_reference(kernel: tuple[InstructionSet, int], dtype: torch.dtype) -> None:
    for size in SIZES:
        x = torch.randn(size).to(dtype)
        for p in PROBABILITIES if size < 10**5 else PROBABILITIES[:2]:
            y = torch.empty_like(x)
            kernels.run_kernel(x, y, seed_of(size), p, kernel[1])
            assert bits(y) == bits(kernels.run_reference(x, seed_of(size), p)), (size, p)


@KERNELS
@DTYPES
def test_the_lower_bits_of_the_probability_count(
    kernel: tuple[InstructionSet, int], dtype: torch.dtype
) -> None:
    # Upper 16 bits zero: only the second stream decides what is dropped.
    x, seed, p = torch.ones(1 << 20, dtype=dtype), seed_of(5), 60_000 / 2.0**32
    y = torch.empty_like(x)
    kernels.run_kernel(x, y, seed, p, kernel[1])
    assert bits(y) == bits(kernels.run_reference(x, seed, p))
    assert 3 <= int((y == 0).sum()) <= 35, "14.6 expected"


@KERNELS
@DTYPES
def test_special_values_and_in_place(
    kernel: tuple[InstructionSet, int], dtype: torch.dtype
) -> None:
    special = [np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 1e-38, 1.0039]
    x = torch.tensor(special * 20).to(dtype)
    expected = kernels.run_reference(x, seed_of(1), 0.5)
    kernels.run_kernel(x, x, seed_of(1), 0.5, kernel[1])
    assert bits(x) == bits(expected)


@KERNELS
def test_unaligned_addresses_work(kernel: tuple[InstructionSet, int]) -> None:
    x = torch.randn(1003)
    for begin in (1, 2, 3):
        y = torch.full((1003,), 7.0)
        kernels.run_kernel(x[begin:], y[begin:], seed_of(2), 0.3, kernel[1])
        assert torch.equal(y[begin:], kernels.run_reference(x[begin:], seed_of(2), 0.3))
        assert (y[:begin] == 7).all()


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, single, four = torch.randn(500_001), torch.empty(500_001), torch.empty(500_001)
    for threads, y in ((1, single), (4, four)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        kernels.run_kernel(x, y, seed_of(3), 0.1)
    assert torch.equal(single, four)


def test_the_environment_chooses_the_kernel() -> None:
    script = (
        "import torch; from slipstream.techniques.dropout import kernels as d;"
        "x = torch.arange(300.); s = torch.tensor([3, 4]);"
        "print(next(iter(d.kernels()), None), d.dropout(x, s, 0.3).sum().item())"
    )
    check_choice(script)


def test_invalid_arguments_of_the_operator_are_named() -> None:
    x, seed = torch.ones(3), torch.tensor([1, 2])
    with pytest.raises(InvalidArgumentError, match="seed"):
        kernels.dropout(x, torch.tensor([1]), 0.5)
    with pytest.raises(InvalidArgumentError, match="seed"):
        kernels.dropout(x, torch.tensor([1.0, 2.0]), 0.5)
    with pytest.raises(InvalidArgumentError, match="p:"):
        kernels.dropout(x, seed, 1.0)
    with pytest.raises(InvalidArgumentError, match="floating-point"):
        kernels.dropout(torch.ones(3, dtype=torch.int64), seed, 0.5)


def build_program(folder: Path, compiler: str, levels: list[str], *flags: str) -> Path:
    """Return the driver with the kernels of `levels`."""
    source = NATIVE / "src"
    return build(
        folder, "dropout", levels, NATIVE.parent / "tests/native/dropout_main.cpp",
        source / "dropout" / "dropout.cpp", source / "threads.cpp",
        compiler=compiler, flags=flags,
    )  # fmt: skip


def check_program(command: list[str], levels: list[str]) -> None:
    """Check that the program's output equals the reference for each kernel."""
    for dtype, number in kernels.KERNEL_DTYPES.items():
        for size, p in ((1, 0.5), (129, 0.1), (70_001, 0.1), (4096, 60_000 / 2**32)):
            x, seed = torch.randn(size).to(dtype), seed_of(size)
            threshold, scale = threshold_and_scale(p)
            words = [str(word) for word in seed.numpy().view(np.uint64)]
            arguments = [str(number), str(size), *words, str(threshold), float(scale).hex(), "3"]
            run = subprocess.run([*command, *arguments], input=bits(x), capture_output=True)
            assert run.returncode == 0, run.stderr.decode()
            assert run.stderr.decode().split() == levels
            assert run.stdout == bits(kernels.run_reference(x, seed, p)) * len(levels)


def test_neon_on_an_emulated_cpu(tmp_path: Path, require: Callable[[str, bool, str], None]) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    available = shutil.which(compiler) is not None and shutil.which(emulator) is not None
    require("qemu", available, f"{compiler} and {emulator} are needed")
    program = build_program(tmp_path, compiler, ["scalar", "neon"], "-static")
    check_program([emulator, str(program)], ["scalar", "neon"])


@pytest.mark.full
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    levels = [str(level) for level in reversed(kernels.kernels())]
    if not levels or shutil.which("g++") is None:
        pytest.skip("no kernels, or no g++")
    program = build_program(tmp_path, "g++", levels, *SANITIZERS)
    check_program([str(program)], levels)
