"""Preprocessing stages for text: words, word pieces and token ids."""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.preprocessing.cast import Cast
from slipstream.runtimes.preprocessing.pipeline import Array, Pipeline, RawInputError, Stage

# Longer words are unknown, as in BERT's tokenizer.
_MAX_CHARACTERS = 100


@dataclass(frozen=True)
class Read(Stage):
    """Decode text, a file's bytes, or a path to text.

    Attributes:
        encoding: encoding of bytes; text is encoded as UTF-8 first, so that a wrong encoding has
            the same effect on it.
        form: Unicode normal form.
        escapes: whether to resolve HTML escapes such as ``&amp;``.
    """

    name = "read"
    family = "text"
    encoding: Literal["utf-8", "latin-1", "ascii"] = "utf-8"
    form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFC"
    escapes: bool = False

    def __call__(self, value: Any) -> str:
        try:
            if isinstance(value, Path):
                value = value.read_bytes()
            content = value.encode() if isinstance(value, str) else bytes(value)
            text = content.decode(self.encoding, "ignore" if self.encoding == "ascii" else "strict")
        except (OSError, ValueError, TypeError) as error:
            raise RawInputError(
                f"the input is not text in {self.encoding}: {error}", remedy="save it as UTF-8"
            ) from error
        return unicodedata.normalize(self.form, html.unescape(text) if self.escapes else text)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "UTF-8 is read as Latin-1", self.changed(encoding="latin-1")
        yield "characters outside ASCII are dropped", self.changed(encoding="ascii")
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            yield f"the Unicode normal form is {form}", self.changed(form=form)
        resolved = "not resolved" if self.escapes else "resolved"
        yield f"HTML escapes are {resolved}", self.changed(escapes=not self.escapes)

    def code(self) -> str:
        errors = ', "ignore"' if self.encoding == "ascii" else ""
        text = f'content.decode("{self.encoding}"{errors})'
        text = f"html.unescape({text})" if self.escapes else text
        return f'text = unicodedata.normalize("{self.form}", {text})'


@dataclass(frozen=True)
class Casing(Stage):
    """Convert the case and strip accents.

    Attributes:
        case: ``lower``, ``keep`` or ``upper``.
        accents: whether to keep accents.
    """

    name = "casing"
    family = "text"
    order = 10
    optional = True
    case: Literal["lower", "keep", "upper"] = "keep"
    accents: bool = True

    def __call__(self, value: str) -> str:
        cased = {"lower": value.lower, "upper": value.upper, "keep": lambda: value}[self.case]()
        if self.accents:
            return cased
        decomposed = unicodedata.normalize("NFD", cased)
        return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for case, text in (
            ("lower", "text is lower-cased"), ("keep", "text is not lower-cased"),
            ("upper", "text is upper-cased"),
        ):  # fmt: skip
            yield text, self.changed(case=case)
        treatment = "stripped" if self.accents else "kept"
        yield f"accents are {treatment}", self.changed(accents=not self.accents)

    def code(self) -> str:
        cased = {"lower": "text.lower()", "upper": "text.upper()", "keep": "text"}[self.case]
        if self.accents:
            return f"text = {cased}"
        decomposed = f'unicodedata.normalize("NFD", {cased})'
        return f'text = "".join(c for c in {decomposed} if unicodedata.category(c) != "Mn")'


@dataclass(frozen=True)
class Split(Stage):
    """Split text into words.

    Attributes:
        marks: punctuation marks are separate words (``apart``), part of words (``attached``), or
            dropped (``dropped``).
    """

    name = "split"
    family = "text"
    order = 20
    marks: Literal["apart", "attached", "dropped"] = "apart"

    def __call__(self, value: str) -> list[str]:
        return re.findall(_WORDS[self.marks], value)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "punctuation is part of words", self.changed(marks="attached")
        yield "punctuation is dropped", self.changed(marks="dropped")
        yield "punctuation marks are separate words", self.changed(marks="apart")

    def code(self) -> str:
        return f"words = re.findall({_WORDS[self.marks]!r}, text)"


# The underscore is punctuation; combining marks belong to words.
_LETTERS = r"(?:[^\W_]|[\u0300-\u036f])+"
_WORDS = {"apart": rf"{_LETTERS}|[^\s]", "attached": r"\S+", "dropped": _LETTERS}


