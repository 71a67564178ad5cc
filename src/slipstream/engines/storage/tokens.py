"""Tokens of the contexts of requests: text without identifiers, counts and times."""

from __future__ import annotations

import functools
import re

Context = tuple[tuple[str, str], ...]
"""Pairs of key and text, sorted by key."""
MAX_TOKENS = 64
# Identifiers and times: they determine a request, so nothing learned from them applies to others.
_LEAKS = frozenset(
    ("trace_id", "span_id", "parent_id", "time", "timestamp", "pid", "thread.id", "process.pid")
)
_HASH = re.compile(r"(?=[a-z]*\d)[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|(?=[a-f]*\d)"
                   r"(?=\d*[a-f])[0-9a-f]{16,}", re.IGNORECASE)  # fmt: skip
_WORD = re.compile(r"<hash>|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")


@functools.lru_cache(1 << 16)
def tokens_of(text: str) -> tuple[str, ...]:
    """Split text at punctuation, changes of case and digits.

    A number becomes ``<num:LENGTH>``, a hash or UUID ``<hash>``.

    >>> tokens_of("/data/trainA/shard-00012.tar")
    ('data', 'train', 'a', 'shard', '<num:5>', 'tar')
    """
    words = _WORD.findall(_HASH.sub("<hash>", text))
    return tuple(f"<num:{len(word)}>" if word.isdigit() else word.lower() for word in words)


def key_tokens(context: Context) -> Context:
    """Return the tokens of each key, joined by spaces.

    At most `MAX_TOKENS` are kept; keys that leak are omitted.
    """
    found: dict[str, str] = {}
    room = MAX_TOKENS
    for key, text in context:
        if key.lower() not in _LEAKS and room > 0:
            words = tokens_of(str(text))[:room]
            found[key] = " ".join(words)
            room -= len(words)
    return tuple(found.items())


class ContextClasses:
    """Numbers of contexts, from 0: those with equal tokens share one. Numbers are memoised.

    Attributes:
        tokens: by number, the tokens of its contexts by key.
    """

    def __init__(self) -> None:
        self.tokens: list[Context] = []
        self._numbers: dict[Context, int] = {}
        self._of_tokens: dict[Context, int] = {}

    def number(self, context: Context) -> int:
        """Return the number of a context."""
        number = self._numbers.get(context)
        if number is None:
            tokens = key_tokens(context)
            number = self._numbers[context] = self._of_tokens.setdefault(tokens, len(self.tokens))
            if number == len(self.tokens):
                self.tokens.append(tokens)
        return number
