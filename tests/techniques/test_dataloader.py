"""dataloader: loading is seen, moves to lanes ahead of the step, and workers really load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from recorded import build, graph_of, mlp
from torch import nn

from slipstream.durations import Answer, Durations, Question
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Graph, Kind, StepPhase, replace_tasks, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context
from slipstream.techniques import dataloader
from slipstream.techniques.dataloader import DataLoader
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload

_TAKE_NS = 50_000.0
_SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows that NumPy makes: work that PyTorch sees nothing of."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        made = np.random.default_rng(index).standard_normal((256, 64)).astype(np.float32)
        return torch.from_numpy(np.sort(made, axis=None)[:16].copy()), index % 4


def loaded() -> Any:
    """A step of the user's own that takes its batch from a loader."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = iter(torch.utils.data.DataLoader(Noisy(), 8))

    def step() -> Any:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Known(Durations):
    """Taking a batch takes as long as said above."""

    def __init__(self, path: Path) -> None:
        super().__init__(1, path / "durations.db")

    def lookup(self, call: Call | Question) -> Answer | None:
        return Answer(_TAKE_NS, 0.1, Provenance.MICROBENCHMARK)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(dataloader, "usable_cores", lambda: 16)
    return Context(Known(tmp_path))


def loading(graph: Graph) -> np.ndarray[Any, Any]:
    return np.array([graph.string(int(s)).startswith(_SINGLE) for s in graph.tasks.scope])


def with_loading(graph: Graph, factor: float) -> Graph:
    """The step with its loading `factor` times as long as all the rest."""
    inside = loading(graph)
    tasks = graph.tasks
    rest = tasks.duration_ns[~inside].sum() + tasks.gap_ns.sum()
    scale = factor * rest / tasks.duration_ns[inside].sum()
    calm = dict(graph.meta) | {"contended": False}
    made = replace_tasks(
        graph, duration_ns=np.where(inside, tasks.duration_ns * scale, tasks.duration_ns)
    )
    return Graph(**{**vars(made), "meta": calm})


def test_loading_is_a_task_of_its_own_and_the_operators_inside_follow_it() -> None:
    graph = graph_of(loaded)
    inside = np.flatnonzero(loading(graph))
    assert inside.tolist() == list(range(1, 1 + len(inside)))
    kinds = graph.tasks.kind[inside]
    assert kinds[0] == Kind.WAIT
    assert graph.string(int(graph.tasks.name[1])) == "data loading"
    assert (kinds[1:] == Kind.OP).all()
    assert "aten::stack" in {graph.string(int(graph.tasks.name[t])) for t in inside}
    assert (graph.tasks.phase[inside] == StepPhase.OTHER).all()
    # Sorting numbers takes most of this step, and no operator of PyTorch does it.
    assert graph.tasks.duration_ns[1] > 0.2 * replay(graph).step_ns
    assert (graph.tasks.gap_ns[inside[:-1]] == 0).all()


def test_a_step_without_a_loader_has_no_such_task() -> None:
    assert not (graph_of(mlp).tasks.kind == Kind.WAIT).any()
    assert "no torch DataLoader" in (DataLoader().why_not(graph_of(mlp)) or "")


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("factor", [0.3, 3.0, 10.0])
def test_the_step_takes_as_long_as_the_slower_of_the_two(
    factor: float, workers: int, context: Context
) -> None:
    graph = with_loading(graph_of(loaded), factor)
    work = float(graph.tasks.duration_ns[loading(graph)].sum())
    rest = replay(graph).step_ns - work
    after = DataLoader(workers).predict(graph, context)
    after.check()
    expected = max(rest + _TAKE_NS, work / workers)
    assert replay(after).step_ns == pytest.approx(expected, rel=1e-3)
    assert after.lanes[1:] == tuple(f"loader {worker}" for worker in range(workers))
    # Nothing is lost: the workers do what the step did.
    moved = after.tasks.lane > 0
    assert after.tasks.duration_ns[moved].sum() == pytest.approx(work)


