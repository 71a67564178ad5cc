"""A scaling curve as an SVG: bars of a step's parts against the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from slipstream.files import replacing
from slipstream.units import format_duration

_COLOURS = ("#4a90d9", "#7fb069", "#9b7fb0", "#e0a030", "#c4502f")
STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#222}.faint{fill:#667}"
    "line{stroke:#ccd}@media(prefers-color-scheme:dark){svg{background:#1b1d21}text{fill:#eee}"
    ".faint{fill:#99a}line{stroke:#444}}"
)
_LEFT, _TOP, _HEIGHT, _BAR, _GAP, _BELOW = 70, 54, 240, 44, 26, 58


def curve_svg(
    title: str, columns: Sequence[tuple[str, Mapping[str, float], str]], parts: Sequence[str]
) -> str:
    """Stacked bars.

    Args:
        columns: label, nanoseconds by part, and a word above the bar: the wall.
        parts: names, from the bottom up.
    """
    most = max((sum(column.values()) for _, column, _ in columns), default=0.0) or 1.0
    width = max(_LEFT + len(columns) * (_BAR + _GAP) + _GAP, 620)
    floor = _TOP + _HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {floor + _BELOW}" '
        f'width="{width}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in range(5):
        y = floor - _HEIGHT * tick / 4
        out.append(f'<line x1="{_LEFT}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_duration(most * tick / 4) if tick else '0'}</text>"
        )
    for number, (label, column, wall) in enumerate(columns):
        x, y = _LEFT + _GAP + number * (_BAR + _GAP), float(floor)
        for part, colour in zip(parts, _COLOURS, strict=False):
            height = _HEIGHT * column.get(part, 0.0) / most
            y -= height
            out.append(
                f'<rect x="{x}" y="{y:.1f}" width="{_BAR}" height="{height:.1f}" fill="{colour}">'
                f"<title>{escape(part)}: {format_duration(column.get(part, 0.0))}</title></rect>"
            )
        middle = x + _BAR / 2
        out.append(
            f'<text class="faint" x="{middle}" y="{y - 5:.1f}" text-anchor="middle" '
            f'font-size="10">{escape(wall)}</text>'
            f'<text x="{middle}" y="{floor + 16}" text-anchor="middle">{escape(label)}</text>'
        )
    for number, (part, colour) in enumerate(zip(parts, _COLOURS, strict=False)):
        x = _LEFT + number * 112
        out.append(
            f'<rect x="{x}" y="{floor + 34}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14}" y="{floor + 43}">{escape(part)}</text>'
        )
    return "".join([*out, "</svg>\n"])


def write_curve(path: Path, svg: str) -> None:
    """Write the picture, whole or not at all."""
    with replacing(path) as beside:
        beside.write_text(svg, encoding="utf-8")
