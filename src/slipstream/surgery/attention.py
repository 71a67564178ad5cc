"""Replace hand-written attention in a module's forward by one fused call.

The forward is traced symbolically with its submodules as leaves; in the trace, common spellings of
``softmax(q @ k^T * s + mask) @ v`` become ``torch.nn.functional.scaled_dot_product_attention``.
Only the module's ``forward`` changes; parameters, buffers, names and hooks stay.

Source: Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning in
Python", MLSys 2022; the kernel: Dao et al., "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Mask values up to this count as minus infinity: their exp is below rounding.
_MASKED = -1e4
_LAST_TWO = ((-2, -1), (-1, -2), (2, 3), (3, 2))


class NotRewrittenError(Exception):
    """The reason why a module's forward is unchanged; callers catch it."""


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    masked: Any = None,
    scale: Sequence[tuple[str, Any]] = (),
    drop: Any = None,
    dropout: tuple[float, bool] = (0.0, False),
) -> Any:
    """Compute ``softmax(query @ key^T * scale + mask) @ value`` as one call.

    Args:
        query, key, value: [..., length, width], with one or two leading dimensions.
        mask: added if numeric; if boolean, True positions are attended to.
        masked: boolean; True positions are not attended to.
        scale: factors (``"mul"``) and divisors (``"div"``) of the scores.
        drop: the ``nn.Dropout`` of the weights, if any.
        dropout: probability of a functional dropout, and whether it is active.
    """
    from torch.nn.functional import scaled_dot_product_attention

    factor = 1.0
    for kind, number in scale:
        if getattr(number, "requires_grad", False):
            raise NotRewrittenError("its scale is learned")
        factor = factor * float(number) if kind == "mul" else factor / float(number)
    if masked is not None:
        mask = masked.logical_not()
    rate, on = dropout if drop is None else (drop.p, drop.training)
    batched = query.dim() == 3
    if batched:
        # The fused kernels require a dimension of heads.
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    if mask is not None and mask.dim() != query.dim():
        mask = mask[(None,) * (query.dim() - mask.dim())]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=rate if on else 0.0, scale=factor
    )
    return attended.squeeze(1) if batched else attended


