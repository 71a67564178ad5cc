"""`Expression`: a composition of operators and library functions, as data.

Patterns that are read from a model consist of ATen operators; replacements are built from
`FUNCTIONS`. Sizes in arguments are those of the model where the pattern was found; `run` can
substitute others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Ref:
    """The value of an input, or of an earlier instruction: inputs are numbered first."""

    index: int


@dataclass(frozen=True)
class Constant:
    """A number of the pattern by its index, or the number's inverse."""

    index: int
    inverse: bool = False


@dataclass(frozen=True)
class Instruction:
    """A call: ``aten`` operator with its overload, or a key of `FUNCTIONS`; `Ref`s and scalars."""

    op: str
    arguments: tuple[Any, ...]


class Function(NamedTuple):
    """A library function that replacements are composed of.

    Attributes:
        call: takes the instruction's arguments.
        source: how users write it, with a placeholder per argument.
        is_view: whether it only makes a view, which costs nothing.
    """

    call: Callable[..., torch.Tensor]
    source: str
    is_view: bool = False


def _functions() -> dict[str, Function]:
    named: dict[str, Function] = {}
    for text in (
        "exp log sqrt rsqrt relu tanh sigmoid abs neg square erf reciprocal", "F.gelu F.silu",
        "F.softplus F.logsigmoid maximum:2 addmm:3 F.cross_entropy:2",
    ):  # fmt: skip
        for item in text.split():
            path, _, count = item.partition(":")
            name, slots = path.removeprefix("F."), range(int(count or 1))
            shown = path if path.startswith("F.") else f"torch.{path}"
            home: Any = functional if path.startswith("F.") else torch
            arguments = ", ".join(f"{{{n}}}" for n in slots)
            named[name] = Function(getattr(home, name), f"{shown}({arguments})")
    for name, sign in {"add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@"}.items():
        named[name] = Function(getattr(torch, name), f"{{0}} {sign} {{1}}")
    for name in ("sum", "mean", "amax", "logsumexp"):
        source = f"torch.{name}({{0}}, {{1}}, {{2}})"
        named[name] = Function(getattr(torch, name), source)
    for name in ("softmax", "log_softmax", "cumsum"):
        named[name] = Function(getattr(torch, name), f"torch.{name}({{0}}, dim={{1}})")
    for name, arity in {"transpose": 3, "unsqueeze": 2, "squeeze": 2}.items():
        arguments = ", ".join(f"{{{n}}}" for n in range(1, arity))
        named[name] = Function(getattr(torch, name), f"{{0}}.{name}({arguments})", True)
    return named


_F = functional
FUNCTIONS: dict[str, Function] = _functions() | {
    "gelu_tanh": Function(lambda x: _F.gelu(x, approximate="tanh"), "F.gelu({0}, 'tanh')"),
    "clone": Function(lambda x: x.clone(memory_format=torch.contiguous_format),
                      "{0}.clone(memory_format=torch.contiguous_format)"),
    "max_values": Function(lambda x, dim, keepdim: torch.max(x, dim, keepdim).values,
                           "{0}.max({1}, {2}).values"),
    # torch.var takes several times as long on the CPU.
    "variance": Function(
        lambda x, dim, keepdim: _F.mse_loss(x, x.mean(dim, True).expand_as(x), reduction="none")
        .mean(dim, keepdim),
        "F.mse_loss({0}, {0}.mean({1}, True).expand_as({0}), reduction='none').mean({1}, {2})",
    ),
    "norm": Function(lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim),
                     "torch.linalg.vector_norm({0}, 2, {1}, {2})"),
    "normalize": Function(lambda x, dim, eps: _F.normalize(x, dim=dim, eps=eps),
                          "F.normalize({0}, 2, {1}, {2})"),
    "mean_all": Function(torch.mean, "torch.mean({0})"),
    "sum_all": Function(torch.sum, "torch.sum({0})"),
    "layer_norm": Function(
        lambda x, weight, bias, eps: _F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        "F.layer_norm({0}, {0}.shape[-1:], {1}, {2}, {3})",
    ),
    "rms_norm": Function(lambda x, weight, eps: _F.rms_norm(x, x.shape[-1:], weight, eps),
                         "F.rms_norm({0}, {0}.shape[-1:], {1}, {2})"),
    "linear": Function(lambda x, w, b: _F.linear(x, w.mT, b), "F.linear({0}, {1}.mT, {2})"),
    "attention": Function(
        lambda q, k, v, m, s: _F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=s),
        "F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3}, scale={4})",
    ),
}  # fmt: skip
"""What replacements are composed of, by name."""
_SHAPED = ("view", "_unsafe_view", "reshape", "expand")


