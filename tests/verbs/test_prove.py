"""Tests of prove and its quality check, with real steps of both sides."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import technique
from slipstream.capture.place import Place
from slipstream.errors import WorkloadError
from slipstream.measure.checks import QualityStatus, judge
from slipstream.measure.records import Phase, PredictionRecord
from slipstream.technique import QualityKind, quality_of
from slipstream.verbs import first_steps
from slipstream.verbs.first_steps import trial_of
from slipstream.verbs.proving import quality, sides
from slipstream.verbs.proving.proof import Proof
from slipstream.verbs.proving.quality import check_quality, one_trial
from slipstream.verbs.proving.sides import default_quality_budget, prove
from slipstream.verbs.proving.summary import summary_table, tensor_memory
from slipstream.workload import BuiltWorkload, Workload
from tiny_models import parts

# Values beyond 65504 are infinite in float16, but not in bfloat16.
_TRAIN = """\
import torch
from torch import nn

def make(scale=1.0):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    batch = scale * torch.randn(8, 8), torch.randn(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-14)
    return model, batch, nn.functional.mse_loss, optimizer
"""


def trial(built: BuiltWorkload, seed: int = 0, steps: int | None = 4) -> Any:
    """Run what a child runs for one seed."""
    running = one_trial(built, steps=steps, limit_s=0.05)
    value = None
    try:
        while True:
            running.send(value)
            value = built.step()
    except StopIteration as end:
        (found,) = end.value
    return trial_of(seed, found)


def build(name: str, *techniques: str, seed: int = 0, **more: Any) -> BuiltWorkload:
    recipe = Workload.of(*parts(name), **more)
    chosen = [part for text in techniques for part in technique.parse(text)]
    return recipe.with_technique(*chosen).build(seed)


def test_the_default_quality_budget_follows_the_speed_budget() -> None:
    found = [default_quality_budget(budget) for budget in ("10s", 5, "60s", "10min")]
    assert found == [1.0, 0.5, 3.0, 3.0]


def test_a_classifier_reports_its_answers_and_labels() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    batch = torch.randn(16, 8), torch.arange(16) % 3
    loss = torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    built = Workload.of(model, batch, loss, optimizer).build(0)
    found = trial(built)
    with torch.no_grad():
        assert list(found.answers) == built.model(batch[0]).argmax(1).tolist()
    assert list(found.targets) == batch[1].tolist()
    assert built.model.training
    regression = Workload.of(torch.nn.Linear(8, 1), (batch[0], batch[0][:, :1]),
                             torch.nn.functional.mse_loss).build(0)  # fmt: skip
    assert trial(regression).answers == ()


def test_techniques_are_loaded_before_memory_at_rest_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(technique, "registry", lambda: order.append("techniques"))
    monkeypatch.setattr(sides, "resettable", lambda: True)
    monkeypatch.setattr(sides, "read_status_bytes", lambda name: order.append(name) or 0)
    monkeypatch.setattr(sides, "run_program", lambda *_, **__: order.append("workload"))
    sides.serve_steps({}, "", 0)
    assert order == ["techniques", "VmRSS", "workload"]


def test_samples_are_of_all_steps_of_a_short_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    measured: dict[int, int] = {}

    def run(*arguments: Any, **_: Any) -> None:
        for number, _ in enumerate(arguments[2](build("mlp"))):
            measured[len(sent)] = number

    monkeypatch.setattr(sides, "channel", lambda: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(sides, "calls", lambda: iter([{"arguments": {}}] * 40))
    monkeypatch.setattr(sides, "run_program", run)
    sides.serve_steps({}, "", 0)
    del measured[0]  # before the first sample
    for cycle in (2, 3, 5):
        assert {number % cycle for number in measured.values()} == set(range(cycle))


def test_a_turn_of_a_loader_with_workers_has_a_batch_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It skips the batches that they fetched during turns of other sides."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(sides, "channel", lambda: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(sides, "calls", lambda: iter([{"arguments": {}}]))
    monkeypatch.setattr(sides.multiprocessing, "active_children", lambda: ["worker", "worker"])
    monkeypatch.setattr(
        sides, "run_program", lambda *arguments, **_: list(arguments[2](build("mlp")))
    )
    assert len(sides.serve_steps({}, "", 0)) == 1 + 2 * 2 + 2 * 2
    assert sent[-1]["result"]["wall"] > 0


def test_losses_match_a_training_loop() -> None:
    model, (inputs, targets), loss, optimizer = parts("mlp")
    by_hand = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        by_hand.append(float(value.detach()))
    found = trial(build("mlp"))
    assert found.losses == pytest.approx(by_hand, rel=1e-6)
    assert (found.steps, found.training, found.metric) == (4, True, None)


def test_the_number_of_steps_fits_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build("mlp")
    plain, now = built.step, [0.0]

    def step() -> Any:
        now[0] += 0.015
        return plain()

    built.step = step
    monkeypatch.setattr(first_steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert trial(built, steps=None).steps == 4
    assert trial(build("mlp"), steps=7).steps == 7


def test_inference_compares_the_output() -> None:
    base = [trial(build("mlp inference"))]
    assert base[0].output is not None
    assert (base[0].shape, base[0].steps, base[0].losses) == ((6, 4), 1, None)
    rounded = [trial(build("mlp inference", "amp:bf16"))]
    found = judge("amp:bf16", "rounding", "", base, rounded)
    # A bfloat16 has 8 bits.
    assert 0 < found.difference < 0.05
    assert judge("amp:bf16", "rounding", "", base, base).status is QualityStatus.SAME


def test_large_outputs_are_sampled_evenly() -> None:
    built = BuiltWorkload(None, step=lambda: torch.arange(300_000.0).view(2, -1))
    found = trial(built)
    assert found.shape == (2, 150_000)
    assert found.output is not None
    assert list(found.output[:3]) == [0, 3, 6]
    assert found.output[-1] > 299_990


@pytest.mark.parametrize(
    ("trial_s", "left_s", "identical", "trials"),
    [(1.0, 100.0, False, 5), (1.0, 3.5, False, 3), (10.0, 1.0, False, 2), (1.0, 100.0, True, 2)],
    ids=["time for all", "for three", "for none", "identical seeds"],
)
def test_seeds_run_while_they_differ_and_time_remains(
    trial_s: float, left_s: float, identical: bool, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def run_program(workload: Any, keep_in: str, program: Any, seed: int) -> list[Any]:
        now[0] += trial_s
        return [{"steps": 3, "losses": [0.0 if identical else seed]}]

    monkeypatch.setattr(quality, "run_program", run_program)
    monkeypatch.setattr(quality, "report_progress", lambda line: None)
    monkeypatch.setattr(quality, "time", SimpleNamespace(monotonic=lambda: now[0]))
    done = quality.trials_in_child({}, "", list(range(5)), None, 100.0, left_s, 0)
    assert len(done) == trials


def test_a_metric_is_taken_after_the_steps() -> None:
    built = build("mlp")
    before = float(built.model[0].weight.sum())
    built.metric = lambda: float(built.model[0].weight.sum())
    after = trial(built).metric
    assert after == float(built.model[0].weight.sum()) != before


def test_a_metric_that_fails_is_named() -> None:
    built = build("mlp")
    built.metric = lambda: 1 / 0
    with pytest.raises(WorkloadError, match="metric fails") as caught:
        trial(built)
    assert "--no-quality" in str(caught.value)


def test_a_step_without_a_result_is_unchecked() -> None:
    built = BuiltWorkload(None, step=lambda: None)
    found = trial(built)
    assert (found.losses, found.output) == (None, None)
    assert judge("x", "rounding", "", [found], [found]).status is QualityStatus.UNCHECKED


def test_a_combination_is_as_consequential_as_its_worst_part() -> None:
    both = technique.parse("amp:bf16+accumulation:4")
    assert quality_of(both).kind is QualityKind.NEEDS_TRAINING
    assert quality_of(()).kind is QualityKind.EXACT


def test_parts_of_one_kind_combine_basis_and_advice() -> None:
    workers, both = (quality_of(technique.parse(text)) for text in ("ddp:4", "ddp:4+sign"))
    assert workers.advice == ""
    (sign,) = technique.parse("sign")
    assert both.basis == f"{workers.basis}; {quality_of([sign]).basis}"
    assert "momentum" in both.advice


def test_infinities_fail_the_candidate(forked_children: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    workload = Workload.parse(f"{tmp_path}/train.py:make", scale=1e6)
    names = ("amp:bf16", "amp:fp16")
    changed = {
        name: (workload.with_technique(*chosen), quality_of(chosen))
        for name in names
        for chosen in [technique.parse(name)]
    }
    changed["nothing"] = (workload, quality_of(()))
    messages: list[str] = []
    checks = check_quality(workload, changed, budget_s=1.0, threads=1, report=messages.append)
    bf16, fp16, nothing = checks
    assert [check.arm for check in checks] == [*names, "nothing"]
    assert bf16.status not in (QualityStatus.FAILED, QualityStatus.UNCHECKED, QualityStatus.SAME)
    assert bf16.spread
    assert len(bf16.seeds) >= 2
    assert {len(losses) for losses in bf16.losses_candidate} == {bf16.steps}
    assert fp16.status is QualityStatus.FAILED
    assert re.search(r"not finite.*\bstep 1\b", fp16.sentence)
    assert nothing.status is QualityStatus.EXACT
    assert any(re.search(r"amp:fp16: seed 2\b", line) for line in messages)


def test_a_disabled_check_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def make(): raise SystemExit('this was run')")
    workload = Workload.parse(f"{tmp_path}/train.py:make")
    chosen = technique.parse("amp:bf16")
    changed = {"amp:bf16": (workload.with_technique(*chosen), quality_of(chosen))}
    (found,) = check_quality(workload, changed, budget_s=None)
    assert found.status is QualityStatus.UNCHECKED
    assert "switched off" in found.sentence


def test_times_are_scaled_to_equal_samples(forked_children: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    found = prove(
        f"{tmp_path}/train.py:make", ["batch_size:x32"],
        threads=1, budget="2s", quality_budget=None,
    )  # fmt: skip
    # Dispatch dominates: 256 samples cost little more than 8.
    assert found.ratio("batch_size:x32").ratio < 0.5
    (note,) = [note for note in found.table().notes if "samples" in note]
    assert re.search(r"batch_size:x32\b.*\b256\b.*\b8\b", note)
    # 32 times a small batch is less than the page counts of two processes differ by. Some kernels
    # do not report peaks.
    peaks = [
        statistics.median(series.values)
        for (arm, metric, phase), series in found.experiment.series.items()
        if (metric, phase) == ("peak_memory", Phase.MEASURE)
        and arm in ("as it is", "batch_size:x32")
    ]
    assert len(peaks) == 2 * sides.resettable()
    assert all(1 << 20 < peak < 1 << 30 for peak in peaks)
    assert all(after > 0.9 * before for before, after in itertools.pairwise(peaks))
    memory = tensor_memory(found.experiment)["batch_size:x32"]
    assert memory.measured > memory.baseline > 0
    assert memory.predicted is None
    summary = summary_table(found)
    assert [row[0] for row in summary.rows] == ["batch_size:x32"]
    assert len(summary.notes) <= 6  # five sentences and a pointer to the details
    # With a prediction of three times the baseline's memory:
    record = PredictionRecord(
        "train.py", "batch_size:x32", "wall", 1.0, 0.9, 1.1, "measured", "", "",
        detail={
            "peak_bytes": [memory.baseline, 3 * memory.baseline],
            "notes": {"batch_size:x32": "twice is as good"},
        },
    )  # fmt: skip
    predictions = {"batch_size:x32": record}
    with_prediction = replace(found, experiment=replace(found.experiment, predictions=predictions))
    for table in (summary_table(with_prediction), Proof(with_prediction).tables()[0]):
        assert any("batch_size:x32: twice is as good" in note for note in table.notes)
    (row,) = summary_table(with_prediction).rows
    assert any(re.search(r"\d %.*\+200\.0 %", str(cell)) for cell in row)


def test_the_technique_is_the_reason_for_wall_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    found = prove(f"{tmp_path}/train.py:make", ["threads:2"], budget="1s", quality_budget=None)
    claim = found.ratio("threads:2")
    assert claim.metric == "wall"
    assert re.search(r"threads:2\b.*\bwall\b", claim.reason)
    assert not any("samples per step" in note for note in found.table().notes)


class Device(Place):
    """Stands in for a CUDA device: synchronisation and peak memory."""

    def synchronise(self) -> None:
        time.sleep(0.004)

    def forget_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 1234


def test_a_step_on_a_device_is_timed_until_the_device_is_done(
    forked_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    monkeypatch.setattr(sides, "find_device", lambda built: Device("cuda"))
    found = prove(
        f"{tmp_path}/train.py:make",
        ["fused_optimizer"],
        budget=1.0,
        quality_budget=None,
        threads=1,
    )
    experiment = found.experiment
    steps = experiment.series[sides.BASELINE, "wall", Phase.MEASURE].values
    assert min(steps) >= 4e6
    assert found.ratio("fused_optimizer:fused").metric == "wall"
    assert (sides.BASELINE, "cpu", Phase.MEASURE) not in experiment.series
    assert set(experiment.series[sides.BASELINE, "peak_memory", Phase.MEASURE].values) == {1234}
    assert any(re.search(r"\bCUDA\b", note) for note in found.table().notes)
    (memory,) = tensor_memory(experiment).values()
    assert (memory.baseline, memory.measured) == (1234, 1234)
