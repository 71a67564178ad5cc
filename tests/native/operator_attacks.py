"""A program: call every operator of the package with invalid arguments, against references.

Every argument of a valid call is changed in every way below, one at a time. An operator may refuse;
if it gives something, that is what its reference gives, or tensors without numbers. Prints JSON:
``calls``, ``refused``, ``equal``, ``undefined``, ``wrong``, the calls that gave something else, and
``library``, the path of the compiled one.

An argument names a folder with the compiled library to take instead of the installed one.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import slipstream
from slipstream.native import loader
from slipstream.techniques.dropout import kernels as dropout
from slipstream.techniques.embedding.kernels import bags, robe, robe_reference, tt, tt_reference
from slipstream.techniques.lowbit import pack_weights
from slipstream.techniques.lowbit.kernels import PackedWeights
from slipstream.techniques.lowbit.operators import stored
from slipstream.techniques.scan import cells, linear_recurrence

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip
NUMBERS = [-(2**62), -(2**31), -1, 0, 1, 2, 3, 7, 2**31, 2**62]
REALS = [float("nan"), float("inf"), -1.0, 0.0, 1e-300, 1e300, 0.3]


class UndefinedError(Exception):
    """The arguments contradict each other undetectably: any result is allowed."""


class Sample(NamedTuple):
    """A valid call of an operator, and an independent computation of its result."""

    arguments: tuple[Any, ...]
    reference: Callable[..., Any]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


# ---- samples ----


def _bags(count: int, total: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.sort(torch.randint(0, count + 1, (total,))).values
    offsets[0] = 0
    return torch.randint(0, rows, (count,)), offsets


def dropouts() -> Iterator[tuple[str, Sample]]:
    def reference(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
        assert seed.dtype is torch.int64
        assert seed.shape == (2,)
        assert 0 <= p < 1
        return dropout.run_reference(x.contiguous().float(), seed.contiguous(), p).to(x.dtype)

    yield "dropout", Sample((drawn(9, 30), dropout.draw_seed(), 0.4), reference)


def robes() -> Iterator[tuple[str, Sample]]:
    tables = torch.tensor([[robe.table_key(3, t), 40, width, -1] for t, width in ((0, 8), (1, 16))])

    def forward(array: torch.Tensor, *how: Any) -> torch.Tensor:
        ids, offsets, weights, tables, count, width, block, sign, mode = how
        bags.check(ids, offsets, tables[:, 1], count)
        assert width == int(tables[:, 2].sum())
        name = robe.MODES[mode]
        assert weights is None or name == "sum"
        return robe_reference.bags_of(
            array, ids, offsets, weights, tables, count, block, sign, name
        )

    def gradient(grad: Any, array: Any, made: Any, *how: Any) -> Any:
        *how_, scale = how
        if made is not None and how_[-1] == 2 and not torch.equal(made, forward(array, *how_)):
            raise UndefinedError
        (found,) = bags.gradients(lambda leaf: forward(leaf, *how_), [array], grad)
        return found * scale

    def weighted(grad: Any, array: Any, *how: Any) -> Any:
        (found,) = bags.gradients(
            lambda weights: forward(array.detach(), *how[:2], weights, *how[3:]), [how[2]], grad
        )
        return found

    for mode in (0, 1, 2):
        ids, offsets = _bags(50, 10, 40)
        weights = torch.rand(50) if mode == 0 else None
        how = (ids, offsets, weights, tables, 5, 24, 8, True, mode)
        array = drawn(77)
        yield "robe", Sample((array, *how), forward)
        made = forward(array, *how)
        yield "robe.gradient", Sample((drawn(5, 24), array, made, *how, 0.5), gradient)
        if weights is not None:
            yield "robe.weights", Sample((drawn(5, 24), array, *how), weighted)


def trains() -> Iterator[tuple[str, Sample]]:
    cores = [drawn(3, 1, 2, 4), drawn(4, 4, 2, 4), drawn(5, 4, 2, 1)]
    cached = torch.tensor([3, 17, 40])
    hot = torch.full((8, 2), -1)
    for row, (index, place) in enumerate(
        zip(cached.tolist(), tt_reference.start(cached, 8).tolist(), strict=True)
    ):
        while hot[place, 0] >= 0:
            place = (place + 1) % 8
        hot[place] = torch.tensor([index, row])

    def forward(inputs: Any, *how: Any) -> torch.Tensor:
        cache, table, ids, offsets, weights, rows, padding, count, mode = how
        bags.check(ids, offsets, torch.tensor([rows]), count)
        name = tt.MODES[mode]
        assert weights is None or name == "sum"
        return tt_reference.bags_of(
            inputs, cache, table, ids, offsets, weights, padding, count, name
        )

    def gradient(grad: Any, inputs: Any, *how: Any) -> Any:
        leaves = [*inputs, *([] if how[0] is None else [how[0]])]
        if not all(bool(leaf.isfinite().all()) for leaf in leaves):
            # Whether infinity is multiplied by 0 depends on the order of products.
            raise UndefinedError
        return bags.gradients(
            lambda *made: forward(made[:3], None if how[0] is None else made[-1], *how[1:]),
            leaves, grad,
        )  # fmt: skip

    def weighted(grad: Any, inputs: Any, *how: Any) -> Any:
        (found,) = bags.gradients(
            lambda weights: forward(inputs, *how[:4], weights, *how[5:]), [how[4]], grad
        )
        return found

    for mode, cache in ((0, drawn(3, 8)), (1, None)):
        ids, offsets = _bags(60, 6, 60)
        weights = torch.rand(60) if mode == 0 else None
        how = (cache, None if cache is None else hot, ids, offsets, weights, 60, 4, 6, mode)
        yield "tt", Sample((cores, *how), forward)
        yield "tt.gradient", Sample((drawn(6, 8), cores, *how), gradient)
        if weights is not None:
            yield "tt.weights", Sample((drawn(6, 8), cores, *how), weighted)


def lowbits() -> Iterator[tuple[str, Sample]]:
    def packed(n: int, k: int, bits: int) -> torch.Tensor:
        weight = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), dtype=torch.int8)
        if bits == 1:
            weight = torch.cat([torch.randint(0, 2, (n, k)), torch.ones(1, k)]).to(torch.uint8)
        return stored(pack_weights(weight, bits, activation_bits=4))

    def read(weights: torch.Tensor) -> torch.Tensor:
        assert weights.dtype is torch.uint8
        return PackedWeights.from_bytes(weights.contiguous().numpy().tobytes()).weights().long()

    def matmul(a: Any, weights: Any, n: int, zero: int) -> Any:
        weight = read(weights)
        assert (a.dtype, len(weight)) in ((torch.uint8, n), (torch.int8, n))
        return ((a.long() - zero) @ weight.T).int()

    def coded(x: Any, step: float, zero: int) -> Any:
        assert 0 <= zero < 16
        assert 0 < step < float("inf")
        steps = (x / torch.tensor(step, dtype=torch.float32)).round()
        return steps.clamp(-zero, 15 - zero).nan_to_num(0).long()

    def finished(made: Any, relu: bool, ceiling: float) -> Any:
        made = made.clamp(min=0) if relu else made
        return made.clamp(max=ceiling) if ceiling < 1e38 else made

    def linear(x: Any, weights: Any, scale: Any, bias: Any, step: float, zero: int,
               binary: bool, relu: bool, ceiling: float) -> Any:  # fmt: skip
        matrices = [read(weight) for weight in weights]
        codes = coded(x, step, zero)
        first, total = 0, 0
        factors = scale if scale.dim() == 2 else scale[:, None]
        for number, matrix in enumerate(matrices):
            part = codes[..., first : first + matrix.shape[1]] @ matrix.T
            if binary:
                part = 2 * part[..., :-1] - part[..., -1:]
            total = total + part.float() * factors[:, number]
            first += matrix.shape[1]
        assert first == x.shape[-1]
        made = finished(total if bias is None else total + bias, relu, ceiling)
        return made.masked_fill(x.isnan().any(-1, keepdim=True), float("nan"))

    def conv2d(x: Any, weights: Any, scale: Any, bias: Any, *how: Any) -> Any:
        step, zero, binary, relu, ceiling, kernel, stride, padding, dilation, depthwise = how
        channels = x.shape[1]
        spoiled = x.isnan().flatten(1).any(1)[:, None, None, None]
        if depthwise:
            (weight,) = map(read, weights)
            weight = 2 * weight[:-1] - 1 if binary else weight
            assert weight.shape == (channels, math.prod(kernel))
            sums = torch.nn.functional.conv2d(
                coded(x, step, zero).double(), weight.double().view(channels, 1, *kernel), None,
                stride, padding, dilation, channels,
            )  # fmt: skip
            made = sums.float() * scale[:, None, None]
            made = made if bias is None else made + bias[:, None, None]
            return finished(made, relu, ceiling).masked_fill(spoiled, float("nan"))
        seen = torch.nn.functional.unfold(x, kernel, dilation, padding, stride)
        rows = seen.unflatten(1, (channels, -1)).permute(0, 3, 2, 1).flatten(2)
        made = linear(rows, weights, scale, bias, step, zero, binary, relu, ceiling)
        size = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
        ]
        made = made.transpose(1, 2).unflatten(2, size)
        return made.masked_fill(spoiled, float("nan"))

    codes = torch.randint(0, 16, (5, 30), dtype=torch.uint8)
    yield "lowbit_matmul", Sample((codes, packed(7, 30, 3), 7, 2), matmul)
    yield "lowbit_matmul", Sample(((codes.to(torch.int8) - 8), packed(7, 30, 3), 7, -2), matmul)
    scale, bias = torch.rand(7) + 0.1, drawn(7)
    blocks, rows = [packed(7, 16, 3), packed(7, 14, 3)], drawn(2, 5, 30)
    for weights, factors, binary in (
        ([packed(7, 30, 4)], scale, False), (blocks, torch.rand(7, 2), False),
        ([packed(7, 30, 1)], scale, True),
    ):  # fmt: skip
        how = (weights, factors, bias, 0.3, 5, binary, True, 20.0)
        yield "lowbit_linear", Sample((rows, *how), linear)
        window = ((2, 3), (1, 2), (1, 0), (1, 1))
        yield "lowbit_conv2d", Sample((drawn(2, 5, 6, 7), *how, *window, False), conv2d)
    for bits, binary in ((8, False), (1, True)):
        how = ([packed(7, 6, bits)], scale, bias, 0.3, 5, binary, True, 20.0)
        yield "lowbit_conv2d", Sample((drawn(2, 7, 6, 7), *how, *window, True), conv2d)


def scans() -> Iterator[tuple[str, Sample]]:
    def forward(projections: Any, weight: Any, bias: Any, h: Any, c: Any, kind: str) -> Any:
        if kind in ("gru", "lstm") and not all(
            bool(tensor.isfinite().all()) for tensor in (projections, weight, h)
        ):
            # A closed gate is 0 or a tiny number, and infinity is multiplied by it.
            raise UndefinedError
        states, gates, extra = [], [], []
        for step in projections:
            if kind == "tanh" or kind == "relu":
                h = getattr(torch, kind)(step + h @ weight.T)
            elif kind == "gru":
                (a, b, n), (d, e, m) = step.chunk(3, 1), (h @ weight.T).chunk(3, 1)
                r, z, m = (a + d).sigmoid(), (b + e).sigmoid(), m + bias
                n = (n + r * m).tanh()
                h = n + z * (h - n)
                gates.append(torch.cat([r, z, n], 1))
                extra.append(m)
            else:
                i, f, g, o = (step + h @ weight.T).chunk(4, 1)
                i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
                c = f * c + i * g
                h = o * c.tanh()
                gates.append(torch.cat([i, f, g, o], 1))
                extra.append(c)
            states.append(h)
        none = projections.new_empty(0)
        return (
            torch.stack(states), torch.stack(gates) if gates else none,
            torch.stack(extra) if extra else none,
        )  # fmt: skip

    def backward(y: Any, gates: Any, extra: Any, weight: Any, h0: Any, c0: Any, *how: Any) -> Any:
        dy, dh, dc, kind = how
        saved = cells.Saved(kind, weight, y, gates, extra, h0, c0)
        zero = torch.zeros_like(h0)
        dc = zero if dc is None and c0 is not None else dc
        found = cells.sequential(saved, dy, zero if dh is None else dh, dc)
        dc0 = y.new_empty(0) if found.dc0 is None else found.dc0
        return found.dgates, found.dweight, found.dbias, found.dh0, dc0

    for kind, count in (("tanh", 1), ("relu", 1), ("gru", 3), ("lstm", 4)):
        c = drawn(3, 5) if kind == "lstm" else None
        inputs = (
            drawn(4, 3, 5 * count), drawn(5 * count, 5), drawn(5) if kind == "gru" else None,
            drawn(3, 5), c, kind,
        )  # fmt: skip
        yield "scan_forward", Sample(inputs, forward)
        if kind in ("tanh", "relu"):
            continue  # their gates are empty: there is nothing to change
        gradients = (drawn(4, 3, 5), drawn(3, 5), c, kind)
        yield (
            "scan_backward",
            Sample((*forward(*inputs), inputs[1], inputs[3], c, *gradients), backward),
        )

    def diagonal(a: Any, b: Any, h0: Any, reverse: bool) -> Any:
        states, order = [h0], range(len(a))
        for t in reversed(order) if reverse else order:
            states.append(a[t] * states[-1] + b[t])
        return torch.stack(states[:0:-1] if reverse else states[1:])

    def diagonal_gradient(a: Any, h0: Any, h: Any, dh: Any, reverse: bool) -> Any:
        if reverse:
            a, h, dh = a.flip(0), h.flip(0), dh.flip(0)
        carried, db = torch.zeros_like(h0), []
        for t in reversed(range(len(a))):
            db.append(dh[t] + carried)
            carried = a[t] * db[-1]
        made = torch.stack(db[::-1])
        da = made * torch.cat([h0[None], h[:-1]])
        return (da.flip(0), made.flip(0), carried) if reverse else (da, made, carried)

    a, b, h0 = drawn(6, 21), drawn(6, 21), drawn(21)
    yield "scan_diagonal", Sample((a, b, h0, True), diagonal)
    h = linear_recurrence(a, b, h0, structure="diag")
    yield "scan_diagonal_backward", Sample((a, h0, h, drawn(6, 21), False), diagonal_gradient)


# ---- changes of an argument ----


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the ways to change an argument, each with its name."""
    if isinstance(value, torch.Tensor):
        yield from changed_tensor(value)
    elif isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        yield from ((f"is {number}", number) for number in NUMBERS)
    elif isinstance(value, float):
        yield from ((f"is {number}", number) for number in REALS)
    elif isinstance(value, (list, tuple)):
        yield "empty", []
        yield "shorter", list(value[:-1])
        yield "longer", [*value, value[-1]]
        for place, item in enumerate(value):
            for name, other in changed(item):
                yield f"[{place}] {name}", [*value[:place], other, *value[place + 1 :]]


