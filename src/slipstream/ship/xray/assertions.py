"""Assertions on every compared layer, for users and continuous integration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.runtimes.taps import TappedTensor

Assertion = Callable[..., Any]
_assertions: dict[str, Assertion] = {}


@dataclass(frozen=True)
class LayerView:
    """Measurements of a layer, passed to assertions.

    Attributes:
        name, kind: of the layer.
        nonfinite: number of NaN and infinite values over all frames.
        drift, rmse, bias: compared with the reference.
        low, high: minimum and maximum over all frames.
    """

    name: str
    kind: str
    nonfinite: int
    drift: float
    rmse: float
    bias: float
    low: float
    high: float


@dataclass(frozen=True)
class Failure:
    """An assertion that failed for a layer."""

    assertion: str
    layer: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.assertion}: {self.layer}" + (f": {self.message}" if self.message else "")


def assertion(function: Assertion) -> Assertion:
    """Register a function that takes a `LayerView`; it runs for every compared layer.

        @xray.assertion
        def no_drift(layer):
            assert layer.drift < 0.05

    It fails if it returns False or raises `AssertionError`; `slipstream xray compare` then exits
    with status 1.
    """
    _assertions[function.__name__] = function
    return function


@assertion
def finite(layer: LayerView) -> bool:
    """Fail for NaN and infinite values."""
    return not layer.nonfinite


def check(layers: Iterable[tuple[TappedTensor, dict[str, Any]]]) -> Iterator[Failure]:
    """Yield failures of the registered assertions."""
    for layer, values in layers:
        view = LayerView(layer.name, layer.kind, **values)
        for name, function in _assertions.items():
            try:
                if function(view) is False:
                    yield Failure(name, layer.name)
            except AssertionError as error:
                yield Failure(name, layer.name, str(error))
