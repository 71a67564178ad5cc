"""Run a task once: build, train, evaluate, and log it.

A run has its own process, or several processes that are joined as ranks and share every batch.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from slipstream import technique as techniques
from slipstream.errors import SlipstreamError, WorkloadError
from slipstream.mlperf.training.evidence import OpenedFiles, Samples
from slipstream.mlperf.training.log import Log
from slipstream.mlperf.training.tasks import Task, load
from slipstream.technique import Stage, TechniqueSettings, Traits
from slipstream.workload import BuiltWorkload, build_from
from slipstream.workload.built import prepare, seed_all


class TouchedError(WorkloadError):
    """A task that reads data before the clock starts."""


class DivergedError(SlipstreamError):
    """A loss that is infinite or NaN; the run is logged as aborted."""


@dataclass
class TrainingRun:
    """The argument of a task's function.

    Attributes:
        seed: seed of this run; torch, NumPy and Python are already seeded with it.
        batch: samples per step.
    """

    seed: int
    batch: int
    log: Log
    started: bool = False
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def data(self, name: str, **options: Any) -> Any:
        """Return a data set by name, see `slipstream.data.get`.

        Raises:
            TouchedError: the clock has not started.
            MissingDataError: the data set is not on this machine.
        """
        from slipstream import data

        self.touch(f"data set {name}")
        return data.get(name, **options)

    def touch(self, what: str) -> None:
        """Declare that data is read now; call it before you read your own files.

        Raises:
            TouchedError: the clock has not started.
        """
        if not self.started:
            self.log.event("data_touched", what)
            raise TouchedError(
                f"data was read before the clock started: {what}",
                remedy="read it after the first yield, which starts the clock",
            )

    def shuffled(self, *tensors: torch.Tensor) -> _Shuffled:
        """Return batches in a new order every epoch; an incomplete last batch is dropped."""
        self.touch("a tensor of data")
        return _Shuffled(tensors, self.batch, self._generator)


@dataclass(frozen=True)
class _Shuffled:
    tensors: Sequence[torch.Tensor]
    batch: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        rows = len(self.tensors[0])
        order = torch.randperm(rows, generator=self.generator)
        for begin in range(0, rows - self.batch + 1, self.batch):
            chosen = order[begin : begin + self.batch]
            yield tuple(tensor[chosen] for tensor in self.tensors)


@dataclass(frozen=True)
class _Join(TechniqueSettings):
    """Broadcast the parameters of rank 0 before the first technique of the distribution stage."""

    name: ClassVar[str] = "join"
    traits: ClassVar[Traits] = Traits(stage=Stage.DISTRIBUTION - 1)

    def apply(self, built: BuiltWorkload) -> None:
        import torch.distributed as dist

        built.rank, built.ranks = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            for tensor in (*built.model.parameters(), *built.model.buffers()):
                if tensor.numel():
                    dist.broadcast(tensor, 0)


def describe(target: str) -> dict[str, Any]:
    """Return a task as JSON, running its file in this process."""
    return load(target).to_json()


def first_step(task: str, batch: int) -> tuple[Any, Any, Any, Any]:
    """Return the step of a task as a workload: (model, batch, loss, optimizer).

    Raises:
        WorkloadError: a yield of the task is not of the documented form.
    """
    loaded = load(task)
    assert loaded.make is not None
    run = TrainingRun(0, batch, Log(None))
    parts = loaded.make(run)
    model, loss, optimizer = _first_yield(next(parts, None), loaded)
    run.started = True
    batches, _ = _second_yield(next(parts, None), loaded)
    return model, next(iter(batches)), loss, optimizer


def run(
    target: str, combination: str, seed: int, log: str, *, division: str = "open",
    batch: int | None = None, target_quality: float | None = None, threads: int = 1,
    most_epochs: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a task once, until it reaches its target or its last epoch.

    Args:
        target: a task's name, or ``file.py:function``.
        combination: technique spec; empty for none.
        log: path of the log file, which rank 0 writes.
        batch, target_quality, most_epochs: override the task's values.

    Returns:
        JSON: status, samples, wall and CPU seconds, qualities by samples, all losses and their
        digest.

    Raises:
        WorkloadError: the task's code fails, or a yield is not of the documented form.
    """
    import torch.distributed as dist

    torch.set_num_threads(threads)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    path = target.rpartition(":")[0]
    opened = OpenedFiles(Path(path).resolve().parent if path else None)
    with opened:
        task = load(target)
    chosen = techniques.parse(combination) if combination else ()
    writer = Log(Path(log) if rank == 0 else None, task.place)
    try:
        return _Training(
            task, chosen, seed, writer, division, batch or task.batch,
            task.target if target_quality is None else target_quality, rank, ranks,
            int(task.train_samples * (most_epochs or task.most_epochs)), opened,
        ).run()  # fmt: skip
    finally:
        writer.close()


