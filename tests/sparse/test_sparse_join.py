"""Joins find exactly the matching pairs; near-duplicates of a corpus equal a plain count."""

from __future__ import annotations

import json
import os
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from formulas import FORMULAS, skewed

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.sparse import dedup, pairwise_distances, radius_join
from slipstream.sparse.dedup import Shingler


def joined(*arguments: object, **options: object) -> list[tuple[int, int, float]]:
    found = list(radius_join(*arguments, **options))  # type: ignore[arg-type]
    assert all(len(pairs) for pairs in found)
    return [
        pair
        for pairs in found
        for pair in zip(pairs.left.tolist(), pairs.right.tolist(), pairs.distance, strict=True)
    ]


def families(seed: int, rows: int = 240, columns: int = 400) -> sp.csr_matrix:
    """Sets in families of varying similarity, of popular and rare columns; some empty."""
    rng = np.random.default_rng(seed)
    popularity = 1 / (1 + np.arange(columns)) ** 0.8
    dense = np.zeros((rows, columns))
    for i in range(rows):
        if i % 8 == 0 or i < 8:
            base = rng.choice(columns, rng.integers(1, 40), False, popularity / popularity.sum())
        changed = base.copy()
        lost = rng.random(len(changed)) < rng.uniform(0, 0.3)
        changed[lost] = rng.integers(0, columns, lost.sum())
        dense[i, changed] = rng.integers(1, 5, len(changed))
    dense[[5, 77, 78]] = 0
    return sp.csr_matrix(dense)


@pytest.mark.parametrize("radius", [0.0, 0.1, 0.2, 1 / 3, 0.5, 0.9, 1.0])
def test_all_jaccard_pairs_are_found(radius: float) -> None:
    rows = families(1)
    distances = pairwise_distances(rows, metric="jaccard")
    i, j = np.nonzero(np.triu(distances <= radius, 1))
    expected = list(zip(i.tolist(), j.tolist(), distances[i, j], strict=True))
    assert len(expected) > 3
    assert joined(rows, metric="jaccard", radius=radius) == expected
    assert joined(rows, metric="jaccard", radius=radius, block_bytes=2**16) == expected
    other = families(2, 90)
    distances = pairwise_distances(rows, other, "jaccard")
    i, j = np.nonzero(distances <= radius)
    expected = list(zip(i.tolist(), j.tolist(), distances[i, j], strict=True))
    assert joined(rows, other, "jaccard", radius) == expected


@pytest.mark.parametrize("metric", ["manhattan", "cosine", "canberra"])
def test_joins_by_other_metrics(metric: str) -> None:
    rows = skewed(150, 80, 3)
    distances = FORMULAS[metric](rows.toarray(), rows.toarray())
    radius = float(np.quantile(distances, 0.05))
    found = joined(rows, metric=metric, radius=radius, block_bytes=2**16)
    i, j = np.nonzero(np.triu(pairwise_distances(rows, metric=metric) <= radius, 1))
    assert [pair[:2] for pair in found] == list(zip(i.tolist(), j.tolist(), strict=True))


def test_an_invalid_radius_is_refused() -> None:
    for radius in (-0.1, float("nan"), "near"):
        with pytest.raises(InvalidArgumentError, match="radius"):
            radius_join(families(1), radius=radius)  # type: ignore[arg-type]


# ---- corpora -------------------------------------------------------------------------------------

WORDS = [f"w{n}" for n in range(300)]


def texts(seed: int, count: int = 120) -> list[str]:
    rng = np.random.default_rng(seed)
    made: list[str] = ["", "one word", "One, WORD!", "...", "Schöne Grüße 你好 мир ok ok"]
    while len(made) < count:
        words = list(rng.choice(WORDS, rng.integers(8, 60)))
        for _ in range(rng.integers(1, 5)):
            copy = words.copy()
            for _ in range(rng.integers(0, 4)):
                copy[rng.integers(len(copy))] = str(rng.choice(WORDS))
            made.append(" ".join(copy))
    return made