def with_attention(module: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a forward for `module` in which hand-written attention is one call.

    Args:
        arguments: arguments of the forward, by name; those that are not tensors become constants.

    Raises:
        NotRewrittenError: the forward cannot be traced, or does not contain the pattern.
    """
    import torch

    training, other = (_trace(module, arguments, mode) for mode in (True, False))
    graph, other = (training, other) if module.training else (other, training)
    tied = _tied_to_training(graph, other)
    matches = [
        match
        for node in list(graph.nodes)
        if _is(node, "softmax", kind=torch.nn.Softmax, module=module)
        for match in [_match(node, module)]
    ]
    if not matches:
        raise NotRewrittenError("its forward calls no softmax that a trace can see")
    for match in matches:
        _replace(graph, match, tied)
    code = torch.fx.GraphModule(module, graph)
    # Bind to the module itself, not to the traced copy, so that later changes of its parameters,
    # buffers and children take effect.
    return types.MethodType(type(code).forward, module)


@dataclass
class _Match:
    """Nodes of one attention and their operands."""

    product: Any
    query: Any = None
    key: Any = None
    value: Any = None
    transposed: bool = True
    mask: Any = None
    masked: Any = None
    scale: list[tuple[str, Any]] = field(default_factory=list)
    drop: Any = None


def _trace(module: Any, arguments: Mapping[str, Any], training: bool) -> Any:
    import torch

    class Tracer(torch.fx.Tracer):
        # Buffers may be sliced by sizes that are only known at run time.
        proxy_buffer_attributes = True

        def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
            return True

    constants = {
        name: value
        for name, value in arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
    before = module.training
    module.training = training
    try:
        graph = Tracer().trace(module, concrete_args=constants)
    except Exception as error:
        raise NotRewrittenError(
            f"its forward cannot be traced ({type(error).__name__}: {str(error).splitlines()[0]})"
            if str(error)
            else f"its forward cannot be traced ({type(error).__name__})"
        ) from error
    finally:
        module.training = before
    names = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            # The trace renames constants; callers use the original names.
            name = next(names, None)
            if name is not None and not str(node.target).startswith("*"):
                node.target = name
    return graph


def _tied_to_training(graph: Any, other: Any) -> set[Any]:
    tied = set()
    for a, b in itertools.zip_longest(graph.nodes, other.nodes):
        same_call = a is not None and b is not None and (a.op, a.target) == (b.op, b.target)
        if same_call and str((a.args, a.kwargs)) == str((b.args, b.kwargs)):
            continue
        if not same_call or not _is(a, "dropout"):
            raise NotRewrittenError("its forward differs between training and evaluation")
        tied.add(a)
    return tied


def _is(node: Any, *names: str, kind: type | None = None, module: Any = None) -> bool:
    """Return whether `node` calls a function or method in `names`, or a module of class `kind`."""
    if node.op == "call_method":
        return str(node.target).removesuffix("_") in names
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).removesuffix("_") in names
    if node.op == "call_module" and kind is not None:
        return type(module.get_submodule(node.target)) is kind
    return False


def _match(softmax: Any, module: Any) -> _Match:
    import torch

    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if softmax.op == "call_module":
        dim = module.get_submodule(softmax.target).dim
    if dim not in (-1, 2, 3) or softmax.kwargs.get("dtype") is not None:
        raise NotRewrittenError("its softmax is not over the last dimension in its own dtype")
    weights = _only_user(softmax)
    drop = None
    if _is(weights, "dropout", kind=torch.nn.Dropout, module=module):
        drop, weights = weights, _only_user(weights)
    last = drop or softmax
    if _is(weights, kind=torch.nn.Identity, module=module):
        last, weights = weights, _only_user(weights)
    left, value = _product(weights) or (None, None)
    if left is not last:
        raise NotRewrittenError("its weights are not multiplied with values by a matmul or bmm")
    match = _Match(weights, value=value, drop=drop)
    node = softmax.args[0] if softmax.args else softmax.kwargs["input"]
    while True:
        if len(node.users) > 1:
            raise NotRewrittenError("its scores are used elsewhere too")
        product = _product(node)
        if product is not None:
            match.query, match.key = product
            break
        node = _towards_product(node, match)
    if _is(match.key, "transpose") and tuple(match.key.args[1:]) in _LAST_TWO:
        match.key, match.transposed = match.key.args[0], False
    return match


def _only_user(node: Any) -> Any:
    users = list(node.users)
    if len(users) != 1:
        raise NotRewrittenError("its weights are used elsewhere too")
    return users[0]


def _product(node: Any) -> tuple[Any, Any] | None:
    return tuple(node.args) if _is(node, "matmul", "bmm") and len(node.args) == 2 else None


def _towards_product(node: Any, match: _Match) -> Any:
    """Return the node whose scores `node` scales or masks, and record how in `match`."""
    import torch

    args = node.args
    for kind, names in (("mul", ("mul", "imul")), ("div", ("div", "truediv", "itruediv"))):
        if _is(node, *names) and len(args) == 2:
            scores, number = args
            if kind == "mul" and not _leads_to_product(scores):
                scores, number = number, scores
            if _leads_to_product(scores):
                match.scale.append((kind, number))
                return scores
    has_mask = match.mask is not None or match.masked is not None
    if _is(node, "add", "iadd") and len(args) == 2:
        scores, mask = args if _leads_to_product(args[0]) else (args[1], args[0])
        if _leads_to_product(scores) and not has_mask and not match.scale:
            match.mask = mask
            return scores
        raise NotRewrittenError("its mask is scaled, or it has several")
    fills = _is(node, "masked_fill")
    if (fills or node.target is torch.where) and len(args) == 3 and not has_mask:
        if not isinstance(args[2], (int, float)) or args[2] > _MASKED:
            raise NotRewrittenError("it fills masked scores with a value other than -inf")
        if fills:
            match.masked, scores = args[1], args[0]
        else:
            match.mask, scores = args[0], args[1]
        return scores
    raise NotRewrittenError(
        f"its scores pass through '{node.name}', which the fused call does not support"
    )


def _leads_to_product(node: Any) -> bool:
    """Return whether `node` computes scores: a product, possibly scaled or masked."""
    if not hasattr(node, "op"):
        return False
    names = ("mul", "imul", "div", "truediv", "itruediv", "add", "iadd", "masked_fill")
    scaled = _is(node, *names) and any(map(_leads_to_product, node.args))
    return scaled or _product(node) is not None


def _replace(graph: Any, match: _Match, tied: set[Any]) -> None:
    kwargs: dict[str, Any] = {}
    with graph.inserting_before(match.product):
        key = match.key
        if match.transposed:
            key = graph.call_method("transpose", (key, -2, -1))
        for name in ("mask", "masked"):
            if getattr(match, name) is not None:
                kwargs[name] = getattr(match, name)
        if match.scale:
            kwargs["scale"] = tuple(match.scale)
        drop = match.drop
        if drop is not None and drop.op == "call_module":
            kwargs["drop"] = graph.create_node("get_attr", drop.target)
        elif drop is not None:
            rate = drop.kwargs.get("p", drop.args[1] if len(drop.args) > 1 else 0.5)
            on = drop.kwargs.get("training", drop.args[2] if len(drop.args) > 2 else True)
            if drop in tied:
                on = graph.create_node("get_attr", "training")
            kwargs["dropout"] = (rate, on)
        fused = graph.call_function(attend, (match.query, key, match.value), kwargs)
    match.product.replace_all_uses_with(fused)
    _erase(graph, match.product)


def _erase(graph: Any, node: Any) -> None:
    """Erase `node` and nodes that only it used; other unused nodes may have effects."""
    if node.users or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for read in inputs:
        _erase(graph, read)
