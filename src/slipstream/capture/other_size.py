"""The same step once more, untimed, on another number of samples: how its calls depend on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.capture.trace import Node, read_trace, recorded
from slipstream.capture.units import find_units
from slipstream.files import temporary_folder
from slipstream.graph import Call

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

# Half of fewer would leave one sample, and an extent of one is laid out and computed differently.
_FEWEST_TO_HALVE = 4
_LONGEST_REASON = 200


@dataclass(frozen=True)
class OtherSize:
    """A step on another number of samples.

    Attributes:
        samples: how many; 0 when it could not be told.
        of: how many the recorded step has.
        calls: by unit of the recorded step: the same call here, None for a unit that is no
            operator; empty with a `reason`.
        reason: why nothing was recorded, in words.
    """

    samples: int
    of: int
    calls: tuple[Call | None, ...] = ()
    reason: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        """What the graph keeps of it: see `Graph.shrunk`."""
        fields: dict[str, Any] = {"samples": self.samples, "of": self.of}
        return {**fields, "reason": self.reason} if self.reason else fields


def record_other_size(built: BuiltWorkload, trace: Sequence[Node]) -> OtherSize:
    """Run one step on half of the batch (twice, when it has fewer than four rows).

    Half needs less memory than the recorded step did. The batch is as before afterwards; what the
    step did to the model stays done. Whatever goes wrong is told by `reason`, never raised.

    Args:
        trace: the recorded step.
    """
    batch, samples, rows = built.batch, built.samples, built.rows
    if not built.reads_batch or not rows:
        return OtherSize(
            0,
            samples,
            reason="the step hides its batch; "
            "name a function that returns (model, batch, loss, optimizer)",
        )
    if samples % rows:
        return OtherSize(
            0, samples, reason=f"{samples} samples are no multiple of the batch's {rows} rows"
        )
    other = samples // rows * (rows // 2 if rows >= _FEWEST_TO_HALVE else 2 * rows)
    try:
        built.resize(other)
        with temporary_folder("trace") as folder:
            path = folder / "trace.json"
            with recorded(path):
                built.step()
            there = _units(read_trace(path))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        return OtherSize(other, samples, reason=f"a step of {other} samples fails: {why}")
    finally:
        built.batch, built.samples = batch, samples
    reason = _difference(_units(trace), there, samples, other)
    calls = () if reason else tuple(node.call for node in there)
    return OtherSize(other, samples, calls, reason)


def _units(trace: Sequence[Node]) -> list[Node]:
    return [trace[i] for i in find_units(trace).nodes]


def _difference(ours: Sequence[Node], theirs: Sequence[Node], samples: int, other: int) -> str:
    """Why the two sequences of units cannot be laid side by side; empty when they can."""
    for number, (one, another) in enumerate(zip(ours, theirs, strict=False)):
        if _kind(one) != _kind(another):
            return (
                f"its operators depend on the number of samples: number {number} is {one.name} "
                f"with {samples} and {another.name} with {other}"
            )
    if len(ours) != len(theirs):
        return (
            f"its operators depend on the number of samples: {len(ours)} with {samples}, "
            f"{len(theirs)} with {other}"
        )
    if all(one.call == another.call for one, another in zip(ours, theirs, strict=True)):
        return "the step does the same work whatever its batch"
    return ""


def _kind(unit: Node) -> str:
    """The operator with its overload; the annotation of what is none."""
    return unit.call.op if unit.call is not None else unit.name
