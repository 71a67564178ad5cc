"""Checks of CPU support for techniques."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.techniques.precision import onednn_has_bf16


@pytest.fixture
def bf16_lstm(require: Callable[[str, bool, str], None]) -> Callable[[str], None]:
    """Skips the step of that name where it is an LSTM's, which oneDNN does not run in bfloat16 on
    every processor."""

    def need(name: str) -> None:
        supported = name != "lstm" or onednn_has_bf16()
        require("bf16", supported, "oneDNN has no LSTM in bfloat16 for this CPU")

    return need
