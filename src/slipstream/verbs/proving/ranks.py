"""Measure real ranks for `prove`: processes that take a step together.

A side with distributed techniques runs one child per rank, on links like the cluster's
(`slipstream.ranks.hosts`). All ranks are called simultaneously, and a step takes as long as its
slowest rank. After every turn the ranks compare hashes of their parameters: replicas that differ
end the side.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
"""Metric: bytes sent by a rank's interface per step, including headers."""
STEP = "whole_step"
"""Metric: nanoseconds of a step of all ranks together, whatever its number of samples."""
# The module that runs in a rank's process.
_RANK_MODULE = "slipstream.verbs.proving.rank_process"
# Steps that last longer are measured one at a time.
_SHORT_S = 0.25
_STEPS = 3
# DistributedDataParallel rebuilds its buckets after the first step, and allocators warm up.
_WARMUP_STEPS = 4
_MIN_COLLECTIVE_S = 20.0
# Time of watched steps after all timing, and limits on their number.
_WATCHED_S, _MIN_WATCHED, _MAX_WATCHED = 1.5, 4, 40
# Readings of the interface's counters per step, and limits on their interval in seconds.
_READINGS, _MIN_INTERVAL_S, _MAX_INTERVAL_S = 60, 0.001, 0.02


def ranks_of(techniques: Sequence[Technique]) -> int:
    """Return the number of processes the combination needs; 1 without distributed techniques.

    Raises:
        UsageError: a technique for replicas without one that makes replicas.
    """
    workers = [part.workers for part in techniques if technique.makes_replicas(part)]
    of_replicas = [part for part in techniques if part.traits.is_distributed]
    if of_replicas and not workers:
        name = of_replicas[0].name
        raise UsageError(
            f"{name} changes how replicas exchange gradients, but nothing makes replicas",
            remedy=f"combine it: --technique ddp:workers=2+{of_replicas[0]}",
        )
    return int(workers[0]) if of_replicas else 1


def are_replicas(techniques: Sequence[Technique]) -> bool:
    """Whether all ranks have the same parameters after every step."""
    return all(part.traits.axis in ("data", "tile") for part in techniques)


