"""Draw an arena as an SVG: steps from left to right, bytes from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from html import escape

from slipstream.ship.firmware.arena import Arena
from slipstream.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 960, 420, 70, 40, 34
_COLOURS = ("#4a90d9", "#c46a10", "#5a9e4b", "#9b6bb3", "#c0504d", "#3d9a9a", "#8a8a3a", "#7c7c8c")
_CHARACTER_WIDTH = 6.2


def draw_arena(arena: Arena, steps: int, title: str, inputs: Collection[str] = ()) -> str:
    """Return an SVG with a rectangle per region; full names are in tooltips.

    A rectangle is labelled with the last part of its name if that is unique and fits, else with the
    number of the step that writes it; `inputs` are names of tensors that no step writes.
    """
    wide, high = _WIDTH / max(steps, 1), _HEIGHT / max(arena.size, 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} '
        f'{_TOP + _HEIGHT + _BELOW}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}: memory</title>",
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}: {arena.size:,} bytes of RAM'
        f"{', optimal' if arena.plan.optimal else ''}</text>",
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="currentColor" opacity="0.4"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{_TOP + share * _HEIGHT + 4:.0f}" text-anchor="end">'
            f"{format_bytes(round(share * arena.size))}</text>"
            for share in (0.0, 0.5, 1.0)
        ),
        f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 18}">step 0</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
        "number: the step that writes it; in: an input; darker: shared by an operator's input "
        "and output</text>",
        f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 18}" text-anchor="end">'
        f"{steps - 1}</text>",
    ]
    ends = Counter(region.name.rsplit("/", 1)[-1] for region in arena.regions)
    for number, region in enumerate(arena.regions):
        x, width = _LEFT + region.first * wide, (region.last - region.first + 1) * wide
        y, height = _TOP + region.offset * high, max(region.size * high, 0.5)
        tooltip = (
            f"{region.name}: {region.size:,} B at {region.offset:,}, "
            f"steps {region.first} to {region.last}"
        )
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}" fill-opacity="0.55" stroke="white" '
            f'stroke-width="0.5"><title>{escape(tooltip)}</title></rect>'
        )
        label = region.name.rsplit("/", 1)[-1]
        if ends[label] > 1 or width <= _CHARACTER_WIDTH * len(label) + 6:
            label = "in" if region.name in inputs else str(region.first)
        if height > 12 and width > _CHARACTER_WIDTH * len(label) + 6:
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 11:.1f}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
