"""Tests of the batch model with known times and memory, and with real workloads in children."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidArgumentError, MeasurementError, WorkloadError
from slipstream.report.batch import batch_svg
from slipstream.verbs.batch import search
from slipstream.verbs.batch.model import BatchModel, model_of
from slipstream.verbs.batch.samples import BatchSample, DoesNotFitError, Facts, Sampler, Timing
from slipstream.verbs.batch.search import batch_model, more_sizes

MS = 1e6
UPDATE = 55_000_000
FACTS = Facts(16, 1, True, "cpu", "cpu", 0)


def model(
    time: Any, sizes: tuple[int, ...] = (16, 40, 96), *, limit: int = 1 << 30, quantum: int = 1
) -> BatchModel:
    """Model of steps of `time(samples)` ms, with 100 MB and 1 MB per sample."""
    facts = Facts(16, quantum, True, "cpu", "cpu", 0)
    found = [
        BatchSample(
            b, time(b) * MS, 0.005, 50_000_000 + 1_000_000 * b, UPDATE, 100_000_000 + 1_000_000 * b
        )
        for b in sizes
    ]
    return model_of("train.py", facts, found, limit_bytes=limit)


def test_formulas_of_a_line() -> None:
    batches = model(lambda b: 10 + 0.5 * b)
    assert batches.why_not is None
    assert batches.time(200).estimate == pytest.approx(110 * MS)
    assert batches.throughput(200).estimate == pytest.approx(200 / 0.110)
    assert batches.max_throughput == pytest.approx(2000)
    # b = x c / (1 - x s), in samples per ms.
    assert batches.for_throughput(1500) == 60
    assert batches.for_throughput(1000) == 20
    assert batches.for_throughput(2001) is None
    assert batches.max_batch(300_000_000) == 197
    assert batches.max_batch("300MB") == 197
    assert batches.max_batch(100_000) == 0
    assert batches.memory(10).estimate == pytest.approx(60_000_000)
    # The update needs more than the passes of few samples.
    assert batches.memory(2).estimate == pytest.approx(UPDATE)
    assert batches.knee is None


def test_the_best_batch_is_the_smallest_nearly_as_fast() -> None:
    batches = model(lambda b: 10 + 0.5 * b)
    best, largest = batches.best(), batches.max_batch()
    fastest = batches.throughput(largest).estimate
    assert batches.throughput(best).estimate >= 0.97 * fastest
    assert batches.throughput(best - 5).estimate < 0.97 * fastest
    # Memory is the limit.
    assert batches.best(150_000_000) <= 50
    assert batches.best(100_000) == 0


def test_the_best_batch_is_at_a_knee() -> None:
    batches = model(lambda b: 10 + 0.5 * b + 0.5 * max(b - 60, 0), (16, 25, 40, 62, 96, 150))
    assert batches.knee == pytest.approx(60, rel=0.1)
    assert batches.dearer_beyond_knee == pytest.approx(2, rel=0.1)
    assert batches.max_throughput == pytest.approx(60 / 0.040, rel=0.03)
    assert batches.best() <= 66
    assert batches.for_throughput(1400) == pytest.approx(1.4 * 10 / (1 - 1.4 * 0.5), rel=0.05)
    assert batches.for_throughput(1700) is None


def test_sizes_are_whole_batches() -> None:
    batches = model(lambda b: 10 + 0.5 * b, (16, 40, 96), quantum=8)
    assert batches.max_batch(305_000_000) == 200
    assert batches.for_throughput(1490) == 64
    assert batches.best() % 8 == 0


@pytest.mark.parametrize(
    ("time", "says"),
    [
        (lambda b: 10.0, "hardly depends"),
        (lambda b: 10 - 0.01 * b, "hardly depends"),
        (lambda b: 0.01 * b**2, "twice"),
    ],
)
def test_refuses_to_predict_from_implausible_lines(time: Any, says: str) -> None:
    batches = model(time)
    assert says in str(batches.why_not)
    # Only measured sizes are available.
    assert batches.time(40).estimate == pytest.approx(time(40) * MS)
    with pytest.raises(MeasurementError, match="not predicted"):
        batches.time(41)
    with pytest.raises(MeasurementError):
        batches.for_throughput(10.0)
    assert batches.best() in (16, 40, 96)
    assert batches.max_batch(300_000_000) == 197
    assert batches.to_json()["reason"] == batches.why_not
    assert batch_svg(batches).endswith("</svg>\n")


def test_a_step_without_fixed_cost_is_proportional() -> None:
    batches = model(lambda b: 0.5 * b - 0.05)
    assert batches.why_not is None
    assert batches.throughput(1000).estimate == pytest.approx(2000, rel=0.01)


@pytest.mark.parametrize("wrong", [0, -3, math.nan, math.inf])
def test_refuses_invalid_numbers(wrong: float) -> None:
    batches = model(lambda b: 10 + 0.5 * b)
    for ask in (batches.time, batches.memory, batches.process, batches.throughput):
        with pytest.raises(InvalidArgumentError, match="samples"):
            ask(wrong)
    with pytest.raises(InvalidArgumentError, match="throughput"):
        batches.for_throughput(wrong)
    with pytest.raises(InvalidArgumentError, match="limit"):
        batches.max_batch("8 elephants")
    with pytest.raises(InvalidArgumentError, match="limit"):
        batches.max_batch(-1)


def test_the_chart_marks_batch_and_limit() -> None:
    svg = batch_svg(model(lambda b: 10 + 0.5 * b, limit=250_000_000))
    assert svg.count("<circle") == 6
    assert "baseline" in svg
    assert "limit 238 MiB" in svg


class FakeSampler:
    """Replaces the child processes: 100 MB and 1 MB per sample, 10 ms and 0.5 ms per sample."""

    facts: Facts | None = None
    knee = math.inf
    jump, jumps_at = 0, 0.0

    def __init__(self, workload: Any, *, limit_bytes: int | None, **rest: Any) -> None:
        self.limit = limit_bytes or 1 << 60
        self.tried: list[int] = []
        self.run: list[int] = []
        FakeSampler.last = self

    last: FakeSampler

    def __enter__(self) -> FakeSampler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def first(self) -> BatchSample:
        self.facts = FACTS
        return self.sample(16)

    def sample(self, samples: int) -> BatchSample:
        self.tried.append(samples)
        needs = self.needs(samples)
        if not needs:
            raise DoesNotFitError(f"{samples} do not fit")
        return BatchSample(samples, 10 * MS, math.inf, needs[0] // 2, 0, needs[0])

    def needs(self, samples: int) -> list[int]:
        """Linear, up to a jump of the allocator's overhead."""
        self.run.append(samples)
        needs = 100_000_000 + 1_000_000 * samples
        needs += self.jump * (samples > self.jumps_at)
        return [needs] * 3 if needs <= self.limit else []

    def timings(self, sizes: list[int], budget_s: float) -> list[Timing]:
        return [Timing(b, (10 + 0.5 * b + 0.5 * max(b - self.knee, 0)) * MS, 0.005) for b in sizes]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(search, "Sampler", FakeSampler)
    monkeypatch.setattr(search, "room_bytes", lambda mapped=0: 1 << 40)
    path = tmp_path / "train.py"
    path.write_text("def make(): ...\n")
    return f"{path}:make"


