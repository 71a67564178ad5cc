"""Tests of prove with real ranks: processes on loopback links, their replicas and failures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from slipstream import technique
from slipstream.child import Child, process
from slipstream.cluster import Cluster
from slipstream.errors import (
    ChildError,
    InvalidArgumentError,
    MeasurementError,
    UsageError,
    WorkloadError,
)
from slipstream.measure.checks import QualityStatus
from slipstream.measure.records import AFTERWARDS, Phase
from slipstream.ranks import hosts, launch, why_no_netlab
from slipstream.ranks.hosts import Hosts, hosts_of
from slipstream.verbs.proving.rank_process import Join, digest
from slipstream.verbs.proving.ranks import SENT, STEP, RanksArm, check_ranks, ranks_of
from slipstream.verbs.proving.sides import prove
from slipstream.workload import BuiltWorkload, Workload, file_backups

# `what` goes wrong on rank 1 in its second step.
_TRAIN = """\
import os, time
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        self.own = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.what, self.calls = what, 0

    def forward(self, x):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 2:
            if self.what == "dies":
                os._exit(3)
            if self.what == "raises":
                raise ValueError("rank one has had enough")
            if self.what == "stops":
                os.kill(os.getpid(), 19)
            if self.what == "differs":
                with torch.no_grad():
                    self.own.add_(1.0)
        return self.net(x) + self.own

def make(what="works"):
    model = Odd(what)
    batch = torch.randn(8, 12), torch.randn(8, 4)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(trained, lr=0.1)
"""
# A tied parameter, one outside any submodule, and a frozen one.
_TANGLED = """\
import torch
from torch import nn

class Tangled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 40)
        self.head.weight = self.table.weight
        self.still = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.still(self.inner(self.table(ids) * self.scale))).flatten(0, 1)

