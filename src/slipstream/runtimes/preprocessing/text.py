"""Stages from text to a model's input: words, pieces of words, their numbers."""

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

# A longer word is unknown, as it is to BERT's own tokeniser.
_LONGEST = 100


@dataclass(frozen=True)
class Read(Stage):
    """Text, a file's bytes, or a path, to text.

    Attributes:
        encoding: of bytes; text goes through UTF-8, so that a wrong one does the same to both.
        form: Unicode's normal form.
        escapes: whether HTML's ``&amp;`` and the like are resolved.
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
                f"it is no text in {self.encoding}: {error}", remedy="save it as UTF-8"
            ) from error
        return unicodedata.normalize(self.form, html.unescape(text) if self.escapes else text)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "UTF-8 is read as Latin-1", self.changed(encoding="latin-1")
        yield "letters that ASCII lacks are dropped", self.changed(encoding="ascii")
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            yield f"Unicode's normal form is {form}", self.changed(form=form)
        resolved = "not resolved" if self.escapes else "resolved"
        yield f"escapes of HTML are {resolved}", self.changed(escapes=not self.escapes)

    def code(self) -> str:
        errors = ', "ignore"' if self.encoding == "ascii" else ""
        text = f'content.decode("{self.encoding}"{errors})'
        text = f"html.unescape({text})" if self.escapes else text
        return f'text = unicodedata.normalize("{self.form}", {text})'


@dataclass(frozen=True)
class Casing(Stage):
    """Letters as the vocabulary has them.

    Attributes:
        case: ``lower``, ``keep`` or ``upper``.
        accents: whether letters keep them.
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
        apart = unicodedata.normalize("NFD", cased)
        return "".join(one for one in apart if unicodedata.category(one) != "Mn")

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for case, text in (
            ("lower", "text is lower-cased"), ("keep", "text is not lower-cased"),
            ("upper", "text is upper-cased"),
        ):  # fmt: skip
            yield text, self.changed(case=case)
        kept = "taken off" if self.accents else "kept"
        yield f"accents are {kept}", self.changed(accents=not self.accents)

    def code(self) -> str:
        cased = {"lower": "text.lower()", "upper": "text.upper()", "keep": "text"}[self.case]
        if self.accents:
            return f"text = {cased}"
        apart = f'unicodedata.normalize("NFD", {cased})'
        return f'text = "".join(c for c in {apart} if unicodedata.category(c) != "Mn")'


@dataclass(frozen=True)
class Split(Stage):
    """Text to words.

    Attributes:
        marks: punctuation is a word a sign (``apart``), stays where it stands (``attached``), or is
            left out (``dropped``).
    """

    name = "split"
    family = "text"
    order = 20
    marks: Literal["apart", "attached", "dropped"] = "apart"

    def __call__(self, value: str) -> list[str]:
        return re.findall(_WORDS[self.marks], value)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "punctuation stays at its word", self.changed(marks="attached")
        yield "punctuation is left out", self.changed(marks="dropped")
        yield "every sign of punctuation is a word", self.changed(marks="apart")

    def code(self) -> str:
        return f"words = re.findall({_WORDS[self.marks]!r}, text)"


# The underscore is punctuation; what combines with a letter belongs to its word.
_LETTERS = r"(?:[^\W_]|[\u0300-\u036f])+"
_WORDS = {"apart": rf"{_LETTERS}|[^\s]", "attached": r"\S+", "dropped": _LETTERS}


