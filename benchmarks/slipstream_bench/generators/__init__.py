"""Seeded generators of data with exact ground truth: entropy, best AUC, boxes, structure."""

from __future__ import annotations

from slipstream_bench.generators.clicks import ClickLog, click_log
from slipstream_bench.generators.drawings import Drawings, shapes
from slipstream_bench.generators.feedback import ImplicitFeedback, implicit_feedback
from slipstream_bench.generators.languages import FormalText, arithmetic, dyck
from slipstream_bench.generators.matrices import PlantedMatrix, banded, block_sparse
from slipstream_bench.generators.requests import RequestTrace, Tenant, request_trace
from slipstream_bench.generators.sounds import Tones, keywords, tones

__all__ = [
    "ClickLog",
    "Drawings",
    "FormalText",
    "ImplicitFeedback",
    "PlantedMatrix",
    "RequestTrace",
    "Tenant",
    "Tones",
    "arithmetic",
    "banded",
    "block_sparse",
    "click_log",
    "dyck",
    "implicit_feedback",
    "keywords",
    "request_trace",
    "shapes",
    "tones",
]
