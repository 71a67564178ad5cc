"""Rewriting of the identifiers in a kernel's source that change meaning in a shared block."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.techniques.side_by_side.cuda.source import (
    Item,
    Token,
    angle,
    closing,
    joined,
    plain,
    tokens_of,
)
from slipstream.techniques.side_by_side.hfuse import KernelSourceError

if TYPE_CHECKING:
    from slipstream.techniques.side_by_side.cuda.fuse import Part

# Operations on the whole block or grid, whose threads also belong to other kernels.
_UNSUPPORTED = {
    "__syncthreads_count": "a barrier that counts",
    "__syncthreads_and": "a barrier that counts",
    "__syncthreads_or": "a barrier that counts",
    "__barrier_sync": "a numbered barrier",
    "__barrier_sync_count": "a numbered barrier",
    "__activemask": "a mask of the active threads",
    "cooperative_groups": "a cooperative group",
    "this_grid": "a barrier of the whole grid",
    "this_thread_block": "a cooperative group",
    "__cluster_dims__": "a cluster of blocks",
    "mbarrier": "a barrier in shared memory",
    "barrier": "a barrier in shared memory",
    "<<<": "a launch of another kernel",
}
_UNSUPPORTED_ASM = re.compile(
    r"\b(bar|barrier|mbarrier)\.|%n?(ctaid|tid)\b|%(warpid|nwarpid)\b|\bexit\b"
)
_PLACE = frozenset({"blockIdx", "gridDim"})
_DEFINE = re.compile(r"(\s*#\s*define\s+\w+(?:\([^)]*\))?)(.*)", re.DOTALL)


class Rewriter:
    """Writer of a kernel's items in the source of a fused kernel.

    Args:
        part: the kernel, its items, threads and barrier.
        native: keep indices and barriers, for a block without other kernels.
    """

    def __init__(self, part: Part, native: bool = False) -> None:
        self.part = part
        self._native = native
        self._arrays = 0
        self._dynamic: dict[str, Item] = {}
        for item in part.items:
            if not item.function and is_dynamic(item):
                self._dynamic[_declared_name(item.tokens[:-1])] = item
        self._placed = frozenset() if native else _placed(part)
        if not native:
            _check_supported(part)

    @property
    def template_parameters(self) -> list[str]:
        """Template parameters that this kernel adds; none if the launch passes arguments."""
        if self.part.launch.template:
            return []
        return [self._renamed(parameter) for parameter in template_list(self.part.kernel)]

    @property
    def arguments(self) -> str:
        """Template arguments of a call of the kernel, such as ``<float, 4>``."""
        names = [_declared_name(parameter) for parameter in template_list(self.part.kernel)]
        if not names:
            return ""
        text = self.part.launch.template or ", ".join(self._prefix(name) for name in names)
        return f"<{text}>"

    def parameters(self) -> list[tuple[str, str]]:
        """Return each parameter's declaration in the fused kernel, and its name."""
        names = parameter_names(self.part.kernel)
        declared = map(self._renamed, _parameter_list(self.part.kernel))
        return list(zip(declared, map(self._prefix, names), strict=True))

    def kernel(self) -> str:
        """Return the kernel as a device function."""
        item = self.part.kernel
        begin = item.parameters[0]
        head, at = [], 0
        while at < begin:
            token = item.tokens[at]
            if token.text == "__launch_bounds__":
                at = closing(item.tokens, plain(item.tokens, at + 1)) + 1
                continue
            if token.text == "__global__":
                head.append("SLIP_INLINE")
            elif token.text not in ("extern", '"C"', "static"):
                head.append(token.text)
            at += 1
        return "".join(head).strip() + self._tokens(item, begin)

    def item(self, item: Item) -> str:
        """Return another item; empty for one that is written into functions instead."""
        if any(name in self._dynamic for name in item.names) and not item.function:
            return ""
        if item.directive == "define":
            macro = _DEFINE.fullmatch(item.tokens[0].text)
            if macro is None:
                return item.tokens[0].text
            tokens = tokens_of(macro[2], item.tokens[0].file)
            return macro[1] + self._words(tokens, set(), item.tokens[0].line)
        return self._tokens(item, 0)

    def _tokens(self, item: Item, start: int) -> str:
        """Return the text of an item's tokens from `start`."""
        insert: dict[int, str] = {}
        begin, end = item.parameters
        takes = item is self.part.kernel or (end and item.name in self._placed)
        if takes and not self._native:
            empty = all(
                token.text == "void" or token.kind == "space"
                for token in item.tokens[begin + 1 : end]
            )
            insert[begin - start] = "(slip::Place slip_place" + ("" if empty else ", ")
        if item.function:
            arrays = sorted(self._dynamic.keys() & item.words)
            insert[item.body[0] - start] = "{" + "".join(
                self._dynamic_array(self._dynamic[name].tokens, name) for name in arrays
            )
        places = {begin - start - 1} if end else set()
        return self._words(item.tokens[start:], places, item.tokens[0].line, insert)

    def _words(
        self,
        tokens: Sequence[Token],
        own: set[int],
        line: int,
        insert: dict[int, str] | None = None,
    ) -> str:
        """Return the text of tokens with replaced identifiers.

        Args:
            own: indices of a function's own name, which is not a call.
            insert: replacements by index.
        """
        shared = dict(_shared_statements(tokens))
        insert = insert or {}
        texts: list[str] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if at in insert:
                texts.append(insert[at])
            elif at in shared:
                texts.append(self._array(tokens[at : shared[at]]))
                at = shared[at]
                continue
            elif token.kind != "word" or self._native:
                texts.append(token.text)
            elif token.text == "__syncthreads":
                opened = plain(tokens, at + 1)
                if opened >= len(tokens) or tokens[opened].text != "(":
                    raise KernelSourceError("a barrier is used as a value", where=token.where)
                texts.append(f"SLIP_BARRIER({self.part.barrier}, {self.part.launch.threads})")
                at = closing(tokens, opened)
            elif token.text in _PLACE:
                field = "block" if token.text == "blockIdx" else "grid"
                texts.append(f"slip_place.{field}")
            elif token.text == "threadIdx":
                block = ", ".join(map(str, (self.part.start, *self.part.launch.block)))
                texts.append(f"slip::thread<{block}>()")
            elif token.text == "blockDim":
                block = ", ".join(map(str, self.part.launch.block))
                texts.append(f"slip::extent<{block}>()")
            elif token.text in self._placed and at not in own and not _member(tokens, at):
                opened = plain(tokens, at + 1)
                if opened < len(tokens) and tokens[opened].text == "<":
                    opened = plain(tokens, angle(tokens, opened))
                if opened >= len(tokens) or tokens[opened].text != "(":
                    raise KernelSourceError(
                        f"'{token.text}' reads its block index and is used as a value",
                        where=f"{token.file}:{line + token.line - 1}",
                    )
                texts.append(joined(tokens[at : opened + 1]) + "slip_place")
                texts.append("" if tokens[plain(tokens, opened + 1)].text == ")" else ", ")
                at = opened
            else:
                texts.append(token.text)
            at += 1
        return "".join(texts)

    def _array(self, statement: Sequence[Token]) -> str:
        """Return a declaration of arrays in shared memory."""
        words = {token.text for token in statement}
        if "extern" in words:
            return self._dynamic_array(statement, _declared_name(statement[:-1]))
        dropped = {"__shared__", "static"}
        align, retained, at = "", list[Token](), 0
        while at < len(statement) - 1:
            if statement[at].text in ("__align__", "alignas"):
                end = closing(statement, plain(statement, at + 1))
                inner = joined(statement[at:end]).partition("(")[2]
                align, at = f"alignas({inner})", end + 1
                continue
            if statement[at].text not in dropped:
                retained.append(statement[at])
            at += 1
        type_, lines = "", []
        for number, declared in enumerate(split(retained)):
            name = _declared_name(declared, typed=number == 0)
            place = max(n for n, token in enumerate(declared) if token.text == name)
            if number == 0:
                type_ = joined(declared[:place]).strip()
            self._arrays += 1
            alias = f"slip_array_{self._arrays}"
            lines.append(
                f"using {alias} = {type_} {joined(declared[place + 1 :])};".replace(" ;", ";")
            )
            lines.append(f"SLIP_SHARED({alias}, {name}, {align});")
        return " ".join(lines)

    def _dynamic_array(self, statement: Sequence[Token], name: str) -> str:
        place = max(n for n, token in enumerate(statement) if token.text == name)
        words, at = [], 0
        while at < place:
            if statement[at].text in ("__align__", "alignas"):
                at = closing(statement, plain(statement, at + 1))
            elif statement[at].text not in ("extern", "__shared__"):
                words.append(statement[at].text)
            at += 1
        type_ = "".join(words).strip()
        return (
            f"{type_}* const {name} = "
            f"reinterpret_cast<{type_}*>(slip::dynamic() + {self.part.offset});"
        )

    def _prefix(self, name: str) -> str:
        return f"{self.part.kernel.name}_{self.part.barrier}_{name}"

    def _renamed(self, tokens: Sequence[Token]) -> str:
        """Return a parameter of the kernel, renamed for the fused kernel."""
        parameter = _declared_name(tokens)
        templates = [_declared_name(template) for template in template_list(self.part.kernel)]
        arguments = split(tokens_of(self.part.launch.template, ""))
        replaced = {name: self._prefix(name) for name in (*templates, parameter)}
        if arguments:
            texts = (joined(argument).strip() for argument in arguments)
            replaced |= dict(zip(templates, texts, strict=False))
            replaced[parameter] = self._prefix(parameter)
        qualified = {
            name: "::".join([self.part.space, *filter(None, item.spaces), name])
            for item in self.part.items
            if not item.function and item.directive != "define"
            for name in item.names
            if item.words & {"struct", "class", "union", "enum", "using", "typedef"}
        }
        words = []
        for at, token in enumerate(tokens):
            is_member = at and tokens[plain(tokens, at - 1, -1)].text == "::"
            name = None if is_member else replaced.get(token.text) or qualified.get(token.text)
            if token.text not in ("__grid_constant__",):
                words.append(name or token.text)
        return "".join(words).strip()