def test_measures_sizes_far_apart(target: str) -> None:
    found = batch_model(target)
    assert FakeSampler.last.tried == [16, 40, 96, 10]
    assert found.time(128).estimate == pytest.approx(74 * MS)


def test_a_knee_adds_sizes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSampler, "knee", 45.0)
    found = batch_model(target)
    assert FakeSampler.last.tried == [16, 40, 96, 10, 24, 64]
    assert more_sizes([10, 16, 40, 96], 1) == [24, 64]
    assert found.knee == pytest.approx(45, rel=0.15)


@pytest.mark.parametrize("limit", [250_000_000, 160_000_000, 130_000_000, 117_000_000])
def test_the_memory_limit_narrows_the_range(target: str, limit: int) -> None:
    found = batch_model(target, limit=limit)
    sizes = [sample.samples for sample in found.measured]
    assert len(sizes) >= 3
    assert 100_000_000 + 1_000_000 * max(sizes) <= limit
    assert found.max_batch() <= (limit - 100_000_000) // 1_000_000
    assert found.max_batch() >= 16


def test_the_largest_batch_is_run_and_corrected(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSampler, "jump", 100_000_000)
    monkeypatch.setattr(FakeSampler, "jumps_at", 700.0)
    limit = 1_000_000_000
    predicted = batch_model(target, limit=limit, budget=100, verify_largest=False)
    assert predicted.tried == ()
    assert predicted.largest_tried is None
    assert predicted.max_batch() > 840
    found = batch_model(target, limit=limit, budget=100)
    # From 700 samples on, memory is 100 MB above the lines.
    assert 800 / 1.03 <= found.max_batch() <= 800
    assert found.max_batch() == found.largest_tried == found.to_json()["max_batch"]
    assert found.to_json()["max_batch_from"] == "tried"
    # In order: measured, predicted, corrected.
    assert [try_.samples for try_ in found.tried[:2]] == [max(FakeSampler.last.tried), 890]
    assert [try_.ran for try_ in found.tried[:2]] == [True, False]
    assert len(found.tried) <= 9
    # Tries refine the line, which predicts other limits.
    assert found.max_batch(limit) == found.max_batch()
    assert found.max_batch("190MB") == pytest.approx(88, abs=6)
    assert found.process(800).estimate == pytest.approx(1e9, rel=0.05)


