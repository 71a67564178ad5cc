"""Advise on the batch size, in a table and in sentences."""

from __future__ import annotations

from slipstream.errors import MeasurementError
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration
from slipstream.verbs.batch.model import BatchModel

# Sizes to show, as multiples of the current batch.
_SHOWN_FACTORS = (0.5, 1, 2, 4, 8)
# Minimum ratio of throughputs that is worth mentioning.
_MIN_GAIN = 1.03


def batch_table(
    model: BatchModel, throughput: float | None = None, needed: int | None = None
) -> Table:
    """Return a table of measured, tried and intermediate sizes and the recommended one.

    Args:
        throughput: requested samples per second.
        wanted: the smallest batch with this throughput; None if no batch has it.
    """
    measured = {sample.samples for sample in model.measured}
    tried = {try_.samples for try_ in model.tried if try_.ran}
    largest, best = model.max_batch(), model.best()
    whole = [round(model.samples * f / model.quantum) * model.quantum for f in _SHOWN_FACTORS]
    shown = {size for size in whole if 0 < size <= largest} if model.why_not is None else set()
    shown |= {size for size in (best, needed or 0, model.largest_tried or 0) if size}
    if model.why_not is not None:
        shown &= measured
    marks = {"current": model.samples, "recommended": best, "largest": model.largest_tried}

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
        Field.of("", lambda size: ", ".join(word for word, n in marks.items() if n == size)),
    )
    clock = "CPU time, one thread" if model.clock == "cpu" else "wall time"
    notes = [*_advice(model, best, largest), *_throughput_note(model, throughput, needed, largest)]
    return Table.of(sorted(shown | measured), fields, f"{model.workload}, {clock}", notes)


def _reach(model: BatchModel, size: int) -> str:
    step_time = model.time(size)
    return f"[{format_duration(step_time.low)}, {format_duration(step_time.high)}]"


def _tensors(model: BatchModel, size: int) -> str:
    try:
        return format_bytes(model.memory(size).estimate)
    except MeasurementError:
        return "-"


def _advice(model: BatchModel, best: int, largest: int) -> list[str]:
    """Describe the best batch, the reason, the knee and the effect of a larger batch."""
    lines = []
    if not best:
        return [f"no batch fits into {format_bytes(model.limit_bytes)}"]
    if model.why_not is not None:
        lines.append(f"times of other sizes are not predicted: {model.why_not}")
    gain = model.throughput(best).estimate / model.throughput(_measured(model)).estimate
    if best == model.samples or abs(gain - 1) < _MIN_GAIN - 1:
        lines.append(f"no batch that fits is faster than {_measured(model)} samples")
    elif gain > 1:
        lines.append(
            f"take {best}: {gain:.2f} times as many samples per second as {_measured(model)}"
        )
    else:
        lines.append(f"take {best}: as fast as {_measured(model)}, in less memory")
    if model.why_not is None:
        end = model.throughput(largest).estimate / model.throughput(best).estimate
        if end < 1 - (_MIN_GAIN - 1):
            lines.append(f"larger batches are slower per sample: {1 / end:.2f} times at {largest}")
        elif largest > best:
            lines.append(
                f"beyond {best} the gain is not worth the memory: the largest batch that fits, "
                f"{largest}, has {100 * (end - 1):.1f} % more throughput"
            )
        if model.knee is not None:
            lines.append(
                f"there is a knee at {model.knee} samples: each sample beyond it takes "
                f"{model.dearer_beyond_knee:.2f} times as long as one below"
            )
    return [*lines, _largest(model, largest)]


def _largest(model: BatchModel, largest: int) -> str:
    sentence = f"at most {largest} samples fit into {format_bytes(model.limit_bytes)}"
    if model.largest_tried is not None:
        above = [try_ for try_ in model.tried if not try_.ran and try_.samples > largest]
        ended = "there was no time to try larger ones"
        if above:
            smallest = min(above, key=lambda try_: try_.samples)
            # A size needs more memory in some processes than in others.
            how = "ran, but may not fit again" if smallest.process_bytes else "did not fit"
            ended = f"{smallest.samples} {how}"
        return f"{sentence}: tried; {ended}"
    seen = max(sample.samples for sample in model.measured)
    trust = f" (measured up to {seen})" if largest > 2 * seen else ""
    failed = f"; {min(model.too_large)} did not fit" if model.too_large else ""
    return f"{sentence}: predicted{trust}{failed}"


def _measured(model: BatchModel) -> int:
    sizes = (sample.samples for sample in model.measured)
    return min(sizes, key=lambda size: abs(size - model.samples))


def _throughput_note(
    model: BatchModel, throughput: float | None, needed: int | None, largest: int
) -> list[str]:
    if throughput is None:
        return []
    if model.why_not is not None:
        return [f"{throughput:g} samples/s cannot be predicted, for the same reason"]
    if needed is None:
        return [
            f"{throughput:g} samples/s: no batch reaches it; the maximum is "
            f"{model.max_throughput:.4g}"
        ]
    fits = "" if needed <= largest else f", which does not fit: the largest that fits is {largest}"
    return [f"{throughput:g} samples/s need a batch of {needed}{fits}"]