@dataclass(frozen=True)
class Expression:
    """A composition of calls on some inputs; its value is that of `result`.

    Attributes:
        constants: numbers that `Constant` refers to.
    """

    inputs: int
    instructions: tuple[Instruction, ...]
    result: Ref
    constants: tuple[float, ...] = ()

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[int, int] | None = None,
        noise: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the value.

        Args:
            sizes: other extents for those in arguments of views.
            noise: applied to every operand of an instruction that computes.
        """
        values = list(inputs)
        for instruction in self.instructions:
            operands: Sequence[torch.Tensor] = values
            if noise is not None and not is_view(instruction.op):
                used = {a.index for a in _refs(instruction.arguments)}
                operands = [noise(v) if n in used else v for n, v in enumerate(values)]
            values.append(call(instruction, operands, self.constants, sizes))
        return values[self.result.index]

    @property
    def operators(self) -> int:
        """Number of calls that compute, which views do not."""
        return sum(not is_view(instruction.op) for instruction in self.instructions)

    @property
    def source(self) -> str:
        """Python source of the value, with inputs ``a``, ``b``, ...."""
        texts = [chr(97 + n) for n in range(self.inputs)]
        for instruction in self.instructions:
            arguments = [self._text(argument, texts) for argument in instruction.arguments]
            function = FUNCTIONS.get(instruction.op)
            if function is None:
                name = instruction.op.partition(".")[0]
                shown = [text for text in arguments if text != "None"]
                texts.append(f"{name}({', '.join(shown)})")
                continue
            if function.source.startswith("{0} "):
                arguments = [f"({text})" if " " in text else text for text in arguments]
            texts.append(function.source.format(*arguments))
        return texts[self.result.index]

    def _text(self, argument: Any, texts: Sequence[str]) -> str:
        if isinstance(argument, Ref):
            return texts[argument.index]
        if isinstance(argument, tuple):
            return f"[{', '.join(self._text(item, texts) for item in argument)}]"
        value = scalar(argument, self.constants)
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    def to_json(self) -> list[Any]:
        """Return JSON for `from_json`."""
        rows = [[i.op, [_encode(argument) for argument in i.arguments]] for i in self.instructions]
        return [self.inputs, rows, self.result.index, list(self.constants)]

    @classmethod
    def from_json(cls, value: Any) -> Expression:
        """Return the expression that `to_json` encoded."""
        inputs, rows, result, constants = value
        instructions = tuple(Instruction(str(op), tuple(map(_decode, row))) for op, row in rows)
        for instruction in instructions:
            function_of(instruction.op)
        return cls(int(inputs), instructions, Ref(int(result)), tuple(constants))

    @property
    def key(self) -> str:
        """The identity of the expression."""
        return json.dumps(self.to_json(), separators=(",", ":"))


@cache
def function_of(op: str) -> Any:
    """Return the function of `FUNCTIONS`, or the ATen operator, that an instruction calls.

    Raises:
        AttributeError: this torch has no such operator.
    """
    if op in FUNCTIONS:
        return FUNCTIONS[op].call
    name, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload)


@cache
def is_view(op: str) -> bool:
    """Whether the instruction only makes a view."""
    if op in FUNCTIONS:
        return FUNCTIONS[op].is_view
    returned = str(function_of(op)._schema).rpartition("->")[2]
    return "(a" in returned or op.startswith(("_unsafe_view", "detach"))


def call(
    instruction: Instruction,
    values: Sequence[torch.Tensor],
    constants: Sequence[float],
    sizes: Mapping[int, int] | None = None,
) -> torch.Tensor:
    """Return the result of one instruction."""
    function, keywords = function_of(instruction.op), dict[str, Any]()
    arguments = [_value(argument, values, constants) for argument in instruction.arguments]
    if instruction.op not in FUNCTIONS:
        schema = function._schema.arguments
        if sizes and instruction.op.partition(".")[0] in _SHAPED:
            arguments[1] = [sizes.get(extent, extent) for extent in arguments[1]]
        count = sum(not argument.kwarg_only for argument in schema)
        keywords = {a.name: v for a, v in zip(schema[count:], arguments[count:], strict=True)}
        arguments = arguments[:count]
    result: torch.Tensor = function(*arguments, **keywords)
    return result


def scalar(argument: Any, constants: Sequence[float]) -> Any:
    """Return an argument with a `Constant` replaced by its number."""
    if isinstance(argument, Constant):
        value = constants[argument.index]
        return (1 / value if value else math.inf) if argument.inverse else value
    return argument


def _refs(arguments: Sequence[Any]) -> Iterator[Ref]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _refs(argument)
        elif isinstance(argument, Ref):
            yield argument


def _value(argument: Any, values: Sequence[torch.Tensor], constants: Sequence[float]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, tuple):
        return [_value(item, values, constants) for item in argument]
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(torch, argument.removeprefix("torch."))
    return scalar(argument, constants)


def _encode(argument: Any) -> Any:
    if isinstance(argument, Ref):
        return {"v": argument.index}
    if isinstance(argument, Constant):
        return {"i" if argument.inverse else "c": argument.index}
    return [_encode(item) for item in argument] if isinstance(argument, tuple) else argument


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, index),) = value.items()
        return Ref(int(index)) if kind == "v" else Constant(int(index), kind == "i")
    return tuple(_decode(item) for item in value) if isinstance(value, list) else value
