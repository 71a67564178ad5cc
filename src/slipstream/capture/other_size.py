"""Record the step, untimed, with another number of samples, on which its calls may depend."""

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

# Halving fewer would leave one sample, and sizes of 1 have other layouts and kernels.
_MIN_ROWS_TO_HALVE = 4
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True)
class OtherSize:
    """A step with another number of samples.

    Attributes:
        samples: Number of samples; 0 if unknown.
        of: Number of samples of the recorded step.
        calls: Call of this step for each unit of the recorded step, None for units that are not
            operators; empty if there is a `reason`.
        reason: Why nothing was recorded.
    """

    samples: int
    of: int
    calls: tuple[Call | None, ...] = ()
    reason: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata for the graph, see `Graph.shrunk`."""
        fields: dict[str, Any] = {"samples": self.samples, "of": self.of}
        return {**fields, "reason": self.reason} if self.reason else fields


def record_other_size(built: BuiltWorkload, trace: Sequence[Node]) -> OtherSize:
    """Run one step on half of the batch, or on twice if it has fewer than four rows.

    Half needs less memory than the recorded step. The batch is restored afterwards; changes of the
    model remain. Failures are reported in `OtherSize.reason`, never raised.

    Args:
        trace: The recorded step.
    """
    batch, samples, rows = built.batch, built.samples, built.rows
    if not built.reads_batch or not rows:
        return OtherSize(
            0,
            samples,
            reason="the step hides its batch; "
            "use a function that returns (model, batch, loss, optimizer)",
        )
    if samples % rows:
        return OtherSize(
            0, samples, reason=f"{samples} samples are not a multiple of the batch's {rows} rows"
        )
    other = samples // rows * (rows // 2 if rows >= _MIN_ROWS_TO_HALVE else 2 * rows)
    try:
        built.resize(other)
        with temporary_folder("trace") as folder:
            path = folder / "trace.json"
            with recorded(path):
                built.step()
            units = _units(read_trace(path))
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON_CHARACTERS]
        return OtherSize(other, samples, reason=f"a step of {other} samples fails: {cause}")
    finally:
        built.batch, built.samples = batch, samples
    reason = _difference(_units(trace), units, samples, other)
    calls = () if reason else tuple(node.call for node in units)
    return OtherSize(other, samples, calls, reason)


def _units(trace: Sequence[Node]) -> list[Node]:
    return [trace[i] for i in find_units(trace).nodes]


def _difference(first: Sequence[Node], second: Sequence[Node], samples: int, other: int) -> str:
    """Return why the two sequences of units do not match; empty if they do."""
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if _kind(a) != _kind(b):
            return (
                f"its operators depend on the number of samples: number {number} is {a.name} "
                f"with {samples} and {b.name} with {other}"
            )
    if len(first) != len(second):
        return (
            f"its operators depend on the number of samples: {len(first)} with {samples}, "
            f"{len(second)} with {other}"
        )
    if all(a.call == b.call for a, b in zip(first, second, strict=True)):
        return "the step does the same work for any batch"
    return ""


def _kind(unit: Node) -> str:
    """Return the operator with its overload, or the annotation if it is not an operator."""
    return unit.call.op if unit.call is not None else unit.name