def parameter_names(kernel: Item) -> list[str]:
    """Return the names of the kernel's parameters, in order.

    Raises:
        KernelSourceError: a parameter has no name.
    """
    names = []
    for parameter in _parameter_list(kernel):
        names.append(_declared_name(parameter))
        if not names[-1]:
            raise KernelSourceError("a parameter has no name", where=parameter[0].where)
    return names


def _parameter_list(kernel: Item) -> list[list[Token]]:
    begin, end = kernel.parameters
    listed = split(kernel.tokens[begin + 1 : end])
    return [parameter for parameter in listed if [token.text for token in parameter] != ["void"]]


def template_list(item: Item) -> list[list[Token]]:
    """Return a function template's parameters, as tokens; empty for other items."""
    at = plain(item.tokens, 0)
    if item.tokens[at].text != "template":
        return []
    begin = plain(item.tokens, at + 1)
    return split(item.tokens[begin + 1 : angle(item.tokens, begin) - 1])


def split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Split tokens at commas outside of brackets, and strip spaces."""
    parts: list[list[Token]] = [[]]
    at = 0
    while at < len(tokens):
        token, end = tokens[at], at
        if token.kind == "mark" and token.text in "([{":
            end = closing(tokens, at)
        elif token.text == "<":
            end = angle(tokens, at) - 1
        if token.text == ",":
            parts.append([])
        else:
            parts[-1] += tokens[at : end + 1]
        at = end + 1
    return [part for part in map(_trimmed, parts) if part]


def _trimmed(tokens: list[Token]) -> list[Token]:
    places = [n for n, token in enumerate(tokens) if token.kind not in ("space", "comment")]
    return tokens[places[0] : places[-1] + 1] if places else []


def _declared_name(tokens: Sequence[Token], typed: bool = True) -> str:
    """Return the name that a parameter or variable declares; empty if it has none.

    Args:
        typed: whether a type precedes it.
    """
    end = next((n for n, token in enumerate(tokens) if token.text in ("=", "[")), len(tokens))
    words = [token.text for token in tokens[:end] if token.kind == "word"]
    return words[-1] if len(words) > typed else ""


def is_dynamic(item: Item) -> bool:
    """Whether an item declares dynamic shared memory, whose size the launch sets."""
    return "__shared__" in item.words and any(
        any(token.text == "extern" for token in item.tokens[begin:end])
        for begin, end in _shared_statements(item.tokens)
    )


def _shared_statements(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return the start and end indices of declarations in shared memory."""
    spans = []
    for at, token in enumerate(tokens):
        if token.text != "__shared__":
            continue
        begin = at
        while begin and tokens[begin - 1].text not in (";", "{", "}", ":"):
            if tokens[begin - 1].kind == "directive":
                break
            begin -= 1
        begin = plain(tokens, begin)
        end = next((n for n in range(at, len(tokens)) if tokens[n].text == ";"), len(tokens))
        spans.append((begin, min(end + 1, len(tokens))))
    return spans