class RanksArm(Arm):
    """A side whose step several processes take together.

    Args:
        workload: with its techniques.
        ranks: number of processes, on the first hosts.
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
        """Build the workload on every rank and run warm-up steps on unshaped links."""
        restore_files(self._keep_in, leave_folders=True)
        interface = self.hosts.ranks[0].interface
        built = self._call(
            "serve", timeout_s, partial(self._arguments, timeout_s, interface=interface)
        )
        # Times are scaled to the samples of a step without techniques, as in predictions.
        samples = sum(answer["samples"] for answer in built)
        self._share = built[0]["samples_before"] / samples if samples else 1.0 / self.ranks
        with self.hosts.unshaped():
            # Including steps that techniques treat differently from all later ones.
            warmup = max((part.warmup_steps() for part in self._workload.techniques), default=0)
            self._ask("some_steps", timeout_s, warm=_WARMUP_STEPS + warmup, steps=1)
        self.notes = (f"{self.name}: {self.hosts.notes[0]}", *self.hosts.notes[1:])

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Return the time of a step, scaled to the samples without techniques, and bytes sent."""
        steps = 1 if self._step_s > _SHORT_S else _STEPS
        answers = self._ask("some_steps", timeout_s, warm=1, steps=steps)
        wall_ns = max(answer["wall"] for answer in answers) / steps
        self._step_s = wall_ns / 1e9
        # Of the busiest rank, or the mean if one interface counts all ranks.
        sent = max(answer["sent"] for answer in answers) / min(self.hosts.sharing, self.ranks)
        return {"wall": wall_ns * self._share, STEP: wall_ns, SENT: sent / (steps + 1)}

    def trials(self, seeds: Sequence[int], steps: int, timeout_s: float) -> list[Trial]:
        """Run the first steps from each seed; a step's loss is the mean over the ranks.

        Raises:
            MeasurementError: the replicas differ afterwards.
        """
        try:
            with self.hosts.unshaped():
                return [self._trial(seed, steps, timeout_s) for seed in seeds]
        except BaseException:
            # End these ranks; the speed measurement starts others.
            self.close()
            raise

    def _trial(self, seed: int, steps: int, timeout_s: float) -> Trial:
        arguments = partial(self._arguments, timeout_s, seed=seed, steps=steps)
        answers = self._call("trial", timeout_s, arguments)
        self._check_replicas(answers)
        of_ranks = [trial_of(seed, answer).losses for answer in answers]
        if not all(of_ranks):
            return Trial(seed, steps)
        return Trial(seed, steps, tuple(map(statistics.fmean, zip(*of_ranks, strict=True))))

    def afterwards(self, timeout_s: float | None) -> dict[str, Any]:
        """Measure how long a step waits for each layer, and the link's traffic.

        Waits are means over ranks; traffic and time lines are rank 0's.
        """
        step_s = max(self._step_s, 1e-4)
        steps = max(_MIN_WATCHED, min(_MAX_WATCHED, round(_WATCHED_S / step_s)))
        every_s = min(max(step_s / _READINGS, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        answers = self._ask("watched_steps", timeout_s, steps=steps, every_s=every_s)
        of_ranks = [answer["layers_s"] for answer in answers]
        mean = None
        if None not in of_ranks:
            layers = dict.fromkeys(layer for waits in of_ranks for layer in waits)
            mean = {
                layer: statistics.fmean(waits.get(layer, 0.0) for waits in of_ranks)
                for layer in layers
            }
        keys = ("order", "how", "steps", "step_s", "link", "drawn")
        first = {name: answers[0][name] for name in keys}
        return {
            "layers_s": mean,
            "line_bytes_per_s": self.hosts.bytes_per_s,
            "sharing": min(self.hosts.sharing, self.ranks),
            **first,
        }

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _call(
        self, function: str, timeout_s: float | None, of_rank: Callable[[int], Mapping[str, Any]]
    ) -> list[Any]:
        """Call a function of `rank_process` on every rank, starting the ranks if necessary."""
        if self._processes is None:
            self._processes = WorkerProcesses(
                self.name, self.hosts.ranks[: self.ranks],
                environment=one_pool(max(1, self._threads)),
                memory_limit_bytes=memory_limit_bytes(),
            ).__enter__()  # fmt: skip
        return self._processes.call(f"{_RANK_MODULE}:{function}", timeout_s, of_rank)

    def _arguments(self, timeout_s: float | None, rank: int, **more: Any) -> dict[str, Any]:
        if rank == 0:
            # Ranks find each other through a new file.
            self._store = str(self._keep_in / f"ranks-{secrets.token_hex(8)}")
        limit = max(_MIN_COLLECTIVE_S, 0.8 * timeout_s) if timeout_s else 300.0
        join = {"rank": rank, "ranks": self.ranks, "store": self._store, "timeout_s": limit}
        return {
            "workload": self._workload.to_json(), "keep_in": str(self._keep_in), "join": join,
            **more,
        }  # fmt: skip

    def _ask(self, function: str, timeout_s: float | None, **arguments: Any) -> list[Any]:
        answers = self._call(function, timeout_s, lambda rank: arguments)
        self._check_replicas(answers)
        return answers

    def _check_replicas(self, answers: Sequence[Mapping[str, Any]]) -> None:
        if not are_replicas(cast(Sequence[Technique], self._workload.techniques)):
            return
        different = [n for n, a in enumerate(answers) if a["digest"] != answers[0]["digest"]]
        if different:
            raise MeasurementError(
                f"the replicas differ: rank {', '.join(map(str, different))} has other parameters "
                "than rank 0",
                remedy="check that all trained parameters are in the model and that no rank draws "
                "random numbers alone",
            )


@contextlib.contextmanager
def rank_hosts(
    workload: Workload,
    combinations: Mapping[str, Sequence[Technique]],
    cluster: Cluster | None,
) -> Iterator[tuple[Hosts | None, dict[str, int]]]:
    """Yield hosts for the ranks of all combinations, and the number of ranks by name."""
    distributed = check_ranks(workload, combinations, cluster)
    if cluster is None or not distributed:
        yield None, distributed
        return
    with hosts_of(cluster, max(distributed.values())) as hosts:
        yield hosts, distributed


def check_ranks(
    workload: Workload, combinations: Mapping[str, Sequence[Technique]], cluster: Cluster | None
) -> dict[str, int]:
    """Return the number of processes of each combination that needs several, by name.

    Raises:
        UsageError: see `ranks_of`; no cluster; or a plain script or live objects, which ranks
            cannot build.
        InvalidArgumentError: more workers than the cluster has devices.
    """
    needed = {name: ranks_of(chosen) for name, chosen in combinations.items()}
    distributed = {name: ranks for name, ranks in needed.items() if ranks > 1}
    for name in distributed:
        if cluster is None:
            raise UsageError(
                f"{name} starts {distributed[name]} ranks, which need a description of the network",
                remedy="pass --cluster here.toml (slipstream cluster measure), or in short "
                f"--cluster workers={distributed[name]},link=100mbit,latency=50us",
            )
        technique.need_devices(combinations[name], cluster)
        if workload.live is not None or workload.function is None:
            what = "live objects do" if workload.live is not None else "a plain script does"
            raise UsageError(
                f"every rank builds the workload itself, which {what} not allow",
                remedy="pass a function that returns (model, batch, loss, optimizer), for example "
                "train.py:make_workload; start a script of your own with torchrun "
                f"--nproc-per-node {distributed[name]}",
            )
    return distributed
