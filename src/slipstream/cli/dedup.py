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
        Path, typer.Argument(metavar="CORPUS", help='A JSON object a line: {"text": "..."}')
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the lines that are kept."),
    ] = None,
    field: Annotated[str, typer.Option(help="Where the text is in the object.")] = "text",
    threshold: Annotated[
        float, typer.Option(help="Jaccard similarity from which on texts are alike, up to 1.")
    ] = 0.8,
    shingle: Annotated[int, typer.Option(help="Words that follow each other in a shingle.")] = 5,
    as_json: Json = False,
) -> None:
    """Find documents that are nearly the same, and keep one of each.

    A document is the set of its shingles, runs of so many words, in lower case and without
    punctuation; a null is a document without words. Two are alike when the shingles
    they share are at least the threshold's part of all that either has (Jaccard similarity); every
    such pair is found, not only most of them. Of documents that are alike, directly or through
    others, the first is kept. Without --output nothing is written.

        slipstream dedup corpus.jsonl

        slipstream dedup corpus.jsonl -o unique.jsonl

        slipstream dedup corpus.jsonl --threshold 0.5 --json
    """
    from slipstream.sparse import dedup

    with progress("dedup") as report:
        deduped = dedup(
            corpus, output, field=field, threshold=threshold, shingle=shingle, progress=report
        )
    kept = int(deduped.kept.sum())
    payload = {
        "corpus": str(corpus),
        "output": None if output is None else str(output),
        "documents": deduped.documents,
        "kept": kept,
        "removed": deduped.documents - kept,
        "identical": deduped.identical,
        "near_duplicate_pairs": deduped.pairs,
        "wordless": deduped.wordless,
        "shingles": deduped.shingles,
        "threshold": threshold,
        "shingle": shingle,
        "group": deduped.group.tolist(),
    }
    notes = [f"alike: Jaccard similarity >= {threshold:g} of {shingle}-word shingles, exact"]
    if deduped.wordless:
        notes.append(f"{deduped.wordless:,} documents have no words; one of them is kept")
    if output is not None:
        notes.append(f"kept lines are in {output}")
    counts = {
        "documents": deduped.documents, "kept": kept, "same shingles": deduped.identical,
        "near-duplicate pairs": deduped.pairs,
    }  # fmt: skip
    row = [f"{count:,}" for count in counts.values()]
    table = Table([Column(name, "right") for name in counts], [row], notes=notes)
    emit(table, payload, as_json=as_json)
