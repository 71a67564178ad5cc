"""A picture of an arena: steps from left to right, bytes from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from html import escape

from slipstream.ship.firmware.arena import Arena
from slipstream.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 960, 420, 70, 40, 34
_COLOURS = ("#4a90d9", "#c46a10", "#5a9e4b", "#9b6bb3", "#c0504d", "#3d9a9a", "#8a8a3a", "#7c7c8c")
_LETTER = 6.2


def draw_arena(arena: Arena, steps: int, title: str, inputs: Collection[str] = ()) -> str:
    """An SVG with a rectangle a tensor; whole names are in tooltips.

    A rectangle's text is the end of its name where that is its own and has room, else the number
    of the step that writes it, as tables have it.

    Args:
        inputs: names of tensors that no step writes.
    """
    wide, high = _WIDTH / max(steps, 1), _HEIGHT / max(arena.size, 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} '
        f'{_TOP + _HEIGHT + _BELOW}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}: memory</title>",
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}: {arena.size:,} bytes of RAM'
        f"{', proved least' if arena.plan.optimal else ''}</text>",
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="currentColor" opacity="0.4"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{_TOP + share * _HEIGHT + 4:.0f}" text-anchor="end">'
            f"{format_bytes(round(share * arena.size))}</text>"
            for share in (0.0, 0.5, 1.0)
        ),
        f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 18}">step 0</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
        "a number is the step that writes it, in: an input; darker: shared while one is read, "
        "the other written</text>",
        f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 18}" text-anchor="end">'
        f"{steps - 1}</text>",
    ]
    ends = Counter(one.name.rsplit("/", 1)[-1] for one in arena.regions)
    for number, one in enumerate(arena.regions):
        x, width = _LEFT + one.first * wide, (one.last - one.first + 1) * wide
        y, height = _TOP + one.offset * high, max(one.size * high, 0.5)
        tooltip = f"{one.name}: {one.size:,} B at {one.offset:,}, steps {one.first} to {one.last}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}" fill-opacity="0.55" stroke="white" '
            f'stroke-width="0.5"><title>{escape(tooltip)}</title></rect>'
        )
        label = one.name.rsplit("/", 1)[-1]
        if ends[label] > 1 or width <= _LETTER * len(label) + 6:
            label = "in" if one.name in inputs else str(one.first)
        if height > 12 and width > _LETTER * len(label) + 6:
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 11:.1f}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
