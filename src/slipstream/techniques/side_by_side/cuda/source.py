"""Minimal parser of CUDA C++ into tokens and top-level items, to move kernels, not check them.

A file is split into tokens, and those into top-level items: directives, functions, types,
variables. The items that a kernel needs are found by name. The only headers read are those in the
file's folder, and macros are not expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import UnknownNameError
from slipstream.techniques.side_by_side.hfuse import KernelSourceError

_TOKEN = re.compile(
    r"""(?P<directive>^[ \t]*\#(?:[^\n\\]|\\\n|\\.)*)
    |(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<text>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[\w.]|(?<=[eEpP])[+-]|'(?=\w))*)
    |(?P<space>\s+)
    |(?P<mark_>::|->|<<<|>>>|\#\#|[^\s\w])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OPEN, _CLOSE = dict(zip("([{", ")]}", strict=True)), frozenset(")]}")
# Words before a parenthesis that is not a parameter list.
_ATTRIBUTES = frozenset({"__launch_bounds__", "__attribute__", "__align__", "alignas", "decltype",
                         "__declspec", "noexcept", "requires"})  # fmt: skip
# Directives that are always copied, since they may surround needed items.
_COPIED_DIRECTIVES = frozenset(
    {"if", "ifdef", "ifndef", "elif", "else", "endif", "undef", "pragma", "error"}
)
_TYPES = frozenset({"struct", "class", "union", "enum"})


@dataclass(frozen=True)
class Token:
    """A token of source.

    Attributes:
        kind: directive, comment, text, word, number, space, or mark.
        text: unchanged text.
        line: line number, from 1.
        file: name of its file.
    """

    kind: str
    text: str
    line: int
    file: str

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Item:
    """A top-level directive, function, type or variable.

    Attributes:
        tokens: all its tokens.
        spaces: names of its namespaces, outermost first; "" for an anonymous one.
        names: names that it declares.
        function: whether it is a function definition, whose only name is in `names`.
        parameters: indices of the parentheses of a function definition or declaration.
        body: indices of the braces of a function definition.
        words: all identifiers in it, including those in directives.
    """

    tokens: tuple[Token, ...]
    spaces: tuple[str, ...]
    names: frozenset[str]
    function: bool = False
    parameters: tuple[int, int] = (0, 0)
    body: tuple[int, int] = (0, 0)
    words: frozenset[str] = field(default=frozenset())

    @property
    def directive(self) -> str:
        """Name of the directive, such as ``define``; empty for other items."""
        first = self.tokens[0]
        word = _WORD.search(first.text) if first.kind == "directive" else None
        return word.group() if word else ""

    @property
    def kernel(self) -> bool:
        """Whether it is a ``__global__`` function."""
        return self.function and "__global__" in self.words

    @property
    def name(self) -> str:
        """Name of a function."""
        return next(iter(self.names))


def tokens_of(text: str, file: str) -> list[Token]:
    """Split `text` into tokens, whose concatenation is `text`."""
    tokens, line = [], 1
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup).rstrip("_") if match.lastgroup != "mark" else "text"
        tokens.append(Token(kind, match.group(), line, file))
        line += match.group().count("\n")
    return tokens


def joined(tokens: Iterable[Token]) -> str:
    """Return the concatenated text of tokens."""
    return "".join(token.text for token in tokens)


def closing(tokens: Sequence[Token], at: int) -> int:
    """Return the index of the bracket that closes the one at `at`.

    Raises:
        KernelSourceError: the bracket is never closed.
    """
    depth = 0
    for place in range(at, len(tokens)):
        token = tokens[place]
        if token.kind == "mark":
            depth += (token.text in _OPEN) - (token.text in _CLOSE)
            if depth == 0:
                return place
    raise KernelSourceError(f"'{tokens[at].text}' is never closed", where=tokens[at].where)


def angle(tokens: Sequence[Token], at: int) -> int:
    """Return the index after a list in ``<>`` that opens at `at`."""
    depth = 0
    for place in range(at, len(tokens)):
        text = tokens[place].text
        depth += (text == "<") - (text.count(">") if set(text) == {">"} else 0)
        if tokens[place].kind == "mark" and text in "([{":
            continue
        if depth <= 0:
            return place + 1
    raise KernelSourceError("'<' is never closed", where=tokens[at].where)


def plain(tokens: Sequence[Token], start: int, step: int = 1) -> int:
    """Return the next index from `start` beyond spaces and comments; -1 or the length if none."""
    at = start
    while 0 <= at < len(tokens) and tokens[at].kind in ("space", "comment"):
        at += step
    return at


def read_items(path: Path) -> list[Item]:
    """Return all items of a file, including those of headers in its folder.

    Raises:
        KernelSourceError: the file does not exist or is not text, or its brackets do not match.
    """
    return list(_items(_with_headers(path, set()), ()))


def _with_headers(path: Path, seen: set[Path]) -> list[Token]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise KernelSourceError(f"'{path}' cannot be read: {reason}") from None
    seen.add(path.resolve())
    tokens: list[Token] = []
    for token in tokens_of(text, path.name):
        name = re.match(r'\s*#\s*include\s*"([^"]+)"', token.text)
        header = path.parent / name.group(1) if token.kind == "directive" and name else None
        if header is None or not header.is_file():
            tokens.append(token)
        elif header.resolve() not in seen:
            tokens += _with_headers(header, seen)
    return tokens


def _items(tokens: list[Token], spaces: tuple[str, ...]) -> Iterator[Item]:
    at = 0
    while (at := plain(tokens, at)) < len(tokens):
        first = tokens[at]
        if first.kind == "directive":
            yield _directive(first, spaces)
            at += 1
            continue
        inner = _container(tokens, at)
        if inner is not None:
            name, brace = inner
            end = closing(tokens, brace)
            yield from _items(tokens[brace + 1 : end], spaces if name is None else (*spaces, name))
            at = end + 1
            continue
        end = _end(tokens, at)
        if end > at + 1 or first.text != ";":
            yield _item(tuple(tokens[at:end]), spaces)
        at = end


def _directive(token: Token, spaces: tuple[str, ...]) -> Item:
    words = _WORD.findall(token.text)
    defined = frozenset(words[1:2]) if words[:1] == ["define"] else frozenset()
    return Item((token,), spaces, defined, words=frozenset(words[1:]) - defined)


def _container(tokens: Sequence[Token], at: int) -> tuple[str | None, int] | None:
    """Return a namespace's name, or None for ``extern "C" {``, and the index of its brace."""
    if tokens[at].text not in ("namespace", "extern", "inline"):
        return None
    words: list[str] = []
    for place in range(at, len(tokens)):
        token = tokens[place]
        if token.text == "{":
            named = words[0] == "namespace" or words[:2] == ["inline", "namespace"]
            if named:
                parts = [word for word in words if word not in ("namespace", "inline", "::")]
                return "::".join(parts), place
            return (None, place) if len(words) == 2 and words[1] == '"C"' else None
        if token.text in (";", "(", "="):
            return None
        if token.kind not in ("space", "comment"):
            words.append(token.text)
    return None


def _end(tokens: Sequence[Token], at: int) -> int:
    """Return the index after the item that starts at `at`."""
    place, has_parentheses, assigned = at, False, False
    while place < len(tokens):
        text = tokens[place].text
        if tokens[place].kind == "mark":
            if text in "([{":
                end = closing(tokens, place)
                behind = plain(tokens, end + 1)
                if text == "{" and has_parentheses and not assigned:
                    return end + 1
                has_parentheses |= text == "("
                place = end + 1
                if text == "{" and behind < len(tokens) and tokens[behind].kind == "directive":
                    return place
                continue
            if text == ";":
                return place + 1
            if text in _CLOSE:
                raise KernelSourceError(
                    f"'{text}' does not match an opening bracket", where=tokens[place].where
                )
            assigned |= text == "="
        place += 1
    raise KernelSourceError("the file ends within a declaration", where=tokens[at].where)


def _item(tokens: tuple[Token, ...], spaces: tuple[str, ...]) -> Item:
    words = frozenset(
        word for token in tokens if token.kind in ("word", "directive")
        for word in _WORD.findall(token.text)
    )  # fmt: skip
    signature = _signature(tokens)
    if signature is not None:
        name, parameters, brace = signature
        names = frozenset({tokens[name].text})
        if brace is None:
            return Item(tokens, spaces, names, parameters=parameters, words=words)
        body = brace, closing(tokens, brace)
        return Item(tokens, spaces, names, True, parameters, body, words)
    return Item(tokens, spaces, _declared(tokens), words=words)


def _signature(
    tokens: Sequence[Token],
) -> tuple[int, tuple[int, int], int | None] | None:
    """Return the indices of a function's name, its parentheses and its body's brace."""
    at = 0
    while at < len(tokens):
        text = tokens[at].text
        if text in ("=", ";", "{") or (text in _TYPES and not at):
            return None
        if text == "template":
            at = angle(tokens, plain(tokens, at + 1))
            continue
        if text == "(":
            before = plain(tokens, at - 1, -1)
            end = closing(tokens, at)
            word = tokens[before].text if before >= 0 and tokens[before].kind == "word" else ""
            inner = plain(tokens, at + 1)
            if word and word not in _ATTRIBUTES and tokens[inner].text != "*":
                return before, (at, end), _brace(tokens, end + 1)
            at = end
        at += 1
    return None


def _brace(tokens: Sequence[Token], at: int) -> int | None:
    for place in range(at, len(tokens)):
        if tokens[place].text == "{":
            return place
        if tokens[place].text in (";", "="):
            return None
    return None


def _declared(tokens: Sequence[Token]) -> frozenset[str]:
    """Return the names that a type or variable declares, possibly too many."""
    names, at, enum = set(), 0, any(token.text == "enum" for token in tokens)
    while at < len(tokens):
        token = tokens[at]
        if token.text == "template":
            at = angle(tokens, plain(tokens, at + 1))
            continue
        if token.text == "=" and not enum:
            break
        if token.text == "{" and not enum:
            at = closing(tokens, at)
        elif token.kind == "word":
            names.add(token.text)
        at += 1
    return frozenset(names)


def needed(items: Sequence[Item], kernel: Item) -> list[Item]:
    """Return the items that `kernel` needs, in order, including itself but no other kernel."""
    items_by_name: dict[str, list[int]] = {}
    for n, item in enumerate(items):
        for name in item.names if not item.kernel else ():
            items_by_name.setdefault(name, []).append(n)
    chosen = {
        n for n, item in enumerate(items) if item is kernel or item.directive in _COPIED_DIRECTIVES
    }
    waiting, seen = list(chosen), set[str]()
    while waiting:
        fresh = items[waiting.pop()].words - seen
        seen |= fresh
        for n in (n for word in fresh for n in items_by_name.get(word, ())):
            if n not in chosen:
                chosen.add(n)
                waiting.append(n)
    retained = [items[n] for n in sorted(chosen)]
    return [item for item in retained if "once" not in item.words or item.directive != "pragma"]


def find_kernel(items: Sequence[Item], name: str, file: str) -> Item:
    """Return the kernel of that name.

    Raises:
        UnknownNameError: the file does not have the kernel.
    """
    kernels = {item.name: item for item in items if item.kernel}
    if name not in kernels:
        raise UnknownNameError(f"kernel of {file}", name, kernels)
    return kernels[name]
