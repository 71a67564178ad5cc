"""Where the numbers of a cluster that was fitted to measurements are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """What a fit to measurements left unexplained, and where it was made.

    Attributes:
        date: ISO 8601.
        fingerprint: of the machine; see `slipstream.measure`.
        libraries: name and version of what was measured.
        residual: median of the relative errors of the fit.
        residual_p90: nine of ten are below.
        oversubscription: ranks per processor core; above 1 the scheduler was measured too.
        detail: what else the file keeps: samples, intervals.
    """

    date: str
    fingerprint: str
    libraries: str
    residual: float
    residual_p90: float
    oversubscription: float
    detail: Mapping[str, Any] = field(default_factory=dict)
