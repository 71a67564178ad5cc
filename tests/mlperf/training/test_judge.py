"""Real trainings: reproducible, in ranks, with early reads of data, and with crashes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import InvalidArgumentError, UnknownNameError, UsageError, WorkloadError
from slipstream.mlperf.training import SUITE, Task, TrainingResult, time_to_quality
from slipstream.mlperf.training.evidence import OpenedFiles, Samples, hashes
from slipstream.mlperf.training.log import found, read
from slipstream.mlperf.training.tasks import load, recorded

OWN = """
import os
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from slipstream.mlperf import training

FACTS = dict(train_samples=64, batch=16, evaluate_every=16, most_epochs=2, eval_samples=16)

def parts(run, end=lambda model: 1.0):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    yield model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)
    yield run.shuffled(torch.randn(64, 8), torch.randint(0, 8, (64,))), end

@training.task(target=0.5, **FACTS)
def plain(run):
    yield from parts(run)

@training.task(target=2.0, **FACTS)
def never(run):
    yield from parts(run)

@training.task(target=0.5, **FACTS)
def early(run):
    run.data("digits")
    yield from parts(run)

@training.task(target=0.5, **FACTS)
def dies(run):
    yield from parts(run, lambda model: os._exit(3))

@training.task(target=0.5, **FACTS)
def explodes(run):
    model = nn.Sequential(nn.Linear(8, 8))
    yield model, lambda a, b: cross_entropy(a, b) * float("inf"), torch.optim.SGD(
        model.parameters(), 0.1)
    yield run.shuffled(torch.randn(64, 8), torch.randint(0, 8, (64,))), lambda model: 0.0

@training.task(target=0.5, **FACTS)
def wrong(run):
    yield 1
"""


# Every task but the first breaks one rule.
CARELESS = """
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from slipstream.mlperf import training

FACTS = dict(target=0.0, train_samples=64, batch=16, evaluate_every=16, most_epochs=2,
             eval_samples=32)
FILE = Path(__file__).with_name("samples.npy")

def parts(trained=slice(0, 64), evaluated=slice(64, 96), early=False, compiled=False):
    x = np.load(FILE) if early else None
    model = nn.Sequential(nn.Linear(8, 8))
    yield model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)
    x = torch.from_numpy(np.load(FILE) if x is None else x)
    y = torch.zeros(96, dtype=torch.long)
    batches = [(x[trained][n:n + 16], y[:16]) for n in range(0, 64, 16)]
    yield batches, lambda model: training.accuracy(model, x[evaluated], y[evaluated])

@training.task(**FACTS)
def valid(run):
    yield from parts()

@training.task(**FACTS)
def early(run):
    yield from parts(early=True)

@training.task(**FACTS)
def half(run):
    yield from parts(evaluated=slice(64, 80))

@training.task(**FACTS)
def same(run):
    yield from parts(evaluated=slice(0, 32))