@dataclass(frozen=True)
class Vocabulary(Stage):
    """Convert words to token ids, int64 [tokens].

    Attributes:
        words: one word per line, like BERT's ``vocab.txt``: the id is the line number from 0, and
            continuations start with ``##``.
        pieces: whether to split a missing word into the longest pieces, from its start.
        unknown: id of words that cannot be split; if negative, they are dropped.
        offset: offset of all ids.
        alphabetical: whether words are sorted before they are numbered.
    """

    name = "vocabulary"
    family = "text"
    order = 30
    words: str = field(default="", repr=False)
    pieces: bool = True
    unknown: int = 1
    offset: int = 0
    alphabetical: bool = False

    def __call__(self, value: list[str]) -> Array:
        table = _ids_of(self.words, self.alphabetical)
        ids = [token for word in value for token in self._word(word, table)]
        return np.array([token + self.offset for token in ids if token >= 0], np.int64)

    def _word(self, word: str, table: dict[str, int]) -> list[int]:
        if word in table or not self.pieces or len(word) > _MAX_CHARACTERS:
            return [table.get(word, self.unknown)]
        ids, at = [], 0
        while at < len(word):
            mark = "##" if at else ""
            ends = range(len(word), at, -1)
            end = next((end for end in ends if mark + word[at:end] in table), 0)
            if not end:
                return [self.unknown]
            ids.append(table[mark + word[at:end]])
            at = end
        return ids

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for offset in (0, 1, -1, 2, 3):
            text = f"token ids are {offset - self.offset:+d} off"
            yield text, self.changed(offset=offset)
        yield "the vocabulary is sorted before it is numbered", self.changed(alphabetical=True)
        split = "not split" if self.pieces else "split"
        yield f"unknown words are {split} into pieces", self.changed(pieces=not self.pieces)
        for unknown in (-1, 0, 1):
            text = f"have the id {unknown}" if unknown >= 0 else "are dropped"
            yield f"unknown words {text}", self.changed(unknown=unknown)

    def code(self) -> str:
        option = ", alphabetical=True" if self.alphabetical else ""
        return (
            f'ids = pre.Vocabulary(open("vocab.txt").read(), pieces={self.pieces}, '
            f"unknown={self.unknown}, offset={self.offset}{option})(words)"
        )


@functools.lru_cache(maxsize=8)
def _ids_of(words: str, alphabetical: bool) -> dict[str, int]:
    lines = words.splitlines()
    return {word: number for number, word in enumerate(sorted(lines) if alphabetical else lines)}


