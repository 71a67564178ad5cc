"""Finite spaces of hardware, whose points are numbered from 0."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.nas.supernet import Supernet
from slipstream.tables import Table


class HardwareSpace(ABC):
    """All combinations of the values of some attributes.

    Attributes:
        metrics: metrics that `costs` returns, with their units.
        values: values of each attribute; the last one varies fastest.
        settings: names of the attributes that determine the costs.
    """

    metrics: ClassVar[Mapping[str, str]]
    settings: ClassVar[tuple[str, ...]] = ("values",)
    values: Mapping[str, tuple[Any, ...]]

    def __len__(self) -> int:
        return math.prod(self._sizes)

    @property
    def identity(self) -> str:
        """Description that differs between spaces with other costs."""
        settings = repr([getattr(self, name) for name in self.settings])
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return f"{type(self).__name__} of {len(self):,} points, {digest}"

    @property
    def _sizes(self) -> list[int]:
        return [len(options) for options in self.values.values()]

    def at(self, point: int) -> dict[str, Any]:
        """Return the values of a point by attribute."""
        places = np.unravel_index(point, self._sizes)
        return {name: o[n] for (name, o), n in zip(self.values.items(), places, strict=True)}

    def point(self, values: Mapping[str, Any]) -> int:
        """Return the number of the point with these values."""
        places = [options.index(values[name]) for name, options in self.values.items()]
        return int(np.ravel_multi_index(places, self._sizes))

    @abstractmethod
    def costs(self, net: Supernet, config: Mapping[str, int]) -> dict[str, NDArray[np.float64]]:
        """Return each metric of a sub-network, float64 [points].

        Raises:
            WorkloadError: the hardware cannot run an operator, or its time is unknown.
        """

    @abstractmethod
    def baseline(self, net: Supernet, config: Mapping[str, int]) -> dict[str, float]:
        """Return each metric of a sub-network on the base hardware."""

    @abstractmethod
    def explain(self, net: Supernet, config: Mapping[str, int], point: int) -> Table:
        """Return a table of the time of each operator of a sub-network on a point."""
