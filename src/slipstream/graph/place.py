"""Place a recorded step on ranks: cut into parts, repeated per micro-batch, joined by transfers.

Each part has a lane, which runs its slots in the placement's order, and each direction between two
parts has a lane for transfers. A slot that runs some steps later than its micro-batch's first
forward pass waits for transfers of earlier steps. The allocations of a rank are those of its tasks;
one that lasts for several steps exists once for each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.cluster import Collective, Group
from slipstream.cluster.orders import Action, Slot
from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.graph.communicate import network_spread
from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import Graph
from slipstream.graph.parts import Cut, Indices, cut, parameter_parts
from slipstream.graph.values import (
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Edit,
    Kind,
    Role,
    StepPhase,
    StringTable,
    Tasks,
)
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.cluster.placement import Placement

_ASSUMED = PROVENANCES.index(Provenance.ASSUMED)


def place(
    graph: Graph,
    placement: Placement,
    cluster: Cluster,
    *,
    micro: Graph | None = None,
    accumulate_ns: Sequence[float] = (),
    weight_copies: Sequence[int] = (),
) -> Graph:
    """Return the step of all ranks of `placement`.

    Args:
        graph: the step of one process, with the samples of all micro-batches.
        micro: the same tasks with the samples of one micro-batch; required for several.
        accumulate_ns: by part, the time to add a micro-batch's gradients to earlier ones.
        weight_copies: by part, how many versions of its parameters it holds; one by default.

    Raises:
        InvalidArgumentError: the step cannot be cut there, a part has several devices, parts share
            one, or `micro` is missing.
        GraphError: `micro` has other tasks than `graph`.
    """
    if placement.order.micro_batches == 1:
        micro = graph
    if micro is None:
        raise InvalidArgumentError("micro", "it is None, but there are several micro-batches")
    if len(micro) != len(graph) or len(micro.memory) != len(graph.memory):
        raise GraphError("the step of a micro-batch has other tasks than the whole step")
    for part in placement.parts:
        if len(part.devices) != 1:
            raise InvalidArgumentError(
                "parts", f"'{part.name}' has {len(part.devices)} devices", remedy="pass one device"
            )
    if placement.ranks != len(placement.parts):
        raise InvalidArgumentError("parts", "some share a device", remedy="pass separate devices")
    if len(placement.parts) == 1 and micro is graph:
        return graph
    modules = [module for part in placement.parts[1:] for module in part.modules[:1]]
    return _Placing(graph, micro, placement, cluster, cut(graph, modules)).placed(
        accumulate_ns, weight_copies
    )


@dataclass
class _Placing:
    graph: Graph
    micro: Graph
    placement: Placement
    cluster: Cluster
    cut: Cut
    # Tasks so far: index in `graph`, -1 for others; and columns that differ from its tasks.
    source: list[Indices] = field(default_factory=list)
    own: list[dict[str, NDArray[np.float64]]] = field(default_factory=list)
    count: int = 0
    # By (part, slot): the new index of each of its tasks, by index in `graph`.
    places: dict[tuple[int, Slot], dict[int, int]] = field(default_factory=dict)
    # By part: its first and last task.
    spans: list[tuple[int, int]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    # nbytes, role, producer, release.
    memory: list[tuple[int, int, int, int]] = field(default_factory=list)

    def placed(self, accumulate_ns: Sequence[float], weight_copies: Sequence[int]) -> Graph:
        strings = StringTable(self.graph.strings)
        names = {
            name: strings.add(name)
            for name in ("accumulate gradients", "send activations", "send gradients", "relay")
        }
        self.spans = spans = [
            self._stage(part, names["accumulate gradients"], accumulate_ns)
            for part in range(len(self.placement.parts))
        ]
        lanes = [f"{part.name}" for part in self.placement.parts]
        for part in range(len(spans) - 1):
            for backwards in (False, True)[: 1 + self._returns_gradient(part)]:
                self._transfers(part, backwards, names, len(lanes))
                ends = (part + 1, part) if backwards else (part, part + 1)
                lanes.append("network " + " to ".join(lanes[end] for end in ends))
        if len(self.graph.memory):
            self._allocate(weight_copies)
        source, target, lag = np.array(self.edges, np.int64).reshape(-1, 3).T
        graph, order = self.graph, self.placement.order
        meta = {**graph.meta, "workers": self.placement.ranks}
        if order.max_shift:
            meta["warm_steps"] = order.max_shift
        what = (
            f"{len(spans)} stages, {order.micro_batches} "
            f"micro-batch{'es' * (order.micro_batches != 1)}"
        )
        placed = replace(
            graph,
            tasks=self._tasks(),
            edges=Edges.of(
                source, target, np.full(len(source), int(Dependency.COMMUNICATION)),
                np.zeros(len(source)), lag,
            ),
            strings=strings.freeze(),
            calls=(*graph.calls, *self.micro.calls),
            shrunk=(),
            # Copies of a task have other storages, which are not named.
            operand_start=np.zeros(self.count + 1, np.int64),
            operands=np.zeros(0, np.int32),
            lanes=tuple(lanes),
            meta=meta,
            memory=Allocations.of(
                *(([row[0] for row in self.memory]), [-1] * len(self.memory)),
                *([row[at] for row in self.memory] for at in (1, 2, 3)),
            ),
            exchanges=tuple(self.exchanges),
            edits=(*graph.edits, Edit("place", what, self.count)),
        )  # fmt: skip
        placed.check()
        return placed

    def _add(self, source: Indices, **own: object) -> int:
        """Append tasks; return the index of the first."""
        first = self.count
        columns = {
            name: np.broadcast_to(np.asarray(value, np.float64), len(source))
            for name, value in own.items()
        }
        self.source.append(source)
        self.own.append(columns)
        self.count += len(source)
        return first

    def _stage(self, part: int, accumulate: int, accumulate_ns: Sequence[float]) -> tuple[int, int]:
        """Append the tasks of a part; return the indices of the first and last."""
        cut, count = self.cut, len(self.placement.parts)
        where = {"lane": part, "rank": self.placement.parts[part].devices[0]}
        begin = self.count
        if part == 0:
            self._run(part, Slot(Action.UPDATE, -2), cut.begin, where)
        accumulated = False
        for slot in self.placement.order.slots[part]:
            self._run(part, slot, self._tasks_of(part, slot.action), where)
            if slot.action not in (Action.BACKWARD, Action.WEIGHT):
                continue
            if accumulated and accumulate_ns and accumulate_ns[part]:
                self._add(
                    np.array([-1]), name=accumulate, phase=int(StepPhase.BACKWARD), **where,
                    duration_ns=accumulate_ns[part], kind=int(Kind.OP), spread=0.1,
                    provenance=PROVENANCES.index(Provenance.MICROBENCHMARK),
                )  # fmt: skip
            accumulated = True
        if part == count - 1:
            self._run(part, Slot(Action.UPDATE, -3), cut.end, where)
        if self.count == begin:
            raise GraphError(f"'{self.placement.parts[part].name}' runs no tasks")
        return begin, self.count - 1

    def _tasks_of(self, part: int, action: Action) -> Indices:
        cut = self.cut
        if action is Action.BACKWARD:
            return cut.backward(part)
        if action is Action.UPDATE:
            return cut.update[part]
        by_action = {
            Action.FORWARD: cut.forward, Action.INPUT: cut.inputs, Action.WEIGHT: cut.weights,
        }  # fmt: skip
        return by_action[action][part]

    def _run(self, part: int, slot: Slot, tasks: Indices, where: dict[str, int]) -> None:
        passes = slot.action is not Action.UPDATE
        recorded = (self.micro if passes else self.graph).tasks.take(tasks)
        share = 1.0 if passes else self.cut.share[part, tasks]
        call = recorded.call + np.where(recorded.call >= 0, passes * len(self.graph.calls), 0)
        first = self._add(
            tasks, **where, call=call, spread=recorded.spread,
            duration_ns=recorded.duration_ns * share, gap_ns=recorded.gap_ns * share,
            provenance=np.where(np.equal(share, 1.0), recorded.provenance, _ASSUMED),
        )  # fmt: skip
        self.places[part, slot] = {task: first + n for n, task in enumerate(tasks.tolist())}

    def _tasks(self) -> Tasks:
        source = np.concatenate(self.source)
        columns = self.graph.tasks.take(np.maximum(source, 0)).columns()
        new = source < 0
        for name in ("name", "scope", "module", "source", "gap_ns"):
            columns[name][new] = 0
        columns["call"][new] = columns["sequence"][new] = -1
        at = 0
        for tasks, own in zip(self.source, self.own, strict=True):
            for name, column in own.items():
                columns[name][at : at + len(tasks)] = column
            at += len(tasks)
        return Tasks(**columns)

    def _slot(self, part: int, action: Action, micro_batch: int) -> Slot:
        return Slot(action, micro_batch, self.placement.order.shift(part, action, micro_batch))

    def _transfers(self, part: int, backwards: bool, names: dict[str, int], lane: int) -> None:
        """Append the transfers between a part and the next one, in the sender's order."""
        parts, order = self.placement.parts, self.placement.order
        sender, receiver = (part + 1, part) if backwards else (part, part + 1)
        nbytes = self.cut.boundaries[part].spec(self.micro).nbytes
        devices = [parts[number].devices[0] for number in (sender, receiver)]
        collective = Collective("p2p", nbytes, Group.of(devices), "direct")
        cost = self.cluster.cost(collective)
        action = awaited_action = Action.FORWARD
        if backwards:
            action = Action.INPUT if order.splits_backward else Action.BACKWARD
            awaited_action = self._backward_actions(receiver)[0]
        where = {"lane": lane, "rank": devices[0], "phase": int(
            StepPhase.BACKWARD if backwards else StepPhase.FORWARD)}  # fmt: skip
        for slot in order.slots[sender]:
            if slot.action is not action:
                continue
            ready = max(self.places[sender, slot].values(), default=-1)
            if ready < 0:
                raise GraphError(f"'{parts[sender].name}' computes no gradient of its input")
            awaited_slot = self._slot(receiver, awaited_action, slot.micro_batch)
            awaited = min(self.places[receiver, awaited_slot].values())
            lag = awaited_slot.shift - slot.shift
            # Lags above one are made of tasks without a duration, each a step later.
            relays = [
                self._add(
                    np.array([-1]), name=names["relay"], **where, duration_ns=0.0,
                    kind=int(Kind.WAIT), spread=0.0, provenance=_ASSUMED,
                )
                for _ in range(lag - 1)
            ]  # fmt: skip
            task = self._add(
                np.array([-1]), **where, kind=int(Kind.COMMUNICATION),
                name=names["send gradients" if backwards else "send activations"],
                duration_ns=cost.duration_ns, spread=network_spread(self.cluster),
                provenance=PROVENANCES.index(cost.provenance),
            )  # fmt: skip
            self.edges.append((ready, task, 0))
            for relay in relays:
                self.edges.append((task if relay is relays[0] else relay - 1, relay, 1))
            last = relays[-1] if relays else task
            self.edges.append((last, awaited, min(lag, 1)))
            self.exchanges.append(
                Exchange(
                    task, ready, awaited, collective, (), cost.latency_ns, cost.bytes_per_rank,
                    cost.bottleneck, min(lag, 1), purpose="activation",
                )
            )  # fmt: skip

    def _backward_actions(self, part: int) -> list[Action]:
        """Return the actions of the backward pass that have tasks, in order."""
        splits = self.placement.order.splits_backward
        actions = (Action.INPUT, Action.WEIGHT) if splits else (Action.BACKWARD,)
        return [action for action in actions if len(self._tasks_of(part, action))]

    def _returns_gradient(self, part: int) -> bool:
        """Whether the next part sends gradients: a layer up to `part` is trained."""
        return any(map(len, map(self.cut.backward, range(part + 1))))

    # ---- memory -------------------------------------------------------------------------------

    def _allocate(self, weight_copies: Sequence[int]) -> None:
        memory, order, cut, spans = self.graph.memory, self.placement.order, self.cut, self.spans
        owner = np.full(len(self.graph) + 1, -1)
        in_pass = np.zeros(len(self.graph) + 1, bool)
        for part in range(len(spans)):
            for tasks in (cut.forward[part], cut.backward(part)):
                owner[tasks] = part
                in_pass[tasks] = True
        pools = self._pools_before(owner)
        for row in range(len(memory)):
            producer, release = int(memory.producer[row]), int(memory.release[row])
            role = int(memory.role[row])
            if producer >= 0 and in_pass[producer]:
                part = int(owner[producer])
                self._allocate_in_pass(row, part, bool(release >= 0 and in_pass[release]), owner)
                continue
            shares = pools[:, row] if producer < 0 else self.cut.share[:, producer]
            for part, nbytes in enumerate(_split(int(memory.nbytes[row]), shares)):
                if nbytes:
                    at = self._once(part, producer)
                    self._emit(part, nbytes, role, at, self._once(part, release))
        for part, boundary in enumerate(cut.boundaries):
            nbytes = boundary.spec(self.micro).nbytes
            # The receiver's copies of an activation, and of its gradient.
            copies = [(part + 1, (Action.FORWARD, *self._backward_actions(part + 1)))]
            if self._returns_gradient(part):
                copies.append((part, (self._backward_actions(part)[0],)))
            for (end, actions), m in itertools.product(copies, range(order.micro_batches)):
                begun, ended = self._slot(end, actions[0], m), self._slot(end, actions[-1], m)
                self._emit(
                    end, nbytes, int(Role.ACTIVATION), min(self.places[end, begun].values()),
                    max(self.places[end, ended].values()), ended.shift - begun.shift,
                )  # fmt: skip
        for part, versions in enumerate(weight_copies):
            held = sum(
                row[0] for row in self.memory
                if row[1] == Role.PARAMETER and row[2:] == spans[part]
            )  # fmt: skip
            for _ in range(versions - 1 if self._returns_gradient(part) else 0):
                self._emit(part, held, int(Role.PARAMETER), -1, -1)

    def _emit(
        self, part: int, nbytes: int, role: int, producer: int, release: int, lag: int = 0
    ) -> None:
        """Append an allocation that is released `lag` steps after the step that makes it.

        What outlives its steps lasts from the first to the last task of the rank.
        """
        first, last = self.spans[part]
        lasting = (nbytes, role, first, last)
        if producer < 0 and release < 0:
            self.memory.append(lasting)
        elif lag == 0 or producer < 0 or release < 0:
            self.memory.append(
                (
                    nbytes,
                    role,
                    first if producer < 0 else producer,
                    last if release < 0 else release,
                )
            )
        else:
            self.memory += [lasting] * (lag - 1)
            self.memory += [(nbytes, role, first, release), (nbytes, role, producer, last)]

    def _pass_slot(self, part: int, task: int, m: int) -> Slot:
        """Return the slot in which a part runs a forward or backward task of a micro-batch."""
        if self.graph.tasks.phase[task] != StepPhase.BACKWARD:
            return self._slot(part, Action.FORWARD, m)
        if not self.placement.order.splits_backward:
            return self._slot(part, Action.BACKWARD, m)
        inputs = bool(np.isin(task, self.cut.inputs[part]))
        return self._slot(part, Action.INPUT if inputs else Action.WEIGHT, m)

    def _allocate_in_pass(self, row: int, part: int, freed_in_pass: bool, owner: Indices) -> None:
        memory, order = self.graph.memory, self.placement.order
        producer, release = int(memory.producer[row]), int(memory.release[row])
        role, nbytes = int(memory.role[row]), int(self.micro.memory.nbytes[row])
        same = freed_in_pass and int(owner[release]) == part
        slots = [slot for slot in order.slots[part] if slot.micro_batch >= 0]
        slots = [self._pass_slot(part, producer, m) for m in
                 dict.fromkeys(slot.micro_batch for slot in slots)]  # fmt: skip
        update = self._slot(part, Action.UPDATE, -1)
        first = min(range(order.micro_batches), key=lambda m: slots[m].micro_batch)
        for m, slot in enumerate(slots):
            made = self.places[part, slot][producer]
            end = max(self.places[part, slot].values())
            if same:
                ended = self._pass_slot(part, release, slot.micro_batch)
                freed = self.places[part, ended][release]
                self._emit(part, nbytes, role, made, freed, ended.shift - slot.shift)
            elif freed_in_pass:
                self._emit(part, nbytes, role, made, end)
            elif role == Role.GRADIENT and m != first:
                self._emit(part, nbytes, role, made, made)
            elif role != Role.GRADIENT and slot.micro_batch != order.micro_batches - 1:
                self._emit(part, nbytes, role, made, end)
            elif role == Role.GRADIENT:
                # Used by the update, and freed before the next step's first backward pass.
                freed = max(self.places[part, update].values(), default=end)
                self._emit(part, nbytes, role, made, freed, update.shift - slot.shift)
            else:
                self._emit(part, nbytes, role, made, self._once(part, release))

    def _once(self, part: int, task: int) -> int:
        """Return the task of a part that represents one outside of the passes; -1 stays -1."""
        if task < 0:
            return -1
        for (owner, slot), tasks in self.places.items():
            if owner == part and slot.micro_batch <= 0 and task in tasks:
                return tasks[task]
        begun = self.cut.forward[0]
        return self.spans[part][0 if len(begun) and task < begun[0] else 1]

    def _pools_before(self, owner: Indices) -> NDArray[np.float64]:
        """Return each part's share of allocations from before the step, [parts, allocations]."""
        memory, count = self.graph.memory, len(self.placement.parts)
        part_of = parameter_parts(self.graph, owner)
        weight = np.zeros(count)
        for row in np.flatnonzero(memory.role == Role.PARAMETER).tolist():
            if int(memory.storage[row]) in part_of:
                weight[part_of[int(memory.storage[row])]] += float(memory.nbytes[row])
        fallback = weight / weight.sum() if weight.sum() else np.full(count, 1.0 / count)
        shares = np.tile(fallback[:, None], (1, len(memory)))
        user = np.repeat(np.arange(len(self.graph)), np.diff(self.graph.operand_start))
        readers = dict(zip(self.graph.operands[::-1].tolist(), user[::-1].tolist(), strict=True))
        # Gradients of the step before have the sizes of those of this one.
        made: dict[int, list[int]] = {}
        for row in np.flatnonzero((memory.role == Role.GRADIENT) & (memory.producer >= 0)).tolist():
            made.setdefault(int(memory.nbytes[row]), []).append(int(owner[memory.producer[row]]))
        for row in np.flatnonzero(memory.producer < 0).tolist():
            storage, role = int(memory.storage[row]), int(memory.role[row])
            if role == Role.INPUT:
                shares[:, row] = np.arange(count) == 0
            elif storage in part_of:
                shares[:, row] = np.arange(count) == part_of[storage]
            elif role == Role.GRADIENT and (parts := made.get(int(memory.nbytes[row]))):
                shares[:, row] = np.arange(count) == parts.pop()
            elif storage in readers:
                task = readers[storage]
                shares[:, row] = self.cut.share[:, task]
        return shares


def _split(nbytes: int, shares: NDArray[np.float64]) -> list[int]:
    """Return integers that add up to `nbytes`, in proportion to `shares`."""
    until = np.rint(np.cumsum(shares) / max(float(shares.sum()), 1e-300) * nbytes).astype(np.int64)
    return [int(part) for part in np.diff(until, prepend=0)]
