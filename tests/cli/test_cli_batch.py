"""`slipstream batch` and `slipstream devices`, as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.verbs.batch.advice import batch_table
from slipstream.verbs.batch.model import model_of
from slipstream.verbs.batch.samples import BatchSample, Facts
from slipstream.verbs.batch.tries import Try


def test_requested_sizes_are_predicted(slipstream: Any) -> None:
    run = slipstream(
        "batch", "train.py:make_workload", "--sizes", "4,16,40", "--threads", 1, "--limit", "4GiB",
        "--svg", "batch.svg", "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [row["samples"] for row in found["measured"]] == [4, 16, 40]
    assert found["samples"] == 4
    assert found["limit_bytes"] <= 4 << 30
    picture = (slipstream.folder / "batch.svg").read_text()
    assert picture.count("<circle") == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "4"], "--sizes: "),
        (["--sizes", "4,x"], "4,x"),
        (["--for-throughput", "-3"], "-3 "),
        (["--svg", "nowhere/batch.svg"], "'nowhere'"),
        (["--limit", "8 elephants"], "8 elephants"),
    ],
)
def test_invalid_requests_are_reported(slipstream: Any, arguments: list[str], says: str) -> None:
    assert says in slipstream.refused(2, "batch", "train.py:make_workload", *arguments).what


def words(
    time: Any, limit: int, sizes: tuple[int, ...] = (16, 40, 96), tried: Any = (), **more: Any
) -> str:
    facts = Facts(16, 1, True, "cpu", "cpu", 0)
    found = [BatchSample(b, time(b) * 1e6, 0.005, 10**6 * b, 0, 10**8 + 10**6 * b) for b in sizes]
    model = model_of("train.py", facts, found, limit_bytes=limit, tried=tried)
    return batch_table(model, more.get("throughput"), more.get("wanted")).to_markdown()


def test_the_advice_is_in_sentences() -> None:
    text = words(lambda b: 10 + 0.5 * b, 10**9, throughput=1500.0, wanted=60)
    assert re.search(r"\b370\b.*\b2\.13\b.*\b16\b", text)
    assert re.search(r"\b370\b.*\bnot worth the memory\b", text)
    assert re.search(r"most.*\b890 samples\b.*\b954 MiB\b.*predicted.*measured.*\b96\b", text)
    assert re.search(r"\b1500\b.*\bsamples/s\b.*\b60\b", text)
    assert "| predicted | recommended |" in text


def test_a_tried_size_is_marked() -> None:
    tried = [Try(96, 196_000_000), Try(890, 0), Try(800, 990_000_000), Try(820, 0)]
    text = words(lambda b: 10 + 0.5 * b, 10**9, tried=tried)
    assert re.search(r"\bmost\b.*\b800 samples\b.*\b954 MiB\b.*\btried\b.*\b820\b.*\bnot\b", text)
    assert "| tried | largest |" in text
    tight = [*tried[:3], Try(820, 998_000_000, room=False)]
    nearly = words(lambda b: 10 + 0.5 * b, 10**9, tried=tight)
    assert re.search(r"\btried\b.*\b820 ran\b.*\bnot fit again\b", nearly)
    in_time = words(lambda b: 10 + 0.5 * b, 10**9, tried=tried[::2])
    assert re.search(r"\b800 samples\b.*\b954 MiB\b.*\btried\b.*\bno\b", in_time)


def test_the_advice_reports_its_limits() -> None:
    bent = words(lambda b: 10 + 0.5 * b + 0.5 * max(b - 60, 0), 10**9, (16, 25, 40, 62, 96, 150))
    assert re.search(r"\bknee at \d+", bent)
    assert re.search(r"\bbatches are slower\b", bent)
    unbelievable = words(lambda b: 10.0, 10**9, throughput=1500.0)
    assert re.search(r"\b1500 samples/s cannot be predicted\b", unbelievable)
    assert re.search(r"\bsizes\b.*\bnot predicted\b", unbelievable)
    assert "predicted |" not in unbelievable
    assert re.search(r"\bno\b.*\b1\.00 MiB\b", words(lambda b: 10 + 0.5 * b, 1 << 20))
    fast = words(lambda b: 10 + 0.5 * b, 10**9, throughput=3000.0)
    assert re.search(r"\bno batch\b.*\bmaximum\b.*\b2000\b", fast)
    late = words(lambda b: 10 + 0.5 * b, 2 * 10**8, throughput=1900.0, wanted=380)
    assert re.search(r"\bnot fit\b.*\b98\b", late)


def test_a_recording_on_other_devices(recorded: Any) -> None:
    run = recorded.shell("devices", recorded.path, "--device", "h100", "--device", "t4")
    assert run.returncode == 0, run.stderr
    assert "h100-sxm" in run.stdout
    assert "data sheet" in run.stdout
    assert "$ per million samples" in run.stdout
    found = json.loads(
        recorded.shell("devices", recorded.path, "--device", "h100", "--json").stdout
    )
    assert found[0]["device"] == "h100-sxm"
    assert found[0]["known"] == "datasheet"


def test_an_unknown_device_suggests_the_nearest(recorded: Any) -> None:
    error = recorded.shell.refused(2, "devices", recorded.path, "--device", "avx1024")
    assert "'avx1024'" in error.what
    assert "avx" in error.remedy


def test_a_trace_of_a_gpu(slipstream: Any, shared_data: Path) -> None:
    name = "critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz"
    run = slipstream("import", shared_data / "gpu_traces" / name, "-o", "run.slipgraph")
    assert run.returncode == 0, run.stderr
    run = slipstream("devices", "run.slipgraph", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [row["sample_ns"] for row in found] == sorted(row["sample_ns"] for row in found)
    assert next(row for row in found if row["device"] == "a100-sxm")["speedup"] == 1.0