def _member(tokens: Sequence[Token], at: int) -> bool:
    before = plain(tokens, at - 1, -1)
    return before >= 0 and tokens[before].text in (".", "->")


def _closure(part: Part, starts: Callable[[Item], bool]) -> frozenset[str]:
    """Return the functions and macros that satisfy `starts`, or mention one that does."""
    callers: dict[str, list[Item]] = {}
    names: set[str] = set()
    waiting: list[str] = []

    def add(item: Item) -> None:
        fresh = item.names - names
        names.update(fresh)
        waiting.extend(fresh)

    for item in part.items:
        callable_item = item.parameters[1] or item.directive == "define"
        if not callable_item or item is part.kernel:
            continue
        for word in item.words:
            callers.setdefault(word, []).append(item)
        if starts(item):
            add(item)
    while waiting:
        for item in callers.get(waiting.pop(), []):
            add(item)
    return frozenset(names)


def _placed(part: Part) -> frozenset[str]:
    """Return the functions that read their block or grid, directly or through calls."""
    for item in part.items:
        if item.parameters[1] == 0 and item.words & _PLACE and item.directive != "define":
            where = next(t.where for t in item.tokens if t.text in _PLACE)
            raise KernelSourceError(
                "a member function reads its block index", where=where,
                remedy="pass the index as an argument",
            )  # fmt: skip
    functions = _closure(part, lambda item: bool(item.words & _PLACE))
    macros = {name for item in part.items if item.directive == "define" for name in item.names}
    return functions - macros


