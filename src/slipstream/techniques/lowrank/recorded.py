"""Edit of a recorded step that replaces weights by products: more operators, smaller updates.

A convolution becomes two, as does its backward pass. Each of the three matrix products of a linear
layer becomes two thin ones. Durations are scaled by the ratio of micro-benchmarks of the new and
recorded shapes. An LSTM is timed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import CallChanges, pace, ratio_columns, required_timings
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec, price, price_columns
from slipstream.graph.flow import Flow, Match, matches
from slipstream.graph.layers import CONVOLUTIONS, MATMULS, RECURRENT, LayerSettings, layers
from slipstream.surgery import module_of
from slipstream.technique import Context
from slipstream.techniques._baseline import updated_tensors
from slipstream.techniques.lowrank.timing import lstm_call

_LSTM = "aten::mkldnn_rnn_layer"
_MULTIPLIES = frozenset({*CONVOLUTIONS, *MATMULS, _LSTM})
_DENSE = frozenset(RECURRENT) - {"aten::lstm"}
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER, Role.TEMPORARY)
_COPIES = ("aten::detach", "aten::clone", "aten::copy_")


@dataclass(frozen=True, eq=False)
class Product:
    """Tasks of a site that make the same call, and the calls that replace it.

    Attributes:
        tasks: int64 [k], ascending.
        forward: whether they run in the forward pass, where the last of `calls` replaces the
            task; in the backward pass the first does.
        recorded: the recorded call.
    """

    tasks: NDArray[np.int64]
    forward: bool
    recorded: Call
    calls: list[Call]


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRankSite(Match):
    """A weight of a layer, or two of an LSTM, and the tasks that use it.

    Attributes:
        shape: shape of the weight as a matrix, for each of `count` products.
        shortcut: whether it is a convolution that only changes a residual's shape.
        ranks: rank of each weight's products, by storage.
        products: replacements of its tasks, in the order of their first ones.
        thin: size in bytes of the tensor between the factors, the task that allocates it and the
            last one that reads it.
    """

    shape: tuple[int, int]
    count: int
    shortcut: bool = False
    ranks: dict[int, int] = field(default_factory=dict)
    products: tuple[Product, ...] = ()
    thin: tuple[int, int, int] = (0, -1, -1)

    def parameters(self, storage: int) -> int:
        """Return the number of parameters of a weight's factors."""
        spec, rank = self.weights[storage], self.ranks[storage]
        rows = self.shape[0] * self.count
        columns = spec.numel // rows
        return rank * (rows + columns * self.count)


@dataclass(frozen=True, eq=False)
class LowRankPlan:
    """Edits of a recorded step.

    Attributes:
        sites: layers that become products.
        updates: the optimizer's tasks on factors instead of weights.
        exchanged: calls that store a gradient with the size of the factors, by task.
    """

    sites: list[LowRankSite]
    updates: CallChanges
    exchanged: dict[int, Call]

    @classmethod
    def of(cls, graph: Graph, chosen: Sequence[LowRankSite]) -> LowRankPlan:
        """Return the plan for sites whose ranks are set."""
        sites = [as_products(graph, site) for site in chosen]
        return cls(sites, CallChanges.of(graph, updates(graph, sites)), exchanged(graph, sites))


def sites(flow: Flow) -> Iterator[LowRankSite]:
    """Find layers whose weights are parameters; all calls of a layer form one site."""
    graph, tasks, strings = flow.graph, flow.graph.tasks, flow.graph.strings
    is_attention = np.array(
        ["scaled_dot_product" in text or text == "aten::bmm" for text in strings]
    )
    attention_modules = {
        strings[module].partition(".")[2]
        for module in np.unique(tasks.module[is_attention[tasks.name]]).tolist()
    }
    # LSTMs are the only recurrent modules with a low-rank form.
    dense = np.array([text.partition("/")[0] in _DENSE for text in strings])[tasks.scope]
    calls: dict[int, list[Match]] = {}
    for match in matches(graph, layers, _lstm_layers):
        (task,), weight = match.forward, next(iter(match.weights), -1)
        thin = flow.name(task) in _MULTIPLIES and not dense[task] and not match.settings.transposed
        if thin and match.module and weight in flow.parameters:
            calls.setdefault(weight, []).append(match)
    for weight, (match, *others) in calls.items():
        settings, count = match.settings, match.settings.groups
        rows = settings.outputs // count
        columns = match.weights[weight].numel // settings.outputs
        if (
            match.kind in ("linear", "matmul")
            and match.module in attention_modules
            and rows == 3 * columns
        ):
            # Queries, keys and values together: three products.
            rows, count = columns, 3
        pointwise = len(settings.kernel) == 2 and set(settings.kernel) == {1}
        yield LowRankSite(
            match.kind, match.module,
            tuple(task for call in (match, *others) for task in call.forward),
            tuple(task for call in (match, *others) for task in call.backward),
            match.x, match.y, match.weights, settings, shape=(rows, columns), count=count,
            shortcut=pointwise and set(settings.stride) != {1},
        )  # fmt: skip


