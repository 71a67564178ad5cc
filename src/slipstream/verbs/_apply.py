"""apply: the real transformation, built and run once before it is believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream import technique
from slipstream.source import AlreadyThereError, NotPlacedError, Source, locate
from slipstream.technique import CodeChange, Technique
from slipstream.verbs._children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.workload import Built, Workload

_TRIAL_STEPS = 5


@dataclass(frozen=True)
class Applied:
    """A workload with techniques on top that was built and ran.

    Attributes:
        workload: the recipe with the techniques; ``ss.profile`` and ``ss.prove`` take it.
        before, after: the loss of each of the first steps, unmodified and transformed, from the
            same seed; None where the step returns no number.
        code: edits of the user's source that do the same, where there are such.
        source: the user's file with all of these edits; None unless there is one for every
            technique, so that it is never half of what ran.
        not_run: why the transformed workload was not run, in words; then `after` knows no loss.
    """

    workload: Workload
    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    code: tuple[CodeChange, ...]
    source: Source | None = None
    not_run: str | None = None

    @property
    def diff(self) -> str:
        """All edits as one unified diff; where they do not make a whole, those there are."""
        if self.source is not None:
            return self.source.diff()
        return "".join(change.diff for change in self.code)

    @property
    def difference(self) -> float | None:
        """Relative difference of the last loss, or None without one."""
        if not self.before or not self.after:
            return None
        old, new = self.before[-1], self.after[-1]
        if old is None or new is None or not old:
            return None
        return (new - old) / abs(old)

    @property
    def finite(self) -> bool:
        """Whether no loss of the transformed step is infinite or not a number."""
        return all(value is None or math.isfinite(value) for value in self.after)


def apply(
    workload: Workload | str,
    techniques: str | Technique,
    *,
    steps: int = _TRIAL_STEPS,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    say: Callable[[str], None] = lambda line: None,
) -> Applied:
    """Put `techniques` on `workload`, and run both for a few steps to see that it works.

    Nothing of the user's is changed: the result is a recipe.

    Raises:
        WorkloadError: the workload fails, with or without the technique; the message says which.
        UsageError: a name or setting that is not in the grammar.
    """
    if isinstance(workload, str):
        workload = Workload.parse(workload)
    chosen = technique.parse(techniques) if isinstance(techniques, str) else (techniques,)
    transformed = workload.with_technique(*chosen)
    # Before anything runs: a file that is edited meanwhile is not written.
    code = tuple(change for one in chosen if (change := one.code(workload)) is not None)
    source = _edited(workload, code) if len(code) == len(chosen) else None
    not_run = technique.not_in_script(chosen, workload)
    losses: list[tuple[float | None, ...]] = []
    for recipe, label in ((workload, "as it is"), (transformed, "transformed")):
        if recipe is transformed and not_run is not None:
            losses.append((None,) * steps)
            continue
        say(f"running {steps} steps {label}")
        losses.append(trial_losses(recipe, steps, threads=threads, timeout_s=timeout_s))
    return Applied(transformed, losses[0], losses[1], code, source, not_run)


def _edited(workload: Workload, code: Sequence[CodeChange]) -> Source | None:
    """The workload's file with every change, one after the other; None where one has no place."""
    source = Source.read(workload.path)
    for change in code:
        if change.edit is None:
            return None
        try:
            source = change.edit(locate(source, workload.function)).settled()
        except AlreadyThereError:
            continue
        except NotPlacedError:
            return None
    return source


def trial_losses(
    workload: Workload,
    steps: int,
    *,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[float | None, ...]:
    """What the first `steps` steps return, as numbers; None where they return something else."""
    if workload.live is not None:
        built = workload.build()
        return tuple(_number(built.step()) for _ in range(steps))
    found = call_in_child(
        workload, "_apply:losses_in_child", threads=threads, timeout_s=timeout_s, steps=steps
    )
    return tuple(None if value is None else float(value) for value in found)


def losses_in_child(workload: dict[str, Any], keep_in: str, steps: int) -> Any:
    """The value of each step. Runs in the child; infinities cross the pipe as text."""

    def program(built: Built) -> Generator[None, Any, list[str | None]]:
        values = []
        for _ in range(steps):
            number = _number((yield))
            values.append(None if number is None else repr(number))
        return values

    return run_program(workload, keep_in, program)


def _number(value: Any) -> float | None:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        # A script's loss still has its graph.
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None
