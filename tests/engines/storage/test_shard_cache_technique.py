"""shard_cache: offered where loading limits the step, predicted from a trace, applied to files."""

from __future__ import annotations

import builtins
import io
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.utils.data
from torch import nn

from slipstream.durations import Durations
from slipstream.engines.storage import AccessTrace
from slipstream.engines.storage.reading import READING_TASK, Fetches, recorded_trace
from slipstream.engines.storage.technique import CachedFiles
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, replace_tasks, replay
from slipstream.technique import Context, parse
from slipstream.verbs.explaining.explain import explain
from slipstream.verbs.profiling import profile, summary
from slipstream.workload import Workload


class Slow(torch.utils.data.Dataset[Any]):
    """Rows in files that arrive after 2 ms."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        with (self.folder / f"{index % 50:03d}.bin").open("rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).float()


def slow_step(folder: str, workers: int) -> Any:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(torch.utils.data.DataLoader(Slow(folder), 4, num_workers=workers))

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def two_loaders(folder: str) -> Any:
    plain = iter(torch.utils.data.DataLoader(torch.zeros(4000, 8), 4))
    step = slow_step(folder, 0)
    return lambda: step() + next(plain).sum()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(50):
        (folder / f"{number:03d}.bin").write_bytes(bytes([number] * 8))
    return folder


@pytest.fixture(scope="module", params=[0, 2])
def graph(request: pytest.FixtureRequest, shards: Path) -> Graph:
    arguments = {"folder": str(shards), "workers": request.param}
    workload = Workload(f"{__file__}:slow_step", arguments)
    return profile(workload, warmup=1, steps=3, threads=1, launches=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of ten epochs of 50 files."""
    rng = np.random.default_rng(0)
    names = [f"/data/{n:03d}" for _ in range(10) for n in rng.permutation(50)]
    AccessTrace.of(names, [100] * 500).save(tmp_path / "run.npz")
    return tmp_path / "run.npz"


def reading(graph: Graph) -> np.ndarray[Any, Any]:
    return np.array([graph.string(int(name)) == READING_TASK for name in graph.tasks.name])


def test_file_reads_are_tasks_of_the_loaders_process(graph: Graph) -> None:
    workers = cast("dict[str, Any]", graph.meta["reads"])["workers"]
    lanes = [graph.lanes[lane] for lane in graph.tasks.lane[reading(graph)]]
    assert lanes == (["loader 0", "loader 1"] if workers else ["cpu"])
    # A sleep is not shorter than requested: four files of 2 ms, by all workers together.
    assert graph.tasks.duration_ns[reading(graph)].sum() >= 7e6
    assert replay(graph).step_ns >= 8e6 / max(workers, 1) * 0.9
    takes = [graph.string(int(name)) == "data loading" for name in graph.tasks.name]
    if workers:
        # The step waits for the lanes, not also in its own task.
        first = graph.tasks.duration_ns[takes][0]
        assert first <= cast("int", graph.meta["loading_cpu_ns"])
    assert CachedFiles().why_not(graph) is None
    place = "in 2 workers" if workers else "in the step's process"
    assert any(f"for 4 files, {place}" in note for note in summary(graph).notes)
    assert "file reads" in str(explain(graph))


def test_a_loader_that_opens_no_files_does_not_wait(shards: Path) -> None:
    workload = Workload(f"{__file__}:two_loaders", {"folder": str(shards)})
    found = profile(workload, warmup=1, steps=3, threads=1, launches=False)
    assert np.count_nonzero(reading(found)) == 1


def test_a_step_that_waits_for_no_file_is_refused(graph: Graph) -> None:
    short = replace_tasks(graph, duration_ns=np.where(reading(graph), 1.0, graph.tasks.duration_ns))
    reason = CachedFiles().why_not(short)
    assert reason is not None
    assert "waiting for files makes only" in reason
    named = replace_tasks(graph, name=np.where(reading(graph), 0, graph.tasks.name))
    assert "opened files" in str(CachedFiles().why_not(named))


def test_waiting_shrinks_by_what_hits(graph: Graph, trace: Path, tmp_path: Path) -> None:
    context = Context(Durations(1, tmp_path / "durations.db"))
    for recorded in ("", str(trace)):
        before, half, whole = (
            found.tasks.duration_ns[reading(found)].sum()
            for found in (
                graph,
                CachedFiles(recorded, capacity="50%").predict(graph, context),
                CachedFiles(recorded, capacity="100%").predict(graph, context),
            )
        )
        assert whole < 0.2 * before < 0.4 * before < half < 0.8 * before