def _lstm_layers(flow: Flow) -> Iterator[Match]:
    """Find the layers of LSTMs, each with two weights of four gates."""
    for task in flow.calling((_LSTM,), StepPhase.FORWARD).tolist():
        call, (storages, _) = flow.call(task), flow.operands(task)
        if call is not None and storages[1] in flow.parameters:
            module = flow.graph.task(task).module.partition(".")[2]
            rows = call.inputs[1].shape[0]
            yield Match(
                "lstm", module, (task,), tuple(flow.backward[task]), call.inputs[0],
                call.outputs[0], dict(zip(storages[1:3], call.inputs[1:3], strict=True)),
                LayerSettings(rows, True, groups=4),
            )  # fmt: skip


def as_products(graph: Graph, site: LowRankSite) -> LowRankSite:
    """Return the site with the replacements of its tasks at its ranks."""
    tasks, weight = np.sort(np.array(site.tasks)), next(iter(site.weights))
    number = graph.tasks.call[tasks]
    backward = graph.tasks.phase[tasks] == StepPhase.BACKWARD
    reads = np.zeros(len(tasks), bool)
    for call_number in np.unique(number).tolist():
        inputs = np.arange(len(graph.calls[call_number].inputs))
        places = graph.operand_start[tasks[number == call_number], None] + inputs
        reads[number == call_number] = (graph.operands[places] == weight).any(axis=1)
    matmuls = [
        graph.calls[call_number].name == "aten::mm"
        for call_number in number[backward & reads].tolist()
    ]
    codes, firsts = np.unique(4 * number + 2 * backward + reads, return_index=True)
    products = []
    for code, first in sorted(zip(codes.tolist(), firsts.tolist(), strict=True), key=itemgetter(1)):
        call, after = graph.calls[number[first]], bool(backward[first])
        calls = _thin_calls(site, call, after, bool(reads[first]), any(matmuls))
        if calls:
            members = tasks[4 * number + 2 * backward + reads == code]
            products.append(Product(members, not after, call, calls))
    thin = site.thin
    begin = next(product for product in products if product.forward)
    if len(begin.calls) > 1:
        first = int(begin.tasks[0])
        ends = [int(product.tasks[-1]) for product in products if not product.forward]
        thin = (begin.calls[0].outputs[0].nbytes, first, max(ends, default=first))
    return replace(site, products=tuple(products), thin=thin)


