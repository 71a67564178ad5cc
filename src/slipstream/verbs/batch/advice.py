"""Which batch to take, in a table and in words."""

from __future__ import annotations

from slipstream.errors import MeasurementError
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration
from slipstream.verbs.batch.model import BatchModel

# Sizes that are shown, in batches as they are.
_TIMES = (0.5, 1, 2, 4, 8)
# What is worth a word of throughput.
_GAIN = 1.03


def batch_table(
    model: BatchModel, throughput: float | None = None, wanted: int | None = None
) -> Table:
    """One row a size: those measured or tried, some between, and the one to take.

    Args:
        throughput: samples per second that were asked for.
        wanted: the fewest samples that make so many; None where no batch does.
    """
    measured = {one.samples for one in model.measured}
    tried = {one.samples for one in model.tried if one.ran}
    most, best = model.max_batch(), model.best()
    whole = [round(model.samples * f / model.quantum) * model.quantum for f in _TIMES]
    shown = {size for size in whole if 0 < size <= most} if model.why_not is None else set()
    shown |= {size for size in (best, wanted or 0, model.largest_tried or 0) if size}
    if model.why_not is not None:
        shown &= measured
    marks = {"as it is": model.samples, "take this": best, "largest": model.largest_tried}

    def origin(size: int) -> str:
        return "measured" if size in measured else "tried" if size in tried else "predicted"

    fields: tuple[Field[int], ...] = (
        Field.number("samples", str),
        Field.number("step", lambda size: format_duration(model.time(size).estimate)),
        Field.number("90 % interval", lambda size: _reach(model, size)),
        Field.number("samples/s", lambda size: f"{model.throughput(size).estimate:.4g}"),
        Field.number("tensors", lambda size: _tensors(model, size)),
        Field.number("process", lambda size: format_bytes(model.process(size).estimate)),
        Field.of("from", origin),
        Field.of("", lambda size: ", ".join(word for word, one in marks.items() if one == size)),
    )
    clock = "CPU time, one thread" if model.clock == "cpu" else "wall time"
    notes = [*_advice(model, best, most), *_wanted(model, throughput, wanted, most)]
    return Table.of(sorted(shown | measured), fields, f"{model.workload}, {clock}", notes)


def _reach(model: BatchModel, size: int) -> str:
    took = model.time(size)
    return f"[{format_duration(took.low)}, {format_duration(took.high)}]"


def _tensors(model: BatchModel, size: int) -> str:
    try:
        return format_bytes(model.memory(size).estimate)
    except MeasurementError:
        return "-"


def _advice(model: BatchModel, best: int, most: int) -> list[str]:
    """In words: which batch, why, where the knee is, and what a larger one would bring."""
    lines = []
    if not best:
        return [f"no batch fits into {format_bytes(model.limit_bytes)}"]
    if model.why_not is not None:
        lines.append(f"times of other sizes are not predicted: {model.why_not}")
    gain = model.throughput(best).estimate / model.throughput(_measured(model)).estimate
    if best == model.samples or abs(gain - 1) < _GAIN - 1:
        lines.append(f"{_measured(model)} samples are as fast a batch as any that fits")
    elif gain > 1:
        lines.append(
            f"take {best}: {gain:.2f} times as many samples per second as {_measured(model)}"
        )
    else:
        lines.append(f"take {best}: as fast as {_measured(model)}, in less memory")
    if model.why_not is None:
        end = model.throughput(most).estimate / model.throughput(best).estimate
        if end < 1 - (_GAIN - 1):
            lines.append(f"beyond it batches grow slower per sample: {1 / end:.2f} times at {most}")
        elif most > best:
            lines.append(
                f"no gain worth its memory beyond {best}: the largest batch that fits, {most}, "
                f"makes {100 * (end - 1):.1f} % more samples per second"
            )
        if model.knee is not None:
            lines.append(
                f"there is a knee at {model.knee} samples: each one beyond it takes "
                f"{model.dearer_beyond_knee:.2f} times as long as one before"
            )
    return [*lines, _largest(model, most)]


def _largest(model: BatchModel, most: int) -> str:
    """How many samples fit, and how that is known."""
    sentence = f"at most {most} samples fit into {format_bytes(model.limit_bytes)}"
    if model.largest_tried is not None:
        above = [one for one in model.tried if not one.ran and one.samples > most]
        ended = "there was no time for larger ones"
        if above:
            least = min(above, key=lambda one: one.samples)
            # A size needs more in one process than in another.
            how = "ran, and would not always" if least.process_bytes else "did not fit"
            ended = f"{least.samples} {how}"
        return f"{sentence}: tried; {ended}"
    seen = max(one.samples for one in model.measured)
    trust = f" (measured up to {seen})" if most > 2 * seen else ""
    failed = f"; {min(model.too_large)} did not fit" if model.too_large else ""
    return f"{sentence}: predicted{trust}{failed}"


def _measured(model: BatchModel) -> int:
    """The batch as it is, or what was measured nearest to it."""
    return min((one.samples for one in model.measured), key=lambda size: abs(size - model.samples))


def _wanted(
    model: BatchModel, throughput: float | None, wanted: int | None, most: int
) -> list[str]:
    if throughput is None:
        return []
    if model.why_not is not None:
        return [f"for the same reason nothing is told about {throughput:g} samples/s"]
    if wanted is None:
        return [
            f"{throughput:g} samples/s: no batch is that fast; the most is "
            f"{model.max_throughput:.4g}"
        ]
    fits = "" if wanted <= most else f", which does not fit: at most {most} do"
    return [f"{throughput:g} samples/s take a batch of {wanted}{fits}"]
