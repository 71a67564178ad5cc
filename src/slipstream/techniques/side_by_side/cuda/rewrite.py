"""The words of a kernel's source that mean something else once it shares its block."""

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

# What asks for the whole block or grid, whose threads are no longer only this kernel's.
_REFUSED = {
    "__syncthreads_count": "a barrier that counts",
    "__syncthreads_and": "a barrier that counts",
    "__syncthreads_or": "a barrier that counts",
    "__barrier_sync": "a barrier with a number of its own",
    "__barrier_sync_count": "a barrier with a number of its own",
    "__activemask": "a mask of whatever threads are running",
    "cooperative_groups": "a cooperative group",
    "this_grid": "a barrier of the whole grid",
    "this_thread_block": "a cooperative group",
    "__cluster_dims__": "a cluster of blocks",
    "mbarrier": "a barrier in shared memory",
    "barrier": "a barrier in shared memory",
    "<<<": "a launch of another kernel",
}
_REFUSED_ASM = re.compile(
    r"\b(bar|barrier|mbarrier)\.|%n?(ctaid|tid)\b|%(warpid|nwarpid)\b|\bexit\b"
)
_PLACE = frozenset({"blockIdx", "gridDim"})
_DEFINE = re.compile(r"(\s*#\s*define\s+\w+(?:\([^)]*\))?)(.*)", re.DOTALL)


