"""shard_cache: offered where loading limits the step, predicted from a trace, applied to files."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch import nn

from slipstream.durations import Durations
from slipstream.engines.storage import AccessTrace
from slipstream.engines.storage.technique import CachedFiles
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, replay
from slipstream.technique import Context, parse
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload


class Slow(torch.utils.data.Dataset[Any]):
    """Rows that arrive after 2 ms."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.full((8,), float(index))


def slow_step() -> Any:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(torch.utils.data.DataLoader(Slow(), 4))

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.fixture(scope="module")
def graph() -> Graph:
    workload = Workload.parse(f"{__file__}:slow_step")
    return profile(workload, warmup=1, steps=3, threads=1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of ten epochs of 50 files."""
    rng = np.random.default_rng(0)
    names = [f"/data/{n:03d}" for _ in range(10) for n in rng.permutation(50)]
    AccessTrace.of(names, [100] * 500).save(tmp_path / "run.npz")
    return tmp_path / "run.npz"


def test_the_reason_names_what_to_record(graph: Graph) -> None:
    reason = CachedFiles().why_not(graph)
    assert reason is not None
    assert "storage record" in reason
    assert CachedFiles(trace="run.npz").why_not(graph) is None


def test_loading_shrinks_by_what_hits(graph: Graph, trace: Path, tmp_path: Path) -> None:
    context = Context(Durations(1, tmp_path / "durations.db"))
    before = replay(graph).step_ns
    whole, half = (
        replay(CachedFiles(str(trace), capacity=share).predict(graph, context)).step_ns
        for share in ("100%", "50%")
    )
    assert whole < 0.3 * before < half < 0.8 * before


def test_files_are_opened_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "open", builtins.open)
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
    with pytest.raises(FileNotFoundError):
        open(origin / "missing.bin", "rb").close()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="waiting"):
        CachedFiles(waiting=0.0)
    for capacity in ("0%", "lots", "0"):
        with pytest.raises(InvalidArgumentError, match="shard_cache:capacity"):
            CachedFiles(capacity=capacity)
    with pytest.raises(InvalidArgumentError, match="origin"):
        CachedFiles().prepare()


def test_the_spec_is_read() -> None:
    (settings,) = parse("shard_cache:run.npz,capacity=30%")
    assert settings == CachedFiles("run.npz", capacity="30%")


def test_the_lines_to_write_have_the_capacity() -> None:
    change = CachedFiles(capacity="3TB").code(Workload.parse(f"{__file__}:slow_step"))
    assert change is not None
    assert '"3TB"' in change.note