def _thin_calls(
    site: LowRankSite, call: Call, backward: bool, reads_weight: bool, takes_input: bool
) -> list[Call]:
    """Return the calls that replace `call` at the ranks of `site`; empty if it stays."""
    rank = next(iter(site.ranks.values()))
    if call.name in CONVOLUTIONS:
        return _convolutions(call, rank)
    if call.name == "aten::convolution_backward":
        return _convolutions_backward(call, rank)
    if call.name in (_LSTM, f"{_LSTM}_backward"):
        x, w = call.inputs[0], call.inputs[1]
        return [lstm_call(x.shape, w.shape[0] // 4, tuple(site.ranks.values()), backward)]
    if call.name in MATMULS:
        part = _part(call, site.count, reads_weight, backward)
        return _thin_products(part, rank, backward, reads_weight, takes_input) * site.count
    return []


def _spec(like: TensorSpec, *shape: int) -> TensorSpec:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return TensorSpec(like.dtype, tuple(shape), tuple(strides), like.device)


def _like_image(like: TensorSpec, *shape: int) -> TensorSpec:
    """Return a spec of this shape with the dimension order of `like`."""
    if len(shape) == 4 and like.strides[1] == 1 and like.shape[1] > 1:
        _, c, h, w = shape
        return TensorSpec(like.dtype, shape, (c * h * w, 1, w * c, c), like.device)
    return _spec(like, *shape)


def _factors(weight: TensorSpec, rank: int, groups: int) -> tuple[TensorSpec, TensorSpec]:
    ones = [1] * (len(weight.shape) - 2)
    a = _like_image(weight, rank * groups, *weight.shape[1:])
    return a, _spec(weight, weight.shape[0], rank, *ones)


def _convolutions(call: Call, rank: int) -> list[Call]:
    x, weight, bias, stride, padding, dilation, transposed, extra, groups, *rest = call.arguments
    output = call.outputs[0]
    a, b = _factors(weight, rank, groups)
    thin = _like_image(output, output.shape[0], rank * groups, *output.shape[2:])
    ones, zeros = (1,) * len(stride), (0,) * len(stride)
    first = (x, a, None, stride, padding, dilation, transposed, extra, groups, *rest)
    second = (thin, b, bias, ones, zeros, ones, False, zeros, groups, *rest)
    return [Call(call.op, first, (thin,)), Call(call.op, second, call.outputs)]


def _convolutions_backward(call: Call, rank: int) -> list[Call]:
    grad, x, weight, sizes, stride, padding, dilation, transposed, extra, groups, mask = (
        call.arguments
    )
    a, b = _factors(weight, rank, groups)
    thin = _like_image(grad, grad.shape[0], rank * groups, *grad.shape[2:])
    ones, zeros = (1,) * len(stride), (0,) * len(stride)
    second = (
        grad, thin, b, sizes, ones, zeros, ones, False, zeros, groups, (True, True, mask[2])
    )  # fmt: skip
    first = (
        thin, x, a, None, stride, padding, dilation, transposed, extra, groups,
        (mask[0], True, False),
    )  # fmt: skip
    return [Call(call.op, second, (thin, b)), Call(call.op, first, call.outputs[:1])]


def _part(call: Call, count: int, reads_weight: bool, backward: bool) -> Call:
    """Return one of the `count` matrix products that `call` consists of, by the weight's rows."""
    *rest, left, right = call.inputs

    def cut(spec: TensorSpec, axis: int) -> TensorSpec:
        shape = list(spec.shape)
        shape[axis] //= count
        return replace(spec, shape=tuple(shape))

    if reads_weight and backward:
        return call.with_inputs([*rest, cut(left, 1), cut(right, 0)])
    if reads_weight:
        return call.with_inputs([*(cut(bias, 0) for bias in rest), left, cut(right, 1)])
    return call.with_inputs([*rest, cut(left, 0), right])


def _thin_products(
    call: Call, rank: int, backward: bool, reads_weight: bool, takes_input: bool
) -> list[Call]:
    """Return the thin products that replace a matrix product, forward or backward."""
    left, right = call.inputs[-2:]
    (m, k), n = left.shape, right.shape[1]

    def mm(a: TensorSpec, b: TensorSpec) -> Call:
        return Call(_MM, (a, b), (_spec(left, a.shape[0], b.shape[1]),))

    if reads_weight:
        # [m, k] times the weight is [m, n], computed through [m, rank].
        between = _spec(left, m, rank)
        right_1, right_2 = replace(right, shape=(k, rank)), replace(right, shape=(rank, n))
        if right.strides[0] == 1:
            right_1, right_2 = replace(right_1, strides=(1, k)), replace(right_2, strides=(1, rank))
        else:
            right_1, right_2 = replace(right_1, strides=(rank, 1)), replace(right_2, strides=(n, 1))
        second = mm(between, right_2)
        if call.name == "aten::addmm":
            second = Call(
                call.op, (call.arguments[0], between, right_2, *call.arguments[3:]), call.outputs
            )
        return [mm(left, right_1), second]
    if not backward:
        return [call]
    # The weight's gradient [m, n] over k samples becomes the gradients of both factors.
    calls = [mm(left, _spec(left, k, rank)), mm(_spec(left, rank, k), right)]
    if not takes_input:
        # Without a gradient of the input, the one between the factors is still needed.
        calls.append(mm(_spec(left, k, m), _spec(left, m, rank)))
    return calls


def insert_products(edit: Editor, graph: Graph, plan: LowRankPlan, context: Context) -> None:
    """Edit forward and backward passes, updates, exchanged gradients and memory."""
    durations, recorded = context.durations, graph.tasks
    for site in plan.sites:
        timed = [product for product in site.products if not _whole_layer(product)]
        old = np.sort(np.concatenate([*(product.tasks for product in timed), []]))
        in_step = pace(graph, old.astype(np.int64), durations)
        for product in site.products:
            tasks, calls, forward = product.tasks, product.calls, product.forward
            recorded_ns = recorded.duration_ns[tasks]
            before = None if _whole_layer(product) else durations.lookup(product.recorded)
            scale = in_step if before is None else recorded_ns / before.nanoseconds
            # The recorded task becomes the last call in forward and the first in backward.
            stays = len(calls) - 1 if forward else 0
            for number, call in enumerate(calls):
                cost = price(durations, call, math.nan)
                unknown = math.isnan(cost.nanoseconds)
                duration_ns = recorded_ns / len(calls) if unknown else cost.nanoseconds * scale
                duration_ns = np.broadcast_to(duration_ns, len(tasks))
                if number == stays:
                    edit.set_duration(
                        tasks, duration_ns, cost.provenance, spread=cost.spread, call=call
                    )
                else:
                    edit.insert_all(
                        tasks, call.name, duration_ns, cost.provenance, before=forward,
                        spread=cost.spread, call=edit.call_number(call),
                    )  # fmt: skip
        nbytes, first, last = site.thin
        if first >= 0 and len(graph.memory):
            trains = last != first
            role = Role.ACTIVATION if trains else Role.TEMPORARY
            edit.allocate(nbytes, role, producer=first, release=last)
    tasks, pair = plan.updates.tasks, plan.updates.pair
    factor = ratio_columns(durations, plan.updates.pairs)[0]
    prices = [price(durations, now, 0.0) for _, now in plan.updates.pairs]
    _, provenance, spread = price_columns(prices)
    numbers = np.array([edit.call_number(now) for _, now in plan.updates.pairs], np.int64)
    duration_ns = recorded.duration_ns[tasks] * factor[pair]
    edit.set_duration(tasks, duration_ns, provenance[pair], spread=spread[pair], call=numbers[pair])
    for task, call in plan.exchanged.items():
        tasks = np.array([task])
        edit.set_duration(tasks, recorded.duration_ns[tasks], recorded.provenance[tasks], call=call)
    _resize(edit, graph, plan.sites)


def _whole_layer(product: Product) -> bool:
    """Whether the replacement is timed as a whole layer."""
    return product.calls[0].name.startswith("slipstream::")


def required_calls(graph: Graph, plan: LowRankPlan) -> list[Call]:
    """Return the recorded and new calls whose durations `insert_products` looks up."""
    lookups: list[Call] = []
    for site in plan.sites:
        for product in site.products:
            recorded = [] if _whole_layer(product) else [product.recorded]
            lookups += [*recorded, *product.calls]
    return lookups + required_timings(graph, plan.updates)


def _places(graph: Graph, chosen: Sequence[LowRankSite]) -> dict[tuple[int, ...], list[int | None]]:
    """Return the parameters of each trained tensor's factors, by shape; None if it stays dense."""
    sizes = {storage: site.parameters(storage) for site in chosen for storage in site.weights}
    shapes = {spec.shape for site in chosen for spec in site.weights.values()}
    specs = updated_tensors(graph)
    storages: list[int] = graph.parameters.tolist()
    places: dict[tuple[int, ...], list[int | None]] = {}
    if len(specs) != len(storages):
        for site in chosen:
            for storage, spec in site.weights.items():
                places.setdefault(spec.shape, []).append(sizes[storage])
        return places
    for storage, spec in zip(storages, specs, strict=True):
        if spec.shape in shapes:
            places.setdefault(spec.shape, []).append(sizes.get(storage))
    return places


def updates(graph: Graph, chosen: Sequence[LowRankSite]) -> dict[int, Call]:
    """Return the calls of the optimizer's tasks on factors instead of weights, by task."""
    places = _places(graph, chosen)
    changed: dict[int, Call] = {}
    single: dict[tuple[int, ...], list[int]] = {shape: [] for shape in places}
    updating = np.flatnonzero((graph.tasks.phase == StepPhase.OPTIMIZER) & (graph.tasks.call >= 0))
    call_numbers = graph.tasks.call[updating].tolist()
    # Many tasks share a few calls.
    shapes_of = {
        number: {spec.shape for spec in graph.calls[number].inputs} & set(places)
        for number in set(call_numbers)
    }
    in_lists = {
        number: _in_lists(graph.calls[number], places)
        for number, shapes in shapes_of.items()
        if shapes and _has_lists(graph.calls[number])
    }
    for task, number in zip(updating.tolist(), call_numbers, strict=True):
        if number in in_lists:
            changed[task] = in_lists[number]
            continue
        for shape in shapes_of[number]:
            single[shape].append(task)
    alone: dict[tuple[int, tuple[int, ...], int], Call] = {}
    for shape, tasks in single.items():
        tasks_per_tensor = max(1, len(tasks) // len(places[shape]))
        for place, task in enumerate(tasks):
            size = places[shape][min(place // tasks_per_tensor, len(places[shape]) - 1)]
            if size is None:
                continue
            key = int(graph.tasks.call[task]), shape, size
            if key not in alone:
                alone[key] = _in_lists(graph.calls[key[0]], {shape: [size]})
            changed[task] = alone[key]
    return changed


def _has_lists(call: Call) -> bool:
    return any(isinstance(value, (list, tuple)) and value for value in call.arguments)


def _in_lists(call: Call, places: Mapping[tuple[int, ...], list[int | None]]) -> Call:
    """Resize the n-th tensor of a shape in each list of `call` to the factors."""

    def changed(value: object) -> object:
        if isinstance(value, TensorSpec):
            size = places.get(value.shape, [None])[0]
            return value if size is None else _spec(value, size)
        if not isinstance(value, (list, tuple)):
            return value
        counts = dict.fromkeys(places, 0)
        items: list[object] = []
        for item in value:
            if isinstance(item, TensorSpec) and item.shape in places:
                at = min(counts[item.shape], len(places[item.shape]) - 1)
                size = places[item.shape][at]
                counts[item.shape] += 1
                items.append(item if size is None else _spec(item, size))
            else:
                items.append(item)
        return tuple(items)

    outputs = changed(call.outputs)
    assert isinstance(outputs, tuple)
    return Call(call.op, tuple(changed(value) for value in call.arguments), outputs)


def exchanged(graph: Graph, chosen: Sequence[LowRankSite]) -> dict[int, Call]:
    """Return the calls that store exchanged gradients, with the size of the factors, by task."""
    copies: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    tasks = graph.tasks
    is_copy = np.array([*(call.name in _COPIES for call in graph.calls), False])  # -1 is not a call
    accumulates = np.array(["AccumulateGrad" in text for text in graph.strings])
    mask = (tasks.phase == StepPhase.BACKWARD) & is_copy[tasks.call] & accumulates[tasks.scope]
    for task in np.flatnonzero(mask).tolist():
        key = module_of(graph, task), graph.task(task).known_call.inputs[0].shape
        copies.setdefault(key, []).append(task)
    changed: dict[int, Call] = {}
    for site in chosen:
        for storage, spec in site.weights.items():
            # Tasks of two weights of the same shape in a module are assigned in order.
            candidates = copies.get((site.module, spec.shape))
            if candidates:
                task = candidates.pop(0)
                call = graph.task(task).known_call
                factors = _spec(spec, site.parameters(storage))
                changed[task] = call.with_inputs([factors] * len(call.inputs))
    return changed


def _resize(edit: Editor, graph: Graph, chosen: Sequence[LowRankSite]) -> None:
    """Scale allocations of the size of a weight to its factors."""
    shares = {
        storage: site.parameters(storage) / spec.numel
        for site in chosen
        for storage, spec in site.weights.items()
    }
    sizes: dict[int, list[float]] = {}
    for site in chosen:
        for storage, spec in site.weights.items():
            sizes.setdefault(spec.nbytes, []).append(shares[storage])
    memory = graph.memory
    as_large = np.isin(memory.nbytes, list(sizes)) & np.isin(memory.role, _ROLES)
    rows = np.flatnonzero(as_large)
    nbytes, storages = memory.nbytes[rows], memory.storage[rows]
    share = np.full(max(*shares, int(storages.max(initial=0))) + 2, np.nan)  # -1 is not a storage
    share[list(shares)] = list(shares.values())
    others = ~np.isin(storages, graph.parameters) & (memory.role[rows] != Role.TEMPORARY)
    resized = nbytes * share[storages]
    for size, parts in sizes.items():
        resized[np.isnan(resized) & others & (nbytes == size)] = size * sum(parts) / len(parts)
    changed = ~np.isnan(resized)
    edit.resize(rows[changed], np.rint(resized[changed]))


def rank_of(site: LowRankSite, ratio: float, rank: int | None) -> dict[int, int] | None:
    """Return the rank of the products by weight; None if `rank` exceeds a full rank of the site."""
    ranks = {}
    for storage, spec in site.weights.items():
        rows = site.shape[0]
        full = min(rows, spec.numel // (rows * site.count))
        if rank is not None and rank > full:
            return None
        ranks[storage] = max(1, int(ratio * full)) if rank is None else rank
    return ranks