@dataclass(frozen=True)
class Sequence(Stage):
    """Cut or pad token ids to one length, int64 [length].

    Attributes:
        length: output length.
        first, last: ids added before and after the text; negative for none.
        pad: id of padding.
        side: side of the padding, ``end`` or ``start``.
        keep: part of long texts to keep, ``start`` or ``end``.
        late: whether to cut after `first` and `last` are added, which may cut them off.
        backwards: whether to reverse the ids.
    """

    name = "sequence"
    family = "text"
    order = 40
    length: int = 128
    first: int = -1
    last: int = -1
    pad: int = 0
    side: Literal["end", "start"] = "end"
    keep: Literal["start", "end"] = "start"
    late: bool = False
    backwards: bool = False

    def __call__(self, value: Array) -> Array:
        ends = (self.first >= 0) + (self.last >= 0)
        if self.length <= ends:
            raise InvalidArgumentError("length", f"{self.length} leaves no space for words")
        ids = value[::-1] if self.backwards else value
        ids = ids if self.late else self._cut(ids, self.length - ends)
        before, after = ([n] if n >= 0 else [] for n in (self.first, self.last))
        ids = self._cut(np.concatenate([before, ids, after]).astype(np.int64), self.length)
        missing = self.length - len(ids)
        sides = (0, missing) if self.side == "end" else (missing, 0)
        return np.pad(ids, sides, constant_values=self.pad)

    def _cut(self, value: Array, count: int) -> Array:
        return value[:count] if self.keep == "start" else value[max(len(value) - count, 0) :]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        if self.first >= 0:
            yield "the token before the text is missing", self.changed(first=-1)
        if self.last >= 0:
            yield "the token after the text is missing", self.changed(last=-1)
        if min(self.first, self.last) >= 0:
            yield "the tokens around the text are missing", self.changed(first=-1, last=-1)
            swapped = self.changed(first=self.last, last=self.first)
            yield "the tokens around the text are swapped", swapped
            late = "before" if self.late else "after"
            yield (
                f"text is cut {late} the tokens around it are added",
                self.changed(late=not self.late),
            )
        for side in ("start", "end"):
            yield f"padding is at the {side}", self.changed(side=side)
        for pad in (0, 1, 2, 3):
            yield f"padding has the id {pad}", self.changed(pad=pad)
        for keep in ("start", "end"):
            yield f"the {keep} of long texts is kept", self.changed(keep=keep)
        yield "the text is read backwards", self.changed(backwards=not self.backwards)

    def code(self) -> str:
        lines = ["ids = ids[::-1]"] if self.backwards else []
        before, after = (f"[{n}]" if n >= 0 else "[]" for n in (self.first, self.last))
        added = f"ids = np.concatenate([{before}, ids, {after}]).astype(np.int64)"
        room = self.length - (0 if self.late else (self.first >= 0) + (self.last >= 0))
        cut = f"ids = ids[:{room}]" if self.keep == "start" else f"ids = ids[-{room}:]"
        lines += [added, cut] if self.late else [cut, added]
        missing = f"{self.length} - len(ids)"
        sides = f"(0, {missing})" if self.side == "end" else f"({missing}, 0)"
        return "\n".join([*lines, f"x = np.pad(ids, {sides}, constant_values={self.pad})"])


def text_pipeline(
    vocabulary: Path | str,
    length: int = 128,
    *,
    lower: bool = True,
    dtype: str = "int64",
    before: str = "[CLS]",
    after: str = "[SEP]",
    unknown: str = "[UNK]",
    padding: str = "[PAD]",
) -> Pipeline:
    """Build the usual pipeline of BERT-like models: word pieces, lower-cased and without accents.

    Args:
        vocabulary: path of a ``vocab.txt``, or its text: one word or piece per line.
        length: token ids per sample.
        lower: whether to lower-case words and strip accents.
        dtype: type of token ids.
        before, after, unknown, padding: words of the vocabulary; `before` and `after` are optional.

    Raises:
        InvalidArgumentError: `vocabulary` cannot be read, or lacks `unknown` or `padding`.
    """
    try:
        words = vocabulary if isinstance(vocabulary, str) and "\n" in vocabulary else (
            Path(vocabulary).read_text("utf-8"))  # fmt: skip
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("vocabulary", f"the file cannot be read: {error}") from error
    numbers = _ids_of(words, False)
    for name, word in (("unknown", unknown), ("padding", padding)):
        if word not in numbers:
            raise InvalidArgumentError(name, f"the vocabulary has no {word}")
    return Pipeline((
        Read(), Casing("lower" if lower else "keep", accents=not lower), Split(),
        Vocabulary(words, unknown=numbers[unknown]),
        Sequence(length, numbers.get(before, -1), numbers.get(after, -1), numbers[padding]),
        Cast(dtype),
    ))  # fmt: skip


def vocabulary_of(texts: Iterable[str], most: int = 4096) -> str:
    """Build a vocabulary (`Vocabulary.words`) from texts, for models without one and for tests.

    It has four tokens (``[PAD]``, ``[UNK]``, ``[CLS]``, ``[SEP]``), all characters, alone and as
    pieces, then the most frequent words and endings of two to four characters; lower-cased and
    without accents.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(Split()(Casing("lower", accents=False)(text)))
    letters = sorted(set("".join(counts)))
    endings: Counter[str] = Counter()
    for word, count in counts.items():
        endings.update({"##" + word[-n:]: count for n in (2, 3, 4) if len(word) > n})
    frequent = sorted((counts | endings).items(), key=lambda item: (-item[1], item[0]))
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *("##" + c for c in letters)]
    more = [word for word, _ in frequent if word not in letters]
    return "\n".join([*lines, *more[: max(most - len(lines), 0)]]) + "\n"
