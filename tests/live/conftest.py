"""Fixtures of live analyses: one warm process, and a small workload to edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_workloads import LIMIT_S, TRAIN

from slipstream.child.fork_server import ForkServer
from slipstream.live import Analyst
from slipstream.live.queue import warm_server


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store micro-benchmarks of these tests in a separate cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def server(own_cache: None) -> Iterator[ForkServer]:
    """Return the warm process from which all analyses of these tests are forked."""
    forking = warm_server({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    assert forking is not None
    forking.warm_up()
    yield forking
    forking.close()


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """Write ``train.py`` with `make_workload` to a separate folder."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


Start = Callable[..., Analyst]


@pytest.fixture
def analyst_of(server: ForkServer) -> Iterator[Start]:
    """Create analysts that record briefly and simulate nothing; close them at the end."""
    made: list[Analyst] = []

    def make(path: Path, **settings: object) -> Analyst:
        options = {
            "threads": 1, "steps": 3, "techniques": None, "batches": False, "server": server,
            "timeout_s": LIMIT_S, **settings,
        }  # fmt: skip
        analyst = Analyst(f"{path}:make_workload", **options)  # type: ignore[arg-type]
        made.append(analyst)
        return analyst

    yield make
    for opened in made:
        opened.close()
