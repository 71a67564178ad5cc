"""Text pipelines: compared with another tokenizer, invalid inputs, and variations."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import xray
from slipstream.ship.xray.statistics import canonical, measured

TEXTS = [
    "The café's owner, Zoë, didn't expect THIS: 40 guests & a naïve critic!",
    "Short.",
    "It was -- as far as anyone could tell -- the best (and the longest) evening of the year, "
    "which nobody who had been there, neither guests nor cooks, would ever forget again.",
    "An unforeseeable, forgettable foretelling.",
    "Déjà vu at the café",
    "Guests forget; critics, naïve or not, never do.",
]
VOCABULARY = pre.vocabulary_of(TEXTS[:3] * 2 + TEXTS, 150)
PIPELINE = pre.text_pipeline(VOCABULARY, 24)


def test_token_ids_equal_those_of_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {word: number for number, word in enumerate(VOCABULARY.splitlines())}
    theirs = tokenizers.BertWordPieceTokenizer(vocab=numbers, lowercase=True)
    theirs.enable_truncation(24)
    theirs.enable_padding(length=24, pad_id=numbers["[PAD]"])
    for text in [*TEXTS, "§ 7: a_b, x-ray 3.14 \u4f60", "Å\u0301ngström   tab\there"]:
        assert PIPELINE(text).tolist() == theirs.encode(text).ids, text


def test_vocabulary_has_endings_of_two_to_four_characters() -> None:
    assert {"walking", "##ng", "##ing", "##king"} <= {*pre.vocabulary_of(["walking"]).split()}


def test_sequence_with_one_special_token_has_no_swap_bug() -> None:
    one_sided = pre.Sequence(first=2)
    assert [text for text, _ in one_sided.bugs() if "around" in text] == []
    assert (one_sided.pad, one_sided(np.array([7])).tolist()[:3]) == (0, [2, 7, 0])


def test_bytes_paths_and_text_give_equal_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXTS[0], "utf-8")
    for raw in (TEXTS[0].encode(), path):
        assert np.array_equal(PIPELINE(raw), PIPELINE(TEXTS[0]))
    with pytest.raises(pre.RawInputError, match=r"\butf-8\b"):
        PIPELINE(b"\xff\xfe\x00")
    with pytest.raises(pre.RawInputError):
        PIPELINE(np.zeros((2, 2), np.float32)[None].tolist())


def test_refuses_invalid_vocabularies_and_lengths(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        pre.text_pipeline(tmp_path / "none.txt")
    with pytest.raises(InvalidArgumentError, match=r"no \[UNK\]"):
        pre.text_pipeline("a\nb\n")
    with pytest.raises(InvalidArgumentError, match="no space"):
        pre.text_pipeline(VOCABULARY, 2)("a")


def test_variations_round_trip_through_json_and_equal_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text(VOCABULARY, "utf-8")
    names = {"np": np, "pre": pre, "re": re, "html": html, "unicodedata": unicodedata}
    found = list(PIPELINE.variations())
    assert len({variation.text for variation in found}) == len(found) > 30
    for variation in found:
        assert (
            pre.Pipeline.from_dict(json.loads(json.dumps(variation.pipeline.to_dict())))
            == variation.pipeline
        )
        for text in TEXTS[:3]:
            ran: dict[str, Any] = dict(names, content=text.encode())
            exec(variation.pipeline.code(), ran)
            assert np.array_equal(ran["x"], variation.pipeline(text)), variation.text
    assert len(str(PIPELINE)) < 1_000


@pytest.mark.parametrize("number", range(0, 30, 3))
def test_wrong_stage_is_found_with_its_fix(number: int) -> None:
    right = [PIPELINE(text) for text in TEXTS]
    seen = [
        variation for variation in PIPELINE.variations()
        if any(
            not np.array_equal(variation.pipeline(t), r) for t, r in zip(TEXTS, right, strict=True)
        )
    ]  # fmt: skip
    wrong = seen[number % len(seen)]
    inputs = measured([canonical(wrong.pipeline(text)[None]) for text in TEXTS])
    cause = xray.explain(inputs, TEXTS, PIPELINE)
    assert cause.pipeline is not None, wrong.text
    assert all(np.array_equal(cause.pipeline(t), wrong.pipeline(t)) for t in TEXTS), wrong.text
    assert wrong.text in (cause.text, *cause.alternatives)
    assert cause.fix


def test_ids_that_are_one_off_are_found() -> None:
    """A padding id that is one off is found alone and together with a larger cause."""
    whole = PIPELINE.completed()
    sequence = next(stage for stage in whole.stages if isinstance(stage, pre.Sequence))
    padded = whole.with_stage(sequence.changed(pad=1))
    both = padded.with_stage(pre.Read("latin-1"))
    for wrong, kinds in ((padded, ("sequence",)), (both, ("read", "sequence"))):
        inputs = measured([canonical(wrong(text)[None]) for text in TEXTS])
        assert tuple(sorted(xray.explain(inputs, TEXTS, PIPELINE).stages)) == kinds
