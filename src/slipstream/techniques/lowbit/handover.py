"""Which low-bit layers can hand codes to which others, found by watching one forward pass.

A layer's output is followed through ReLUs, maxima over windows, concatenations, changes of shape
and one sum. Where nothing but low-bit layers with the same codes read it in the end, codes are
handed on; a sum, which the next sum reads, too, is handed on as both codes and floats. Results stay
what they were: see `slipstream.techniques.lowbit.coded`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slipstream.techniques.lowbit import cost
from slipstream.techniques.lowbit.layer import AfterSum, LowBitLayer
from slipstream.techniques.lowbit.nn import LowBitConv2d

_aten = torch.ops.aten
_RELUS = (_aten.relu.default, _aten.relu_.default)
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)
_IN_PLACE = (_aten.relu_.default, _aten.hardtanh_.default, _aten.add_.Tensor)
_THROUGH = (
    _aten.clone.default, _aten._unsafe_view.default, _aten.hardtanh.default,
    _aten.hardtanh_.default,
)  # fmt: skip
_POOLS = (torch.max_pool2d, torch.nn.functional.max_pool2d)


@dataclass(eq=False)
class _Value:
    """A tensor of the pass.

    Attributes:
        maker: the layer whose output it is, or of whose output it is the sum; None: neither.
        summed: whether it is the latter.
        parts: what it was made of by going through something.
        uses: who reads it: layers, values made of it (by a ReLU or otherwise), or None for others.
        clips: whether it was made by a ReLU.
        total: the sum it is a term of, where its maker can take that along.
    """

    maker: LowBitLayer | None = None
    summed: bool = False
    parts: tuple[_Value, ...] = ()
    uses: list[LowBitLayer | _Value | None] = field(default_factory=list)
    clips: bool = False
    total: _Value | None = None


class _Watched(torch.Tensor):
    """A tensor of the pass that tells its `_Value` what is done with it."""

    plain: torch.Tensor
    value: _Value

    def __new__(cls, plain: torch.Tensor, value: _Value) -> Self:
        watched: Self = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype
        )
        watched.plain, watched.value = plain, value
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _POOLS and not kwargs.get("return_indices"):
                return _through((args[0],), func(args[0].plain, *args[1:], **kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        seen: list[_Watched] = []

        def plain(one: _Watched) -> torch.Tensor:
            seen.append(one)
            return one.plain

        out = func(*tree_map_only(_Watched, plain, args), **tree_map_only(_Watched, plain, kwargs))
        watched: torch.Tensor | None = None
        if func in _RELUS or func in _THROUGH:
            watched = _through(tuple(seen), out, clips=func in _RELUS)
        elif func is _aten.cat.default and len(seen) == len(args[0]):
            watched = _through(tuple(seen), out)
        elif (
            func in _SUMS and not kwargs and all(isinstance(one, torch.Tensor) for one in args[:2])
        ):
            watched = _summed(seen, args[0], args[1], out)
        else:
            for one in seen:
                one.value.uses.append(None)
        if func in _IN_PLACE and isinstance(watched, _Watched) and isinstance(args[0], _Watched):
            # PyTorch gives the object it was called with back, whatever is returned here.
            args[0].plain, args[0].value = watched.plain, watched.value
            return args[0]
        return out if watched is None else watched


def _through(seen: tuple[_Watched, ...], out: torch.Tensor, *, clips: bool = False) -> torch.Tensor:
    value = _Value(parts=tuple(one.value for one in seen), clips=clips)
    for one in seen:
        one.value.uses.append(value)
    return _Watched(out, value)


def _summed(seen: list[_Watched], one: Any, other: Any, out: torch.Tensor) -> torch.Tensor:
    for watched in seen:
        watched.value.uses.append(None)
    if out.numel() < cost.LEAST_SUM:
        return out
    # The first, since the second is there when the sum is taken; the second if it is made last.
    for term, beside in ((one, other), (other, one)):
        value = term.value if isinstance(term, _Watched) else None
        if value is None or value.summed or value.uses != [None] or value.parts:
            continue
        maker = value.maker
        if isinstance(maker, LowBitConv2d) and not maker.relu and beside.shape == term.shape:
            value.total = _Value(maker=maker, summed=True)
            return _Watched(out, value.total)
    return out


def hand_over(model: nn.Module, run: Callable[[], object]) -> int:
    """Let layers hand codes to those that read them, and take sums along.

    Args:
        run: runs one forward pass.

    Returns:
        How many layers hand codes on, or take a sum along.
    """
    for one in model.modules():
        if isinstance(one, LowBitLayer):
            one.output_codes, one.after_sum = None, None
    values, repeated = _watch(model, run)
    # What becomes of a sum is decided for its maker's output, too: it has no other use.
    summing = {id(value.maker) for value in values if value.summed}
    wanted = [value for value in values if value.summed or id(value.maker) not in summing]
    return sum(_decide(group) for group in _groups(wanted) if not _makers(group) & repeated)


def _decide(group: list[_Value]) -> int:
    """Tell the makers of `group` what to hand on; how many of them do something they did not."""
    makers = [value for value in group if value.maker is not None]
    readers = [use for value in group for use in value.uses if isinstance(use, LowBitLayer)]
    others = any(use is None for value in group for use in value.uses)
    codes = readers[0].input_codes if readers else None
    alike = not others and all(reader.input_codes == codes for reader in readers)
    # A sum is written as floats in any case.
    direct = len(makers) == 1 and all(value.clips for value in group if value.parts)
    handing = 0
    for value in makers:
        assert value.maker is not None
        if value.summed:
            only = value.uses[0] if len(value.uses) == 1 else None
            relu = isinstance(only, _Value) and only.clips
            value.maker.after_sum = AfterSum(relu, codes if alike or direct else None)
        elif alike:
            value.maker.output_codes = codes
        handing += value.summed or (alike and codes is not None)
    return handing


def _makers(group: list[_Value]) -> set[LowBitLayer]:
    return {value.maker for value in group if value.maker is not None}


def _watch(model: nn.Module, run: Callable[[], object]) -> tuple[list[_Value], set[LowBitLayer]]:
    """The outputs of layers and their sums, and the layers that ran more than once."""
    layers = [one for one in model.modules() if isinstance(one, LowBitLayer)]
    by_layer: dict[LowBitLayer, _Value] = {}
    repeated: set[LowBitLayer] = set()
    values: list[_Value] = []

    def before(layer: Any, args: Any) -> Any:
        def read(one: _Watched) -> torch.Tensor:
            one.value.uses.append(layer)
            values.append(one.value)
            return one.plain

        return tree_map_only(_Watched, read, args)

    def after(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if layer in by_layer:
            repeated.add(layer)
        value = by_layer.setdefault(layer, _Value(maker=layer))
        values.append(value)
        return _Watched(output, value)

    def end(module: Any, args: Any, output: Any) -> Any:
        def given(one: _Watched) -> torch.Tensor:
            one.value.uses.append(None)
            return one.plain

        return tree_map_only(_Watched, given, output)

    hooks = [one.register_forward_pre_hook(before) for one in layers]
    hooks += [one.register_forward_hook(after) for one in layers]
    hooks.append(model.register_forward_hook(end))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return _all_of(values), repeated


def _all_of(values: list[_Value]) -> list[_Value]:
    """These, and what was made of them or went into them, each once."""
    by_id: dict[int, _Value] = {}
    waiting = list(values)
    while waiting:
        one = waiting.pop()
        if id(one) in by_id:
            continue
        by_id[id(one)] = one
        waiting += [use for use in one.uses if isinstance(use, _Value)]
        waiting += [*one.parts, *([one.total] if one.total else [])]
    return list(by_id.values())


def _groups(values: list[_Value]) -> list[list[_Value]]:
    """Values that are handed over alike, because one was made of the other."""
    group_of: dict[int, list[_Value]] = {id(one): [one] for one in values}
    for one in values:
        for part in one.parts:
            mine, other = group_of[id(one)], group_of.get(id(part))
            if other is None or other is mine:
                continue
            mine += other
            for moved in other:
                group_of[id(moved)] = mine
    return list({id(group): group for group in group_of.values()}.values())
