"""Miss ratio by cache size as an SVG, a line for each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slipstream.report._svg import Drawing

_COLOURS = ("#4a90d9", "#7fb069", "#9b7fb0", "#e0a030", "#c4502f", "#5f6f7f", "#d98cb3")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW, _ENTRY = 640, 260, 60, 44, 64, 96


def miss_ratio_svg(title: str, curve: Mapping[str, Mapping[float, float]]) -> str:
    """Draw miss ratios over cache sizes (log scale); dashes for belady, which is a bound.

    Args:
        curve: miss ratio by share of the footprint, for each policy; see `StorageProfile`.
    """
    drawing = Drawing(title, _WIDTH, _TOP + _HEIGHT + _BELOW, _LEFT)
    floor, shares = _TOP + _HEIGHT, sorted({share for row in curve.values() for share in row})
    low, high = math.log(shares[0]), math.log(shares[-1])

    def x(share: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 24) * (math.log(share) - low) / max(high - low, 1e-9)

    ticks = [(floor - _HEIGHT * tick / 4, f"{tick / 4:g}") for tick in range(5)]
    drawing.scale(_LEFT, _WIDTH - 8, ticks)
    drawing.text(_LEFT, _TOP - 10, "miss ratio of requests", faint=True)
    for share in shares:
        drawing.text(x(share), floor + 18, f"{share:.0%}", anchor="middle", faint=True)
    drawing.text(_WIDTH / 2, floor + 34, "share of all bytes", anchor="middle", faint=True)
    entries = []
    for number, (policy, ratios) in enumerate(curve.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{x(share):.1f},{floor - _HEIGHT * ratio:.1f}" for share, ratio in ratios.items()
        )
        dashes = ' stroke-dasharray="4 3"' if policy == "belady" else ""
        drawing.shape(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
            f"<title>{policy}</title></polyline>"
        )
        entries.append((colour, 1.0, policy))
    drawing.legend(_LEFT, floor + 46, _ENTRY, entries)
    return str(drawing)
