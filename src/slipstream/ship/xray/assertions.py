"""What a user, or continuous integration, wants to hold of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.runtimes.taps import Layer

Assertion = Callable[..., Any]
_assertions: dict[str, Assertion] = {}


@dataclass(frozen=True)
class LayerView:
    """What an assertion is given.

    Attributes:
        name, kind: of the layer.
        nonfinite: values that are NaN or infinite, over all frames.
        drift, rmse, bias: against the reference.
        low, high: over all frames.
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
    """An assertion that does not hold of a layer."""

    assertion: str
    layer: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.assertion}: {self.layer}" + (f": {self.message}" if self.message else "")


def assertion(function: Assertion) -> Assertion:
    """Register a function that is given a `LayerView` of every layer that is compared.

        @xray.assertion
        def no_drift(layer):
            assert layer.drift < 0.05

    It fails where it returns False or raises `AssertionError`; `slipstream xray compare` then
    leaves with code 1.
    """
    _assertions[function.__name__] = function
    return function


@assertion
def finite(layer: LayerView) -> bool:
    """No layer gives NaN or infinities."""
    return not layer.nonfinite


def check(layers: Iterable[tuple[Layer, dict[str, Any]]]) -> Iterator[Failure]:
    """Those registered that do not hold."""
    for layer, values in layers:
        view = LayerView(layer.name, layer.kind, **values)
        for name, function in _assertions.items():
            try:
                if function(view) is False:
                    yield Failure(name, layer.name)
            except AssertionError as error:
                yield Failure(name, layer.name, str(error))
