"""The report of an x-ray: an HTML file with the differences, the fix, and drift by layer."""

from __future__ import annotations

from html import escape
from pathlib import Path

from slipstream.files import write_text
from slipstream.report._svg import Drawing
from slipstream.ship.xray.comparing import Comparison, drift_table

_LEFT, _WIDTH, _TOP, _HEIGHT = 60, 760, 30, 180
_FINE, _SUSPECT = "#4a90d9", "#c4502f"
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}"
    "td,th{padding:.2em .8em;vertical-align:top;white-space:pre-line}"
    "table{border-collapse:collapse;margin:1em 0}tr{border-bottom:1px solid #8884}"
    ":root{color-scheme:light dark}"
)


def drift_svg(comparison: Comparison) -> str:
    """Draw a bar per layer in execution order, red for jumps of drift and non-finite values."""
    drawing = Drawing("Drift of layers", _LEFT + _WIDTH + 16, _TOP + _HEIGHT + 30, _LEFT)
    most = max((layer.drift for layer in comparison.layers), default=0.0) or 1.0
    ticks = [
        (_TOP + _HEIGHT * (1 - share), f"{most * share:.3g}")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    drawing.scale(_LEFT, _LEFT + _WIDTH, ticks)
    width = _WIDTH / max(len(comparison.layers), 1)
    suspects = {layer.name for layer in comparison.suspects}
    for number, layer in enumerate(comparison.layers):
        height = _HEIGHT * min(layer.drift / most, 1.0)
        drawing.rect(
            _LEFT + number * width, _TOP + _HEIGHT - height, max(width - 1, 1), height,
            _SUSPECT if layer.name in suspects else _FINE,
            tip=f"{layer.name}: {layer.drift:.4g} {layer.remark}",
        )  # fmt: skip
    drawing.text(_LEFT, _TOP + _HEIGHT + 18, "layers in execution order", faint=True)
    return str(drawing)


def write_xray(comparison: Comparison, path: Path | str) -> Path:
    """Write the result of `slipstream.ship.xray.compare` as a self-contained HTML file.

    Raises:
        SlipstreamError: the file cannot be written.
    """
    path = Path(path)
    title = f"{comparison.candidate} against {comparison.reference}"
    parts = [comparison.tables()[0].to_html()]
    if comparison.layers:
        parts += [drift_svg(comparison), drift_table(comparison.layers, "all layers").to_html()]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(parts) + "</body></html>\n"
    )  # fmt: skip
    write_text(path, page, "the report", "name another file: --html FILE")
    return path
