"""The same script gives the same results on every engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import control_functions as functions
import pytest
import torch

from slipstream.engines.controller import (
    Controller,
    engine_by_name,
    ray_engine,
    run_program,
    sharded,
)
from slipstream.engines.controller.actors import ActorEngine
from slipstream.engines.controller.host import HostRuntime
from slipstream.errors import (
    ChildError,
    CommunicationError,
    MissingExtraError,
    SlipstreamError,
    UnknownNameError,
    UsageError,
)
from slipstream.ranks.members import Frame, Members

EXAMPLE = Path(__file__).parents[3] / "examples/control_stages.py"
LIMIT_S = 120.0


@pytest.fixture(params=["ray", "monarch"])
def engine(
    request: pytest.FixtureRequest, require: Callable[[str, bool, str], None],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> str:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        engine_by_name(request.param).stop()
    except MissingExtraError as error:
        require(request.param, False, error.what)
    return str(request.param)


def test_values_and_a_dead_host_on_other_engines(engine: str) -> None:
    with Controller(2, engine=engine) as pool:
        both = pool.slice(2)
        with pool.program("fragile") as program:
            x = program.input("x", torch.tensor([1.0, 2.0]), both, sharded(0))
            y = functions.dies_on_negative(x)
            program.output("y", functions.product(y, y))
        assert pool.launch(program).result(timeout_s=LIMIT_S) == 13.0
        dying = pool.launch(program, {"x": torch.tensor([1.0, -1.0])})
        with pytest.raises(CommunicationError, match="host 1 died"):
            dying.wait(LIMIT_S)
        pool.rebind(both)
        assert pool.launch(program).result(timeout_s=LIMIT_S) == 13.0


def test_the_example_learns(forked: None) -> None:
    target = f"{EXAMPLE}:make_program"
    losses = [
        run_program(target, "local", 2, 1, launches, lambda line: None).outputs[0][3]
        for launches in (1, 50)
    ]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1] < losses[0] / 2


def test_an_engine_that_is_unknown_or_not_installed_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'rya'"):
        Controller(engine="rya")
    try:
        import monarch  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="torchmonarch, which is not installed"):
            Controller(engine="monarch")


def test_a_member_that_cannot_start_is_named(forked: None) -> None:
    members = Members("member", f"{__name__}:missing", {})
    try:
        with pytest.raises(ChildError, match="member 0 failed"):
            members.start({0: {}})
    finally:
        members.stop()


class Slow(ActorEngine):
    """An engine whose actors run once they are awaited, except on host 2."""

    def _spawn(self, host: int) -> list[int]:
        return [host]

    def _await(self, actor: list[int]) -> None:
        if actor.pop() == 2:
            raise RuntimeError("out of memory")

    def _post(self, actor: list[int], message: object, payload: bytes) -> None: ...

    def _receive(self, actor: list[int]) -> list[Frame]:
        raise EOFError

    def _end(self, actors: object) -> None: ...


def test_hosts_run_once_they_are_started() -> None:
    """A host that is still starting would not answer, and count as hanging."""
    engine = Slow()
    try:
        engine.start([0, 1])
        assert list(engine._actors.values()) == [[], []]
        with pytest.raises(SlipstreamError, match="host 2 cannot be started: out of memory"):
            engine.start([2])
    finally:
        engine.stop()


def test_ray_shuts_down_before_its_processes_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for them."""
    calls: list[str] = []
    shutdown = functools.partial(calls.append, "shutdown")
    ray = SimpleNamespace(is_initialized=lambda: False, shutdown=shutdown)
    monkeypatch.setattr(ray_engine, "ray_module", lambda: ray)
    monkeypatch.setattr(ray_engine, "start_ray", lambda *_: [])
    monkeypatch.setattr(ray_engine, "end_processes", lambda _: calls.append("kill"))
    engine = ray_engine.RayEngine()
    engine.start([])
    engine.stop()
    assert calls == ["shutdown", "kill"]


def test_a_host_does_not_start_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a guard would otherwise start a controller on each of its hosts."""
    monkeypatch.setattr(HostRuntime, "runs_here", True)
    with pytest.raises(UsageError, match=r'starts a controller(.|\n)*"__main__"'):
        Controller(1, engine="sim")