@dataclass
class _Training:
    task: Task
    techniques: Sequence[Any]
    seed: int
    log: Log
    division: str
    batch: int
    target: float
    rank: int
    ranks: int
    most_samples: int
    opened: OpenedFiles
    seen: Samples = field(default_factory=Samples)
    watching_s: float = 0.0
    watching_cpu_s: float = 0.0
    samples: int = 0
    qualities: list[tuple[int, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_s: float = 0.0
    step_cpu_s: float = 0.0

    def run(self) -> dict[str, Any]:
        seed_all(self.seed)
        log, task = self.log, self.task
        log.event("cache_clear", True, what="a new process")
        log.start("init_start")
        self._facts()
        prepare(self.techniques)
        run = TrainingRun(self.seed, self.batch, log)
        assert task.make is not None
        parts = task.make(run)
        with self.opened:
            first = next(parts, None)
        model, loss, optimizer = _first_yield(first, task)
        self._hyper_parameters(optimizer)
        log.stop("init_stop")
        for path in self.opened.paths:
            log.event("data_touched", path)
        log.start("run_start")
        run.started = True
        began, began_cpu = time.monotonic(), time.process_time()
        batches, evaluate = _second_yield(next(parts, None), task)
        status, reason = "aborted", ""
        try:
            built = self._built(model, loss, optimizer, next(iter(batches)))
            reached = self._train(built, batches, evaluate)
            status = "success" if reached else "aborted"
            reason = "" if reached else "the target was not reached"
        except DivergedError as error:
            reason = error.what
        seconds = time.monotonic() - began - self.watching_s
        cpu_s = time.process_time() - began_cpu - self.watching_cpu_s
        log.stop("run_stop", status=status, **({"reason": reason} if reason else {}))
        if self.qualities and self.rank == 0:
            self._check_evaluation(_inner(built.model), evaluate)
        digest = hashlib.sha256(struct.pack(f"<{len(self.losses)}d", *self.losses)).hexdigest()
        return {
            "status": status, "reason": reason, "samples": self.samples, "seconds": seconds,
            "cpu_s": cpu_s, "step_s": self.step_s, "step_cpu_s": self.step_cpu_s,
            "steps": len(self.losses), "qualities": self.qualities,
            "losses": self.losses, "digest": digest, "seed": self.seed,
            "batch": self.batch,
        }  # fmt: skip

    def _facts(self) -> None:
        task = self.task
        for key, value in (
            ("submission_benchmark", task.name), ("submission_org", "slipstream"),
            ("submission_division", self.division), ("submission_status", "research"),
            ("submission_platform", "this machine"), ("seed", self.seed),
            ("global_batch_size", self.batch), ("gradient_accumulation_steps", 1),
            ("train_samples", task.train_samples), ("eval_samples", task.eval_samples),
            ("target_quality", self.target), ("evaluate_every", task.evaluate_every),
            ("techniques", techniques.combination_name(self.techniques)),
        ):  # fmt: skip
            self.log.event(key, value)

    def _hyper_parameters(self, optimizer: Any) -> None:
        first = optimizer.param_groups[0]
        self.log.event("opt_name", type(optimizer).__name__.lower())
        self.log.event("opt_base_learning_rate", first["lr"])
        self.log.event("opt_weight_decay", first.get("weight_decay", 0.0))

    def _built(self, model: Any, loss: Any, optimizer: Any, batch: Any) -> BuiltWorkload:
        planned = max(1, self.task.planned_steps * self.task.batch // self.batch)
        parts = BuiltWorkload(model, self._share(batch), loss, optimizer, planned_steps=planned)
        joining = (_Join(),) if self.ranks > 1 else ()
        built = build_from(
            parts, (*self.techniques, *joining), self.seed, self.task.name, self.task.place
        )
        seed_all(self.seed + 1)
        return built

    def _share(self, batch: Any) -> Any:
        """Return this rank's rows of a batch."""
        if self.ranks == 1:
            return batch
        from torch.utils._pytree import tree_map_only

        return tree_map_only(torch.Tensor, lambda tensor: tensor[self.rank :: self.ranks], batch)

    def _train(self, built: BuiltWorkload, batches: Any, evaluate: Any) -> bool:
        due = self.task.evaluate_every
        epoch = 0
        while self.samples < self.most_samples:
            epoch += 1
            before = self.samples
            self.log.start("epoch_start", epoch_num=epoch, samples_count=self.samples)
            for batch in batches:
                self._watch(batch)
                self._step(built, self._share(batch))
                if self.samples >= due:
                    due += self.task.evaluate_every
                    if self._reached(built, evaluate):
                        self.log.stop("epoch_stop", epoch_num=epoch, samples_count=self.samples)
                        return True
                if self.samples >= self.most_samples:
                    break
            self.log.stop("epoch_stop", epoch_num=epoch, samples_count=self.samples)
            if self.samples == before:
                raise WorkloadError(
                    f"an epoch of {self.task.name} is smaller than a batch of {self.batch} samples",
                    where=self.task.place,
                )
        return False

    def _watch(self, batch: Any) -> None:
        """Hash the samples of the first epoch, with the clock paused."""
        if self.samples < self.task.train_samples and self.rank == 0:
            began, cpu = time.monotonic(), time.process_time()
            self.seen.train(batch)
            self.watching_s += time.monotonic() - began
            self.watching_cpu_s += time.process_time() - cpu

    def _check_evaluation(self, model: Any, evaluate: Any) -> None:
        """Evaluate again after the clock stopped, and log which samples reach the model."""

        def watch(_: Any, args: Any, kwargs: Any) -> None:
            self.seen.evaluate((args, kwargs))

        model.eval()
        hook = model.register_forward_pre_hook(watch, with_kwargs=True)
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                evaluate(model)
        except Exception as error:
            self.log.event("eval_samples_unknown", f"{type(error).__name__}: {error}")
        finally:
            hook.remove()
        if self.seen.evaluated:
            self.log.event("eval_samples_seen", self.seen.evaluated)
            self.log.event("eval_samples_trained_on", round(self.seen.shared, 4))

    def _step(self, built: BuiltWorkload, batch: Any) -> None:
        built.batch = batch
        began, cpu = time.monotonic(), time.process_time()
        loss = float(built.step())
        self.step_s += time.monotonic() - began
        self.step_cpu_s += time.process_time() - cpu
        self.losses.append(loss)
        self.samples += self.batch
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} after {self.samples} samples")

    def _reached(self, built: BuiltWorkload, evaluate: Any) -> bool:
        import torch.distributed as dist

        num = round(self.samples / self.task.train_samples, 4)
        where: dict[str, Any] = {"epoch_num": num, "samples_count": self.samples}
        self.log.start("eval_start", **where)
        built.settle()
        model = _inner(built.model)
        quality = 0.0
        if self.rank == 0:
            model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                quality = float(evaluate(model))
            model.train()
        if self.ranks > 1:
            shared = torch.tensor([quality], dtype=torch.float64)
            dist.broadcast(shared, 0)
            quality = float(shared)
        self.qualities.append((self.samples, quality))
        self.log.event("eval_accuracy", quality, **where)
        self.log.stop("eval_stop", **where)
        return quality >= self.target if self.task.higher else quality <= self.target


def _inner(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def _first_yield(value: Any, task: Task) -> tuple[Any, Any, Any]:
    if not isinstance(value, tuple) or len(value) != 3 or not hasattr(value[2], "param_groups"):
        raise WorkloadError(
            f"the first yield of {task.name} is not (model, loss, optimizer)", where=task.place
        )
    return value


def _second_yield(value: Any, task: Task) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2 or not callable(value[1]):
        raise WorkloadError(
            f"the second yield of {task.name} is not (batches, evaluate)", where=task.place,
            remedy="for example: yield run.shuffled(x, y), lambda model: accuracy(model)",
        )  # fmt: skip
    return value