@dataclass(frozen=True)
class Vocabulary(Stage):
    """Words to numbers, int64 [tokens].

    Attributes:
        words: one a line, as ``vocab.txt`` of BERT: the number of a word is that of its line, from
            0; what continues a word begins with ``##``.
        pieces: a word that is not there is cut into the longest pieces that are, from its front.
        unknown: number of words that cannot be cut; those are left out if it is negative.
        offset: added to all numbers.
        alphabetical: words were sorted before they were numbered.
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
        numbers = _numbers(self.words, self.alphabetical)
        ids = [number for word in value for number in self._word(word, numbers)]
        return np.array([n + self.offset for n in ids if n >= 0], np.int64)

    def _word(self, word: str, numbers: dict[str, int]) -> list[int]:
        if word in numbers or not self.pieces or len(word) > _LONGEST:
            return [numbers.get(word, self.unknown)]
        ids, at = [], 0
        while at < len(word):
            mark = "##" if at else ""
            ends = range(len(word), at, -1)
            end = next((end for end in ends if mark + word[at:end] in numbers), 0)
            if not end:
                return [self.unknown]
            ids.append(numbers[mark + word[at:end]])
            at = end
        return ids

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for offset in (0, 1, -1, 2, 3):
            text = f"numbers of words are {offset - self.offset:+d} off"
            yield text, self.changed(offset=offset)
        yield "the vocabulary is numbered in another order: sorted", self.changed(alphabetical=True)
        cut = "not cut" if self.pieces else "cut"
        yield f"unknown words are {cut} into pieces", self.changed(pieces=not self.pieces)
        for unknown in (-1, 0, 1):
            text = f"have the number {unknown}" if unknown >= 0 else "are left out"
            yield f"unknown words {text}", self.changed(unknown=unknown)

    def code(self) -> str:
        # The words are those of the reader's own file.
        odd = ", alphabetical=True" if self.alphabetical else ""
        return (
            f'ids = pre.Vocabulary(open("vocab.txt").read(), pieces={self.pieces}, '
            f"unknown={self.unknown}, offset={self.offset}{odd})(words)"
        )


@functools.lru_cache(maxsize=8)
def _numbers(words: str, alphabetical: bool) -> dict[str, int]:
    lines = words.splitlines()
    return {word: number for number, word in enumerate(sorted(lines) if alphabetical else lines)}


@dataclass(frozen=True)
class Sequence(Stage):
    """Numbers cut or filled up to one length, int64 [length].

    Attributes:
        length: that comes out.
        first, last: numbers put before and after the text; negative for none.
        pad: number that it is filled up with.
        side: where: at the ``end`` or the ``start``.
        keep: the ``start`` or the ``end`` of what is too long.
        late: it is cut after `first` and `last` were put there, so that one of them may be lost.
        backwards: the numbers stand in reverse order.
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
            raise InvalidArgumentError("length", f"{self.length} has no place for any word")
        kept = value[::-1] if self.backwards else value
        kept = kept if self.late else self._cut(kept, self.length - ends)
        before, after = ([n] if n >= 0 else [] for n in (self.first, self.last))
        kept = self._cut(np.concatenate([before, kept, after]).astype(np.int64), self.length)
        lacking = self.length - len(kept)
        sides = (0, lacking) if self.side == "end" else (lacking, 0)
        return np.pad(kept, sides, constant_values=self.pad)

    def _cut(self, value: Array, count: int) -> Array:
        return value[:count] if self.keep == "start" else value[max(len(value) - count, 0) :]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        if self.first >= 0:
            yield "the token before the text is missing", self.changed(first=-1)
        if self.last >= 0:
            yield "the token after the text is missing", self.changed(last=-1)
        if min(self.first, self.last) >= 0:
            yield "no tokens stand around the text", self.changed(first=-1, last=-1)
            swapped = self.changed(first=self.last, last=self.first)
            yield "the tokens around the text change places", swapped
            late = "before" if self.late else "after"
            yield (
                f"text is cut {late} the tokens around it are added",
                self.changed(late=not self.late),
            )
        for side in ("start", "end"):
            yield f"padding stands at the {side}", self.changed(side=side)
        for pad in (0, 1, 2, 3):
            yield f"padding has the number {pad}", self.changed(pad=pad)
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
        lacking = f"{self.length} - len(ids)"
        sides = f"(0, {lacking})" if self.side == "end" else f"({lacking}, 0)"
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
    """What BERT and its kin take: lower-cased words without accents, cut into pieces, numbered.

    Args:
        vocabulary: path of a ``vocab.txt``, or its text: one word or piece a line.
        length: numbers of a sample.
        lower: whether letters are lower-cased and lose their accents.
        dtype: of numbers.
        before, after, unknown, padding: words of the vocabulary; `before` and `after` may lack.

    Raises:
        InvalidArgumentError: `vocabulary` cannot be read, or lacks `unknown` or `padding`.
    """
    try:
        words = vocabulary if isinstance(vocabulary, str) and "\n" in vocabulary else (
            Path(vocabulary).read_text("utf-8"))  # fmt: skip
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("vocabulary", f"it cannot be read: {error}") from error
    numbers = _numbers(words, False)
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
    """A vocabulary of texts, as `Vocabulary.words`: for models without one, and for tests.

    Four tokens (``[PAD]``, ``[UNK]``, ``[CLS]``, ``[SEP]``), all letters, alone and as pieces, then
    the most frequent words and endings of two to four letters; lower-cased, without accents.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(Split()(Casing("lower", accents=False)(text)))
    letters = sorted(set("".join(counts)))
    endings: Counter[str] = Counter()
    for word, count in counts.items():
        endings.update({"##" + word[-n:]: count for n in (2, 3, 4) if len(word) > n})
    frequent = sorted((counts | endings).items(), key=lambda one: (-one[1], one[0]))
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *("##" + one for one in letters)]
    more = [word for word, _ in frequent if word not in letters]
    return "\n".join([*lines, *more[: max(most - len(lines), 0)]]) + "\n"
