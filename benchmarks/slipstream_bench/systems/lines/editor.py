"""Latency of the server's answers to an editor during an analysis."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

_MAX_S, _PAUSE_S, _END_S = 150.0, 0.01, 10.0
_DONE = ("ready", "failed")


def latencies_ms(path: Path, function: str) -> list[float]:
    """Return round trips of alternating requests until the analysis is ready; empty if it
    failed."""
    return asyncio.run(_latencies(path, function))


async def _latencies(path: Path, function: str) -> list[float]:
    client, uri = LanguageClient("bench", "1"), path.as_uri()

    @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)  # type: ignore[untyped-decorator]
    def ignore(params: types.PublishDiagnosticsParams) -> None:
        """Ignore diagnostics."""

    target = f"{path}:{function}"
    await client.start_io(
        sys.executable, "-m", "slipstream", "lsp", target, "--threads", "1", "--no-batches"
    )
    try:
        await client.initialize_async(
            types.InitializeParams(types.ClientCapabilities(), root_uri=path.parent.as_uri())
        )
        client.initialized(types.InitializedParams())
        text = path.read_text()
        item = types.TextDocumentItem(uri, types.LanguageKind.Python, 1, text)
        client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return await _asked(client, uri, text)
    finally:
        # A server that has exited, or hangs, does not answer.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.shutdown_async(None), _END_S)
            client.exit(None)
        await client.stop()


async def _asked(client: LanguageClient, uri: str, text: str) -> list[float]:
    document = types.TextDocumentIdentifier(uri)
    whole = types.Range(types.Position(0, 0), types.Position(text.count("\n"), 0))
    hover = types.HoverParams(document, types.Position(text.count("\n") // 2, 0))
    times_s: list[float] = []

    async def timed(answer: Any) -> Any:
        begin = time.perf_counter()
        found = await answer
        times_s.append((time.perf_counter() - begin) * 1e3)
        return found

    end = time.monotonic() + _MAX_S
    while time.monotonic() < end:
        await timed(client.text_document_code_lens_async(types.CodeLensParams(document)))
        await timed(client.text_document_inlay_hint_async(types.InlayHintParams(document, whole)))
        await timed(client.text_document_hover_async(hover))
        state = await client.workspace_execute_command_async(
            types.ExecuteCommandParams("slipstream.show", [uri])
        )
        if state is not None and state["state"] in _DONE:
            return times_s if state["state"] == _DONE[0] else []
        await asyncio.sleep(_PAUSE_S)
    return times_s
