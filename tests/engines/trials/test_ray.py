"""Studies on Ray: the same facts as anywhere, also when a worker is killed."""

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
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        patch.delenv(name, raising=False)
    try:
        import ray
    except ImportError:
        require("ray", False, "Ray is not installed")
        return
    from slipstream.engines.trials.ray_executor import RayExecutor

    # One Ray for all tests: an executor that finds one leaves it running.
    executor = RayExecutor(2)
    yield
    executor.close()
    ray.shutdown()
    patch.undo()


def test_ray_leaves_nothing_in_the_home_folder() -> None:
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
    """Twenty-five steps or five of 0.2 s, a checkpoint after each; on two devices of 0.15 s."""
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


def test_the_level_rule_gives_a_device_that_came_free_to_who_ends_last(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    executor = RayExecutor(2, scheduler="level", ahead=2, restart_s=0.2)
    run = study(
        "s", Space({"long": Bool()}), "steps", estimator=stepped, strategy="grid",
        rungs=Halving(1, 1, n=2), store=tmp_path / "s.db",
    ).run(executor)  # fmt: skip
    assert {t.config["long"]: t.values["steps"] for t in run.trials} == {False: 5.0, True: 25.0}
    # What it reported before it was resized, too.
    assert [list(t.reports) for t in run.trials if t.config["long"]] == [[*range(1, 26)]]
    widths: dict[bool, list[int]] = {False: [], True: []}
    for number, devices, *_ in sorted(executor.intervals, key=lambda one: one[2]):
        widths[run.trials[number].config["long"]].append(len(devices))
    # Neither has stopped for the other: both begin alone, and the longer one has both at its end.
    assert widths == {False: [1], True: [1, 2]}


def test_promotions_are_those_of_a_study_in_one_process(tmp_path: Path) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    def made(store: str) -> Any:
        return study("s", SPACE, {"y": "min"}, estimator=shaped, strategy="random",
                     rungs=Halving(1, 9), store=tmp_path / store)  # fmt: skip

    executor = RayExecutor(4, scheduler="level", ahead=100)
    there = made("ray.db").run(executor)
    here = made("here.db").run()
    assert {(t.candidate.id, t.fidelity) for t in there.trials} == {
        (t.candidate.id, t.fidelity) for t in here.trials
    }
    assert there.best().candidate == here.best().candidate
    assert there.replay() == len(there.trials) == 13
    # Fewer trials than slots: the last one was given more than one, and never more than there are.
    assert there.trials[-1].values["width"] > 1
    for _, devices, start, end in executor.intervals:
        beside = {d for _, ds, s, e in executor.intervals if s < end and start < e for d in ds}
        assert set(devices) <= beside <= set(range(4))


def test_a_killed_worker_costs_no_trial(tmp_path: Path) -> None:
    import ray

    from slipstream.engines.trials.ray_executor import RayExecutor

    mark = tmp_path / "died"
    os.environ["SLIPSTREAM_DIES_ONCE"] = str(mark)
    try:
        executor = RayExecutor(2)
        executor._actor_kind = executor._actor_kind.options(
            runtime_env={"env_vars": {"SLIPSTREAM_DIES_ONCE": str(mark)}}
        )
        made = study("s", SPACE, "y", estimator=dies_once, strategy="random",
                     budget=Budget(trials=12)).run(executor)  # fmt: skip
    finally:
        del os.environ["SLIPSTREAM_DIES_ONCE"]
    assert ray.is_initialized()
    assert mark.exists()
    assert [one.state for one in made.trials] == [State.COMPLETE] * 12
    assert sorted(one.attempts for one in made.trials)[-1] == 2


DEVICE_BYTES = 600 * 2**20


@estimator({"y": "", "width": ""}, cost=lambda config: Cost(1.0, utilisation=0.3, memory=0.3))
def packed(config: dict[str, Any], run: TrialRun) -> dict[str, float]:
    """Says that it holds 0.3 of a device; the one where x is 2 holds three times as much."""
    path = Path(os.environ["SLIPSTREAM_BEGUN"])
    with path.open("a") as begun:
        begun.write(f"{config['x']} ")
    deadline = time.monotonic() + 30
    while len(path.read_text().split()) < int(os.environ["SLIPSTREAM_MANY"]):
        assert time.monotonic() < deadline, "not all run beside each other"
        time.sleep(0.01)
    held = b"x" * int((0.9 if config["x"] == 2 else 0.2) * DEVICE_BYTES)
    time.sleep(1.0)
    return {"y": float(len(held)), "width": run.width}


def test_a_trial_that_lies_about_its_memory_moves_and_its_neighbours_do_not(
    tmp_path: Path,
) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    begun = tmp_path / "begun"
    executor = RayExecutor(1, scheduler="level", ahead=3, device_bytes=DEVICE_BYTES)
    executor._actor_kind = executor._actor_kind.options(
        runtime_env={"env_vars": {"SLIPSTREAM_BEGUN": str(begun), "SLIPSTREAM_MANY": "3"}}
    )
    lying = study("s", Space({"x": Int(0, 2)}), "y", estimator=packed, strategy="grid",
                  budget=Budget(trials=3), store=tmp_path / "s.db").run(executor)  # fmt: skip
    assert [one.state for one in lying.trials] == [State.COMPLETE] * 3
    liar = next(one for one in lying.trials if one.candidate.config["x"] == 2)
    assert [one for one in lying.trials if one.reason] == [liar]
    assert "0.30" in str(liar.reason)
    assert sorted(begun.read_text().split()) == ["0", "1", "2", "2"]
    again = max(start for number, _, start, _ in executor.intervals if number == liar.number)
    others = [end for number, _, _, end in executor.intervals if number != liar.number]
    assert max(others) <= again, "it begins again where nobody is beside it"


def test_a_trial_that_no_device_holds_has_failed(
    tmp_path: Path,
) -> None:
    from slipstream.engines.trials.ray_executor import RayExecutor

    executor = RayExecutor(1, scheduler="level", device_bytes=DEVICE_BYTES // 3)
    begun = {"SLIPSTREAM_BEGUN": str(tmp_path / "begun"), "SLIPSTREAM_MANY": "1"}
    executor._actor_kind = executor._actor_kind.options(runtime_env={"env_vars": begun})
    failing = study("s", Space({"x": Int(2, 3)}), "y", estimator=packed, strategy="grid",
                    budget=Budget(trials=1), store=tmp_path / "s.db").run(executor)  # fmt: skip
    assert [one.state for one in failing.trials] == [State.FAILED]
    assert "200 MiB" in str(failing.trials[0].reason)
