"""Real ranks for `prove`: processes that take a step together, asked from here.

A side whose techniques spread the step is one child for every rank, on links like the cluster's
(`slipstream.ranks.hosts`). All are asked at once, and a step takes as long as its slowest rank.
After every turn the ranks say what their parameters' bits add up to: replicas that differ end the
side, whatever its speed.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import technique
from slipstream.durations.durations import one_pool
from slipstream.errors import MeasurementError, UsageError
from slipstream.measure.arms import Arm, Home, Sample
from slipstream.measure.checks import Trial
from slipstream.ranks.hosts import Hosts, hosts_of
from slipstream.ranks.launch import WorkerProcesses
from slipstream.technique import Technique
from slipstream.verbs.children import memory_limit_bytes
from slipstream.verbs.first_steps import trial_of
from slipstream.workload import Workload, restore_files

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

SENT = "wire_sent"
"""Bytes a rank's interface sent in a step, headers included: a metric of samples."""
STEP = "whole_step"
"""Nanoseconds of a step of all ranks together, of however many samples: a metric of samples."""
# What runs in a rank's process.
_PROCESS = "slipstream.verbs.proving.rank_process"
# Steps that last longer are measured one at a time.
_SHORT_S = 0.25
_STEPS = 3
# DistributedDataParallel rebuilds its buckets after the first step, and allocators warm up.
_TO_SETTLE = 4
_SHORTEST_COLLECTIVE_S = 20.0
# Steps that are watched, once nothing is timed any more: about so long, and so many.
_WATCHED_S, _FEWEST_WATCHED, _MOST_WATCHED = 1.5, 4, 40
# Readings of the interface's counters in a step, and the seconds between two.
_READINGS, _OFTEN_S, _SELDOM_S = 60, 0.001, 0.02


def ranks_of(techniques: Sequence[Technique]) -> int:
    """How many processes the combination needs; 1 where nothing spreads the step.

    Raises:
        UsageError: something for replicas, without what makes replicas.
    """
    workers = [one.workers for one in techniques if technique.makes_replicas(one)]
    of_replicas = [one for one in techniques if one.traits.is_distributed]
    if of_replicas and not workers:
        name = of_replicas[0].name
        raise UsageError(
            f"{name} changes how replicas exchange gradients, and nothing makes replicas",
            remedy=f"combine it: --technique ddp:workers=2+{of_replicas[0]}",
        )
    return int(workers[0]) if of_replicas else 1


