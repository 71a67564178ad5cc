"""A recorded step with products in the place of weights: two operators for one, less to update.

A convolution becomes two, its backward pass too; of a linear layer each of the three products of
matrices becomes two thin ones, with the times that micro-benchmarks of these shapes have against
those of the recorded ones. An LSTM is timed as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.durations import pace
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec, price
from slipstream.surgery import module_of
from slipstream.technique import Context
from slipstream.techniques._baseline import updated_tensors
from slipstream.techniques.layer_sites import RECURRENT
from slipstream.techniques.lowrank.timing import lstm_call

_CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
_PRODUCTS = ("aten::mm", "aten::addmm")
_LSTM = "aten::mkldnn_rnn_layer"
_DENSE = frozenset(RECURRENT) - {"aten::lstm"}
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER, Role.TEMPORARY)
_TAKES = ("aten::detach", "aten::clone", "aten::copy_")


@dataclass
class Site:
    """One weight of a layer, and the tasks that work with it.

    Attributes:
        module: qualified name of its layer.
        storages: of the weights; an LSTM has two that belong together.
        shape: of the weight as a matrix, for each of `count` products.
        weights: specs of the weights, by storage.
        ranks: of each weight's products.
        calls: by task, what it becomes; the first stands in its place.
        thin: bytes between the factors, made in the forward pass, with the task that makes them and
            the last one that needs them.
    """

    module: str
    shape: tuple[int, int]
    count: int
    weights: dict[int, TensorSpec]
    shortcut: bool = False
    ranks: dict[int, int] = field(default_factory=dict)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    thin: tuple[int, int, int] = (0, -1, -1)
    tasks: list[int] = field(default_factory=list)

    def numbers(self, storage: int) -> int:
        """Of the factors of a weight."""
        spec, rank = self.weights[storage], self.ranks[storage]
        rows = self.shape[0] * self.count
        columns = spec.numel // rows
        return rank * (rows + columns * self.count)


def sites(graph: Graph) -> list[Site]:
    """Layers of a recorded step whose weights are parameters, in the order in which they run."""
    parameters = set(graph.parameters.tolist())
    by_storage: dict[int, Site] = {}
    by_sequence: dict[int, Site] = {}
    attending = {
        graph.task(task).module
        for task in range(len(graph))
        if "scaled_dot_product" in graph.task(task).name or graph.task(task).name == "aten::bmm"
    }
    for task in range(len(graph)):
        view = graph.task(task)
        call = view.call
        if call is None or len(view.storages) != len(call.inputs) + len(call.outputs):
            continue
        if view.phase == StepPhase.BACKWARD:
            site = by_sequence.get(view.sequence)
            if site is not None and view.sequence >= 0:
                site.tasks.append(task)
            continue
        # Of recurrent modules only LSTMs have a thin form.
        if view.phase != StepPhase.FORWARD or view.scope.partition("/")[0] in _DENSE:
            continue
        weight = _weight(call, view.storages, parameters)
        if weight is None or not module_of(graph, task):
            continue
        storages, specs, shape, count, shortcut = weight
        if view.module in attending and call.name in _PRODUCTS and shape[0] == 3 * shape[1]:
            # Queries, keys and values at once: three products.
            shape, count = (shape[1], shape[1]), 3
        if any(storage in by_storage for storage in storages):
            # Of a layer that is called twice all tasks belong together.
            site = by_storage[storages[0]]
        else:
            weights = dict(zip(storages, specs, strict=True))
            site = Site(module_of(graph, task), shape, count, weights, shortcut)
            by_storage.update(dict.fromkeys(storages, site))
        site.tasks.append(task)
        if view.sequence >= 0:
            by_sequence[view.sequence] = site
    return list({id(one): one for one in by_storage.values()}.values())


def _weight(
    call: Call, storages: Sequence[int], parameters: set[int]
) -> tuple[Sequence[int], list[TensorSpec], tuple[int, int], int, bool] | None:
    """Storages and specs of a layer's weights, the shape of each product, their number, and
    whether it is a shortcut."""
    if call.name in _CONVOLUTIONS and storages[1] in parameters and not call.arguments[6]:
        spec, groups = call.inputs[1], int(call.arguments[8])
        rows, columns = spec.shape[0] // groups, spec.numel // spec.shape[0]
        ones = all(k == 1 for k in spec.shape[2:])
        shortcut = len(spec.shape) == 4 and ones and any(s != 1 for s in call.arguments[3])
        return [storages[1]], [spec], (rows, columns), groups, shortcut
    if call.name in _PRODUCTS:
        at = len(call.inputs) - 1
        if storages[at] not in parameters:
            return None
        columns, rows = call.inputs[at].shape
        spec = TensorSpec(call.inputs[at].dtype, (rows, columns), (columns, 1))
        return [storages[at]], [spec], (rows, columns), 1, False
    if call.name == _LSTM and storages[1] in parameters:
        spec = call.inputs[1]
        return (
            storages[1:3], list(call.inputs[1:3]), (spec.shape[0] // 4, spec.shape[1]), 4, False
        )  # fmt: skip
    return None


def as_products(graph: Graph, site: Site) -> None:
    """Fill in what becomes of the site's tasks at its ranks."""
    backward = [t for t in site.tasks if graph.task(t).phase == StepPhase.BACKWARD]
    rank = next(iter(site.ranks.values()))
    takes_input = any(
        next(iter(site.weights)) in graph.task(t).operands[0]
        and graph.task(t).known_call.name == "aten::mm"
        for t in backward
    )
    for task in site.tasks:
        call = graph.task(task).known_call
        if call.name in _CONVOLUTIONS:
            site.calls[task] = _convolutions(call, rank)
        elif call.name == "aten::convolution_backward":
            site.calls[task] = _convolutions_backward(call, rank)
        elif call.name == _LSTM or call.name == f"{_LSTM}_backward":
            x, w = call.inputs[0], call.inputs[1]
            ranks = tuple(site.ranks.values())
            site.calls[task] = [lstm_call(x.shape, w.shape[0] // 4, ranks, task in backward)]
        elif call.name in _PRODUCTS:
            reads = next(iter(site.weights)) in graph.task(task).operands[0]
            part = _part(call, site.count, reads, task in backward)
            thin = _thin_products(part, rank, task in backward, reads, takes_input)
            site.calls[task] = thin * site.count
    forward = [t for t in site.calls if t not in backward]
    first = site.calls[forward[0]]
    if len(first) > 1:
        nbytes = first[0].outputs[0].nbytes
        last = max((t for t in site.calls if t in backward), default=forward[0])
        site.thin = (nbytes, forward[0], last)


def _spec(like: TensorSpec, *shape: int) -> TensorSpec:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return TensorSpec(like.dtype, tuple(shape), tuple(strides), like.device)


def _like_image(like: TensorSpec, *shape: int) -> TensorSpec:
    """Of this shape, in the order of dimensions that `like` has."""
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
    """One of `count` products of matrices that a product is, by the weight's rows."""
    *rest, left, right = call.inputs

    def cut(spec: TensorSpec, axis: int) -> TensorSpec:
        shape = list(spec.shape)
        shape[axis] //= count
        return replace(spec, shape=tuple(shape))

    if reads_weight and backward:
        return call.with_inputs([*rest, cut(left, 1), cut(right, 0)])
    if reads_weight:
        return call.with_inputs([*(cut(one, 0) for one in rest), left, cut(right, 1)])
    return call.with_inputs([*rest, cut(left, 0), right])


def _thin_products(
    call: Call, rank: int, backward: bool, reads_weight: bool, takes_input: bool
) -> list[Call]:
    """What one product of matrices becomes, forward or backward."""
    left, right = call.inputs[-2:]
    (m, k), n = left.shape, right.shape[1]

    def mm(one: TensorSpec, other: TensorSpec) -> Call:
        return Call(_MM, (one, other), (_spec(left, one.shape[0], other.shape[1]),))

    if reads_weight:
        # [m, k] through the weight to [m, n], by way of [m, rank].
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
    # The weight's gradient [m, n] over k samples: those of both factors.
    calls = [mm(left, _spec(left, k, rank)), mm(_spec(left, rank, k), right)]
    if not takes_input:
        # Whoever needs no gradient of the input needs it between the factors.
        calls.append(mm(_spec(left, k, m), _spec(left, m, rank)))
    return calls


def edited(edit: Editor, graph: Graph, chosen: Sequence[Site], context: Context) -> None:
    """Put the products in: forward, backward, updates, gradients that are exchanged, memory."""
    for site in chosen:
        old = [t for t in site.calls if not site.calls[t][0].name.startswith("slipstream::")]
        in_step = pace(graph, old, context.durations)
        for task, calls in site.calls.items():
            view = graph.task(task)
            whole = context.durations.lookup(view.known_call)
            scale = view.duration_ns / whole.nanoseconds if whole is not None else in_step
            if calls[0].name.startswith("slipstream::"):
                scale = in_step
            share = view.duration_ns / len(calls)
            # The recorded task stays what gives the layer's output, or the weight's gradient first.
            forward = view.phase == StepPhase.FORWARD
            kept = len(calls) - 1 if forward else 0
            for number, call in enumerate(calls):
                took = price(context.durations, call, share, pace=scale)
                if number == kept:
                    edit.set_price(task, took, call=call)
                else:
                    edit.put(task, call, took, before=forward)
        nbytes, first, last = site.thin
        if first >= 0 and len(graph.memory):
            trains = last != first
            role = Role.ACTIVATION if trains else Role.TEMPORARY
            edit.allocate(nbytes, role, producer=first, release=last)
    for task, call in updates(graph, chosen).items():
        was, now = graph.task(task).known_call, call
        ratio = context.durations.ratio(was, now)
        known = price(context.durations, now, graph.task(task).duration_ns)
        took_ns = graph.task(task).duration_ns * (ratio.value if ratio is not None else 1.0)
        edit.set_duration(task, took_ns, known.provenance, spread=known.spread, call=now)
    for task, call in exchanged(graph, chosen).items():
        tasks, column = np.array([task]), graph.tasks
        edit.set_duration(tasks, column.duration_ns[tasks], column.provenance[tasks], call=call)
    _resize(edit, graph, chosen)


def asked(graph: Graph, chosen: Sequence[Site]) -> list[Call]:
    """Calls whose durations `edited` looks up, the recorded ones beside what they become."""
    lookups: list[Call] = []
    for site in chosen:
        for task, calls in site.calls.items():
            lookups += [graph.task(task).known_call, *calls]
    for task, call in updates(graph, chosen).items():
        lookups += [graph.task(task).known_call, call]
    return lookups


def _places(graph: Graph, chosen: Sequence[Site]) -> dict[tuple[int, ...], list[int | None]]:
    """By shape, of each trained tensor in order: numbers of its factors; None where it stays."""
    numbers = {storage: site.numbers(storage) for site in chosen for storage in site.weights}
    shapes = {spec.shape for site in chosen for spec in site.weights.values()}
    specs = updated_tensors(graph)
    storages: list[int] = graph.parameters.tolist()
    places: dict[tuple[int, ...], list[int | None]] = {}
    if len(specs) != len(storages):
        for site in chosen:
            for storage, spec in site.weights.items():
                places.setdefault(spec.shape, []).append(numbers[storage])
        return places
    for storage, spec in zip(storages, specs, strict=True):
        if spec.shape in shapes:
            places.setdefault(spec.shape, []).append(numbers.get(storage))
    return places


def updates(graph: Graph, chosen: Sequence[Site]) -> dict[int, Call]:
    """By the optimizer's tasks: what they call with the factors' numbers in place of weights."""
    places = _places(graph, chosen)
    changed: dict[int, Call] = {}
    single: dict[tuple[int, ...], list[int]] = {shape: [] for shape in places}
    for task in (graph.tasks.phase == StepPhase.OPTIMIZER).nonzero()[0].tolist():
        call = graph.task(task).call
        if call is None:
            continue
        met = {spec.shape for spec in call.inputs} & set(places)
        if any(isinstance(value, (list, tuple)) and value for value in call.arguments):
            if met:
                changed[task] = _in_lists(call, places)
            continue
        for shape in met:
            single[shape].append(task)
    for shape, tasks in single.items():
        each = max(1, len(tasks) // len(places[shape]))
        for number, task in enumerate(tasks):
            numbers = places[shape][min(number // each, len(places[shape]) - 1)]
            if numbers is not None:
                changed[task] = _in_lists(graph.task(task).known_call, {shape: [numbers]})
    return changed


def _in_lists(call: Call, places: Mapping[tuple[int, ...], list[int | None]]) -> Call:
    """`call` with the n-th tensor of a shape, in each list, as long as the factors."""

    def changed(value: object) -> object:
        if isinstance(value, TensorSpec):
            numbers = places.get(value.shape, [None])[0]
            return value if numbers is None else _spec(value, numbers)
        if not isinstance(value, (list, tuple)):
            return value
        met = dict.fromkeys(places, 0)
        items: list[object] = []
        for item in value:
            if isinstance(item, TensorSpec) and item.shape in places:
                at = min(met[item.shape], len(places[item.shape]) - 1)
                numbers = places[item.shape][at]
                met[item.shape] += 1
                items.append(item if numbers is None else _spec(item, numbers))
            else:
                items.append(item)
        return tuple(items)

    outputs = changed(call.outputs)
    assert isinstance(outputs, tuple)
    return Call(call.op, tuple(changed(value) for value in call.arguments), outputs)


def exchanged(graph: Graph, chosen: Sequence[Site]) -> dict[int, Call]:
    """By task: taking a gradient, which has the numbers of the factors: what replicas exchange."""
    taking: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for task in np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD).tolist():
        view = graph.task(task)
        call = view.call
        if call is not None and call.name in _TAKES and "AccumulateGrad" in view.scope:
            key = module_of(graph, task), call.inputs[0].shape
            taking.setdefault(key, []).append(task)
    changed: dict[int, Call] = {}
    for site in chosen:
        for storage, spec in site.weights.items():
            # Two weights of one shape in a module are taken one after the other.
            waiting = taking.get((site.module, spec.shape))
            if waiting:
                task = waiting.pop(0)
                call = graph.task(task).known_call
                given = _spec(spec, site.numbers(storage))
                changed[task] = call.with_inputs([given] * len(call.inputs))
    return changed


def _resize(edit: Editor, graph: Graph, chosen: Sequence[Site]) -> None:
    """Whatever is as large as a weight becomes its share of that."""
    shares = {
        storage: site.numbers(storage) / spec.numel
        for site in chosen
        for storage, spec in site.weights.items()
    }
    sizes: dict[int, list[float]] = {}
    for site in chosen:
        for storage, spec in site.weights.items():
            sizes.setdefault(spec.nbytes, []).append(shares[storage])
    memory = graph.memory
    parameters = set(graph.parameters.tolist())
    for one in range(len(memory)):
        nbytes, storage = int(memory.nbytes[one]), int(memory.storage[one])
        if nbytes not in sizes or int(memory.role[one]) not in _ROLES:
            continue
        if storage in shares:
            edit.resize(one, round(nbytes * shares[storage]))
        elif storage not in parameters and int(memory.role[one]) != Role.TEMPORARY:
            edit.resize(one, round(nbytes * sum(sizes[nbytes]) / len(sizes[nbytes])))


def rank_of(site: Site, ratio: float, rank: int | None) -> dict[int, int] | None:
    """Return the products' rank by weight; None if `rank` is above a full rank of the site."""
    ranks = {}
    for storage, spec in site.weights.items():
        rows = site.shape[0]
        full = min(rows, spec.numel // (rows * site.count))
        if rank is not None and rank > full:
            return None
        ranks[storage] = max(1, int(ratio * full)) if rank is None else rank
    return ranks
