"""Search for a cheaper expression that computes what a pattern computes.

Expressions are enumerated bottom-up, by number of functions. Two that agree on random float64
inputs (a fingerprint of nine digits) count as the same value, of which the first is retained. A new
value that has the pattern's fingerprint is a candidate, for `why_different` to check.

Source: Massalin, "Superoptimizer: A Look at the Smallest Program", ASPLOS 1987; observational
equivalence as in Udupa et al., "TRANSIT", PLDI 2013.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.graph import TensorSpec
from slipstream.techniques.rewrite.expression import Constant, Expression, Instruction, Ref, call
from slipstream.techniques.rewrite.regions import sizes_of
from slipstream.techniques.rewrite.verify import inputs_for, resized

_UNARY = (
    "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "softplus", "logsigmoid", "exp", "log",
    "sqrt", "rsqrt", "square", "neg", "abs", "erf", "reciprocal",
)  # fmt: skip
_BINARY = ("add", "mul", "sub", "div", "maximum")
_REDUCED = ("sum", "mean", "amax", "logsumexp", "norm", "variance")
# Inputs have an empty name.
_FREE = frozenset({"", "transpose", "unsqueeze", "squeeze"})
_Step = tuple[str, tuple[Any, ...]]
MAX_VALUES = 1500
"""Distinct values that are combined with each other."""


@dataclass(eq=False)
class _Value:
    """A value and the call that makes it; an input has its number as the only argument."""

    tensor: torch.Tensor
    op: str
    arguments: tuple[Any, ...]
    level: int = 0

    def steps(self) -> dict[_Value, None]:
        """Return all values that it is computed from in order, itself last."""
        operands = (a.steps() for a in self.arguments if isinstance(a, _Value))
        return {step: None for steps in operands for step in steps} | {self: None}


@dataclass
class Enumeration:
    """Enumeration of expressions on a pattern's inputs.

    Attributes:
        tried: number of expressions evaluated so far.
    """

    pattern: Expression
    specs: Sequence[TensorSpec]
    max_ops: int = 4
    budget_s: float = 20.0
    tried: int = 0
    _values: list[_Value] = field(default_factory=list)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def candidates(self) -> Iterator[Expression]:
        """Yield expressions with the pattern's fingerprint, those of fewer functions first."""
        until = time.process_time() + self.budget_s
        sizes = max(sizes_of(self.pattern, self.specs)[:3], key=lambda s: len(set(s.values())))
        changed = resized(self.specs, sizes)
        generator = torch.Generator().manual_seed(1)
        samples = [inputs_for(changed, kind, generator) for kind in ("normal", "negative", "mixed")]
        with torch.no_grad():
            try:
                self._targets = [self.pattern.run(inputs, sizes) for inputs in samples]
            except (RuntimeError, IndexError):
                return
            self._samples = samples
            self._projections = torch.randn(2, 1 << 14, dtype=torch.float64, generator=generator)
            self._goal = self._fingerprint(self._targets[0])
            if self._goal is None:
                return
            for n, tensor in enumerate(samples[0]):
                yield from self._offer(_Value(tensor, "", (n,)))
            yield from self._views(list(self._values))
            limit = min(self.max_ops, self.pattern.operators - 1)
            for level in range(1, limit + 1):
                before = list(self._values)
                for op, arguments in self._calls(before, level, level == limit):
                    if self.tried % 64 == 0 and time.process_time() > until:
                        return
                    yield from self._try(op, arguments, before, level)
                yield from self._views(self._values[len(before) :])

    def _views(self, values: Sequence[_Value]) -> Iterator[Expression]:
        """Add views, which cost nothing."""
        listed = list(self._values)
        place = {id(value): n for n, value in enumerate(listed)}
        for value in values:
            n, rank = Ref(place[id(value)]), value.tensor.dim()
            pairs = [(-2, -1), (1, 2)] if rank >= 3 else [(-2, -1)] if rank == 2 else []
            views: list[_Step] = [("transpose", (n, *pair)) for pair in pairs]
            views += [("unsqueeze", (n, -1))] * (0 < rank < 4)
            views += [
                ("squeeze", (n, d)) for d in (-1, -2) if -d <= rank and value.tensor.shape[d] == 1
            ]
            for op, arguments in views:
                yield from self._try(op, arguments, listed, value.level)

    def _calls(self, values: Sequence[_Value], level: int, last: bool) -> Iterator[_Step]:
        """Yield the calls whose arguments include a value of the level below."""
        goal = tuple(self._targets[0].shape)
        refs = [Ref(n) for n in range(len(values))]
        new = {n for n, value in enumerate(values) if value.level == level - 1}
        shape = [tuple(value.tensor.shape) for value in values]
        floating = [value.tensor.is_floating_point() for value in values]
        constants = [Constant(n) for n in range(len(self.pattern.constants))]
        scales = [Constant(n, inverse) for n in range(len(constants)) for inverse in (False, True)]
        numbers = [c for c in constants if 0 < self.pattern.constants[c.index] < 0.1]
        inputs = [n for n, value in enumerate(values) if value.level == 0]
        vectors = [n for n in inputs if floating[n] and len(shape[n]) == 1]
        for n in new:
            if not floating[n]:
                continue
            x, rank = refs[n], len(shape[n])
            whole = not last or shape[n] == goal
            for dim in range(-rank, 0):
                single = (*shape[n][: rank + dim], 1, *shape[n][rank + dim + 1 :])
                dropped = (*shape[n][: rank + dim], *shape[n][rank + dim + 1 :])
                for keepdim, made in ((True, single), (False, dropped)):
                    if last and made != goal:
                        continue
                    yield from ((name, (x, dim, keepdim)) for name in _REDUCED)
                if whole:
                    yield from ((name, (x, dim)) for name in ("softmax", "log_softmax", "cumsum"))
                    yield from (("normalize", (x, dim, eps)) for eps in (*numbers, 1e-12))
            if whole:
                fits = [refs[m] for m in vectors if shape[m] == shape[n][-1:]]
                for eps, weight in itertools.product((*numbers, 0.0), (None, *fits)):
                    if rank:
                        yield "rms_norm", (x, weight, eps)
                        biases = (None, *fits) if weight is not None else (None,)
                        yield from (("layer_norm", (x, weight, bias, eps)) for bias in biases)
                yield from ((name, (x,)) for name in (*_UNARY, "clone"))
                yield from (
                    (name, (x, c)) for name in ("mul", "add", "div", "sub") for c in constants
                )
            if goal == () or not last:
                yield from ((name, (x,)) for name in ("mean_all", "sum_all"))
        for a, b in itertools.product(range(len(values)), repeat=2):
            if (a not in new and b not in new) or not (floating[a] and floating[b]):
                continue
            both = _broadcast(shape[a], shape[b])
            if both is not None and (not last or both == goal):
                for name in _BINARY:
                    if a < b or (a > b and name in ("sub", "div")):
                        yield name, (refs[a], refs[b])
            if len(shape[a]) >= 2 <= len(shape[b]) and shape[a][-1] == shape[b][-2]:
                if len(shape[a]) == len(shape[b]) or len(shape[b]) == 2:
                    yield "matmul", (refs[a], refs[b])
                for m in vectors:
                    if shape[m] == shape[b][-1:] and len(shape[b]) == 2:
                        name = "linear" if len(shape[a]) > 2 else "addmm"
                        order = (a, b, m) if name == "linear" else (m, a, b)
                        yield name, tuple(refs[k] for k in order)
        if goal == ():
            targets = [n for n, value in enumerate(values) if value.tensor.dtype == torch.int64]
            for a, t in itertools.product(new, targets):
                if len(shape[a]) == 2 and shape[t] == shape[a][:1]:
                    yield "cross_entropy", (refs[a], refs[t])
        yield from self._attentions(inputs, values, scales, level)

    def _attentions(
        self,
        inputs: Sequence[int],
        values: Sequence[_Value],
        scales: Sequence[Constant],
        level: int,
    ) -> Iterator[_Step]:
        """Yield attention on inputs and their views; on its first level only."""
        if level > 1:
            return
        goal = self._targets[0]
        tensors = [
            n
            for n in inputs
            if values[n].tensor.dim() >= 3 and values[n].tensor.is_floating_point()
        ]
        for q, k, v in itertools.permutations(tensors, 3):
            a, b, c = (values[n].tensor for n in (q, k, v))
            fits = a.shape[-1] == b.shape[-1] and b.shape[:-1] == c.shape[:-1]
            scores = (*a.shape[:-1], b.shape[-2])
            if not fits or goal.shape != (*scores[:-1], c.shape[-1]) or b.shape[:-2] != scores[:-2]:
                continue
            masks = [
                n
                for n in inputs
                if n not in (q, k, v) and _broadcast(values[n].tensor.shape, scores) == scores
            ]
            for mask in (None, *masks):
                shown = None if mask is None else Ref(mask)
                for scale in (None, 1.0, *scales):
                    yield "attention", (Ref(q), Ref(k), Ref(v), shown, scale)

    def _try(
        self, op: str, arguments: tuple[Any, ...], values: Sequence[_Value], level: int
    ) -> Iterator[Expression]:
        self.tried += 1
        tensors = [value.tensor for value in values]
        try:
            made = call(Instruction(op, arguments), tensors, self.pattern.constants)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        operands = tuple(values[a.index] if isinstance(a, Ref) else a for a in arguments)
        value = _Value(made, op, operands, level)
        if sum(step.op not in _FREE for step in value.steps()) <= self.max_ops:
            yield from self._offer(value)

    def _offer(self, value: _Value) -> Iterator[Expression]:
        """Keep a value that is new; yield its expression if it is the pattern's."""
        mark = self._fingerprint(value.tensor)
        if mark is None:
            return
        # A candidate that fails its checks may have a rival with the same fingerprint.
        if mark == self._goal:
            expression = self._expression(value)
            if self._agrees(expression):
                yield expression
            if value.level:
                return
        if mark not in self._seen and len(self._values) < MAX_VALUES:
            self._seen.add(mark)
            self._values.append(value)

    def _fingerprint(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return a hash of shape and values to nine digits; None for values that are not finite."""
        if not tensor.is_floating_point():
            return tuple(tensor.shape), str(tensor.dtype), tuple(tensor.flatten().tolist())
        flat = tensor.reshape(-1).double()
        if flat.numel() > self._projections.shape[1]:
            return None
        a, b = (self._projections[:, : flat.numel()] @ flat).tolist()
        finite = abs(a) < float("inf") and abs(b) < float("inf")
        return (tuple(tensor.shape), f"{a:.8e}", f"{b:.8e}") if finite else None

    def _agrees(self, expression: Expression) -> bool:
        for inputs, target in zip(self._samples, self._targets, strict=True):
            try:
                made = expression.run(inputs)
            except (RuntimeError, IndexError):
                return False
            if made.shape != target.shape or not torch.allclose(
                made, target, rtol=1e-8, atol=1e-10, equal_nan=True
            ):
                return False
        return True

    def _expression(self, value: _Value) -> Expression:
        inputs, rows = self.pattern.inputs, list[Instruction]()
        place: dict[_Value, Ref] = {}
        for step in value.steps():
            if step.op:
                place[step] = Ref(inputs + len(rows))
                arguments = (place[a] if isinstance(a, _Value) else a for a in step.arguments)
                rows.append(Instruction(step.op, tuple(arguments)))
            else:
                place[step] = Ref(step.arguments[0])
        return Expression(inputs, tuple(rows), place[value], self.pattern.constants)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    with suppress(RuntimeError):
        return tuple(torch.broadcast_shapes(a, b))
    return None
