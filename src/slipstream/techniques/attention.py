"""Unfused attention in a recorded step, and the equivalent fused call.

Attention is found by data dependence from every softmax: up through scaling and masks to the
product of queries and keys, and down through dropout to the product with the values. The backward
pass is found by autograd's sequence numbers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.flow import Flow, Match, flow_of
from slipstream.graph.graph import cached_per_graph
from slipstream.techniques.attention_storages import AttentionStorages, storages_of

_FORWARD = (
    "aten::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, "
    "bool enable_gqa=False) -> Tensor"
)
_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, "
    "Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
    "Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)
_NOT = "aten::logical_not(Tensor self) -> Tensor"
_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_SCALES = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")
_SUMS = ("aten::add", "aten::add_")
_FILLS = ("aten::masked_fill", "aten::masked_fill_")
_INSIDE = "aten::scaled_dot_product_attention"
_SOFTMAX = "aten::_softmax"
_MATMUL = "aten::matmul"


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Match):
    """An unfused attention.

    The fused call replaces its last forward task, and the gradient its first backward task. If it
    cannot be fused, only its forward tasks are known.

    Attributes:
        work: its tasks that compute; the others only create views.
        call: the fused call.
        backward_call: its gradient; None for inference.
        keep: negation of the mask, if needed: fused attention masks where it is False.
        storages: storages of the tensors of both calls; None if ambiguous.
        sequence: autograd's number of the product with the values; -1 for inference.
    """

    work: tuple[int, ...]
    call: Call
    backward_call: Call | None
    keep: Call | None
    storages: AttentionStorages | None
    sequence: int


def attentions(flow: Flow) -> Iterator[Attention]:
    """Find unfused attentions."""
    graph = flow.graph
    fused = np.array([_INSIDE in text for text in graph.strings], bool)
    for task in flow.calling((_SOFTMAX,), StepPhase.FORWARD).tolist():
        if flow.complete[task] and not fused[graph.tasks.scope[task]]:
            attention = _Finder(flow, task).find()
            if attention is not None:
                yield attention


class _Finder:
    """Search for an attention from a softmax."""

    _mask: TensorSpec | None = None
    _mask_storage: int | None = None
    _keep: Call | None = None
    _refusal: str | None = None

    def __init__(self, flow: Flow, softmax: int) -> None:
        self._graph, self._flow = flow.graph, flow
        self._softmax, self._chain = softmax, [softmax]

    def find(self) -> Attention | None:
        """Return the attention, or None if the softmax belongs to something else."""
        scores = self._up()
        product = self._down() if scores is not None else None
        if scores is None or product is None:
            return None
        first, left, right = self._operands(scores)
        second, _, value = self._operands(product)
        query, key = left, _swapped(right)
        forward = {*self._chain, *first, *second, *self._dead_ends()}
        forward |= self._transpose_of(min(first), scores, right)
        query, key, value = map(_with_heads, (query, key, value))
        if value.shape[-1] != query.shape[-1]:
            self._refuse("values and keys have different widths, which no fused kernel supports")
        output = _like(query)
        forward |= self._copy_of(product, output)
        mask = None if self._mask is None else _broadcast(self._mask, query, key)
        call = Call(_FORWARD, (query, key, value, mask, 0.0, False, None, False), (output,))
        backward = self._backward(forward)
        gradient = _gradient(query, key, value, output, mask) if backward else None
        flow = self._flow
        work = [t for t in (*sorted(forward), *backward) if flow.complete[t] and not flow.views[t]]
        masks = [] if self._mask_storage is None else [self._mask_storage]
        storages = storages_of(flow, (scores, product), forward, backward, masks)
        module = self._graph.task(max(forward)).module.partition(".")[2]
        return Attention(
            "attention", module, tuple(sorted(forward)), backward, query, output, {},
            refusal=self._refusal, work=tuple(work), call=call, backward_call=gradient,
            keep=self._keep, storages=storages, sequence=int(self._graph.tasks.sequence[product]),
        )  # fmt: skip

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or f"its attention cannot be fused: {reason}"

    def _readers(self, task: int) -> list[int]:
        phase = self._graph.tasks.phase
        return [t for t in self._flow.readers[task] if phase[t] == StepPhase.FORWARD]

    def _up(self) -> int | None:
        """Find the product of queries and keys; record the tasks in between and the mask."""
        flow = self._flow
        call = flow.call(self._softmax)
        assert call is not None
        dims = len(call.inputs[0].shape)
        if dims < 3 or call.arguments[1] not in (-1, dims - 1):
            return None
        scores, t = call.inputs[0].shape, flow.makers[self._softmax][0]
        while t >= 0:
            call = flow.call(t)
            if call is None or self._graph.tasks.phase[t] != StepPhase.FORWARD:
                return None
            if self._readers(t) != [self._chain[-1]]:
                self._refuse("its scores are also used elsewhere")
            if call.name in _PRODUCTS:
                if call.name == "aten::baddbmm" and call.arguments[3] != 0:
                    self._set_mask(call.inputs[0], flow.makers[t][0], flow.operands(t)[0][0])
                return t
            self._chain.append(t)
            place = self._through(t, call, scores)
            if place is None:
                return None
            t = flow.makers[t][place]
        return None

    def _through(self, t: int, call: Call, scores: tuple[int, ...]) -> int | None:
        """Return the index of the scores among the inputs of a scaling or masking; else None."""
        makers, operands = self._flow.makers[t], self._flow.operands(t)[0]
        if call.name in _SCALES and all(spec.numel == 1 for spec in call.inputs[1:]):
            return 0
        if call.name in _SUMS and len(call.inputs) == 2:
            place = next((i for i in (0, 1) if self._is_scores(makers[i])), None)
            if place is not None and call.inputs[place].numel == math.prod(scores):
                self._set_mask(call.inputs[1 - place], makers[1 - place], operands[1 - place])
                return place
        if call.name in _FILLS and len(call.inputs) >= 2 and _is_masked(call.arguments[2]):
            self._set_mask(call.inputs[1], makers[1], operands[1])
            self._keep = Call(_NOT, (call.inputs[1],), (call.inputs[1],))
            return 0
        if call.name == "aten::where" and len(call.inputs) == 3 and call.inputs[2].numel == 1:
            self._set_mask(call.inputs[0], makers[0], operands[0])
            return 1
        return None

    def _is_scores(self, maker: int) -> bool:
        """Whether `maker` is a product, or the scaling or masking of one."""
        seen = 0
        while maker >= 0 and seen < len(_SCALES) + len(_FILLS):
            call = self._flow.call(maker)
            if call is None:
                return False
            if call.name in _PRODUCTS:
                return True
            if call.name not in (*_SCALES, *_SUMS, *_FILLS):
                return False
            maker, seen = self._flow.makers[maker][0], seen + 1
        return False

    def _set_mask(self, spec: TensorSpec, maker: int, storage: int) -> None:
        if self._mask is not None:
            self._refuse("it has several masks")
        if maker in _learned(self._graph) or storage in self._flow.parameters:
            self._refuse("its mask is learned, but the fused kernel has no gradient for masks")
        self._mask, self._mask_storage = spec, storage

    def _down(self) -> int | None:
        """Find the product with the values; record dropout and other readers of the weights."""
        task, graph = self._softmax, self._graph
        readers = self._readers(task)
        views = map(graph.task, readers)
        drops = [view.number for view in views if "dropout" in f"{view.name} {view.scope}"]
        if drops:
            self._refuse("it drops out weights, which the fused CPU kernel does not support")
            # The first tasks create the random mask, the last one applies it.
            task = drops[-1]
            self._chain += [t for t in drops if t not in self._chain]
            readers = self._readers(task)
        products = [t for t in readers if self._flow.name(t) == "aten::bmm"]
        if len(products) != 1 or task not in self._flow.makers[products[0]][:1]:
            return None
        return products[0]

    def _dead_ends(self) -> set[int]:
        """Return readers of the weights whose results are unused, such as the mean over heads."""
        ends: set[int] = set()
        readers = [t for t in self._readers(self._softmax) if t not in self._chain]
        for t in readers:
            if self._flow.name(t) == "aten::bmm":
                continue
            if self._readers(t):
                self._refuse("its weights are also used elsewhere")
            else:
                ends |= {t, *self._flow.views_of[t]}
        views = (t for task in self._chain for t in self._flow.views_of[task])
        return ends | {t for t in views if self._graph.tasks.phase[t] == StepPhase.FORWARD}

    def _operands(self, product: int) -> tuple[set[int], TensorSpec, TensorSpec]:
        """Return the tasks of a matmul and its two arguments."""
        flow, tasks = self._flow, self._graph.tasks
        call = flow.call(product)
        assert call is not None
        group, left, right = {product}, *call.inputs[-2:]
        scope = self._graph.task(product).scope
        if scope.rpartition("/")[2] != _MATMUL:
            return group, left, right
        expands: list[int] = []
        t = product - 1
        while t > 0 and len(expands) < 2 and self._belongs(t, product, scope):
            group.add(t)
            if self._flow.name(t) == "aten::expand":
                expands.append(t)
            t -= 1
        for t in range(product + 1, len(self._graph)):
            if not flow.views[t] or tasks.scope[t] != tasks.scope[product]:
                break
            group.add(t)
            if flow.makers[t][0] == product:
                break
        if len(expands) == 2:
            specs = [flow.call(t) for t in expands]
            right, left = (expand.inputs[0] for expand in specs if expand is not None)
        return group, left, right

    def _belongs(self, t: int, product: int, scope: str) -> bool:
        inside = self._graph.task(t).scope
        same = self._graph.tasks.module[t] == self._graph.tasks.module[product]
        helper = bool(self._flow.views[t]) or self._flow.name(t) == "aten::clone"
        return same and helper and (inside == scope or inside.startswith(scope + "/"))

    def _transpose_of(self, begin: int, product: int, right: TensorSpec) -> set[int]:
        """Return the view before a product that transposes the keys."""
        for t in range(begin - 1, max(begin - 4, 0), -1):
            call = self._flow.call(t)
            if not self._flow.views[t] or call is None or call.name != "aten::transpose":
                continue
            if call.outputs[0] == right and call.inputs[0] == _swapped(right):
                return {t}
        return set()

    def _copy_of(self, product: int, output: TensorSpec) -> set[int]:
        """Return the copy that makes heads contiguous, if the fused output already is."""
        flow = self._flow
        readers = self._readers(product)
        if len(readers) != 1 or self._flow.name(readers[0]) != "aten::clone":
            return set()
        call = flow.call(readers[0])
        assert call is not None
        spec = call.inputs[0]
        if len(spec.shape) != 4 or spec.shape != tuple(output.shape[i] for i in (0, 2, 1, 3)):
            return set()
        dense = _dense(spec.shape)
        return {readers[0]} if tuple(output.strides[i] for i in (0, 2, 1, 3)) == dense else set()

    def _backward(self, forward: set[int]) -> tuple[int, ...]:
        """Return the backward tasks of `forward`."""
        return tuple(sorted(back for task in forward for back in self._flow.backward[task]))


@cached_per_graph
def _learned(graph: Graph) -> set[int]:
    """Return the tasks that depend on parameters, in a step with a backward pass."""
    if not (graph.tasks.phase == StepPhase.BACKWARD).any():
        return set()
    flow = flow_of(graph)
    learned: set[int] = set()
    for t in range(len(graph)):
        inputs, _ = flow.operands(t)
        if not flow.parameters.isdisjoint(inputs) or not learned.isdisjoint(flow.makers[t]):
            learned.add(t)
    return learned


def _is_masked(value: object) -> bool:
    """Whether a fill value acts as minus infinity; that of a tensor is not recorded."""
    return isinstance(value, TensorSpec) or (isinstance(value, (int, float)) and value <= -1e4)


def _swapped(spec: TensorSpec) -> TensorSpec:
    shape, strides = ((*sizes[:-2], *sizes[:-3:-1]) for sizes in (spec.shape, spec.strides))
    return replace(spec, shape=shape, strides=strides)


def _with_heads(spec: TensorSpec) -> TensorSpec:
    """Add a head dimension to [batch, length, width]; leave other shapes unchanged."""
    if len(spec.shape) != 3:
        return spec
    (b, s, e), (sb, ss, se) = spec.shape, spec.strides
    return replace(spec, shape=(b, 1, s, e), strides=(sb, sb, ss, se))


def _dense(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = itertools.accumulate(reversed(tuple(shape)), operator.mul, initial=1)
    return tuple(sizes)[-2::-1]


def _like(spec: TensorSpec) -> TensorSpec:
    """Return the spec of ``empty_like``: dense, with the dimension order of `spec`."""
    order = sorted(range(len(spec.shape)), key=lambda i: -spec.strides[i])
    strides = dict(zip(order, _dense(spec.shape[i] for i in order), strict=True))
    return replace(spec, strides=tuple(strides[i] for i in range(len(order))))


def _broadcast(mask: TensorSpec, query: TensorSpec, key: TensorSpec) -> TensorSpec:
    """Return a mask for the fused call, with a head dimension."""
    if len(mask.shape) in (2, 4):
        return mask
    shape, strides = mask.shape, mask.strides
    if len(shape) == 3:
        # One mask per batch of a single head, or per head.
        heads = shape[0] not in (1, query.shape[0])
        place = 0 if heads else 1
        shape = (*shape[:place], 1, *shape[place:])
        strides = (*strides[:place], strides[0], *strides[place:])
    else:
        shape, strides = (1, *shape), (0, *strides)
    return replace(mask, shape=shape, strides=strides)


def _gradient(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, output: TensorSpec,
    mask: TensorSpec | None,
) -> Call:  # fmt: skip
    batch, heads, length, _ = query.shape
    sums = TensorSpec("float32", (batch, heads, length), (length * heads, 1, heads), query.device)
    if mask is not None and mask.dtype == "bool":
        mask = TensorSpec(query.dtype, mask.shape, _dense(mask.shape), mask.device)
    arguments = (output, query, key, value, output, sums, 0.0, False, mask, None)
    return Call(_BACKWARD, arguments, (query, key, value))
