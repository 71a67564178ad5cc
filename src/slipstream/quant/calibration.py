"""Which ranges the inputs of a model's layers have, found by running it on batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format
from slipstream.quant.grid import Grid, grid_of_range
from slipstream.quant.observers import Observer, Percentile
from slipstream.tables import Column, Table

_COLUMNS = (
    Column("module"),
    *(Column(name, align="right") for name in ("low", "high", "batches")),
)


@dataclass(frozen=True)
class Range:
    """What was seen at one place.

    Attributes:
        low, high: float32 tensors, of the observer's shape; the range to cover.
        batches: how many tensors it is from.
    """

    low: Any
    high: Any
    batches: int

    def grid(self, format: Format, *, symmetric: bool = False) -> Grid:
        """The grid that covers it: see `grid_of_range`."""
        return grid_of_range(self.low, self.high, format, symmetric=symmetric)


class Calibration(Mapping[str, Range]):
    """Ranges by module name: of the module's first input, or of its output as ``name:output``.

    Modules that never ran are in `missing`.
    """

    def __init__(self, ranges: Mapping[str, Range], missing: Iterable[str] = ()) -> None:
        self._ranges = dict(ranges)
        self.missing = tuple(missing)

    def __getitem__(self, name: str) -> Range:
        return self._ranges[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def table(self) -> Table:
        """For people: one row a place."""
        rows = [
            (name, f"{float(one.low.min()):.4g}", f"{float(one.high.max()):.4g}", str(one.batches))
            for name, one in self.items()
        ]
        return Table(_COLUMNS, rows, title="Calibrated ranges")


def has_weight(name: str, module: Any) -> bool:
    """Whether a module is one of those with a matrix of weights: linear or convolution."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def called(model: Any, batch: Any) -> Any:
    """``model(batch)``, ``model(*batch)`` of a tuple or list, ``model(**batch)`` of a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    run: Callable[[Any], object] | None = None,
    modules: Callable[[str, Any], bool] = has_weight,
    observer: Callable[[], Observer] = Percentile,
    outputs: bool = False,
) -> Calibration:
    """Run `model` on `batches` without gradients and in eval mode; the ranges its modules saw.

    The model is left in the mode it was in, without hooks.

    Args:
        batches: each is given to `run`; default: see `called`.
        modules: of which modules, by qualified name and module.
        observer: makes an observer per place.
        outputs: observe what modules return, too.

    Raises:
        InvalidArgumentError: no batch, no such module, or a NaN, infinity or empty tensor reaches
            one of them; names the module.
    """
    watched = [(name, one) for name, one in model.named_modules() if modules(name, one)]
    if not watched:
        raise InvalidArgumentError("modules", "none of the model's modules is chosen")
    observers: dict[str, Observer] = {}
    counts: dict[str, int] = {}

    def note(place: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        try:
            observers.setdefault(place, observer()).observe(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                "batches", f"what reaches the module {place} {str(error.what).partition(' ')[2]}",
                remedy=error.remedy,
            ) from error  # fmt: skip
        counts[place] = counts.get(place, 0) + 1

    hooks = []
    for name, one in watched:
        # What the loop's variable holds later is another name.
        hooks.append(one.register_forward_pre_hook(
            lambda module, args, name=name: note(name, args[0] if args else None)
        ))  # fmt: skip
        if outputs:
            hooks.append(one.register_forward_hook(
                lambda module, args, output, name=name: note(f"{name}:output", output)
            ))  # fmt: skip
    modes = {one: one.training for one in model.modules()}
    ran = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                if run is not None:
                    run(batch)
                else:
                    called(model, batch)
                ran += 1
    finally:
        for hook in hooks:
            hook.remove()
        for one, mode in modes.items():
            one.training = mode
    if not ran:
        raise InvalidArgumentError("batches", "there is none", remedy="give at least one batch")
    ranges = {name: Range(*one.range(), counts[name]) for name, one in observers.items()}
    return Calibration(ranges, [name for name, _ in watched if name not in observers])