def make():
    model = Tangled()
    batch = torch.randint(0, 40, (4, 6)), torch.randint(0, 40, (24,))
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, batch, nn.functional.cross_entropy, torch.optim.SGD(trained, lr=0.1)
"""
LAYERS = {"model", "model.table", "model.inner.0", "model.inner.2", "model.head"}
CLUSTER = "workers=2,link=1gbit,latency=50us"
LIMIT_S = 300.0


@pytest.fixture(autouse=True, scope="module")
def _backups_watched() -> None:
    """Start the process that watches backups, since tests count processes."""
    with file_backups():
        pass


@pytest.fixture
def train(tmp_path: Path) -> Path:
    file = tmp_path / "odd_train.py"
    file.write_text(_TRAIN)
    return file


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "why_no_netlab", lambda: "a network lab needs root")


def workload(train: Path, **arguments: Any) -> Workload:
    return Workload.parse(f"{train}:make", **arguments)


def team(recipe: Workload, text: str, where: Hosts, keep_in: Path) -> RanksArm:
    chosen = technique.parse(text)
    return RanksArm(text, recipe.with_technique(*chosen), ranks_of(chosen), where, 1, keep_in)


@pytest.mark.usefixtures("no_root")
def test_ranks_are_measured_next_to_one_process(train: Path) -> None:
    messages: list[str] = []
    found = prove(
        workload(train),
        ["ddp:2", "ddp:2+topk:0.1"],
        cluster=Cluster.load(CLUSTER),
        budget=1.0,
        quality_budget=0.1,
        report=messages.append,
    )
    experiment = found.experiment
    for arm in ("ddp:2", "ddp:2+topk:0.1"):
        sent = experiment.series[arm, SENT, Phase.MEASURE].values
        assert len(sent) == len(experiment.series[arm, "wall", Phase.MEASURE].values) >= 1
        assert (sent > 0).all()
        check = found.quality[arm]
        assert check.status is QualityStatus.OPEN
        assert len(check.candidate) == len(check.seeds) >= 2
    details = [detail.detail for detail in experiment.events if detail.kind == AFTERWARDS]
    # The side with one process only reports tensor memory.
    assert [detail["arm"] for detail in details if "tensor_peak_bytes" in detail] == ["as it is"]
    shown = [detail for detail in details if "layers_s" in detail]
    assert [detail["arm"] for detail in shown] == ["ddp:2", "ddp:2+topk:0.1"]
    for detail in shown:
        assert set(detail["layers_s"]) == {"model.net.0", "model.net.2"}
        assert 0 < sum(detail["layers_s"].values()) < detail["step_s"]
    notes = [event.detail["what"] for event in experiment.events if event.kind == "note"]
    assert any("memory" in note and "root" in note for note in notes)
    assert any("those of other programs" in note for note in notes)
    assert any(re.search(r"ddp:2: 2 seeds\b", line) for line in messages)


@pytest.mark.usefixtures("no_root")
@pytest.mark.parametrize("techniques", ["ddp:2", "accumulation:3+ddp:2"])
def test_losses_are_the_mean_over_the_ranks(train: Path, techniques: str) -> None:
    """The same batch three times has the mean gradient of once; replicas stay equal."""
    with hosts_of(Cluster.load(CLUSTER), 2) as where, file_backups() as keep_in:
        side = team(workload(train), techniques, where, keep_in)
        try:
            (trial,) = side.trials([3], 4, LIMIT_S)
        finally:
            side.close()
    assert trial.losses == pytest.approx(_by_hand(train, 3, 4), rel=1e-5)


def _by_hand(train: Path, seed: int, steps: int) -> list[float]:
    """Train two replicas in one process: parameters of rank 0, separate batches."""
    names: dict[str, Any] = {}
    exec(train.read_text(), names)
    parts = []
    for rank in range(2):
        torch.manual_seed(seed * 2 + rank)
        parts.append(names["make"]())
    model, _, loss_of, optimizer = parts[0]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        both = [loss_of(model(x), y) for _, (x, y), _, _ in parts]
        (sum(both) / 2).backward()
        optimizer.step()
        losses.append(float(sum(both).detach()) / 2)
    return losses


@pytest.mark.usefixtures("no_root")
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("dies", ChildError, "rank 1 of ddp:2"),
        ("raises", WorkloadError, "rank one has had enough"),
        ("differs", MeasurementError, "rank 1 "),
        ("stops", ChildError, "rank 1 of ddp:2 was suspended"),
    ],
)
def test_a_failed_rank_is_named_and_all_ranks_end(
    train: Path, what: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_MAX_SUSPENSION_S", 0.5)
    before = psutil.Process().children(recursive=True)
    with hosts_of(Cluster.load(CLUSTER), 2) as where, file_backups() as keep_in:
        without_ranks = psutil.Process().children(recursive=True)
        side = team(workload(train, what=what), "ddp:2", where, keep_in)
        with pytest.raises(error) as caught:
            side.trials([0], 3, LIMIT_S)
        # Ranks end with the trial; the speed measurement starts others.
        assert psutil.Process().children(recursive=True) == without_ranks
        assert message in str(caught.value)
        if what == "raises":
            assert "odd_train.py:" in str(caught.value.where)  # type: ignore[attr-defined]
        with pytest.raises(error):
            side.open(LIMIT_S)
        side.close()
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 3), (2.0, 1)])
def test_long_steps_are_timed_one_at_a_time(
    step_s: float, steps: int, train: Path, tmp_path: Path
) -> None:
    counts: list[int] = []

    class Scripted(RanksArm):
        def _call(self, function: str, timeout_s: float | None, of_rank: Any) -> list[Any]:
            counts.append(of_rank(0)["steps"])
            sample_ = {"wall": 1e9 * step_s * counts[-1], "sent": 100.0 * (counts[-1] + 1)}
            return [{**sample_, "digest": "same"}] * 2

    chosen = technique.parse("ddp:2")
    with hosts_of(Cluster.load(CLUSTER), 2) as where:
        side = Scripted("ddp:2", workload(train).with_technique(*chosen), 2, where, 1, tmp_path)
        for _ in range(2):
            sample = side.sample(1, None)
    # The first sample measures the length of a step.
    assert counts == [3, steps]
    assert sample[STEP] == pytest.approx(1e9 * step_s)


@pytest.mark.usefixtures("no_root")
def test_ctrl_c_ends_all_ranks(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children(recursive=True)

    def interrupt(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    with hosts_of(Cluster.load(CLUSTER), 2) as where, file_backups() as keep_in:
        side = team(workload(train), "ddp:2", where, keep_in)
        side.open(LIMIT_S)
        monkeypatch.setattr(launch, "as_completed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            side.sample(1, LIMIT_S)
        side.close()
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.usefixtures("no_root")
@pytest.mark.parametrize(
    ("text", "more_waits"),
    [
        ("ddp:2+sharded_update", {"(all_gather of parameters)"}),
        ("priority_sync:2", set()),
    ],
)
def test_ranks_report_waits_and_link_use(text: str, more_waits: set[str], tmp_path: Path) -> None:
    (tmp_path / "tangled.py").write_text(_TANGLED)
    recipe = Workload.parse(f"{tmp_path / 'tangled.py'}:make")
    with hosts_of(Cluster.load(CLUSTER), 2) as where, file_backups() as keep_in:
        side = team(recipe, text, where, keep_in)
        try:
            side.open(LIMIT_S)
            side.sample(1, LIMIT_S)
            found = side.afterwards(LIMIT_S)
            # Later samples work as before.
            assert side.sample(1, LIMIT_S)["wall"] > 0
        finally:
            side.close()
    assert json.loads(json.dumps(found)) == found
    assert set(found["layers_s"]) == LAYERS | more_waits
    assert 0 < sum(found["layers_s"].values()) < found["step_s"]
    called = [layer for layer in found["order"] if layer in LAYERS]
    assert called == ["model", "model.table", "model.inner.0", "model.inner.2", "model.head"]
    assert found["steps"] >= 4
    assert found["sharing"] == 2
    assert len(found["link"]["sent"]) == len(found["link"]["received"]) == 48
    # Gradients of both ranks, in both directions.
    assert sum(found["link"]["sent"]) / 48 * found["step_s"] > 300
    drawn = found["drawn"]
    assert len(drawn["stamps_s"]) == 5
    assert all(began < drawn["stamps_s"][-1] for began, _ in drawn["waits_s"])
    assert len(drawn["times_s"]) == len(drawn["sent"]) == len(drawn["received"]) >= 2


@pytest.mark.parametrize(("text", "batches"), [("ddp:2", 1), ("accumulation:3+ddp:2", 3)])
def test_ranks_on_shaped_links_count_their_own_bytes(
    text: str, batches: int, train: Path, require: Any
) -> None:
    require("netlab", why_no_netlab() is None, str(why_no_netlab()))
    with (
        hosts_of(Cluster.load("workers=2,link=100mbit"), 2) as where,
        file_backups() as keep_in,
    ):
        assert where.shaped
        assert where.private
        assert "cables of 105 Mbit/s" in where.notes[0]
        side = team(workload(train), text, where, keep_in)
        try:
            side.open(LIMIT_S)
            sample = side.sample(1, LIMIT_S)
        finally:
            side.close()
    assert sample["wall"] == pytest.approx(sample[STEP] / 2 / batches)
    # 412 gradients in both directions per step, however many batches it has; the rest is headers
    # and messages that start and end a sample.
    numbers = 12 * 24 + 24 + 24 * 4 + 4
    assert 4 * numbers < sample[SENT] < 4 * numbers + 6000


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("h100x8-100gbe", "one switch"),
        ("workers=2,link=100gbit", "faster than a network lab"),
    ],
)
def test_reports_links_that_cannot_be_emulated(cluster: str, message: str, require: Any) -> None:
    require("netlab", why_no_netlab() is None, str(why_no_netlab()))
    with hosts_of(Cluster.load(cluster), 2) as where:
        assert not where.shaped
        assert where.private
        assert message in where.notes[0]
        with where.unshaped():
            pass


@pytest.mark.usefixtures("no_root")
def test_more_ranks_than_cores_are_reported_as_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "cores", lambda: 2)
    for ranks, noisy in ((2, False), (4, True)):
        with hosts_of(Cluster.load(CLUSTER), ranks) as where:
            assert any("noisy" in line for line in where.notes) is noisy


@pytest.mark.parametrize(
    ("texts", "cluster", "error", "message"),
    [
        (["ddp:2"], None, UsageError, "--cluster workers=2,link="),
        (["powersgd:4"], CLUSTER, UsageError, "ddp:workers=2+powersgd:4"),
        (["two_d_allreduce"], CLUSTER, UsageError, "two_d_allreduce"),
        (["ddp:3"], CLUSTER, InvalidArgumentError, "2 devices"),
    ],
)
def test_refuses_incomplete_combinations_before_starting(
    train: Path, texts: list[str], cluster: str | None, error: type[Exception], message: str
) -> None:
    where = None if cluster is None else Cluster.load(cluster)
    with pytest.raises(error) as caught:
        prove(workload(train), texts, cluster=where)
    assert message in str(caught.value)


def test_ranks_build_functions_only(train: Path) -> None:
    chosen = {"ddp:2": technique.parse("ddp:2")}
    live = Workload.of(nn.Linear(2, 2), torch.ones(1, 2), lambda out: out.sum())
    for recipe, message in ((Workload.parse(str(train)), "plain script"), (live, "live objects")):
        with pytest.raises(UsageError, match=message):
            check_ranks(recipe, chosen, Cluster.load(CLUSTER))
    assert check_ranks(live, {"amp:bf16": technique.parse("amp:bf16")}, None) == {}


def test_refuses_workloads_without_gradients_to_exchange(tmp_path: Path) -> None:
    class Lightning(nn.Linear):
        def training_step(self, batch: Any) -> Any:
            return self(batch).sum()

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for built, message in (
        (BuiltWorkload(None, step=lambda: None), "its own step function"),
        (BuiltWorkload(net, torch.ones(1, 2), reads_batch=True), "no optimizer"),
        (BuiltWorkload(Lightning(2, 2), torch.ones(1, 2), None, optimizer), "a training_step"),
    ):
        with pytest.raises(WorkloadError, match=message):
            Join(0, 2, str(tmp_path / "store"), 1.0).apply(built)


def test_a_digest_depends_on_every_bit() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    assert digest(BuiltWorkload(first)) == digest(BuiltWorkload(second))
    with torch.no_grad():
        second.weight[0, 0] = torch.nextafter(second.weight[0, 0], torch.tensor(10.0))
    assert digest(BuiltWorkload(first)) != digest(BuiltWorkload(second))


def test_a_child_can_be_started_by_a_command_prefix() -> None:
    with Child("prefixed", prefix=("env", "SLIPSTREAM_PREFIXED=yes")) as child:
        assert child.call("os:getenv", timeout_s=LIMIT_S, key="SLIPSTREAM_PREFIXED") == "yes"
