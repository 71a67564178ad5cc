"""`BuiltWorkload`: the live model, batch, step and metric that a workload's recipe builds."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slipstream.errors import WorkloadError
from slipstream.units import with_article
from slipstream.workload.batch import TokenBatch, find_tokens, resized
from slipstream.workload.lines import UserLines

HIDDEN_BATCH = (
    "the step hides its batch; name a function that returns (model, batch, loss, optimizer)"
)
FIELDS = ("model", "batch", "loss", "optimizer", "step", "metric", "samples")
_PARTS = "return (model, batch, loss, optimizer)"
_IN_ORDER = f"{_PARTS} in this order"


def _no_step() -> None:
    """Placeholder for a step that is built later from the other fields."""


def _nothing() -> None:
    """Do nothing: without communication, nothing outlasts a step."""


class Staged(Protocol):
    """Traits of a technique that building reads (see `slipstream.technique.Traits`)."""

    @property
    def stage(self) -> int:
        """Position in a combination."""

    @property
    def edits_script(self) -> bool:
        """Whether it changes the loop of a plain script."""


class Applicable(Protocol):
    """Attributes of a technique that building uses (see `slipstream.technique.Technique`)."""

    @property
    def name(self) -> str:
        """The field's term for it."""

    @property
    def traits(self) -> Staged:
        """Declared properties."""

    def apply(self, built: BuiltWorkload) -> None:
        """Transform what was built, in place."""

    def prepare(self) -> None:
        """Change what the user's code is about to call."""

    def edit_script(self, script: Path, content: bytes, lines: range) -> bytes:
        """Return a plain script with the technique's change."""

    def warmup_steps(self) -> int:
        """Return the number of first steps that run differently from all later ones."""


_AnyTechnique = TypeVar("_AnyTechnique", bound=Applicable)


def sort_by_stage(techniques: Iterable[_AnyTechnique]) -> tuple[_AnyTechnique, ...]:
    """Return the techniques in the order they are named and applied: by stage, then by name."""
    return tuple(sorted(techniques, key=lambda technique: (technique.traits.stage, technique.name)))


