"""Loading and refusing the compiled library, and the fallback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import SlipstreamError, SlipstreamWarning, UnknownNameError
from slipstream.native import (
    CpuFeatures,
    InstructionSet,
    Program,
    cpu_features,
    library,
    loader,
    simulate,
    why_no_library,
)
from slipstream.native.instruction_set import features_in_cpuinfo


@pytest.fixture
def fresh_loader(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A loader that has not tried yet; restored afterwards."""
    monkeypatch.delenv("SLIPSTREAM_NATIVE", raising=False)
    monkeypatch.setattr(loader, "_answer", None)
    return monkeypatch


def test_the_library_is_loaded_once() -> None:
    assert library() is not None
    assert library() is library()
    assert why_no_library() is None


def test_off_selects_python_without_a_warning(fresh_loader: pytest.MonkeyPatch) -> None:
    fresh_loader.setenv("SLIPSTREAM_NATIVE", "off")
    assert library() is None
    assert "SLIPSTREAM_NATIVE" in str(why_no_library())
    program = Program(np.zeros(2, int), np.ones(2))
    assert program.compile().backend == "python"
    assert simulate(program).makespan_ns == 2.0
    with pytest.raises(SlipstreamError, match="switched off"):
        program.compile("native")


def test_a_missing_library_warns_once_and_python_is_used(
    fresh_loader: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_loader.setattr(loader, "_search_folders", lambda: [tmp_path])
    with pytest.warns(SlipstreamWarning, match="much slower"):
        assert library() is None
    assert library() is None  # a second warning would be an error here
    assert "was not built" in str(why_no_library())
    assert simulate(Program(np.zeros(1, int), np.ones(1))).makespan_ns == 1.0


def test_an_invalid_library_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "libslipstream_native.so").write_bytes(b"not a library")
    found, why_not = loader._load([tmp_path])
    assert found is None
    assert "libslipstream_native.so" in str(why_not)


def test_another_abi_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ENGINE_ABI", 99)
    found, why_not = loader._load(loader._search_folders())
    assert found is None
    assert "this package needs 99" in str(why_not)


def test_without_the_library_a_new_process_warns_and_gives_the_same_bits() -> None:
    code = (
        "import numpy as np\n"
        "from slipstream.native import simulate\n"
        "from slipstream_bench.programs import random_program\n"
        "for seed in range(20):\n"
        "    result = simulate(random_program(np.random.default_rng(seed)))\n"
        "    print(result.end_ns.tobytes().hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SLIPSTREAM_NATIVE": setting, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for setting, seed in (("on", "1"), ("off", "2"))
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 100


def test_cpu_features_agree_with_the_operating_system() -> None:
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("no /proc/cpuinfo here")
    listed = features_in_cpuinfo(Path("/proc/cpuinfo").read_text().splitlines())
    assert cpu_features().source == "cpuid"
    features = cpu_features().features
    # The CPU may have tiles that this process may not use.
    assert features <= listed
    assert listed - features <= {"amx_int8"}


def test_a_feature_must_exist_on_every_core() -> None:
    lines = ["flags : fpu avx2 fma avx512f", "model name : x", "flags\t: fpu avx2 fma"]
    assert features_in_cpuinfo(lines) == {"avx2"}
    assert features_in_cpuinfo([]) == frozenset()
    assert features_in_cpuinfo(["Features : fp asimd asimddp"]) == {"neon", "dotprod"}


def test_the_best_level_is_the_highest_with_all_its_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLIPSTREAM_INSTRUCTION_SET", raising=False)
    everything = {"avx2", "avx512", "avx512_vnni", "avx512_vbmi", "avx512_vpopcntdq"}
    assert CpuFeatures(frozenset(everything), "test").best is InstructionSet.AVX512
    tiles = CpuFeatures(frozenset(everything | {"amx_int8"}), "test")
    assert tiles.levels[:2] == [InstructionSet.AMX, InstructionSet.AVX512]
    without_vbmi = CpuFeatures(frozenset(everything - {"avx512_vbmi"}), "test")
    assert without_vbmi.best is InstructionSet.AVX512VNNI
    assert InstructionSet.AVXVNNI not in without_vbmi.levels
    assert CpuFeatures(frozenset({"avx2", "avx512"}), "test").best is InstructionSet.AVX512BW
    client = CpuFeatures(frozenset({"avx2", "avx_vnni"}), "test")
    assert client.levels == [InstructionSet.AVXVNNI, InstructionSet.AVX2, InstructionSet.SCALAR]
    assert CpuFeatures(frozenset({"avx2"}), "test").best is InstructionSet.AVX2
    assert CpuFeatures(frozenset({"neon"}), "test").best is InstructionSet.NEON
    assert CpuFeatures(frozenset(), "test").best is InstructionSet.SCALAR


def test_the_environment_may_lower_the_level_but_not_raise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = CpuFeatures(frozenset({"avx2"}), "test")
    monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", "scalar")
    assert features.best is InstructionSet.SCALAR
    monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", "avx512")
    assert features.best is InstructionSet.AVX2
    monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", "mmx")
    with pytest.raises(UnknownNameError, match="'mmx'"):
        _ = features.best
