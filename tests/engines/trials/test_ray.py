"""Studies on Ray give the same results as elsewhere, also if a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.search import (
    Bool,
    Budget,
    Cost,
    Float,
    Halving,
    Int,
    Space,
    State,
    TrialRun,
    estimator,
    study,
)

SPACE = Space({"x": Float(0.0, 1.0)})


@pytest.fixture(scope="module", autouse=True)
def _ray(
    require: Callable[[str, bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    # Not the token: Ray keeps the first one of a process, which another test may have set.
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        patch.delenv(name, raising=False)
    try:
        import ray
    except ImportError:
        require("ray", False, "Ray is not installed")
        return
    from slipstream.engines.trials.ray_executor import RayExecutor

    # One Ray for all tests: an executor leaves a Ray running that it did not start.
    executor = RayExecutor(2)
    yield
    executor.close()
    ray.shutdown()
    patch.undo()


def test_ray_writes_nothing_to_the_home_folder() -> None:
    assert list(Path.home().iterdir()) == []


@estimator({"y": "", "width": ""}, cost=lambda config: Cost(0.05, 0.1, 0.5))
def shaped(config: dict[str, Any], run: TrialRun) -> dict[str, float]:
    time.sleep(0.01)
    return {"y": config["x"] / run.fidelity, "width": run.width}


def dies_once(config: dict[str, Any], run: TrialRun) -> float:
    mark = Path(os.environ["SLIPSTREAM_DIES_ONCE"])
    if config["x"] > 0.5 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(config["x"])


@estimator({"steps": ""}, cost=lambda config: Cost(5.0 if config["long"] else 1.0, gamma=0.5))
def stepped(config: dict[str, Any], run: TrialRun) -> float:
    """25 or 5 steps of 0.2 s, or 0.15 s on two devices, with a checkpoint after each."""
    assert run.folder is not None
    path = Path(run.folder, "steps")
    done = int(path.read_text()) if path.exists() else 0
    while done < (25 if config["long"] else 5):
        time.sleep(0.2 if run.width == 1 else 0.15)
        done += 1
        path.write_text(str(done))
        run.report(done, done)
        run.checkpointed()
    return done


def test_level_gives_a_free_device_to_the_trial_that_ends_last(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    executor = RayExecutor(2, scheduler="level", ahead=2, restart_s=0.2)
    run = study(
        "s", Space({"long": Bool()}), "steps", estimator=stepped, strategy="grid",
        rungs=Halving(1, 1, n=2), store=tmp_path / "s.db",
    ).run(executor)  # fmt: skip
    assert {t.config["long"]: t.values["steps"] for t in run.trials} == {False: 5.0, True: 25.0}
    # Includes reports from before the resize.
    assert [list(t.reports) for t in run.trials if t.config["long"]] == [[*range(1, 26)]]
    widths: dict[bool, list[int]] = {False: [], True: []}
    for number, devices, *_ in sorted(executor.intervals, key=lambda interval: interval[2]):
        widths[run.trials[number].config["long"]].append(len(devices))
    # Both start on one device, and the longer one has both at its end.
    assert widths == {False: [1], True: [1, 2]}


def test_promotions_equal_those_of_a_study_in_one_process(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    def made(store: str) -> Any:
        return study("s", SPACE, {"y": "min"}, estimator=shaped, strategy="random",
                     rungs=Halving(1, 9), store=tmp_path / store)  # fmt: skip

    executor = RayExecutor(4, scheduler="level", ahead=100)
    on_ray = made("ray.db").run(executor)
    local = made("local.db").run()
    assert {(t.candidate.id, t.fidelity) for t in on_ray.trials} == {
        (t.candidate.id, t.fidelity) for t in local.trials
    }
    assert on_ray.best().candidate == local.best().candidate
    assert on_ray.replay() == len(on_ray.trials) == 13
    # With fewer trials than slots, the last one had several slots, of those that exist.
    assert on_ray.trials[-1].values["width"] > 1
    for _, devices, start, end in executor.intervals:
        in_use = {d for _, ds, s, e in executor.intervals if s < end and start < e for d in ds}
        assert set(devices) <= in_use <= set(range(4))


def test_killed_worker_costs_no_trial(tmp_path: Path) -> None:
    import ray

    from slipstream.engines.trials.ray_executor import RayExecutor

    mark = tmp_path / "died"
    os.environ["SLIPSTREAM_DIES_ONCE"] = str(mark)
    try:
        executor = RayExecutor(2)
        executor._actor_kind = executor._actor_kind.options(
            runtime_env={"env_vars": {"SLIPSTREAM_DIES_ONCE": str(mark)}}
        )
        run = study("s", SPACE, "y", estimator=dies_once, strategy="random",
                    budget=Budget(trials=12)).run(executor)  # fmt: skip
    finally:
        del os.environ["SLIPSTREAM_DIES_ONCE"]
    assert ray.is_initialized()
    assert mark.exists()
    assert [trial.state for trial in run.trials] == [State.COMPLETE] * 12
    assert sorted(trial.attempts for trial in run.trials)[-1] == 2


DEVICE_BYTES = 600 * 2**20


@estimator({"y": "", "width": ""}, cost=lambda config: Cost(1.0, utilisation=0.3, memory=0.3))
def packed(config: dict[str, Any], run: TrialRun) -> dict[str, float]:
    """Declares 0.3 of a device's memory; allocates 0.2 of it, or 0.9 if x is 2."""
    path = Path(os.environ["SLIPSTREAM_BEGUN"])
    with path.open("a") as begun:
        begun.write(f"{config['x']} ")
    deadline = time.monotonic() + 30
    while len(path.read_text().split()) < int(os.environ["SLIPSTREAM_MANY"]):
        assert time.monotonic() < deadline, "not all run at the same time"
        time.sleep(0.01)
    memory = b"x" * int((0.9 if config["x"] == 2 else 0.2) * DEVICE_BYTES)
    time.sleep(1.0)
    return {"y": float(len(memory)), "width": run.width}


