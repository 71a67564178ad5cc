"""Operators in plain loops on arrays that record every address read and written.

An array records each address of its storage that is loaded before it is stored, and each that is
stored. Results are compared with torch's, to check that the loops compute the operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.graph import Call, TensorSpec
from slipstream.graph.traffic import traffic

Index = tuple[int, ...]


@dataclass
class Counted:
    """A tensor whose elements are identified by their addresses."""

    tensor: Tensor
    loaded: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)

    def _address(self, index: Index) -> int:
        return sum(i * s for i, s in zip(index, self.tensor.stride(), strict=True))

    def __getitem__(self, index: Index) -> float:
        if self._address(index) not in self.stored:
            self.loaded.add(self._address(index))
        return float(self.tensor[index].item())

    def __setitem__(self, index: Index, value: float) -> None:
        self.stored.add(self._address(index))
        self.tensor[index] = value

    @property
    def shape(self) -> Index:
        return tuple(self.tensor.shape)

    def __iter__(self) -> Iterator[Index]:
        return itertools.product(*map(range, self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes loaded and stored."""
        return (len(self.loaded) + len(self.stored)) * self.tensor.element_size()


def _broadcast(array: Counted, index: Index) -> Index:
    own = index[len(index) - len(array.shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(own, array.shape, strict=True))


def mapped(compute: Callable[..., float]) -> Callable[..., None]:
    """Return the reference of an element-wise operator."""

    def run(outs: Sequence[Counted], *ins: Counted) -> None:
        for index in outs[0]:
            outs[0][index] = compute(*(array[_broadcast(array, index)] for array in ins))

    return run


def _rows(array: Counted) -> Iterator[list[Index]]:
    *outer, last = array.shape
    for head in itertools.product(*map(range, outer)):
        yield [(*head, i) for i in range(last)]


def _softmax(outs: Sequence[Counted], x: Counted) -> None:
    for row in _rows(x):
        values = [x[i] for i in row]
        powers = [math.exp(v - max(values)) for v in values]
        for i, v in zip(row, powers, strict=True):
            outs[0][i] = v / sum(powers)


def _log_softmax(outs: Sequence[Counted], x: Counted) -> None:
    for row in _rows(x):
        values = [x[i] for i in row]
        total = math.log(sum(math.exp(v) for v in values))
        for i, v in zip(row, values, strict=True):
            outs[0][i] = v - total


def _softmax_backward(outs: Sequence[Counted], gradient: Counted, y: Counted) -> None:
    for row in _rows(y):
        total = sum(gradient[i] * y[i] for i in row)
        for i in row:
            outs[0][i] = (gradient[i] - total) * y[i]


def _layer_norm(outs: Sequence[Counted], x: Counted, weight: Counted, bias: Counted) -> None:
    for row in _rows(x):
        values = [x[i] for i in row]
        mean = sum(values) / len(values)
        rstd = (sum((v - mean) ** 2 for v in values) / len(values) + 1e-5) ** -0.5
        for i, v in zip(row, values, strict=True):
            outs[0][i] = (v - mean) * rstd * weight[i[-1:]] + bias[i[-1:]]
        outs[1][(*row[0][:-1], 0)], outs[2][(*row[0][:-1], 0)] = mean, rstd


def _layer_norm_backward(
    outs: Sequence[Counted], gradient: Counted, x: Counted, mean: Counted, rstd: Counted,
    weight: Counted, bias: Counted,
) -> None:  # fmt: skip
    columns = x.shape[-1]
    sums = [[0.0] * columns, [0.0] * columns]
    for row in _rows(x):
        head = (*row[0][:-1], 0)
        hats = [(x[i] - mean[head]) * rstd[head] for i in row]
        scaled = [gradient[i] * weight[i[-1:]] for i in row]
        first = sum(scaled) / columns
        second = sum(a * b for a, b in zip(scaled, hats, strict=True)) / columns
        for k, i in enumerate(row):
            outs[0][i] = rstd[head] * (scaled[k] - first - hats[k] * second)
            sums[0][k] += gradient[i] * hats[k]
            sums[1][k] += gradient[i]
    for k in range(columns):
        outs[1][(k,)], outs[2][(k,)] = sums[0][k], sums[1][k]


def _sum_rows(outs: Sequence[Counted], x: Counted) -> None:
    for row in _rows(x):
        outs[0][row[0][:-1]] = sum(x[i] for i in row)


def _sum_columns(outs: Sequence[Counted], x: Counted) -> None:
    for k in range(x.shape[1]):
        outs[0][(k,)] = sum(x[(i, k)] for i in range(x.shape[0]))


def _largest(outs: Sequence[Counted], x: Counted) -> None:
    for row in _rows(x):
        outs[0][row[0][:-1]] = max(x[i] for i in row)


def _product(outs: Sequence[Counted], a: Counted, b: Counted) -> None:
    for i, j in outs[0]:
        outs[0][(i, j)] = sum(a[(i, k)] * b[(k, j)] for k in range(a.shape[1]))


def _affine(outs: Sequence[Counted], bias: Counted, a: Counted, b: Counted) -> None:
    for i, j in outs[0]:
        outs[0][(i, j)] = bias[(j,)] + sum(a[(i, k)] * b[(k, j)] for k in range(a.shape[1]))


def _products(outs: Sequence[Counted], a: Counted, b: Counted) -> None:
    for n, i, j in outs[0]:
        outs[0][(n, i, j)] = sum(a[(n, i, k)] * b[(n, k, j)] for k in range(a.shape[2]))


def _join(outs: Sequence[Counted], a: Counted, b: Counted) -> None:
    for i, j in outs[0]:
        outs[0][(i, j)] = a[(i, j)] if i < a.shape[0] else b[(i - a.shape[0], j)]


def _embedding(outs: Sequence[Counted], table: Counted, ids: Counted) -> None:
    for (i,) in ids:
        row = int(ids[(i,)])
        for k in range(table.shape[1]):
            outs[0][(i, k)] = table[(row, k)]


def _nll(outs: Sequence[Counted], x: Counted, target: Counted) -> None:
    outs[0][()] = -sum(x[(i, int(target[(i,)]))] for (i,) in target) / target.shape[0]
    outs[1][()] = float(target.shape[0])


def _addcmul_in_place(outs: Sequence[Counted], x: Counted, a: Counted, b: Counted) -> None:
    for i in x:
        x[i] = x[i] + 0.5 * a[i] * b[i]


def _copy_in_place(outs: Sequence[Counted], x: Counted, source: Counted) -> None:
    for i in x:
        x[i] = source[_broadcast(source, i)]


def _fill_in_place(outs: Sequence[Counted], x: Counted) -> None:
    for i in x:
        x[i] = 2.5


def _phi(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_slope(gradient: float, x: float) -> float:
    return gradient * (_phi(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class Case:
    """An operator on small tensors, and its reference loops.

    Attributes:
        arguments: tensors and scalars, in the schema's order, without keyword arguments.
        in_place: whether the operator writes its first argument.
    """

    name: str
    operator: Any
    arguments: tuple[Any, ...]
    reference: Callable[..., None]
    keywords: tuple[tuple[str, Any], ...] = ()
    in_place: bool = False

    def call(self) -> tuple[Call, list[Tensor]]:
        """Return the call as a recording has it, and torch's outputs."""
        copies = [value.clone() if self.in_place and n == 0 else value
                  for n, value in enumerate(self.arguments)]  # fmt: skip
        result = self.operator(*copies, **dict(self.keywords))
        outputs = list(result if isinstance(result, tuple) else (result,))
        schema = self.operator._schema
        arguments: list[Any] = []
        for number, argument in enumerate(schema.arguments):
            keyword = dict(self.keywords).get(argument.name)
            value = copies[number] if number < len(copies) else keyword
            value = argument.default_value if value is None and number >= len(copies) else value
            arguments.append(_spec(value))
        return Call(str(schema), tuple(arguments), tuple(map(_spec, outputs))), outputs

    def counted_bytes(self, outputs: Sequence[Tensor]) -> int | None:
        """Return bytes of the loops; None if they do not compute the same as torch."""
        tensors = [
            tensor
            for value in self.arguments
            for tensor in (value if isinstance(value, list) else [value])
            if isinstance(tensor, Tensor)
        ]
        ins = [Counted(tensor.clone() if self.in_place and n == 0 else tensor)
               for n, tensor in enumerate(tensors)]  # fmt: skip
        outs = [] if self.in_place else [Counted(torch.empty_like(output)) for output in outputs]
        self.reference(outs, *ins)
        results = [ins[0].tensor] if self.in_place else [out.tensor for out in outs]
        for ours, theirs in zip(results, outputs, strict=True):
            if not torch.allclose(ours.double(), theirs.double(), rtol=1e-3, atol=1e-4):
                return None
        return sum(array.nbytes for array in (*ins, *outs))

    def agrees(self) -> bool:
        """Return whether `traffic` equals the loops' bytes."""
        call, outputs = self.call()
        return traffic(call).total == self.counted_bytes(outputs)


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorSpec(dtype, tuple(value.shape), tuple(value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(_spec(item) for item in value)
    return value


def cases() -> list[Case]:
    """Return forty operators, some on strided, expanded and half-precision tensors."""
    ops, g = torch.ops.aten, torch.Generator().manual_seed(0)

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x, y, row, wide = t(3, 4), t(3, 4), t(4), t(2, 3, 4)
    half, mask = t(3, 4).bfloat16(), t(3, 4) > 0
    expanded, turned = t(1, 4).expand(3, 4), t(4, 3).t()
    normal = ops.native_layer_norm.default(wide, [4], row, row, 1e-5)
    mean, rstd = normal[1], normal[2]
    made = torch.softmax(x, -1)
    ids = torch.tensor([2, 0, 1])
    maps: list[tuple[str, Any, tuple[Any, ...], Callable[..., float]]] = [
        ("add", ops.add.Tensor, (x, y), lambda a, b: a + b),
        ("add, broadcast", ops.add.Tensor, (wide, row), lambda a, b: a + b),
        ("add, expanded", ops.add.Tensor, (x, expanded), lambda a, b: a + b),
        ("add, transposed", ops.add.Tensor, (x, turned), lambda a, b: a + b),
        ("add, two dtypes", ops.add.Tensor, (x, half), lambda a, b: a + b),
        ("sub", ops.sub.Tensor, (x, y), lambda a, b: a - b),
        ("mul", ops.mul.Tensor, (x, y), lambda a, b: a * b),
        ("div", ops.div.Tensor, (x, y), lambda a, b: a / b),
        ("neg", ops.neg.default, (x,), lambda a: -a),
        ("exp", ops.exp.default, (x,), math.exp),
        ("sqrt", ops.sqrt.default, (x.abs(),), math.sqrt),
        ("tanh", ops.tanh.default, (x,), math.tanh),
        ("sigmoid", ops.sigmoid.default, (x,), lambda a: 1 / (1 + math.exp(-a))),
        ("relu", ops.relu.default, (x,), lambda a: max(a, 0.0)),
        ("gelu", ops.gelu.default, (x,), lambda a: a * _phi(a)),
        ("gelu_backward", ops.gelu_backward.default, (x, y), _gelu_slope),
        ("silu", ops.silu.default, (x,), lambda a: a / (1 + math.exp(-a))),
        ("tanh_backward", ops.tanh_backward.default, (x, y), lambda a, b: a * (1 - b * b)),
        ("where", ops.where.self, (mask, x, y), lambda c, a, b: a if c else b),
        ("maximum", ops.maximum.default, (x, y), max),
        ("gt", ops.gt.Tensor, (x, y), lambda a, b: float(a > b)),
        ("clone", ops.clone.default, (turned,), lambda a: a),
    ]
    found = [Case(name, op, arguments, mapped(how)) for name, op, arguments, how in maps]
    return [
        *found,
        Case("threshold_backward", ops.threshold_backward.default, (x, y, 0.0),
             mapped(lambda a, b: a if b > 0 else 0.0)),
        Case("to bfloat16", ops._to_copy.default, (half,), mapped(lambda a: a),
             (("dtype", torch.float32),)),
        Case("_softmax", ops._softmax.default, (x, -1, False), _softmax),
        Case("_log_softmax", ops._log_softmax.default, (x, -1, False), _log_softmax),
        Case("_softmax_backward", ops._softmax_backward_data.default,
             (y, made, -1, torch.float32), _softmax_backward),
        Case("native_layer_norm", ops.native_layer_norm.default, (wide, [4], row, row + 1, 1e-5),
             _layer_norm),
        Case("native_layer_norm_backward", ops.native_layer_norm_backward.default,
             (wide + 1, wide, [4], mean, rstd, row, row + 1, [True, True, True]),
             _layer_norm_backward),
        Case("sum over rows", ops.sum.dim_IntList, (x, [-1]), _sum_rows),
        Case("sum over columns", ops.sum.dim_IntList, (x, [0]), _sum_columns),
        Case("amax", ops.amax.default, (x, [-1]), _largest),
        Case("mm", ops.mm.default, (x, turned.contiguous().t()), _product),
        Case("addmm", ops.addmm.default, (t(5), x, t(4, 5)), _affine),
        Case("bmm", ops.bmm.default, (wide, t(2, 4, 3)), _products),
        Case("cat", ops.cat.default, ([x, y], 0), _join),
        Case("embedding", ops.embedding.default, (t(3, 4), ids), _embedding),
        Case("nll_loss_forward", ops.nll_loss_forward.default, (x, ids, None, 1, -100), _nll),
        Case("addcmul_", ops.addcmul_.default, (x, y, t(3, 4)), _addcmul_in_place,
             (("value", 0.5),), in_place=True),
        Case("copy_", ops.copy_.default, (x, row), _copy_in_place, in_place=True),
        Case("fill_", ops.fill_.Scalar, (x, 2.5), _fill_in_place, in_place=True),
    ]  # fmt: skip
