"""Tasks: a model, its data and the quality to reach. Write your own, or use one of the suite.

    from slipstream.mlperf import training

    @training.task(target=0.95, train_samples=1437, batch=48, evaluate_every=240, most_epochs=40)
    def digits(run):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        yield model, cross_entropy, torch.optim.SGD(model.parameters(), 0.05)
        images = run.data("digits")                     # the clock starts at the first yield
        x, y = tensors(images)
        yield run.shuffled(x[:1437], y[:1437]), lambda model: accuracy(model, x[1437:], y[1437:])

Code before the first ``yield`` may build and compile. It may not read data.
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
_PACKAGE = "slipstream.mlperf.training.suite"


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        target: the quality to reach.
        train_samples: samples per epoch.
        batch: samples per step.
        evaluate_every: samples between two evaluations, rounded up to a batch.
        most_epochs: limit after which a run has failed.
        metric: name of the quality.
        higher: whether a higher quality is better.
        eval_samples: samples per evaluation.
        typical: median samples to the target of the recorded reference runs; 0 without them.
        about: the model and the data in one line.
        name: name of the function.
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
                "evaluate_every", f"{self.evaluate_every} samples exceed the longest run",
                remedy=f"pass at most {int(self.train_samples * self.most_epochs)}",
            )  # fmt: skip

    def reached(self, quality: float) -> bool:
        """Whether `quality` reaches the target; False for NaN."""
        return quality >= self.target if self.higher else quality <= self.target

    @property
    def most_samples(self) -> int:
        """Maximum number of training samples of a run."""
        return int(self.train_samples * self.most_epochs)

    @property
    def planned_steps(self) -> int:
        """Expected steps of a run: the reference's median, or the maximum without a reference."""
        return max(1, (self.typical or self.most_samples) // self.batch)

    def to_json(self) -> dict[str, Any]:
        """Return all attributes but the function as JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "make"}


def task(**facts: Any) -> Callable[[Callable[[Any], Iterator[Any]]], Task]:
    """Decorate a function as a task; `facts` are attributes of `Task`."""

    def decorate(function: Callable[[Any], Iterator[Any]]) -> Task:
        code = function.__code__
        return Task(
            **facts, name=function.__name__, make=function,
            place=f"{code.co_filename}:{code.co_firstlineno}",
        )  # fmt: skip

    return decorate


def load(target: str) -> Task:
    """Load a task of the suite by name, or run a file and return its task (``file.py:function``).

    Raises:
        UnknownNameError: the suite has no task of that name.
        WorkloadError: the file cannot be run, or has no such task.
    """
    path, colon, name = target.rpartition(":")
    if not colon:
        if target not in SUITE:
            raise UnknownNameError("task", target, SUITE)
        shipped: Task = getattr(importlib.import_module(f"{_PACKAGE}.{target}"), target)
        reference = recorded(target)
        samples = reference["samples"].get(str(shipped.batch), []) if reference else []
        typical = int(statistics.median(samples)) if samples else 0
        return dataclasses.replace(shipped, name=target, typical=typical)
    if not Path(path).is_file():
        raise WorkloadError(
            f"there is no file {path}", remedy="pass file.py:function, or a task of the suite"
        )
    module = _run_file(Path(path).resolve())
    written = getattr(module, name, None)
    if not isinstance(written, Task):
        tasks = [key for key, value in vars(module).items() if isinstance(value, Task)]
        raise WorkloadError(
            f"{Path(path).name} has no task '{name}'",
            where=path,
            remedy=f"choose one of {', '.join(tasks)}"
            if tasks
            else "decorate a function: "
            "@training.task(target=..., train_samples=..., batch=..., evaluate_every=..., "
            "most_epochs=...)",
        )
    return written


def recorded(task: str) -> dict[str, Any] | None:
    """Return the recorded reference runs of a suite's task: samples to the target by batch size."""
    path = Path(__file__).parent / "suite" / "reference.json"
    if not path.exists():
        return None
    reference: dict[str, Any] | None = json.loads(path.read_text("utf-8")).get(task)
    return reference


def recorded_epochs(reference: dict[str, Any], task: Task) -> dict[int, list[float]]:
    """Convert the reference runs of `recorded` to epochs to the target, by batch size."""
    return {
        int(batch): [count / task.train_samples for count in samples]
        for batch, samples in reference["samples"].items()
    }


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
