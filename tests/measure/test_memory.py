"""Peak memory against known sizes, phases apart, and unreadable sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import MeasurementError, WorkloadError
from slipstream.measure import memory

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
linux = pytest.mark.skipif(not memory.resettable(), reason="peaks cannot be reset here")
MIB = 2**20


def peak(function, **arguments):
    prepare = "workers:import_numpy"
    return memory.peak_memory(function, arguments, prepare=prepare, environment=HERE, timeout_s=600)


def assert_close(found, megabytes):
    # The bar: within 2 % or 1 MB of the truth.
    assert abs(found - megabytes * MIB) <= max(0.02 * megabytes * MIB, 1e6)


@linux
@pytest.mark.parametrize("megabytes", [10, 50, 200])
def test_the_peak_equals_the_allocation(megabytes):
    assert_close(peak("workers:allocate", megabytes=megabytes).process.increase, megabytes)


@linux
@pytest.mark.parametrize(("first", "second"), [(200, 50), (50, 200), (30, 30)])
def test_phases_have_separate_peaks_even_after_a_higher_one(first, second):
    found = peak("workers:allocate_in_phases", first=first, second=second)
    assert_close(found.phases["first"].increase, first)
    assert_close(found.phases["second"].increase, second)
    assert_close(found.process.increase, max(first, second))


@linux
def test_a_call_in_this_process_is_not_hidden_by_freed_memory():
    # In a separate process: in a long-running one, memory of other tests may serve the call.
    code = """
import numpy as np
from slipstream.measure import memory

np.ones(100 << 17)
print(memory.peak_of_call(lambda: np.ones(40 << 17)).increase)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert_close(int(done.stdout), 40)


@linux
def test_nested_phases_are_refused():
    with memory.memory_phase("outer"), pytest.raises(MeasurementError, match="inside 'outer'"):
        memory.memory_phase("inner").__enter__()


@linux
def test_the_preparation_of_a_function_runs_before_it_in_its_process():
    # The sample takes from the process what its set-up stored there.
    found = memory.peak_memory(
        "workers:sample", prepare="workers:setup", prepare_arguments={"work": 10},
        environment=HERE, timeout_s=600,
    )  # fmt: skip
    assert found.process.peak > 0


def test_exceptions_of_the_function_are_raised():
    with pytest.raises(WorkloadError, match="cannot be built"):
        memory.peak_memory("workers:setup", {"fail": True}, environment=HERE, timeout_s=600)


def test_without_proc_the_process_has_one_peak_and_phases_report_why(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found = memory._measured("workers:allocate_in_phases", {"first": 5, "second": 5})
    assert found["whole"][0] > 5 * MIB
    assert found["phases"] == {}
    assert "cannot reset the peak" in found["unreadable"]
    with pytest.raises(MeasurementError) as caught:
        memory.peak_of_call(lambda: None)
    assert "WorkerArm" in (caught.value.remedy or "")