def seed_all(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def prepare(techniques: Iterable[Applicable]) -> None:
    """Let `techniques` prepare this process, in their order, before the user's code runs."""
    for technique in sort_by_stage(techniques):
        technique.prepare()


@dataclass
class BuiltWorkload:
    """Live objects of one workload, in the process that built them.

    With an optimizer one step is forward, loss, backward and optimizer step; without, a forward
    pass (with the loss, if any) without gradients. The model gets the batch as PyTorch users write
    it: ``(inputs, targets)`` with a loss: ``loss(model(inputs), targets)``; a dictionary:
    ``model(**batch)``, whose output is or contains the loss; anything else: ``model(batch)``. A
    loss of one argument gets only the output: ``lambda out: out.loss``.

    Attributes:
        model: the ``nn.Module``, or None if the step is opaque.
        step: runs one step and returns its loss or output; built from the other fields by default.
        metric: quality after the steps so far, or None; lower is better.
        samples: samples per step, by default the batch's first dimension; 0 if unknown.
        samples_before: the same before any technique changed it.
        name: name of the workload, for messages.
        reads_batch: whether `step` reads `batch` from here, so that it can be replaced.
        from_parts: whether `step` was built from the other fields, so that nothing else runs.
        other_optimizers: those of a plain script that also step within a step.
        from_script: whether a plain script runs the steps, so that replacing `step` has no effect.
        stepped_at: the line of a plain script on which its optimizer stepped, ``train.py:34``.
        other_loops: lines on which an optimizer steps in other loops of the script.
        evaluations: whether a step is one evaluation of the optimizer's closure.
        lines: the user's lines that created each object, and those that run.
        rank, ranks: index of this process, and number of processes that run the step together;
            they join torch's default process group before the first technique of the stage
            "distribution" is applied, and have the parameters of rank 0.
        planned_steps: maximum number of optimizer steps of the training, for techniques that change
            during it; 0 if a step is run in isolation.
        settle: waits until nothing of the steps so far is in progress; a technique that
            communicates beyond the end of a step replaces it.
    """

    model: Any
    batch: Any = None
    loss: Callable[..., Any] | None = None
    optimizer: Any = None
    step: Callable[[], Any] = field(default=_no_step)
    metric: Callable[[], float] | None = None
    samples: int = 0
    samples_before: int = 0
    name: str = ""
    reads_batch: bool = False
    from_parts: bool = False
    from_script: bool = False
    stepped_at: str = ""
    other_loops: tuple[str, ...] = ()
    evaluations: bool = False
    other_optimizers: tuple[Any, ...] = ()
    lines: UserLines = field(default_factory=UserLines)
    rank: int = 0
    ranks: int = 1
    planned_steps: int = 0
    settle: Callable[[], object] = _nothing

    @property
    def training(self) -> bool:
        """Whether a step updates parameters."""
        return self.optimizer is not None

    @property
    def own_step(self) -> bool:
        """Whether `step` is the user's function; False for a plain script."""
        return self.step is not _no_step and not self.from_parts

    @property
    def rows(self) -> int:
        """Length of the batch's first dimension, which holds its samples; 0 if unknown."""
        return count_samples(self.batch)

    @property
    def tokens(self) -> TokenBatch:
        """Labels and mask of padding, if `batch` has token sequences."""
        return find_tokens(self.batch)

    def need_model(self, technique: str, remedy: str = _PARTS) -> None:
        """Check that `model` is available to `technique`, which changes it.

        Raises:
            WorkloadError: the step hides it.
        """
        if self.model is None:
            raise WorkloadError(
                f"{technique} needs the model, and this workload's step hides it", remedy=remedy
            )

    def resize(self, samples: int) -> None:
        """Replace the batch by one that makes a step of `samples`, truncated or repeated.

        Raises:
            WorkloadError: the step hides its batch, or `samples` need a fractional number of rows.
        """
        rows = self.rows
        if not self.reads_batch or not rows or not self.samples:
            raise WorkloadError(
                HIDDEN_BATCH,
                remedy="or set the batch size where the data is loaded, and record the step again",
            )
        target_rows, remainder = divmod(samples * rows, self.samples)
        if remainder or target_rows < 1:
            raise WorkloadError(
                f"{samples} samples are not a whole batch: {rows} rows make {self.samples} samples"
            )
        self.batch = resized(self.batch, rows, target_rows)
        self.samples = samples


def build_from(
    result: Any, techniques: Iterable[Applicable], seed: int, name: str, where: str | None = None
) -> BuiltWorkload:
    """Build a `BuiltWorkload` from a user's result, and apply `techniques` in stage order.

    Args:
        result: what the user's function returned: a `BuiltWorkload`, a mapping with its field
            names, ``(model, batch[, loss[, optimizer]])``, an ``nn.Module`` subclass with
            ``training_step`` (Lightning style) instead of model and loss, or a zero-argument
            callable that runs one step.
        where: the function's location, for errors.

    Raises:
        WorkloadError: the result is none of these.
    """
    import torch

    built = _normalise(result, where)
    built.name = name
    if built.model is not None and not isinstance(built.model, torch.nn.Module):
        raise WorkloadError(
            f"the model is {with_article(type(built.model).__name__)}, not a torch.nn.Module",
            where=where,
            remedy=_inner_module(built.model) or _PARTS,
        )
    if not built.samples:
        built.samples = count_samples(built.batch)
    built.samples_before = built.samples
    seed_all(seed)
    for technique in sort_by_stage(techniques):
        technique.apply(built)
    return built


def _normalise(result: Any, where: str | None) -> BuiltWorkload:
    import torch

    if isinstance(result, BuiltWorkload):
        return _with_step(result, where) if result.step is _no_step else result
    if isinstance(result, Mapping):
        unknown = set(result) - set(FIELDS)
        if unknown or ("model" not in result and "step" not in result):
            raise WorkloadError(
                f"the function returned a dictionary with the keys {sorted(map(str, result))}",
                where=where,
                remedy=f"use the keys {', '.join(FIELDS)}; only model or step is required",
            )
        fields = {key: value for key, value in result.items() if value is not None}
        built = BuiltWorkload(**{"model": None, **fields})
        return _with_step(built, where) if built.step is _no_step else built
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.nn.Module):
        if 2 <= len(result) <= 4:
            return _with_step(BuiltWorkload(*result), where)
    elif callable(result) and not isinstance(result, (type, torch.nn.Module)):
        return BuiltWorkload(None, step=result)
    shown = type(result).__name__
    remedy = (
        "return (model, batch, loss, optimizer), (model, batch) for inference, "
        "or a function that runs one step"
    )
    if isinstance(result, torch.nn.Module):
        shown += " alone, without a batch to feed it"
        remedy = "return (model, batch) for inference, (model, batch, loss, optimizer) for training"
        if hasattr(result, "training_step"):
            remedy = "return (model, batch): its training_step and configure_optimizers do the rest"
    elif inspect.isgenerator(result):
        remedy = "return them instead of yielding them: (model, batch, loss, optimizer)"
    if isinstance(result, (tuple, list)):
        shown += " of " + (", ".join(type(part).__name__ for part in result) or "nothing")
        if 2 <= len(result) <= 4 and (inner := _inner_module(result[0])) is not None:
            remedy = inner
    raise WorkloadError(
        f"the function returned {'nothing' if result is None else with_article(shown)}",
        where=where,
        remedy=remedy,
    )