def _check_supported(part: Part) -> None:
    """Raise `KernelSourceError` at the first operation that a shared block does not support."""
    for item in part.items:
        asm = bool(item.words & {"asm", "__asm__"})
        for at, token in enumerate(item.tokens):
            reason = _UNSUPPORTED.get(token.text) if token.kind in ("word", "mark") else None
            if token.text == "barrier":
                reason = (
                    reason if item.tokens[plain(item.tokens, at - 1, -1)].text == "::" else None
                )
            if asm and token.kind == "text" and _UNSUPPORTED_ASM.search(token.text):
                reason = "a barrier or an index in assembly"
            if reason is not None:
                raise KernelSourceError(
                    f"{part.kernel.name} uses {reason}: {token.text.strip()[:60]}",
                    where=token.where,
                    remedy="use only __syncthreads, __syncwarp and warp shuffles",
                )
    _check_recursion(part)


def _check_recursion(part: Part) -> None:
    functions: dict[str, list[Item]] = {}
    for item in part.items:
        if item.function:
            functions.setdefault(item.name, []).append(item)
    single = {
        name: items[0] for name, items in functions.items()
        if len(items) == 1 and items[0].tokens[0].text != "template"
    }  # fmt: skip
    calls = {
        name: {
            token.text for n, token in enumerate(item.tokens)
            if item.body[0] < n < item.body[1] and token.text in single
        }
        for name, item in single.items()
    }  # fmt: skip

    @functools.cache
    def reached(name: str) -> frozenset[str]:
        callees, waiting = set[str](), [name]
        while waiting:
            for callee in calls[waiting.pop()] - callees:
                callees.add(callee)
                waiting.append(callee)
        return frozenset(callees)

    for name, item in single.items():
        if name in reached(name):
            raise KernelSourceError(
                f"{part.kernel.name} calls '{name}', which calls itself",
                where=item.tokens[0].where,
                remedy="write a loop; the registers of a recursion cannot be bounded",
            )