def test_trial_that_exceeds_its_declared_memory_is_moved(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    begun = tmp_path / "begun"
    executor = RayExecutor(1, scheduler="level", ahead=3, device_bytes=DEVICE_BYTES)
    executor._actor_kind = executor._actor_kind.options(
        runtime_env={"env_vars": {"SLIPSTREAM_BEGUN": str(begun), "SLIPSTREAM_MANY": "3"}}
    )
    run = study("s", Space({"x": Int(0, 2)}), "y", estimator=packed, strategy="grid",
                budget=Budget(trials=3), store=tmp_path / "s.db").run(executor)  # fmt: skip
    assert [trial.state for trial in run.trials] == [State.COMPLETE] * 3
    moved = next(trial for trial in run.trials if trial.candidate.config["x"] == 2)
    assert [trial for trial in run.trials if trial.reason] == [moved]
    assert "0.30" in str(moved.reason)
    assert sorted(begun.read_text().split()) == ["0", "1", "2", "2"]
    again = max(start for number, _, start, _ in executor.intervals if number == moved.number)
    others = [end for number, _, _, end in executor.intervals if number != moved.number]
    assert max(others) <= again, "it restarts alone"


def test_trial_that_exceeds_a_devices_memory_fails(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    executor = RayExecutor(1, scheduler="level", device_bytes=DEVICE_BYTES // 3)
    begun = {"SLIPSTREAM_BEGUN": str(tmp_path / "begun"), "SLIPSTREAM_MANY": "1"}
    executor._actor_kind = executor._actor_kind.options(runtime_env={"env_vars": begun})
    failing = study("s", Space({"x": Int(2, 3)}), "y", estimator=packed, strategy="grid",
                    budget=Budget(trials=1), store=tmp_path / "s.db").run(executor)  # fmt: skip
    assert [trial.state for trial in failing.trials] == [State.FAILED]
    assert "200 MiB" in str(failing.trials[0].reason)
