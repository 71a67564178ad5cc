"""Low-bit kernels that this CPU may lack: emulated instructions, and AArch64 under qemu."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from lowbit_driver import ROOT, build, run

from slipstream.native import cpu_features, library

Require = Callable[[str, bool, str], None]
KERNELS = ROOT / "native" / "src" / "lowbit"
EMULATED = "-DSLIPSTREAM_EMULATED=ON"
AARCH64 = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
)
LONGER = ("--rounds", "3", "--most", str(1 << 19), "--seed")


def names(*levels: str) -> set[str]:
    """Check the verdicts of all kernels written for these levels."""
    return {file.stem for level in levels for file in KERNELS.glob(f"*_{level}.cpp")}


def of_avx2() -> tuple[str, ...]:
    """Return the levels whose newest instructions AVX2 emulates, if AVX2 is present."""
    return ("avxvnni", "amx") if "avx2" in cpu_features().features else ()


def everything_is_right(levels: tuple[str, ...], *command: str | Path) -> None:
    verdicts, complaint = run(*command)
    assert not complaint
    assert {verdict.kernel for verdict in verdicts} >= names(*levels)
    assert all(verdict.problems > 100 and verdict.failures == 0 for verdict in verdicts)


@pytest.fixture(scope="module")
def cmake(require: Require) -> None:
    available = shutil.which("cmake") is not None and shutil.which("c++") is not None
    require("native", available, "no cmake or no C++ compiler")


@pytest.fixture(scope="module")
def aarch64(cmake: None, require: Require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = ("qemu-aarch64", "aarch64-linux-gnu-g++")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    require("qemu", not missing, f"no {' and no '.join(missing)}")
    return build(tmp_path_factory.mktemp("aarch64"), *AARCH64)


@pytest.fixture(scope="module")
def emulated(cmake: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every AVX-512 instruction is emulated, equally on any CPU. AVX-VNNI and AMX need AVX2."""
    return build(tmp_path_factory.mktemp("emulated"), EMULATED)


@pytest.mark.full
def test_kernels_are_exact_with_emulated_instructions(emulated: Path) -> None:
    everything_is_right(("avx512", "scalar", *of_avx2()), emulated)


@pytest.mark.full
def test_aarch64_kernels_are_exact_under_qemu(aarch64: Path) -> None:
    everything_is_right(("neon", "neon_dotprod", "scalar"), "qemu-aarch64", aarch64)


@pytest.mark.full
def test_the_driver_multiplies_its_input_problems(emulated: Path) -> None:
    verdicts, complaint = run(emulated, "--kernel", "dense_avx512", "3,3,5,40,70", "8,8,96,33,2100")
    assert not complaint
    assert [(verdict.kernel, verdict.problems) for verdict in verdicts] == [("dense_avx512", 2)]
    assert "what is 'W3A3'?" in run(emulated, "W3A3")[1]


def test_the_driver_detects_a_wrong_kernel(cmake: None, tmp_path: Path) -> None:
    """Together with a correct one: that of AVX-VNNI, by instructions of AVX2."""
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "native", copy / "native")
    shutil.copy(ROOT / "CMakeLists.txt", copy)
    for name in names("avx512"):
        (copy / f"native/src/lowbit/{name}.cpp").unlink()
    scalar = copy / "native/src/lowbit/dense_scalar.cpp"
    text = scalar.read_text(encoding="utf-8")
    assert "a[k] * scratch[k]" in text
    # Correct except for the largest product, which an 8-bit sum would lose.
    text = text.replace("a[k] * scratch[k]", "(a[k] * scratch[k]) % 65025")
    scalar.write_text(text, encoding="utf-8")
    verdicts, complaint = run(build(tmp_path / "build", EMULATED, source=copy))
    failures = {verdict.kernel: verdict.failures for verdict in verdicts}
    assert failures.keys() == names("scalar", *of_avx2())
    assert [name for name in failures if failures[name]] == ["dense_scalar"]
    assert "W8A8" in complaint
    assert "W7A7" not in complaint


def test_inner_loops_do_not_use_the_stack(require: Require) -> None:
    """Spilled accumulators cost up to half the speed without changing a result."""
    compiled = library()
    available = compiled is not None and shutil.which("objdump") is not None
    require("native", available, "no compiled library, or no objdump")
    if platform.machine() != "x86_64":
        pytest.skip("reads x86-64 instructions")
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", compiled._name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loops = [
        loop
        for loop in innermost_loops(text)
        if any(word in line for line in loop for word in ("vpdpbusd", "vpopcntq"))
    ]
    assert len(loops) > 50
    spilled = [loop for loop in loops if any(re.search(r"\(%r[sb]p", line) for line in loop)]
    assert not spilled, "\n".join(spilled[0])


def innermost_loops(disassembly: str) -> list[list[str]]:
    """Return the instructions of every loop without an inner loop."""
    lines = re.findall(r"^ *([0-9a-f]+):\t(.*)$", disassembly, re.MULTILINE)
    place = {address: index for index, (address, _) in enumerate(lines)}
    loops: list[list[str]] = []
    last_start = -1
    for index, (_, instruction) in enumerate(lines):
        jump = re.match(r"j\w+ +([0-9a-f]+) ", instruction)
        start = place.get(jump[1], index + 1) if jump else index + 1
        if last_start < start <= index:
            loops.append([text for _, text in lines[start : index + 1]])
            last_start = start
    return loops


@pytest.mark.full
@pytest.mark.parametrize("seed", ["1", "2"])
def test_aarch64_kernels_on_many_problems(aarch64: Path, seed: str) -> None:
    everything_is_right(("neon", "neon_dotprod"), "qemu-aarch64", aarch64, *LONGER, seed)


@pytest.mark.full
def test_avx512_kernels_on_many_problems_with_instructions_of_this_cpu(
    cmake: None, tmp_path: Path
) -> None:
    driver = build(tmp_path, EMULATED, flags="-march=native")
    everything_is_right(("avx512",), driver, *LONGER, "3")


@pytest.mark.full
@pytest.mark.parametrize("options", [(), (EMULATED,)], ids=["real", "emulated"])
def test_kernels_under_sanitizers(cmake: None, tmp_path: Path, options: tuple[str, ...]) -> None:
    flags = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
    driver = build(tmp_path, *options, flags=flags + (" -march=native" if options else ""))
    levels = ("avx512", *of_avx2()) if options else ("scalar",)
    everything_is_right(levels, driver, "--most", str(1 << 15))
