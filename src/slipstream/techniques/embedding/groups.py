"""Edits of a recorded step for tables in other formats: look-ups, updates and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.durations import required_timings, rescale
from slipstream.graph import Call, Editor, Graph, Role, TensorSpec, price
from slipstream.graph.flow import matches
from slipstream.technique import Context
from slipstream.techniques.embedding.tables import Lookup, lookups, updates, with_arrays

_ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
_TIMED = "slipstream.techniques.embedding.timed:module_of"
_TABLE_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER, Role.TEMPORARY)


@dataclass(frozen=True)
class Group:
    """Tables that become one set of parameters, in one format.

    Attributes:
        lookups: look-ups of these tables.
        format: name of the format.
        settings: settings of the format: integers, or ids.
        nbytes: bytes of the new parameters.
        trained: numbers in each new trainable tensor; empty without any.
    """

    lookups: tuple[Lookup, ...]
    format: str
    settings: Mapping[str, int | tuple[int, ...]]
    nbytes: int
    trained: tuple[int, ...]

    @property
    def tables(self) -> dict[int, TensorSpec]:
        """Tables by storage, in the order of their look-ups."""
        return {lookup.table: lookup.weight for lookup in self.lookups}

    def timed_pass(self, lookup: Lookup, backward: bool) -> Call:
        """Return the look-up by the format's module, or its backward pass, for micro-benchmarks."""
        rows, dim = lookup.weight.shape
        # The time depends on the number of hot ids only.
        settings = tuple(
            (key, len(value) if isinstance(value, tuple) else value)
            for key, value in self.settings.items()
        )
        described = {
            "num_embeddings": rows, "embedding_dim": dim, "format": self.format,
            "settings": settings, "mode": "" if lookup.bags is None else lookup.mode,
        }  # fmt: skip
        arguments = (_TIMED, tuple(described.items()), lookup.input, backward)
        return Call("slipstream::module_pass()", arguments, (lookup.y,))

    def timed_passes(self, lookup: Lookup) -> list[tuple[int, Call]]:
        """Return the tasks of a look-up, with the passes that replace them."""
        return [
            (task, self.timed_pass(lookup, backward))
            for task, backward in zip(lookup.tasks, (False, True), strict=False)
        ]

    @property
    def sum_of_gradients(self) -> Call | None:
        """The call that adds one table's gradient to another's; None for a single table."""
        if len(self.tables) == 1:
            return None
        array = TensorSpec("float32", (sum(self.trained),), (1,))
        return Call(_ADD, (array, array, 1), (array,))


def required_calls(graph: Graph, groups: Sequence[Group]) -> list[Call]:
    """Return the calls of which `exchange_tables` needs durations."""
    passes = [
        call
        for group in groups
        for lookup in group.lookups
        for _, call in group.timed_passes(lookup)
    ]
    changed, added, _ = _updates(graph, groups)
    sums = [group.sum_of_gradients for group in groups]
    return [
        *passes, *required_timings(graph, changed), *(call for _, call in added),
        *(call for call in sums if call is not None),
    ]  # fmt: skip


def exchange_tables(edit: Editor, graph: Graph, groups: Sequence[Group], context: Context) -> None:
    """Replace look-ups, gradients and memory of the tables, and merge updates of each group."""
    for group in groups:
        first = True
        for lookup in group.lookups:
            for task, call in group.timed_passes(lookup):
                duration_ns = graph.task(task).duration_ns
                edit.set_price(task, price(context.durations, call, duration_ns))
            if not lookup.backward:
                continue
            if not first and group.sum_of_gradients is not None:
                _insert(edit, lookup.backward[0], group.sum_of_gradients, context)
            first = False
    changed, added, removed = _updates(graph, groups)
    rescale(edit, graph, changed, context.durations)
    for task, call in added:
        _insert(edit, task, call, context)
    for task in removed:
        edit.remove(task)
    _resize(edit, graph, groups)


def _insert(edit: Editor, task: int, call: Call, context: Context) -> None:
    """Insert a call after a task, with duration 0 if it is unknown."""
    edit.put(task, call, price(context.durations, call, 0.0))


def _trained_in_place(
    graph: Graph, groups: Sequence[Group]
) -> dict[tuple[int, ...], list[tuple[int, ...] | None]]:
    """Return the sizes of the tensors that replace each table, by shape and in look-up order.

    The first table of a group has the sizes of the group, the others have none; None stands for an
    unchanged table. Shapes of which all tables are unchanged are omitted.
    """
    in_place: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
    group_of = {table: group for group in groups for table in group.tables}
    for table, weight in {found.table: found.weight for found in matches(graph, lookups)}.items():
        group = group_of.get(table)
        trained = None
        if group is not None:
            trained = group.trained if next(iter(group.tables)) == table else ()
        in_place.setdefault(weight.shape, []).append(trained)
    return {
        shape: tables
        for shape, tables in in_place.items()
        if any(trained is not None for trained in tables)
    }


def _updates(
    graph: Graph, groups: Sequence[Group]
) -> tuple[dict[int, Call], list[tuple[int, Call]], list[int]]:
    """Return the changes of the optimizer's tasks on tables.

    Returns:
        tasks with new calls; calls to insert, each after a task; tasks to remove.
    """
    in_place = _trained_in_place(graph, groups)
    by_shape, on_lists = updates(graph, list(in_place))
    together: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {
        shape: [shape if sizes is None else (sum(sizes),) if sizes else None for sizes in tables]
        for shape, tables in in_place.items()
    }
    changed = {task: with_arrays(graph.task(task).known_call, together) for task in on_lists}
    added: list[tuple[int, Call]] = []
    removed: list[int] = []
    for shape, tasks in by_shape.items():
        # Tables of one shape are updated sequentially, each by the same tasks.
        count = len(tasks) // len(in_place[shape])
        for number, trained in enumerate(in_place[shape]):
            of_table = tasks[number * count : (number + 1) * count]
            if trained is None:
                continue
            if not trained:
                removed += of_table
                continue
            *others, largest = sorted(trained)
            for task in of_table:
                call = graph.task(task).known_call
                changed[task] = with_arrays(call, {shape: [(largest,)]})
                added += [(task, with_arrays(call, {shape: [(size,)]})) for size in others]
    return changed, added, removed


def _resize(edit: Editor, graph: Graph, groups: Sequence[Group]) -> None:
    """Scale allocations of a table's size by the compression of its group."""
    share_of: dict[int, float] = {}
    by_size: dict[int, list[float]] = {}
    for group in groups:
        share = group.nbytes / sum(spec.nbytes for spec in group.tables.values())
        share_of.update(dict.fromkeys(group.tables, share))
    for table, weight in {found.table: found.weight for found in matches(graph, lookups)}.items():
        by_size.setdefault(weight.nbytes, []).append(share_of.get(table, 1.0))
    memory = graph.memory
    parameters = set(graph.parameters.tolist())
    as_large = np.isin(memory.nbytes, list(by_size)) & np.isin(memory.role, _TABLE_ROLES)
    for allocation in np.flatnonzero(as_large).tolist():
        nbytes, storage = int(memory.nbytes[allocation]), int(memory.storage[allocation])
        if storage in share_of:
            edit.resize(allocation, round(nbytes * share_of[storage]))
        elif storage not in parameters:
            # A gradient or optimizer state of one of the tables of this size.
            mean = sum(by_size[nbytes]) / len(by_size[nbytes])
            edit.resize(allocation, round(nbytes * mean))
