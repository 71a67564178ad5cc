"""Exchange of codes between low-bit layers, determined by tracing a forward pass.

A layer's output is traced through ReLUs, max pooling, concatenations, reshapes and one sum. If only
low-bit layers with equal input codes finally read it, it is passed on as codes; a sum, which the
next sum reads as well, is passed on as codes and floats. Results do not change, see
`slipstream.techniques.lowbit.coded`.
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
    """A tensor of the traced pass.

    Attributes:
        maker: the layer that computes it, by itself or as a fused sum; None for others.
        summed: whether it is a fused sum.
        parts: the values from which a traced operator computed it.
        uses: its readers: layers, values computed from it, or None for other operators.
        clips: whether a ReLU computed it.
        total: the sum of which it is a term, if its maker can fuse it.
    """

    maker: LowBitLayer | None = None
    summed: bool = False
    parts: tuple[_Value, ...] = ()
    uses: list[LowBitLayer | _Value | None] = field(default_factory=list)
    clips: bool = False
    total: _Value | None = None


class _Watched(torch.Tensor):
    """A tensor of the traced pass that records uses in its `_Value`."""

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

        def plain(watched: _Watched) -> torch.Tensor:
            seen.append(watched)
            return watched.plain

        out = func(*tree_map_only(_Watched, plain, args), **tree_map_only(_Watched, plain, kwargs))
        watched: torch.Tensor | None = None
        if func in _RELUS or func in _THROUGH:
            watched = _through(tuple(seen), out, clips=func in _RELUS)
        elif func is _aten.cat.default and len(seen) == len(args[0]):
            watched = _through(tuple(seen), out)
        elif (
            func in _SUMS
            and not kwargs
            and all(isinstance(term, torch.Tensor) for term in args[:2])
        ):
            watched = _summed(seen, args[0], args[1], out)
        else:
            for operand in seen:
                operand.value.uses.append(None)
        if func in _IN_PLACE and isinstance(watched, _Watched) and isinstance(args[0], _Watched):
            # PyTorch returns the object on which it was called, not the result of this function.
            args[0].plain, args[0].value = watched.plain, watched.value
            return args[0]
        return out if watched is None else watched


def _through(seen: tuple[_Watched, ...], out: torch.Tensor, *, clips: bool = False) -> torch.Tensor:
    value = _Value(parts=tuple(operand.value for operand in seen), clips=clips)
    for operand in seen:
        operand.value.uses.append(value)
    return _Watched(out, value)


def _summed(seen: list[_Watched], left: Any, right: Any, out: torch.Tensor) -> torch.Tensor:
    for watched in seen:
        watched.value.uses.append(None)
    if out.numel() < cost.MIN_SUM_ELEMS:
        return out
    # Prefer the first term: the second usually exists when the sum is computed.
    for term, addend in ((left, right), (right, left)):
        value = term.value if isinstance(term, _Watched) else None
        if value is None or value.summed or value.uses != [None] or value.parts:
            continue
        maker = value.maker
        if isinstance(maker, LowBitConv2d) and not maker.relu and addend.shape == term.shape:
            value.total = _Value(maker=maker, summed=True)
            return _Watched(out, value.total)
    return out


def hand_over(model: nn.Module, run: Callable[[], object]) -> int:
    """Let layers pass codes to their readers, and fuse sums.

    Args:
        run: runs a forward pass.

    Returns:
        The number of layers that pass codes on or fuse a sum.
    """
    for module in model.modules():
        if isinstance(module, LowBitLayer):
            module.output_codes, module.after_sum = None, None
    values, repeated = _trace(model, run)
    # A maker's output with a fused sum has no other use, so only the sum is considered.
    summing = {id(value.maker) for value in values if value.summed}
    relevant = [value for value in values if value.summed or id(value.maker) not in summing]
    return sum(_decide(group) for group in _groups(relevant) if not _makers(group) & repeated)


def _decide(group: list[_Value]) -> int:
    """Set the outputs of the makers in `group`; return how many pass codes or fuse a sum."""
    makers = [value for value in group if value.maker is not None]
    readers = [use for value in group for use in value.uses if isinstance(use, LowBitLayer)]
    others = any(use is None for value in group for use in value.uses)
    codes = readers[0].input_codes if readers else None
    equal = not others and all(reader.input_codes == codes for reader in readers)
    # A fused sum is written as floats in any case.
    from_one = len(makers) == 1 and all(value.clips for value in group if value.parts)
    changed = 0
    for value in makers:
        assert value.maker is not None
        if value.summed:
            single = value.uses[0] if len(value.uses) == 1 else None
            relu = isinstance(single, _Value) and single.clips
            value.maker.after_sum = AfterSum(relu, codes if equal or from_one else None)
        elif equal:
            value.maker.output_codes = codes
        changed += value.summed or (equal and codes is not None)
    return changed


def _makers(group: list[_Value]) -> set[LowBitLayer]:
    return {value.maker for value in group if value.maker is not None}


def _trace(model: nn.Module, run: Callable[[], object]) -> tuple[list[_Value], set[LowBitLayer]]:
    """Trace a pass; return outputs of layers and their sums, and layers that ran repeatedly."""
    layers = [module for module in model.modules() if isinstance(module, LowBitLayer)]
    by_layer: dict[LowBitLayer, _Value] = {}
    repeated: set[LowBitLayer] = set()
    values: list[_Value] = []

    def before(layer: Any, args: Any) -> Any:
        def read(watched: _Watched) -> torch.Tensor:
            watched.value.uses.append(layer)
            values.append(watched.value)
            return watched.plain

        return tree_map_only(_Watched, read, args)

    def after(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if layer in by_layer:
            repeated.add(layer)
        value = by_layer.setdefault(layer, _Value(maker=layer))
        values.append(value)
        return _Watched(output, value)

    def end(module: Any, args: Any, output: Any) -> Any:
        def read_outside(watched: _Watched) -> torch.Tensor:
            watched.value.uses.append(None)
            return watched.plain

        return tree_map_only(_Watched, read_outside, output)

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    hooks.append(model.register_forward_hook(end))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return _connected(values), repeated


def _connected(values: list[_Value]) -> list[_Value]:
    """Return all values that are connected to `values`."""
    by_id: dict[int, _Value] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in by_id:
            continue
        by_id[id(value)] = value
        waiting += [use for use in value.uses if isinstance(use, _Value)]
        waiting += [*value.parts, *([value.total] if value.total else [])]
    return list(by_id.values())


def _groups(values: list[_Value]) -> list[list[_Value]]:
    """Group values that must have the same form, because one is computed from the other."""
    group_of: dict[int, list[_Value]] = {id(value): [value] for value in values}
    for value in values:
        for part in value.parts:
            group, other = group_of[id(value)], group_of.get(id(part))
            if other is None or other is group:
                continue
            group += other
            for moved in other:
                group_of[id(moved)] = group
    return list({id(each): each for each in group_of.values()}.values())
