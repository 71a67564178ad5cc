"""Find the ranges of a model's layer inputs by running it on batches."""

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
    """Range of the values observed at one place.

    Attributes:
        low, high: float32 tensors, of the observer's shape.
        batches: number of tensors observed.
    """

    low: Any
    high: Any
    batches: int

    def grid(self, format: Format, *, symmetric: bool = False) -> Grid:
        """Return the grid that covers the range: see `grid_of_range`."""
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
        """Return a table with a row per place."""
        rows = [
            (
                name,
                f"{float(seen.low.min()):.4g}",
                f"{float(seen.high.max()):.4g}",
                str(seen.batches),
            )
            for name, seen in self.items()
        ]
        return Table(_COLUMNS, rows, title="Calibrated ranges")


def has_weight(name: str, module: Any) -> bool:
    """Return whether a module is linear or a convolution."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def call_model(model: Any, batch: Any) -> Any:
    """Return ``model(batch)``, with a tuple, list or mapping unpacked into arguments."""
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
    """Run `model` on `batches` in eval mode without gradients; return the ranges of its modules.

    The model's mode is restored and its hooks are removed.

    Args:
        batches: arguments of `run`, by default of `call_model`.
        modules: selects modules, by qualified name and module.
        observer: creates an observer per place.
        outputs: whether to observe outputs, too.

    Raises:
        InvalidArgumentError: no batch, no such module, or a NaN, infinity or empty tensor reaches
            a module, which the error names.
    """
    watched = [(name, module) for name, module in model.named_modules() if modules(name, module)]
    if not watched:
        raise InvalidArgumentError("modules", "selects none of the model's modules")
    observers: dict[str, Observer] = {}
    counts: dict[str, int] = {}

    def note(place: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        try:
            observers.setdefault(place, observer()).observe(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                "batches", f"the input of module {place} {str(error.what).partition(' ')[2]}",
                remedy=error.remedy,
            ) from error  # fmt: skip
        counts[place] = counts.get(place, 0) + 1

    hooks = []
    for name, module in watched:
        # `name=name` binds the loop variable's current value.
        hooks.append(module.register_forward_pre_hook(
            lambda module, args, name=name: note(name, args[0] if args else None)
        ))  # fmt: skip
        if outputs:
            hooks.append(module.register_forward_hook(
                lambda module, args, output, name=name: note(f"{name}:output", output)
            ))  # fmt: skip
    modes = {module: module.training for module in model.modules()}
    ran = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                if run is not None:
                    run(batch)
                else:
                    call_model(model, batch)
                ran += 1
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if not ran:
        raise InvalidArgumentError("batches", "is empty", remedy="pass at least one batch")
    ranges = {name: Range(*seen.range(), counts[name]) for name, seen in observers.items()}
    return Calibration(ranges, [name for name, _ in watched if name not in observers])