def test_a_truncated_line_of_fetches_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    log.write_bytes(b'[7, 2, 10, 30, ["/a"]]\n[8, 0, 5, 5, []]\n[7, 2, 10, 30, ["/b"]')
    with log.open("ab") as file:  # continues the line
        file.write(b'[7, 2, 10, 30, ["/c"]]\n[7, 2, 10, 30')
    found = Fetches.read(log)
    assert found is not None
    assert (found.workers, found.waiting_ns.tolist(), found.files) == (2, [30.0], ("/a",))
    log.write_bytes(b"")
    assert Fetches.read(log) is None


def test_a_longer_run_is_assumed_where_reads_determine_it() -> None:
    files = [[f"/data/{n}", 100] for n in range(4)]

    def run(order: list[int], listed: int = 4) -> tuple[AccessTrace, bool]:
        return recorded_trace({"files": files, "order": order, "listed": listed, "workers": 0})

    fixed, determined = run([2, 0, 1, 3] * 2)
    assert determined
    assert fixed.objects[:8].tolist() == [2, 0, 1, 3] * 2
    shuffled, determined = run([2, 0, 1, 3, 3, 2, 0, 1])
    assert determined
    assert np.bincount(shuffled.objects).tolist() == [len(shuffled) // 4] * 4
    larger, determined = run([0, 1, 2, 3], 30)
    assert not determined
    assert larger.object_bytes.tolist() == [100] * 30
    unequal, determined = run([0, 1, 0, 2, 0, 3, 0, 0])
    assert determined
    assert unequal.objects.tolist() == [0, 1, 0, 2, 0, 3, 0, 0]


def test_files_are_opened_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "open", builtins.open)
    monkeypatch.setattr(io, "open", io.open)
    origin = tmp_path / "origin"
    origin.mkdir()
    np.arange(9, dtype=np.uint8).tofile(origin / "a.bin")
    (origin / "a.txt").write_text("text")
    settings = CachedFiles(origin=str(origin), folder=str(tmp_path / "fast"), capacity="1MB")
    settings.prepare()
    for _ in range(2):
        with open(origin / "a.bin", "rb") as file:
            assert np.fromfile(file, np.uint8).tolist() == list(range(9))
    assert [path.name for path in (tmp_path / "fast").iterdir()] == ["a.bin.cached"]
    (origin / "a.bin").unlink()
    with open(origin / "a.bin", "rb") as file:
        assert len(file.read()) == 9
    with open(origin / "a.txt") as text:
        assert text.read() == "text"
    assert (origin / "a.bin").read_bytes() == bytes(range(9))
    with pytest.raises(FileNotFoundError):
        open(origin / "missing.bin", "rb").close()


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    for capacity in ("0%", "lots", "0"):
        with pytest.raises(InvalidArgumentError, match="shard_cache:capacity"):
            CachedFiles(capacity=capacity)
    with pytest.raises(InvalidArgumentError, match="origin"):
        CachedFiles().prepare()
    with pytest.raises(InvalidArgumentError, match="not a folder"):
        CachedFiles(origin=str(tmp_path / "none"), folder=str(tmp_path)).prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="no files below"):
        CachedFiles(origin=str(tmp_path / "empty"), folder=str(tmp_path)).prepare()
    for folder in (tmp_path, tmp_path / "fast"):
        with pytest.raises(InvalidArgumentError, match="must not be in"):
            CachedFiles(origin=str(tmp_path), folder=str(folder)).prepare()


def test_the_spec_is_read() -> None:
    (settings,) = parse("shard_cache:run.npz,capacity=30%")
    assert settings == CachedFiles("run.npz", capacity="30%")
    assert str(CachedFiles()) == "shard_cache"
    assert parse(str(CachedFiles(capacity="30%"))) == (CachedFiles(capacity="30%"),)


def test_the_lines_to_write_have_the_capacity() -> None:
    change = CachedFiles(capacity="3TB").code(Workload.parse(f"{__file__}:slow_step"))
    assert change is not None
    assert '"3TB"' in change.note
