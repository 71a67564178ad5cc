"""Loaders of running text and parallel text."""

from __future__ import annotations

import importlib
import sysconfig
import tokenize
from collections.abc import Sequence
from pathlib import Path

from slipstream.data._files import check_positive, read_lines, read_text
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import Pairs, Sentences, Text
from slipstream.errors import InvalidArgumentError

# A tenth of the characters is held out, as whole documents.
_HELD_OUT = 0.1


def python_topics(entry: Entry) -> Text:
    """Load the topics of Python's ``help()``, sorted by title, with whole topics held out.

    The text is English with code, 0.4 MB, and varies with the Python version; see `checksum`.
    Since topics quote each other, every paragraph is included once, so that splits are disjoint.
    """
    # Imported by name, because the module has no type information.
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    documents = []
    for title in sorted(topics):
        unseen = []
        for paragraph in topics[title].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                unseen.append(paragraph)
        if unseen:
            documents.append("\n\n".join(unseen))
    return _hold_out(entry.name, documents)


def stdlib_source(entry: Entry, *, limit_bytes: int | None = None) -> Text:
    """Load the modules of the standard library, sorted by path, with whole files held out.

    Tests, bundled wheels and site-packages are excluded. Files are read in their declared encoding.

    Args:
        limit_bytes: size after which no further file is read; None for no limit.
    """
    check_positive(limit_bytes=limit_bytes)
    documents = []
    size = 0
    for path in stdlib_files():
        with tokenize.open(path) as file:
            text = file.read()
        documents.append(text)
        size += len(text.encode("utf-8"))
        if limit_bytes is not None and size >= limit_bytes:
            break
    return _hold_out(entry.name, documents)


def stdlib_files() -> list[Path]:
    """Return the sorted paths of the standard library's modules."""
    library = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    # lib2to3 contains deliberately broken sources; pydoc_data is a separate data set.
    foreign |= {"lib2to3", "pydoc_data", "ensurepip"}
    return sorted(
        path
        for path in library.rglob("*.py")
        if not foreign.intersection(path.relative_to(library).parts)
    )


def tiny_shakespeare(entry: Entry) -> Text:
    """Load plays of Shakespeare, 1,115,394 characters; the last tenth is the validation split."""
    text = read_text(entry, find(entry) / entry.files[0])
    cut = len(text) * 9 // 10
    return Text(entry.name, train=text[:cut], validation=text[cut:])


def wikitext2(entry: Entry) -> Text:
    """Load WikiText-2, tokenised; the validation file serves as `train`.

    The train file is not available, so perplexities on `test` cannot be compared with published
    ones.
    """
    folder = find(entry)
    train, test = (read_text(entry, folder / file) for file in entry.files)
    return Text(entry.name, train=train, validation="", test=test)


def multi30k(entry: Entry, *, source: str = "en", target: str = "de") -> Pairs:
    """Load image captions and their translations, lower-cased and tokenised.

    Args:
        source, target: ``"en"`` or ``"de"``.
    """
    for argument, language in (("source", source), ("target", target)):
        if language not in ("en", "de"):
            raise InvalidArgumentError(argument, f"'{language}' is not en or de")
    folder = find(entry)

    def side(part: str, language: str) -> tuple[str, ...]:
        return tuple(read_lines(entry, folder / f"{part}.{language}"))

    def split(part: str) -> Sentences:
        sentences = Sentences(side(part, source), side(part, target))
        if len(sentences.source) != len(sentences.target):
            raise CorruptDataError(entry.name, f"{part}: languages differ in length")
        return sentences

    return Pairs(
        entry.name, source, target, split("train"), split("val"), split("test_2016_flickr")
    )


def _hold_out(name: str, documents: Sequence[str]) -> Text:
    train: list[str] = []
    validation: list[str] = []
    seen = held = 0
    for text in documents:
        seen += len(text)
        if held + len(text) <= _HELD_OUT * seen:
            held += len(text)
            validation.append(text)
        else:
            train.append(text)
    return Text(name, "\n\n".join(train), "\n\n".join(validation))