def changed_tensor(value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    for dtype in DTYPES:
        yield str(dtype), value.to(dtype)
    yield "on meta", value.to("meta")
    yield "with a dimension before", value[None]
    yield "with a dimension behind", value[..., None]
    yield "flat", value.flatten()
    yield "a number", value.flatten()[0]
    for dim in range(value.dim()):
        yield f"shorter along {dim}", value.narrow(dim, 0, value.shape[dim] - 1).clone()
        yield f"empty along {dim}", value.narrow(dim, 0, 0)
        yield f"longer along {dim}", torch.cat([value, value.narrow(dim, 0, 1)], dim)
        yield (
            f"every other along {dim}",
            value.repeat_interleave(2, dim).index_select(dim, torch.arange(2 * value.shape[dim]))[
                (slice(None),) * dim + (slice(None, None, 2),)
            ],
        )
        yield f"expanded along {dim}", value.narrow(dim, 0, 1).expand_as(value)
        yield f"{dim} innermost", value.movedim(dim, -1).contiguous().movedim(-1, dim)
    yield (
        "in the middle of memory",
        torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape),
    )
    if value.is_floating_point():
        for number in ("nan", "inf", "-inf"):
            other = value.clone()
            other.view(-1)[-1] = float(number)
            yield f"with {number}", other
    elif value.numel():
        for number in (-1, 2**31, 2**62):
            if number <= torch.iinfo(value.dtype).max and value.dtype is torch.int64:
                for place in (0, -1):
                    other = value.clone()
                    other.view(-1)[place] = number
                    yield f"with {number} at {place}", other


