"""``slipstream dedup``: near-duplicates in a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, progress
from slipstream.tables import Column, Table


def command(
    corpus: Annotated[
        Path, typer.Argument(metavar="CORPUS", help='One JSON object per line: {"text": "..."}')
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the retained lines."),
    ] = None,
    field: Annotated[str, typer.Option(help="Key of the text in each object.")] = "text",
    threshold: Annotated[
        float, typer.Option(help="Minimum Jaccard similarity of near-duplicates, up to 1.")
    ] = 0.8,
    shingle: Annotated[int, typer.Option(help="Number of consecutive words per shingle.")] = 5,
    as_json: Json = False,
) -> None:
    """Find near-duplicate documents and keep one of each group.

    A document is the set of its shingles: runs of --shingle words, in lower case and without
    punctuation; null counts as a document without words. Two documents are near-duplicates if they
    share at least the threshold's fraction of the shingles that either has (Jaccard similarity).
    The search is exact: it finds every such pair. Of a group, connected directly or through other
    documents, the first is retained. Without --output nothing is written.

        slipstream dedup corpus.jsonl

        slipstream dedup corpus.jsonl -o unique.jsonl

        slipstream dedup corpus.jsonl --threshold 0.5 --json
    """
    from slipstream.sparse import dedup

    with progress("dedup") as report:
        deduped = dedup(
            corpus, output, field=field, threshold=threshold, shingle=shingle, progress=report
        )
    retained = int(deduped.is_first.sum())
    payload = {
        "corpus": str(corpus),
        "output": None if output is None else str(output),
        "documents": deduped.documents,
        "kept": retained,
        "removed": deduped.documents - retained,
        "identical": deduped.identical,
        "near_duplicate_pairs": deduped.pairs,
        "wordless": deduped.wordless,
        "shingles": deduped.shingles,
        "threshold": threshold,
        "shingle": shingle,
        "group": deduped.group.tolist(),
    }
    notes = [
        f"exact: all pairs with Jaccard similarity >= {threshold:g} of {shingle}-word shingles"
    ]
    if deduped.wordless:
        notes.append(f"{deduped.wordless:,} documents have no words; one of them is retained")
    if output is not None:
        notes.append(f"wrote the retained lines to {output}")
    counts = {
        "documents": deduped.documents, "kept": retained, "same shingles": deduped.identical,
        "near-duplicate pairs": deduped.pairs,
    }  # fmt: skip
    row = [f"{count:,}" for count in counts.values()]
    table = Table([Column(name, "right") for name in counts], [row], notes=notes)
    emit(table, payload, as_json=as_json)