def test_lanes_that_outnumber_the_cores_share_them(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = with_loading(graph_of(loaded), 1.0)
    whole = replay(graph).step_ns
    spreads = []
    for cores, least in ((16, 0.5), (2, 0.5), (1, 1.0)):
        monkeypatch.setattr(dataloader, "usable_cores", lambda cores=cores: cores)
        after = DataLoader(4).predict(graph, context)
        # On one core, all of the work is one after the other.
        assert replay(after).step_ns >= 0.999 * least * whole
        spreads.append(float(after.tasks.spread[after.tasks.lane > 0].min()))
    assert spreads[0] < spreads[1] == spreads[2]


def test_what_is_asked_is_the_batch() -> None:
    (question,) = DataLoader().required_timings(graph_of(loaded))
    assert [spec.shape for spec in question.call.inputs] == [(8, 16), (8,)]
    assert [spec.dtype for spec in question.call.inputs] == ["float32", "int64"]


@pytest.fixture
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test prepares, torch is as before afterwards."""
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(loader, "__init__", loader.__init__)
    yield
    dataloader._seen.clear()


def test_prepared_loaders_have_workers_and_give_the_same_batches(torchs_own: None) -> None:
    plain = [next(iter(torch.utils.data.DataLoader(Noisy(), 4)))[0] for _ in range(2)]
    DataLoader(2).prepare()
    prepared = torch.utils.data.DataLoader(Noisy(), 4)
    assert (prepared.num_workers, prepared.persistent_workers) == (2, True)
    batches = iter(prepared)
    torch.testing.assert_close(next(batches)[0], plain[0])
    theirs = torch.utils.data.DataLoader(Noisy(), 4, num_workers=1)
    assert (theirs.num_workers, theirs.persistent_workers) == (1, False)
    DataLoader(2).apply(build(mlp))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_an_iterable_dataset_is_left_alone_and_that_is_said(torchs_own: None) -> None:
    DataLoader(2).prepare()
    assert [int(x) for x in torch.utils.data.DataLoader(Stream(), None)] == list(range(8))
    with pytest.raises(WorkloadError, match="IterableDataset"):
        build(mlp, DataLoader(2))


def test_without_a_loader_it_is_an_error_in_words(torchs_own: None) -> None:
    DataLoader(2).prepare()
    with pytest.raises(WorkloadError, match="no torch DataLoader"):
        build(mlp, DataLoader(2))


def test_live_objects_are_refused_when_applied_too(torchs_own: None) -> None:
    dataloader._seen.clear()
    with pytest.raises(WorkloadError, match="exists already"):
        build(loaded, DataLoader(2))


def test_settings_and_live_objects() -> None:
    with pytest.raises(InvalidArgumentError, match="workers"):
        DataLoader(0)
    live = Workload.of(*mlp())
    assert "exists already" in (DataLoader().why_not(graph_of(loaded), live) or "")


_SCRIPT = """
import numpy as np, torch
from torch import nn
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, i):
        made = np.sort(np.random.default_rng(i).standard_normal(4096).astype(np.float32))
        return torch.from_numpy(made[:16].copy()), i % 4
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in torch.utils.data.DataLoader(Noisy(), 8, shuffle=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""


def test_the_edit_of_the_source_says_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    change = DataLoader(3).code(Workload.parse(str(script)))
    assert change is not None
    assert "num_workers=3, persistent_workers=True" in change.diff


def test_a_plain_script_gets_workers_and_its_profile_shows_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    workload = Workload.parse(str(script))
    recipe = workload.with_technique(DataLoader(1))
    plain, after = (profile(source, warmup=1, steps=3, threads=1) for source in (workload, recipe))
    assert DataLoader().why_not(plain) is None
    assert "workers already" in str(DataLoader().why_not(after))
    assert plain.tasks.duration_ns[loading(plain)].sum() > 0
    # What is made in the worker is not made here.
    stacks = [
        sum(graph.string(int(name)) == "aten::stack" for name in graph.tasks.name)
        for graph in (plain, after)
    ]
    assert stacks == [1, 0]
