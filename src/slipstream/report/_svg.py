"""SVG drawings with light and dark colours."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#222}.faint{fill:#667}"
    "line{stroke:#ccd}@media(prefers-color-scheme:dark){svg{background:#1b1d21}text{fill:#eee}"
    ".faint{fill:#99a}line{stroke:#444}}"
)


class Drawing:
    """Shapes in drawing order; lengths are in pixels.

    Args:
        title: heading of the drawing and its label for screen readers.
        left: x position of the title.
    """

    def __init__(self, title: str, width: float, height: float, left: float) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>',
            f'<text x="{left}" y="18" font-weight="bold">{escape(title)}</text>',
        ]

    def text(
        self, x: float, y: float, words: str, *,
        anchor: str = "", faint: bool = False, size: int = 0,
    ) -> None:  # fmt: skip
        """Draw text that starts at `x`, or has its middle or end there.

        Args:
            anchor: ``middle`` or ``end``; "" for the start.
            size: font size; 0 for the default.
        """
        kind = _attribute("class", "faint" if faint else "")
        self._parts.append(
            f'<text{kind} x="{x:.1f}" y="{y:.1f}"{_attribute("text-anchor", anchor)}'
            f"{_attribute('font-size', size)}>{escape(words)}</text>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, dashes: str = "", colour: str = ""
    ) -> None:
        """Draw a straight line, in the default colour unless `colour` is given."""
        style = _attribute("style", f"stroke:{colour}" if colour else "")
        self._parts.append(
            f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"{style}'
            f"{_attribute('stroke-dasharray', dashes)}/>"
        )

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *,
        opacity: float = 1.0, tip: str = "",
    ) -> None:  # fmt: skip
        """Draw a filled rectangle with an optional tooltip."""
        faded = _attribute("opacity", "" if opacity == 1.0 else opacity)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}"{faded}' + (f"><title>{escape(tip)}</title></rect>" if tip else "/>")
        )

    def shape(self, element: str) -> None:
        """Add an SVG element unchanged."""
        self._parts.append(element)

    def scale(self, left: float, right: float, ticks: Iterable[tuple[float, str]]) -> None:
        """Draw horizontal lines at ticks (y, label), with labels to the left."""
        for y, words in ticks:
            self.line(left, y, right, y)
            self.text(left - 6, y + 4, words, anchor="end", faint=True)

    def legend(
        self, left: float, top: float, apart: float, entries: Iterable[tuple[str, float, str]]
    ) -> None:
        """Draw squares with labels, from (colour, opacity, label)."""
        for number, (colour, opacity, words) in enumerate(entries):
            x = left + apart * number
            self.rect(x, top, 10, 10, colour, opacity=opacity)
            self.text(x + 14, top + 9, words)

    def __str__(self) -> str:
        return "".join([*self._parts, "</svg>\n"])


def _attribute(name: str, value: object) -> str:
    return f' {name}="{value}"' if value else ""
