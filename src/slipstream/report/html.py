"""The HTML of the page, with a document and its arrays, or for a server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from slipstream.errors import SlipstreamError
from slipstream.tables import json_values

_ASSETS = ("page.js", "page.css")


def assets() -> tuple[str, str]:
    """Return script and style of the page, built from the sources in ``page/``.

    Raises:
        SlipstreamError: they are not installed.
    """
    folder = files("slipstream.report") / "assets"
    try:
        script, style = ((folder / name).read_text("utf-8") for name in _ASSETS)
    except OSError as error:
        raise SlipstreamError(
            "the report's page is missing from this installation",
            where=str(folder),
            remedy="install slipstream again; from a clone: make page",
        ) from error
    return script, style


def to_html(document: Mapping[str, Any], arrays: str) -> str:
    """Return a self-contained page, whose content security policy forbids to load anything."""
    script, style = assets()
    # The page has an empty inline icon, since browsers would request one from the server.
    policy = _policy(f"script-src '{_hash(script)}'", f"style-src '{_hash(style)}'")
    return _page(
        str(document["title"]),
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{style}</style>",
        '<div id="page"><noscript>This report is drawn by a script; '
        "enable scripts for this file.</noscript></div>",
        f'<script type="application/json" id="document">{_json(document)}</script>',
        f'<script type="text/plain" id="arrays">{arrays}</script>',
        f"<script>{script}</script>",
    )


def live_html(key: str | None = None) -> tuple[str, str]:
    """Return the page without a document, for a server that provides one, and its policy.

    The policy only allows script, style and connections of its server.

    Args:
        key: added to the addresses of script and style, for browsers that send no cookie.
    """
    query = f"?key={quote(key, safe='')}" if key else ""
    page = _page(
        "slipstream live",
        "",
        f'<link rel="stylesheet" href="page.css{query}">',
        '<div id="page" data-live="live"><noscript>This page is drawn by a script; '
        "enable scripts for this address.</noscript></div>",
        f'<script src="page.js{query}"></script>',
    )
    return page, _policy("script-src 'self'", "style-src 'self'", "connect-src 'self'")


def _policy(*allowed: str) -> str:
    fixed = ("img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join(["default-src 'none'", *allowed, *fixed])


def _page(title: str, policy: str, style: str, *body: str) -> str:
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        policy,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"{style}</head><body>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(filter(None, lines))


def _json(document: Mapping[str, Any]) -> str:
    text = json.dumps(json_values(document), separators=(",", ":"), ensure_ascii=False)
    # No text in the document may close the script element.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