"""


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("valid", None),
        ("early", ("data before the clock", "samples.npy")),
        ("half", ("evaluation less thorough", "16 samples")),
        ("same", ("trained on the test set", "50 %")),
    ],
)
def test_files_and_samples_of_a_run_are_checked_against_the_rules(
    name: str, broken: tuple[str, str] | None, tmp_path: Path
) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    np.save(tmp_path / "samples.npy", x)
    judged = time_to_quality(f"{tmp_path / 'careless.py'}:{name}", runs=1, folder=tmp_path / "out")
    assert judged.arms[0].runs[0].status == "success"
    found = [(violation.rule, violation.text) for violation in judged.arms[0].violations]
    if broken is None:
        assert found == []
    else:
        ((rule, text),) = found
        assert rule == broken[0]
        assert broken[1] in text


def test_opened_files_are_data_but_not_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.bin", "notes", "task.py", "lib.zip"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path / "lib.zip"))
    opened = OpenedFiles(tmp_path)
    (tmp_path / "train.bin").read_bytes()
    with opened:
        for name in ("train.bin", "notes", "task.py", "lib.zip"):
            (tmp_path / name).read_bytes()
        with pytest.raises(FileNotFoundError):
            (tmp_path / "absent.npy").read_bytes()
        (tmp_path / "log.csv").write_text("")
    (tmp_path / "log.csv").read_bytes()
    assert [Path(path).name for path in opened.paths] == ["train.bin", "notes"]


def test_hashes_depend_on_the_content_of_samples() -> None:
    ids = torch.arange(12).reshape(4, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        tensor = (ids % 2 if dtype is torch.bool else ids).to(dtype)
        assert (hashes(tensor) == hashes((tensor.clone(),))).all()
    assert len(set(hashes(ids))) == 4
    assert len({*hashes((ids, ids + 1)), *hashes((ids + 1, ids))}) == 8
    samples = Samples()
    samples.train((ids, None))
    samples.evaluate((ids[2:],))
    samples.evaluate((ids[2:],))
    samples.evaluate((ids + 100,))
    assert samples.evaluated == 6
    assert samples.shared == pytest.approx(1 / 3)


def test_custom_task_reports_its_detectable_difference(judged: TrainingResult) -> None:
    first = judged.arms[0]
    runs = tuple(replace(first.runs[0], seed=n, samples=n) for n in (1000, 1100, 1250))
    own = replace(judged, task=replace(judged.task, typical=0), arms=(replace(first, runs=runs),))
    assert re.search(r"\b3 runs per arm detect a difference of \d+ %", own.power)
    assert any(own.power in note for note in own.tables()[0].notes)
    assert judged.power == ""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_pairs_share_seeds_and_arms_differ(judged: TrainingResult) -> None:
    base, thin = judged.arms
    assert [run.seed for run in base.runs] == [run.seed for run in thin.runs] == [11, 22, 33]
    assert len({run.digest for arm in judged.arms for run in arm.runs}) == 6
    (verdict,) = judged.verdicts
    assert verdict.sample.n == 3
    assert json.loads((base.folder.parent / "result.json").read_text())["arms"][0]["runs"]


def test_equal_seeds_give_equal_losses(judged: TrainingResult, tmp_path: Path) -> None:
    again = time_to_quality("digits", seeds=[11], folder=tmp_path / "again")
    assert again.arms[0].runs[0].digest == judged.arms[0].runs[0].digest


def test_run_ends_with_the_evaluation_that_reaches_the_target(judged: TrainingResult) -> None:
    for run in judged.arms[0].runs:
        events = read(Path(run.log))
        qualities = [float(event.value) for event in found(events, "eval_accuracy")]
        assert qualities[-1] >= judged.task.target > max(qualities[:-1])
        assert len(Path(run.log).read_bytes()) < 200_000


def test_ranks_share_every_batch(own: str, tmp_path: Path) -> None:
    found = time_to_quality(f"{own}:plain", ["ddp:workers=2"], runs=1, folder=tmp_path / "out")
    assert [arm.runs[0].status for arm in found.arms] == ["success", "success"]
    assert found.arms[1].runs[0].samples == found.arms[0].runs[0].samples


def test_run_that_never_reaches_the_target_fails(own: str, tmp_path: Path) -> None:
    found = time_to_quality(f"{own}:never", runs=1, folder=tmp_path / "out")
    (run,) = found.arms[0].runs
    assert (run.status, run.samples) == ("aborted", 128)
    assert re.search(r"\btarget\b", run.reason)


def test_data_before_the_clock_is_an_error(own: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"\bbefore the clock\b.*\bdigits\b"):
        time_to_quality(f"{own}:early", runs=1, folder=tmp_path / "out")
    (log,) = (tmp_path / "out").rglob("result_0.txt")
    events = read(log)
    assert found(events, "data_touched")
    assert found(events, "run_stop")[0].metadata["status"] == "aborted"


def test_crashed_run_is_logged_as_aborted_and_not_restarted(own: str, tmp_path: Path) -> None:
    judged = time_to_quality(f"{own}:dies", runs=1, folder=tmp_path / "out")
    (run,) = judged.arms[0].runs
    assert run.status == "aborted"
    events = read(Path(run.log))
    assert len(found(events, "init_start")) == 1
    assert found(events, "run_stop")[0].metadata["status"] == "aborted"
    with pytest.raises(UsageError, match=str(Path(run.log).parent)):
        time_to_quality(f"{own}:dies", runs=1, folder=tmp_path / "out")


def test_infinite_loss_ends_the_run(own: str, tmp_path: Path) -> None:
    judged = time_to_quality(f"{own}:explodes", runs=1, folder=tmp_path / "out")
    assert re.search(r"\bloss\b.*\binf\b", judged.arms[0].runs[0].reason)


def test_refuses_invalid_arguments(own: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UnknownNameError, match="digits"):
        time_to_quality("digit", folder=out)
    with pytest.raises(WorkloadError, match="'other'"):
        time_to_quality(f"{own}:other", folder=out)
    with pytest.raises(WorkloadError, match=r"is not \(model, loss, optimizer\)"):
        time_to_quality(f"{own}:wrong", runs=1, folder=out)
    with pytest.raises(InvalidArgumentError) as error:
        time_to_quality("digits", seeds=[1, 1], folder=out)
    assert error.value.argument == "seeds"
    with pytest.raises(UsageError, match="training loop"):
        time_to_quality("digits", ["accumulation:2"], folder=out)
    with pytest.raises(InvalidArgumentError, match="batch"):
        Task(target=1.0, train_samples=1, batch=0, evaluate_every=1, most_epochs=1)


@pytest.mark.parametrize("name", SUITE)
def test_reference_runs_reach_the_target(name: str) -> None:
    reference, task = recorded(name), load(name)
    assert reference is not None
    samples = reference["samples"][str(task.batch)]
    assert len(samples) == 20
    assert reference["reached"] == len(samples)
    assert max(samples) < task.most_samples
    assert reference["target"] == task.target