class Rewriter:
    """One kernel's items as they are written into a fused kernel's source.

    Args:
        part: the kernel, its items, threads and barrier.
        native: leave indices and barriers alone: for a block that has no other kernel.
    """

    def __init__(self, part: Part, native: bool = False) -> None:
        self.part = part
        self._native = native
        self._arrays = 0
        self._dynamic: dict[str, Item] = {}
        for one in part.items:
            if not one.function and is_dynamic(one):
                self._dynamic |= dict.fromkeys(_extern_names(one), one)
        self._placed = frozenset() if native else _placed(part)
        if not native:
            _refuse(part)

    @property
    def template_parameters(self) -> list[str]:
        """Of the fused kernel, those that are this one's: none where all are told."""
        if self.part.launch.template:
            return []
        return [self._renamed(one) for one in template_list(self.part.kernel)]

    @property
    def arguments(self) -> str:
        """What stands between the kernel's name and its parenthesis, as ``<float, 4>``."""
        names = [_declared_name(one) for one in template_list(self.part.kernel)]
        if not names:
            return ""
        text = self.part.launch.template or ", ".join(self._prefix(name) for name in names)
        return f"<{text}>"

    def parameters(self) -> list[tuple[str, str]]:
        """Of each of the kernel's parameters its declaration in the fused kernel, and its name."""
        names = parameter_names(self.part.kernel)
        declared = map(self._renamed, _parameter_list(self.part.kernel))
        return list(zip(declared, map(self._prefix, names), strict=True))

    def kernel(self) -> str:
        """The kernel as a device function."""
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
        """Another item; empty for what has become part of others."""
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
        """The text of an item's tokens from `start` on."""
        insert: dict[int, str] = {}
        begin, end = item.parameters
        takes = item is self.part.kernel or (end and item.name in self._placed)
        if takes and not self._native:
            empty = all(
                one.text == "void" or one.kind == "space" for one in item.tokens[begin + 1 : end]
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
        """Tokens with their words exchanged.

        Args:
            own: places of a function's own name, which is no call.
            insert: by place, what stands there instead.
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
                    raise KernelSourceError("a barrier as a value", where=token.where)
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
                        f"'{token.text}' is used as a value, and asks for its block",
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
        """A declaration of arrays in shared memory."""
        words = {one.text for one in statement}
        if "extern" in words:
            return self._dynamic_array(statement, _declared_name(statement[:-1]))
        dropped = {"__shared__", "static"}
        align, kept, at = "", list[Token](), 0
        while at < len(statement) - 1:
            if statement[at].text in ("__align__", "alignas"):
                end = closing(statement, plain(statement, at + 1))
                inner = joined(statement[at:end]).partition("(")[2]
                align, at = f"alignas({inner})", end + 1
                continue
            if statement[at].text not in dropped:
                kept.append(statement[at])
            at += 1
        type_, lines = "", []
        for number, one in enumerate(split(kept)):
            name = _declared_name(one, typed=number == 0)
            place = max(n for n, token in enumerate(one) if token.text == name)
            if number == 0:
                type_ = joined(one[:place]).strip()
            self._arrays += 1
            alias = f"slip_array_{self._arrays}"
            lines.append(f"using {alias} = {type_} {joined(one[place + 1 :])};".replace(" ;", ";"))
            lines.append(f"SLIP_SHARED({alias}, {name}, {align});")
        return " ".join(lines)

    def _dynamic_array(self, statement: Sequence[Token], name: str) -> str:
        place = max(n for n, one in enumerate(statement) if one.text == name)
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
        """A parameter of the kernel as one of the fused kernel."""
        parameter = _declared_name(tokens)
        templates = [_declared_name(one) for one in template_list(self.part.kernel)]
        given = [joined(one).strip() for one in split(tokens_of(self.part.launch.template, ""))]
        replaced = {name: self._prefix(name) for name in (*templates, parameter)}
        if given:
            replaced |= dict(zip(templates, given, strict=False))
            replaced[parameter] = self._prefix(parameter)
        qualified = {
            name: "::".join([self.part.space, *filter(None, one.spaces), name])
            for one in self.part.items
            if not one.function and one.directive != "define"
            for name in one.names
            if one.words & {"struct", "class", "union", "enum", "using", "typedef"}
        }
        texts = []
        for at, one in enumerate(tokens):
            behind = at and tokens[plain(tokens, at - 1, -1)].text == "::"
            name = None if behind else replaced.get(one.text) or qualified.get(one.text)
            if one.text not in ("__grid_constant__",):
                texts.append(name or one.text)
        return "".join(texts).strip()


def parameter_names(kernel: Item) -> list[str]:
    """Of its parameters, in order.

    Raises:
        KernelSourceError: one has none.
    """
    names = []
    for one in _parameter_list(kernel):
        names.append(_declared_name(one))
        if not names[-1]:
            raise KernelSourceError("a parameter without a name", where=one[0].where)
    return names


def _parameter_list(kernel: Item) -> list[list[Token]]:
    begin, end = kernel.parameters
    listed = split(kernel.tokens[begin + 1 : end])
    return [one for one in listed if [token.text for token in one] != ["void"]]


def template_list(item: Item) -> list[list[Token]]:
    """A function template's parameters, as tokens; empty for what is none."""
    at = plain(item.tokens, 0)
    if item.tokens[at].text != "template":
        return []
    begin = plain(item.tokens, at + 1)
    return split(item.tokens[begin + 1 : angle(item.tokens, begin) - 1])


def split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Tokens between commas that no bracket holds, without spaces at the ends."""
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
    return [one for one in map(_trimmed, parts) if one]


def _trimmed(tokens: list[Token]) -> list[Token]:
    places = [n for n, one in enumerate(tokens) if one.kind not in ("space", "comment")]
    return tokens[places[0] : places[-1] + 1] if places else []


def _declared_name(tokens: Sequence[Token], typed: bool = True) -> str:
    """The name that a parameter or variable declares; empty where it has none.

    Args:
        typed: whether its type stands before it.
    """
    end = next((n for n, one in enumerate(tokens) if one.text in ("=", "[")), len(tokens))
    words = [one.text for one in tokens[:end] if one.kind == "word"]
    return words[-1] if len(words) > typed else ""


def is_dynamic(item: Item) -> bool:
    """Whether it declares shared memory whose size is told at the launch."""
    return "__shared__" in item.words and any(
        any(one.text == "extern" for one in item.tokens[begin:end])
        for begin, end in _shared_statements(item.tokens)
    )


def _extern_names(item: Item) -> list[str]:
    return [_declared_name(item.tokens[:-1])]


def _shared_statements(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Places where declarations in shared memory begin and end."""
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


def _closure(part: Part, begins: Callable[[Item], bool]) -> frozenset[str]:
    """Names of functions and macros that do it, or mention one that does."""
    callers: dict[str, list[Item]] = {}
    names: set[str] = set()
    waiting: list[str] = []

    def add(item: Item) -> None:
        fresh = item.names - names
        names.update(fresh)
        waiting.extend(fresh)

    for one in part.items:
        able = one.parameters[1] or one.directive == "define"
        if not able or one is part.kernel:
            continue
        for word in one.words:
            callers.setdefault(word, []).append(one)
        if begins(one):
            add(one)
    while waiting:
        for one in callers.get(waiting.pop(), []):
            add(one)
    return frozenset(names)


def _placed(part: Part) -> frozenset[str]:
    """Functions that ask for their block or grid, themselves or through what they call."""
    for one in part.items:
        if one.parameters[1] == 0 and one.words & _PLACE and one.directive != "define":
            where = next(t.where for t in one.tokens if t.text in _PLACE)
            raise KernelSourceError(
                "a member function asks for its block", where=where,
                remedy="give it the index as an argument",
            )  # fmt: skip
    functions = _closure(part, lambda one: bool(one.words & _PLACE))
    macros = {name for one in part.items if one.directive == "define" for name in one.names}
    return functions - macros


def _refuse(part: Part) -> None:
    """Raise for what a kernel that shares its block cannot do.

    Raises:
        KernelSourceError: the first such thing, with its line.
    """
    for item in part.items:
        asm = bool(item.words & {"asm", "__asm__"})
        for at, token in enumerate(item.tokens):
            reason = _REFUSED.get(token.text) if token.kind in ("word", "mark") else None
            if token.text == "barrier":
                reason = (
                    reason if item.tokens[plain(item.tokens, at - 1, -1)].text == "::" else None
                )
            if asm and token.kind == "text" and _REFUSED_ASM.search(token.text):
                reason = "a barrier or an index in assembly"
            if reason is not None:
                raise KernelSourceError(
                    f"{part.kernel.name} has {reason}: {token.text.strip()[:60]}",
                    where=token.where,
                    remedy="only __syncthreads, __syncwarp and warps' shuffles are known here",
                )
    _refuse_recursion(part)


def _refuse_recursion(part: Part) -> None:
    functions: dict[str, list[Item]] = {}
    for one in part.items:
        if one.function:
            functions.setdefault(one.name, []).append(one)
    single = {
        name: ones[0] for name, ones in functions.items()
        if len(ones) == 1 and ones[0].tokens[0].text != "template"
    }  # fmt: skip
    calls = {
        name: {
            one.text for n, one in enumerate(item.tokens)
            if item.body[0] < n < item.body[1] and one.text in single
        }
        for name, item in single.items()
    }  # fmt: skip

    @functools.cache
    def reached(name: str) -> frozenset[str]:
        callees, waiting = set[str](), [name]
        while waiting:
            for one in calls[waiting.pop()] - callees:
                callees.add(one)
                waiting.append(one)
        return frozenset(callees)

    for name, item in single.items():
        if name in reached(name):
            raise KernelSourceError(
                f"{part.kernel.name} calls '{name}', which calls itself",
                where=item.tokens[0].where,
                remedy="write it as a loop: registers of a recursion cannot be bounded",
            )