def _inner_module(wrapper: Any) -> str | None:
    """Return the remedy for an object that is not a module but holds one; None if it holds none."""
    import torch

    for name, value in vars(wrapper).items() if hasattr(wrapper, "__dict__") else ():
        if isinstance(value, torch.nn.Module):
            return (
                f"return the module inside: its '{name}' is {with_article(type(value).__name__)}; "
                "or a function that runs one step"
            )
    return None


def _with_step(built: BuiltWorkload, where: str | None) -> BuiltWorkload:
    """Set `step` of `built` from its other fields.

    The step reads them when it runs, so that a technique may replace the batch or the model.
    """
    import torch

    if built.model is None:
        raise WorkloadError(
            "the function returned neither a model nor a step",
            where=where,
            remedy="return (model, batch, loss, optimizer), or a function that runs one step",
        )
    if isinstance(built.batch, torch.optim.Optimizer) or not (
        built.loss is None or callable(built.loss)
    ):
        batch, loss = (with_article(type(part).__name__) for part in (built.batch, built.loss))
        kinds = f"batch is {batch}, loss is {loss}"
        raise WorkloadError(
            f"the function returned its parts in another order: {kinds}",
            where=where,
            remedy=_IN_ORDER + "; without a loss, pass None for it",
        )
    _check_parts(built, where)
    if built.loss is not None and not _accepts(built.loss, 2) and _accepts(built.loss, 1):
        whole = built.model is not None and _accepts(built.model, 2)
        built.loss = _OfOutput(built.loss, whole)
    if built.optimizer is None and hasattr(built.model, "configure_optimizers"):
        built.optimizer = _first_optimizer(built.model.configure_optimizers())
    optimizer = built.optimizer
    if optimizer is None:

        def infer() -> Any:
            with torch.no_grad():
                return _forward(built.model, built.batch, built.loss)

        built.step, built.reads_batch, built.from_parts = infer, True, True
        return built
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "zero_grad"):
        raise WorkloadError(
            f"the value returned as the optimizer is {with_article(type(optimizer).__name__)}",
            where=where,
            remedy=_IN_ORDER,
        )

    def train() -> Any:
        built.optimizer.zero_grad()
        loss = training_loss(built, where)
        loss.backward()
        built.optimizer.step()
        return loss.detach()

    built.step, built.reads_batch, built.from_parts = train, True, True
    return built