def plain_shingles(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    size = min(size, len(words))
    return {tuple(words[n : n + size]) for n in range(len(words) - size + 1)} if words else set()


def write(path: Path, documents: list[str], field: str = "text") -> Path:
    lines = [json.dumps({"id": n, field: text}) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_shingles_equal_plain_ones() -> None:
    for size in (1, 3, 5):
        make = Shingler(size)
        for text in texts(1):
            assert len(make(text)) == len(plain_shingles(text, size))
    assert not np.array_equal(Shingler(2)("a b a"), Shingler(2)("b a b b"))


@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.0])
def test_near_duplicates_equal_a_plain_count(tmp_path: Path, threshold: float) -> None:
    documents = texts(2)
    sets = [plain_shingles(text, 3) for text in documents]
    group = list(range(len(documents)))
    for i, j in combinations(range(len(documents)), 2):
        either = len(sets[i] | sets[j])
        if not either or len(sets[i] & sets[j]) / either >= threshold:
            low, high = sorted((group[i], group[j]))
            group = [low if g == high else g for g in group]
    corpus = write(tmp_path / "corpus.jsonl", documents)
    target = tmp_path / "kept.jsonl"
    found = dedup(corpus, target, threshold=threshold, shingle=3)
    assert found.group.tolist() == group
    assert 1 < found.is_first.sum() < len(documents)
    lines = corpus.read_bytes().splitlines(keepends=True)
    assert target.read_bytes() == b"".join(
        line for line, keep in zip(lines, found.is_first, strict=True) if keep
    )


def test_eight_of_ten_reach_a_threshold_of_eight_tenths(tmp_path: Path) -> None:
    shared = " ".join(f"s{n}" for n in range(8))
    corpus = write(tmp_path / "c.jsonl", [f"{shared} a", f"{shared} b", f"{shared} c d"])
    found = dedup(corpus, shingle=1, threshold=0.8)
    assert found.group.tolist() == [0, 0, 2]


def test_many_equal_texts_are_one_row_not_a_square_of_pairs(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", ["the same few words again"] * 3000 + ["another text"])
    found = dedup(corpus)
    assert (found.identical, found.pairs, int(found.is_first.sum())) == (2999, 0, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "JSON"),
        ("[1]", "not a JSON object"),
        ('{"body": "x"}', "has no 'text'"),
        ('{"text": 3}', "'text' is a int, not a text"),
    ],
)
def test_an_invalid_line_is_named_and_nothing_is_written(
    tmp_path: Path, line: str, words: str
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "fine"}\n' + line + "\n")
    target = tmp_path / "out.jsonl"
    target.write_text("unchanged")
    with pytest.raises(SlipstreamError, match=words) as caught:
        dedup(corpus, target)
    assert caught.value.where == f"{corpus}:2"
    assert target.read_text() == "unchanged"
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "out.jsonl"}


def test_a_null_is_a_text_without_words(tmp_path: Path) -> None:
    corpus, target = tmp_path / "c.jsonl", tmp_path / "out.jsonl"
    corpus.write_text(
        '{"text": null}\n{"text": "One, two"}\n{"text": "..."}\n{"text": "one two"}\n'
    )
    found = dedup(corpus, target)
    assert found.group.tolist() == [0, 1, 0, 1]
    assert found.wordless == 2
    assert target.read_text() == '{"text": null}\n{"text": "One, two"}\n'


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    corpus, target = tmp_path / "c.jsonl", tmp_path / "out.jsonl"
    corpus.write_text('{"text": "one"}\n\n{"text": "two"}\n{"text": "one"}\n \n')
    assert dedup(corpus, target).group.tolist() == [0, 1, 0]
    assert target.read_text() == '{"text": "one"}\n{"text": "two"}\n'
    corpus.write_text('{"text": "one"}\n\n[]\n')
    with pytest.raises(SlipstreamError, match="not a JSON object") as caught:
        dedup(corpus)
    assert caught.value.where == f"{corpus}:3"


def test_invalid_corpora_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="cannot be read"):
        dedup(tmp_path / "none.jsonl")
    corpus = write(tmp_path / "c.jsonl", ["a"])
    with pytest.raises(InvalidArgumentError, match="threshold"):
        dedup(corpus, threshold=1.2)
    with pytest.raises(InvalidArgumentError, match="shingle"):
        dedup(corpus, shingle=0)
    with pytest.raises(SlipstreamError, match="cannot be written"):
        dedup(corpus, tmp_path / "no folder" / "out.jsonl")
    with pytest.raises(SlipstreamError, match="is a folder"):
        dedup(corpus, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SlipstreamError, match=r"\bonce\b(.|\n)*\bpipe\b"):
        dedup(tmp_path / "pipe", tmp_path / "out.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert dedup(tmp_path / "empty.jsonl").documents == 0
