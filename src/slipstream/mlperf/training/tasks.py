"""A task: what is trained, on what, until which quality. Ten lines of yours, or one of the suite's.

    from slipstream.mlperf import training

    @training.task(target=0.95, train_samples=1437, batch=48, evaluate_every=240, most_epochs=40)
    def digits(run):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        yield model, cross_entropy, torch.optim.SGD(model.parameters(), 0.05)
        images = run.data("digits")                     # the clock runs from the first yield on
        x, y = tensors(images)
        yield run.shuffled(x[:1437], y[:1437]), lambda model: accuracy(model, x[1437:], y[1437:])

What comes before the first ``yield`` may build and compile; data may be touched only behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError

SUITE = (
    "digits", "fashion_cnn", "cifar_resnet8", "char_lm", "ncf", "ctr", "sst_bag", "nmt_tiny", "kws",
)  # fmt: skip
"""The tasks that come with slipstream, by name; the first needs no data folder."""
_ROOM = "slipstream.mlperf.training.suite"


@dataclass(frozen=True)
class Task:
    """What is trained, and when it is done.

    Attributes:
        target: the quality to reach.
        train_samples: of an epoch.
        batch: samples of a step.
        evaluate_every: samples between two evaluations, rounded up to a batch.
        most_epochs: after which a run has failed.
        metric: what the quality is called.
        higher: whether more of it is better.
        eval_samples: of an evaluation.
        typical: samples that a run takes, of the recorded reference; 0 where nobody knows.
        about: the model and the data in a line.
        name: of the function.
        place: ``file:line`` of the function.
    """

    target: float
    train_samples: int
    batch: int
    evaluate_every: int
    most_epochs: float
    metric: str = "top-1 accuracy"
    higher: bool = True
    eval_samples: int = 0
    typical: int = 0
    about: str = ""
    name: str = ""
    place: str = ""
    make: Callable[[Any], Iterator[Any]] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("train_samples", "batch", "evaluate_every", "most_epochs"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not positive")
        if self.evaluate_every > self.train_samples * self.most_epochs:
            raise InvalidArgumentError(
                "evaluate_every", f"{self.evaluate_every} samples are more than a run can take",
                remedy=f"at most {int(self.train_samples * self.most_epochs)}",
            )  # fmt: skip

    def reached(self, quality: float) -> bool:
        """Whether that is good enough; NaN is not."""
        return quality >= self.target if self.higher else quality <= self.target

    @property
    def most_samples(self) -> int:
        """After which a run has failed."""
        return int(self.train_samples * self.most_epochs)

    @property
    def planned_steps(self) -> int:
        """How many steps a run takes: as the reference, else at most."""
        return max(1, (self.typical or self.most_samples) // self.batch)

    def to_json(self) -> dict[str, Any]:
        """The facts, without the function."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "make"}


def task(**facts: Any) -> Callable[[Callable[[Any], Iterator[Any]]], Task]:
    """Make a function a task; `facts` are those of `Task`."""

    def decorate(function: Callable[[Any], Iterator[Any]]) -> Task:
        code = function.__code__
        return Task(
            **facts, name=function.__name__, make=function,
            place=f"{code.co_filename}:{code.co_firstlineno}",
        )  # fmt: skip

    return decorate


def load(target: str) -> Task:
    """The task of a name of the suite, or of ``file.py:function``. Runs the file.

    Raises:
        UnknownNameError: the suite has none of that name.
        WorkloadError: the file cannot be run, or has no such task.
    """
    path, colon, name = target.rpartition(":")
    if not colon:
        if target not in SUITE:
            raise UnknownNameError("task", target, SUITE)
        shipped: Task = getattr(importlib.import_module(f"{_ROOM}.{target}"), target)
        known = recorded(target)
        samples = known["samples"].get(str(shipped.batch), []) if known else []
        typical = int(statistics.median(samples)) if samples else 0
        return dataclasses.replace(shipped, name=target, typical=typical)
    if not Path(path).is_file():
        raise WorkloadError(f"there is no file {path}", remedy="as file.py:function, or a task")
    module = _run_file(Path(path).resolve())
    written = getattr(module, name, None)
    if not isinstance(written, Task):
        tasks = [key for key, value in vars(module).items() if isinstance(value, Task)]
        raise WorkloadError(
            f"{Path(path).name} has no task '{name}'",
            where=path,
            remedy=f"one of {', '.join(tasks)}"
            if tasks
            else "decorate a function: "
            "@training.task(target=..., train_samples=..., batch=..., evaluate_every=..., "
            "most_epochs=...)",
        )
    return written


def recorded(task: str) -> dict[str, Any] | None:
    """The recorded reference runs of a task of the suite: samples to the target by batch size."""
    path = Path(__file__).parent / "suite" / "reference.json"
    if not path.exists():
        return None
    reference: dict[str, Any] | None = json.loads(path.read_text("utf-8")).get(task)
    return reference


@functools.cache
def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WorkloadError(
            f"{path.name} fails: {type(error).__name__}: {error}", where=str(path)
        ) from error
    return module