class RanksArm(Arm):
    """One side whose step several processes take together.

    Args:
        workload: with its techniques.
        ranks: how many, on the first of the hosts.
    """

    process: Home = "own"

    def __init__(
        self, name: str, workload: Workload, ranks: int, hosts: Hosts, threads: int,
        keep_in: Path,
    ) -> None:  # fmt: skip
        super().__init__(name, f"{workload.name} {name}, {ranks} ranks")
        self.ranks, self.hosts = ranks, hosts
        self._workload, self._keep_in, self._threads = workload, keep_in, threads
        self._processes: WorkerProcesses | None = None
        self._share = 1.0
        self._step_s = 0.0

    def open(self, timeout_s: float | None) -> None:
        """Build the workload on every rank; the first steps, whose links nobody times."""
        restore_files(self._keep_in, leave_folders=True)
        interface = self.hosts.ranks[0].interface
        built = self._call(
            "serve", timeout_s, partial(self._arguments, timeout_s, interface=interface)
        )
        # Of so many samples as a step has without techniques, as in predictions.
        samples = sum(one["samples"] for one in built)
        self._share = built[0]["samples_before"] / samples if samples else 1.0 / self.ranks
        with self.hosts.unshaped():
            # And the steps that techniques take otherwise than all later ones.
            first = max((one.warmup_steps() for one in self._workload.techniques), default=0)
            self._ask("some_steps", timeout_s, warm=_TO_SETTLE + first, steps=1)
        self.notes = (f"{self.name}: {self.hosts.notes[0]}", *self.hosts.notes[1:])

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """A step's time, as far as it is of the samples of a step without techniques; bytes."""
        steps = 1 if self._step_s > _SHORT_S else _STEPS
        answers = self._ask("some_steps", timeout_s, warm=1, steps=steps)
        wall_ns = max(one["wall"] for one in answers) / steps
        self._step_s = wall_ns / 1e9
        # By the busiest rank; where one interface counts them all, by the mean one.
        sent = max(one["sent"] for one in answers) / min(self.hosts.sharing, self.ranks)
        return {"wall": wall_ns * self._share, STEP: wall_ns, SENT: sent / (steps + 1)}

    def trials(self, seeds: Sequence[int], steps: int, timeout_s: float) -> list[Trial]:
        """The first steps from each seed; a step's loss is the mean of all ranks'.

        Raises:
            MeasurementError: the replicas differ afterwards.
        """
        try:
            with self.hosts.unshaped():
                return [self._trial(seed, steps, timeout_s) for seed in seeds]
        except BaseException:
            # Its ranks have ended; what measures speed starts others.
            self.close()
            raise

    def _trial(self, seed: int, steps: int, timeout_s: float) -> Trial:
        arguments = partial(self._arguments, timeout_s, seed=seed, steps=steps)
        answers = self._call("trial", timeout_s, arguments)
        self._check_replicas(answers)
        of_ranks = [trial_of(seed, one).losses for one in answers]
        if not all(of_ranks):
            return Trial(seed, steps)
        return Trial(seed, steps, tuple(map(statistics.fmean, zip(*of_ranks, strict=True))))

    def afterwards(self, timeout_s: float | None) -> dict[str, Any]:
        """How long a step stands still for each layer, and what the link carries meanwhile.

        Means over ranks; the link's bytes and the times beside them are rank 0's.
        """
        step_s = max(self._step_s, 1e-4)
        steps = max(_FEWEST_WATCHED, min(_MOST_WATCHED, round(_WATCHED_S / step_s)))
        every_s = min(max(step_s / _READINGS, _OFTEN_S), _SELDOM_S)
        answers = self._ask("watched_steps", timeout_s, steps=steps, every_s=every_s)
        of_ranks = [one["layers_s"] for one in answers]
        mean = None
        if None not in of_ranks:
            layers = dict.fromkeys(layer for one in of_ranks for layer in one)
            mean = {
                layer: statistics.fmean(one.get(layer, 0.0) for one in of_ranks) for layer in layers
            }
        kept = ("order", "how", "steps", "step_s", "link", "drawn")
        first = {name: answers[0][name] for name in kept}
        return {
            "layers_s": mean,
            "line_bytes_per_s": self.hosts.bytes_per_s,
            "sharing": min(self.hosts.sharing, self.ranks),
            **first,
        }

    def close(self) -> None:
        """End all ranks."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _call(
        self, function: str, timeout_s: float | None, of_rank: Callable[[int], Mapping[str, Any]]
    ) -> list[Any]:
        """What a function of `slipstream.verbs.proving.rank_process` answers on every rank.

        The ranks are started where they are not running.
        """
        if self._processes is None:
            self._processes = WorkerProcesses(
                self.name, self.hosts.ranks[: self.ranks],
                environment=one_pool(max(1, self._threads)),
                memory_limit_bytes=memory_limit_bytes(),
            ).__enter__()  # fmt: skip
        return self._processes.call(f"{_PROCESS}:{function}", timeout_s, of_rank)

    def _arguments(self, timeout_s: float | None, rank: int, **more: Any) -> dict[str, Any]:
        if rank == 0:
            # Ranks find each other through a file, which nobody has used before.
            self._store = str(self._keep_in / f"ranks-{secrets.token_hex(8)}")
        limit = max(_SHORTEST_COLLECTIVE_S, 0.8 * timeout_s) if timeout_s else 300.0
        join = {"rank": rank, "ranks": self.ranks, "store": self._store, "timeout_s": limit}
        return {
            "workload": self._workload.to_json(), "keep_in": str(self._keep_in), "join": join,
            **more,
        }  # fmt: skip

    def _ask(self, function: str, timeout_s: float | None, **asked: Any) -> list[Any]:
        answers = self._call(function, timeout_s, lambda rank: asked)
        self._check_replicas(answers)
        return answers

    def _check_replicas(self, answers: Sequence[Mapping[str, Any]]) -> None:
        other = [n for n, one in enumerate(answers) if one["digest"] != answers[0]["digest"]]
        if other:
            raise MeasurementError(
                f"the replicas differ: rank {', '.join(map(str, other))} has other parameters than "
                "rank 0",
                remedy="is everything that trains in the model, and nothing drawn by a rank alone?",
            )


@contextlib.contextmanager
def rank_hosts(
    workload: Workload,
    combinations: Mapping[str, Sequence[Technique]],
    cluster: Cluster | None,
) -> Iterator[tuple[Hosts | None, dict[str, int]]]:
    """Hosts for the ranks of all combinations, which take turns; and by name how many each has.

    Raises:
        UsageError: see `check_ranks`.
        InvalidArgumentError: more workers than the cluster has devices.
    """
    spread = check_ranks(workload, combinations, cluster)
    if cluster is None or not spread:
        yield None, spread
        return
    with hosts_of(cluster, max(spread.values())) as hosts:
        yield hosts, spread


def check_ranks(
    workload: Workload, combinations: Mapping[str, Sequence[Technique]], cluster: Cluster | None
) -> dict[str, int]:
    """By name: how many processes it needs, of the combinations that need several.

    Raises:
        UsageError: see `ranks_of`; no cluster; or a plain script, or live objects, which ranks
            cannot build.
        InvalidArgumentError: more workers than the cluster has devices.
    """
    needed = {name: ranks_of(chosen) for name, chosen in combinations.items()}
    spread = {name: ranks for name, ranks in needed.items() if ranks > 1}
    for name in spread:
        if cluster is None:
            raise UsageError(
                f"{name} starts {spread[name]} ranks, and it is not said on what network",
                remedy="--cluster here.toml (slipstream cluster measure), or in short "
                f"--cluster workers={spread[name]},link=100mbit,latency=50us",
            )
        technique.need_devices(combinations[name], cluster)
        if workload.live is not None or workload.function is None:
            what = "live objects do" if workload.live is not None else "a plain script does"
            raise UsageError(
                f"every rank builds the workload anew, which {what} not allow",
                remedy="name a function that returns (model, batch, loss, optimizer), as "
                "train.py:make_workload; a script of your own starts with torchrun "
                f"--nproc-per-node {spread[name]}",
            )
    return spread