# ---- the attack ----


def same(made: Any, expected: Any) -> bool:
    if isinstance(made, (list, tuple)):
        return len(made) == len(expected) and all(map(same, made, expected))
    if made.shape != expected.shape:
        return False
    loose = 2e-2 if made.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn) else 1e-4
    return torch.allclose(
        made.to(torch.float64), expected.to(torch.float64), loose, loose, equal_nan=True
    )


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors(part)] if isinstance(
        value, (list, tuple)
    ) else []  # fmt: skip


def attack(name: str, sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield the outcome of each call: its description, and ``refused``, ``equal`` or ``wrong``."""
    operator = getattr(torch.ops.slipstream, name.partition(".")[0])
    operator = getattr(operator, name.partition(".")[2] or "default")
    arguments = sample.arguments
    calls = [("as it is", arguments)] + [
        (f"argument {place} {how}", (*arguments[:place], other, *arguments[place + 1 :]))
        for place, value in enumerate(arguments)
        for how, other in changed(value)
    ]
    for how, call in calls:
        what = f"{name}: {how}"
        sys.stderr.write(what + "\n")
        try:
            made = operator(*call)
        except Exception as error:
            yield what, "refused" if how != "as it is" else f"wrong: {error}"
            continue
        inputs = tensors(made)
        if any(tensor.is_meta for tensor in tensors(call)):
            yield what, "equal" if all(tensor.is_meta for tensor in inputs) else "wrong: has memory"
            continue
        try:
            yield what, "equal" if same(made, sample.reference(*call)) else "wrong: other numbers"
        except UndefinedError:
            yield what, "undefined"
        except Exception as error:
            yield what, f"wrong: given, where {type(error).__name__}: {str(error)[:200]}"


def defined() -> set[str]:
    """Return the operators of all families; their modules are those that define any."""
    root = Path(slipstream.__file__).parent
    for path in root.rglob("*.py"):
        if re.search(r"^define\(|^    define\(", path.read_text(), re.MULTILINE):
            importlib.import_module(
                ".".join(("slipstream", *path.relative_to(root).with_suffix("").parts))
            )
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("slipstream::") for name in names if name.startswith("slipstream::")}


def main() -> None:
    if len(sys.argv) > 1:
        # The library of another build.
        folder = Path(sys.argv[1])
        loader._search_folders = lambda: [folder]
    torch.manual_seed(0)
    counts = {"calls": 0, "refused": 0, "equal": 0, "undefined": 0}
    wrong, seen = [], set()
    for family in (dropouts, robes, trains, lowbits, scans):
        for name, sample in family():
            seen.add(name)
            for what, came in attack(name, sample):
                counts["calls"] += 1
                if came in counts:
                    counts[came] += 1
                else:
                    wrong.append(f"{what}: {came}")
    missing = sorted(defined() - seen)
    native = loader.library()
    path = None if native is None else native._name
    print(json.dumps({**counts, "wrong": wrong, "without sample": missing, "library": path}))


if __name__ == "__main__":
    main()
