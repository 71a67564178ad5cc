"""Sizes of windows over images, as torch takes them: one number, or height and width."""

from __future__ import annotations

from typing import Any


def pair(value: Any) -> tuple[int, int]:
    """Height and width of a number for both, or of a sequence of one or two."""
    numbers = [int(one) for one in value] if isinstance(value, (list, tuple)) else [int(value)]
    return numbers[0], numbers[-1]