def _check_parts(built: BuiltWorkload, where: str | None) -> None:
    """Refuse a class instead of an object, and a loader instead of a batch."""
    import torch

    for what in ("loss", "optimizer"):
        part = getattr(built, what)
        if isinstance(part, type) and issubclass(part, (torch.nn.Module, torch.optim.Optimizer)):
            arguments = "model.parameters(), ..." if what == "optimizer" else ""
            raise WorkloadError(
                f"the {what} is the class {part.__name__}, not an object of it",
                where=where,
                remedy=f"call it: {part.__name__}({arguments})",
            )
    if isinstance(built.batch, torch.utils.data.DataLoader):
        raise WorkloadError(
            "the value returned as the batch is a DataLoader",
            where=where,
            remedy="return one batch of it: next(iter(loader)); or name a plain script, "
            "whose loading is part of its step",
        )


@dataclass(frozen=True)
class _OfOutput:
    """A loss of one argument, as in Hugging Face style loops: called with only the output.

    Attributes:
        whole: whether the model also gets the second part of a pair, since it computes the loss.
    """

    loss: Callable[..., Any]
    whole: bool

    def __call__(self, output: Any, *_: Any) -> Any:
        return self.loss(output)


def _accepts(function: Any, count: int) -> bool:
    """Whether `function` may be called with `count` positional arguments; True if unknown."""
    import torch

    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


@functools.cache
def _takes_index(kind: Any) -> bool:
    """Whether ``training_step`` of this class takes the optional batch index."""
    return _accepts(kind.training_step, 3)


def training_loss(built: BuiltWorkload, where: str | None = None) -> Any:
    """Return the scalar loss of one forward pass over the batch, for ``backward``.

    Raises:
        WorkloadError: the model does not return a scalar.
    """
    return _loss_of(model_output(built), where)


def model_output(built: BuiltWorkload) -> Any:
    """Return the loss of one forward pass; for scripts that compute the loss, the output."""
    if built.loss is None and hasattr(built.model, "training_step"):
        # mypy does not know that every class can be hashed.
        index = (0,) if _takes_index(type(built.model)) else ()  # type: ignore[arg-type]
        return built.model.training_step(built.batch, *index)
    return _forward(built.model, built.batch, built.loss)


def _first_optimizer(configured: Any) -> Any:
    """Return the first optimizer that Lightning's ``configure_optimizers`` returned, or None."""
    if isinstance(configured, Mapping):
        return configured.get("optimizer")
    if isinstance(configured, (tuple, list)):
        return _first_optimizer(configured[0]) if configured else None
    return configured


def _forward(model: Any, batch: Any, loss: Callable[..., Any] | None) -> Any:
    """Return the model's output for `batch`, or the loss if there is a loss function."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        return output if loss is None else loss(output, batch)
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if loss is not None and pair and not (isinstance(loss, _OfOutput) and loss.whole):
        inputs, targets = batch
        return loss(_call(model, inputs), targets)
    output = _call(model, batch)
    return output if loss is None else loss(output)


def _call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model() if inputs is None else model(inputs)


def _loss_of(output: Any, where: str | None) -> Any:
    """Return the scalar to differentiate: the output, its ``loss``, or its ``["loss"]``."""
    import torch

    value = output
    if isinstance(output, Mapping):
        value = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        value = getattr(output, "loss", None)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        remedy = "return (model, (inputs, targets), loss, optimizer)"
        shape: object = type(output).__name__
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            remedy += "; a loss that gives one number per sample needs .mean()"
        raise WorkloadError(
            f"one training step needs a scalar loss; the model returned {shape}",
            where=where,
            remedy=remedy,
        )
    return value


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`; 0 without a tensor."""
    import torch

    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return next(filter(None, map(count_samples, batch)), 0)
    return 0