def test_does_not_try_a_size_that_would_take_too_long(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MAX_TRYING_S", 0.1)
    found = batch_model(target, limit=1_000_000_000)
    assert found.tried == ()
    assert found.to_json()["max_batch_from"] == "predicted"


@pytest.mark.parametrize("more", [{"limit": None}, {"limit": 10**9, "samples": [16, 40]}])
def test_tries_no_largest_batch_unless_requested(target: str, more: dict[str, Any]) -> None:
    assert batch_model(target, **more).tried == ()


def test_refuses_a_workload_whose_batch_does_not_fit(target: str) -> None:
    with pytest.raises(DoesNotFitError):
        batch_model(target, limit=110_000_000)


@pytest.mark.parametrize("samples", [[4], [], [0, 4], [4.0, 8], "many", [True, 4]])
def test_refuses_invalid_sizes(target: str, samples: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="samples"):
        batch_model(target, samples)


TRAIN = """\
import torch

def make(batch_size=4):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(batch_size, 8), torch.randn(batch_size, 4)
    return model, batch, torch.nn.functional.mse_loss, optimizer

def hidden(batch_size=4):
    model, batch, loss, optimizer = make(batch_size)
    def step():
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return step

def sealed():
    return hidden()

def fussy(batch_size=4):
    model, batch, loss, optimizer = make(batch_size)
    class Fussy(torch.nn.Module):
        def forward(self, x):
            assert len(x) == batch_size, "another batch"
            return model(x)
    return Fussy(), batch, loss, optimizer
"""


@pytest.fixture
def train(tmp_path: Path, forked_children: None) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize("function", ["make", "hidden"])
def test_samples_each_size_in_a_separate_process(train: Path, function: str) -> None:
    found = batch_model(f"{train}:{function}", [4, 12, 32], threads=1, budget=0.2)
    assert [sample.samples for sample in found.measured] == [4, 12, 32]
    assert found.samples == 4
    assert found.clock == "cpu"
    assert all(sample.step_ns > 0 and sample.process_bytes > 1 << 20 for sample in found.measured)
    if function == "make":
        # A row holds 12 numbers, plus intermediate ones; parameters are 36, three times.
        tensors = [sample.tensor_bytes for sample in found.measured]
        slope = (tensors[2] - tensors[0]) / 28
        assert 12 * 4 <= slope <= 64 * 4
        assert found.memory(22).estimate == pytest.approx(tensors[0] + 18 * slope, rel=0.05)


def test_reports_sizes_that_do_not_fit(train: Path) -> None:
    found = batch_model(f"{train}:make", [4, 12, 2_000_000_000], budget=0.1, limit="4GiB")
    assert [sample.samples for sample in found.measured] == [4, 12]
    assert found.too_large == (2_000_000_000,)


def test_refuses_a_workload_whose_batch_cannot_be_set(train: Path) -> None:
    with pytest.raises(WorkloadError) as raised:
        batch_model(f"{train}:sealed", [4, 12])
    assert "batch_size" in str(raised.value.remedy)


def test_raises_errors_other_than_out_of_memory(train: Path) -> None:
    with pytest.raises(WorkloadError, match="another batch") as raised:
        batch_model(f"{train}:fussy", [4, 12])
    assert str(raised.value.where).startswith(f"{train}:")


def test_a_process_that_dies_counts_as_not_fitting(train: Path) -> None:
    train.write_text(
        TRAIN.replace(
            "def make(batch_size=4):\n",
            "def make(batch_size=4):\n    import os, signal\n"
            "    forward = torch.nn.Linear.forward\n"
            "    def dying(self, x):\n"
            "        if len(x) > 20:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
            "        return forward(self, x)\n"
            "    torch.nn.Linear.forward = dying\n",
        )
    )
    with Sampler(
        search.Workload.parse(f"{train}:make"), threads=1, limit_bytes=None, timeout_s=120
    ) as sampler:
        sampler.first()
        with pytest.raises(DoesNotFitError):
            sampler.sample(21)
        assert sampler.sample(20).samples == 20


SCRIPT = """\
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(70, 8), torch.randn(70, 4))
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())

def evaluate():
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=5):
            model(x)

evaluate()
for x, y in DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    print("samples", len(x))
evaluate()
"""


@pytest.fixture
def script(tmp_path: Path, forked_children: None) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_plain_script_is_sampled_through_its_loader(script: Path) -> None:
    workload = search.Workload.parse(script, "8")
    found = batch_model(workload, [8, 16, 32, 71], threads=1, budget=0.2)
    # A pass over the data has eight full steps and a shorter one.
    assert [sample.samples for sample in found.measured] == [8, 16, 32]
    assert found.samples == 8
    assert found.too_large == (71,)
    assert found.max_batch() <= 70
    tensors = [sample.tensor_bytes for sample in found.measured]
    assert tensors[0] < tensors[1] < tensors[2]


def test_refuses_a_script_without_a_loader(script: Path) -> None:
    lines = SCRIPT.replace("DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True)", "BATCHES")
    script.write_text(f"BATCHES = ()\n{lines}".replace(
        "evaluate()\nfor", "BATCHES = [(torch.randn(8, 8), torch.randn(8, 4))] * 40\nfor", 1
    ))  # fmt: skip
    with pytest.raises(WorkloadError) as raised:
        batch_model(search.Workload.parse(script, "8"), [8, 16])
    assert "DataLoader" in str(raised.value.remedy)
