"""The report of an x-ray: one HTML file with what differs, the fix, and drift layer by layer."""

from __future__ import annotations

from html import escape
from pathlib import Path

from slipstream.files import write_text
from slipstream.report._svg import Drawing
from slipstream.ship.xray.comparing import Comparison, drift_table

_LEFT, _WIDTH, _TOP, _HEIGHT = 60, 760, 30, 180
_FINE, _ODD = "#4a90d9", "#c4502f"
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}"
    "td,th{padding:.2em .8em;vertical-align:top;white-space:pre-line}"
    "table{border-collapse:collapse;margin:1em 0}tr{border-bottom:1px solid #8884}"
    ":root{color-scheme:light dark}"
)


def drift_svg(found: Comparison) -> str:
    """A bar a layer, in the order they run; red where drift jumps or values are not finite."""
    drawing = Drawing("Drift of layers", _LEFT + _WIDTH + 16, _TOP + _HEIGHT + 30, _LEFT)
    most = max((one.drift for one in found.layers), default=0.0) or 1.0
    ticks = [
        (_TOP + _HEIGHT * (1 - share), f"{most * share:.3g}")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    drawing.scale(_LEFT, _LEFT + _WIDTH, ticks)
    wide = _WIDTH / max(len(found.layers), 1)
    odd = {one.name for one in found.suspects}
    for number, one in enumerate(found.layers):
        height = _HEIGHT * min(one.drift / most, 1.0)
        drawing.rect(
            _LEFT + number * wide, _TOP + _HEIGHT - height, max(wide - 1, 1), height,
            _ODD if one.name in odd else _FINE, tip=f"{one.name}: {one.drift:.4g} {one.remark}",
        )  # fmt: skip
    drawing.text(_LEFT, _TOP + _HEIGHT + 18, "layers in the order they run", faint=True)
    return str(drawing)


def write_xray(found: Comparison, path: Path | str) -> Path:
    """Write what `slipstream.ship.xray.compare` found as one HTML file that loads nothing.

    Raises:
        SlipstreamError: the file cannot be written.
    """
    path = Path(path)
    title = f"{found.candidate} against {found.reference}"
    parts = [found.tables()[0].to_html()]
    if found.layers:
        parts += [drift_svg(found), drift_table(found.layers, "all layers").to_html()]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(parts) + "</body></html>\n"
    )  # fmt: skip
    write_text(path, page, "the report", "name another file: --html FILE")
    return path
