"""A recorded step with its tables in other formats: other look-ups, updates and memory."""

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
        lookups: of these tables.
        format: its name.
        settings: of the format: integers, or ids.
        nbytes: of what comes in the tables' place.
        trained: numbers in each tensor that is trained in their place; empty for none.
    """

    lookups: tuple[Lookup, ...]
    format: str
    settings: Mapping[str, int | tuple[int, ...]]
    nbytes: int
    trained: tuple[int, ...]

    @property
    def tables(self) -> dict[int, TensorSpec]:
        """By storage, in the order of their look-ups."""
        return {lookup.table: lookup.weight for lookup in self.lookups}

    def timed_pass(self, lookup: Lookup, backward: bool) -> Call:
        """A look-up by the format's module, or its backward pass, as a micro-benchmark times it."""
        rows, dim = lookup.weight.shape
        # Which ids are hot does not change the time; their number does.
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
        """The tasks of a look-up, with the passes that come in their place."""
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


def asked(graph: Graph, groups: Sequence[Group]) -> list[Call]:
    """Calls whose durations `exchanged` looks up."""
    passes = [
        call for group in groups for one in group.lookups for _, call in group.timed_passes(one)
    ]
    changed, added, _ = _updates(graph, groups)
    sums = [group.sum_of_gradients for group in groups]
    return [
        *passes, *required_timings(graph, changed), *(call for _, call in added),
        *(call for call in sums if call is not None),
    ]  # fmt: skip


def exchanged(edit: Editor, graph: Graph, groups: Sequence[Group], context: Context) -> None:
    """Other look-ups and gradients, one update in place of a group's, other memory."""
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
    """A further call, behind a task; at no time where its duration is not known."""
    edit.put(task, call, price(context.durations, call, 0.0))


def _trained_in_place(
    graph: Graph, groups: Sequence[Group]
) -> dict[tuple[int, ...], list[tuple[int, ...] | None]]:
    """By shape, of each table in the order of look-ups, numbers of the tensors in its place.

    They are those of a group for the first of its tables and empty for the others; None where a
    table stays. Shapes of which all tables stay are left out.
    """
    in_place: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
    group_of = {table: group for group in groups for table in group.tables}
    for table, weight in {one.table: one.weight for one in matches(graph, lookups)}.items():
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
    """What becomes of the optimizer's tasks on tables.

    Returns:
        tasks with other calls; further calls, each behind a task; tasks that have nothing to do.
    """
    in_place = _trained_in_place(graph, groups)
    by_shape, on_lists = updates(graph, list(in_place))
    together: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {
        shape: [shape if one is None else (sum(one),) if one else None for one in tables]
        for shape, tables in in_place.items()
    }
    changed = {task: with_arrays(graph.task(task).known_call, together) for task in on_lists}
    added: list[tuple[int, Call]] = []
    removed: list[int] = []
    for shape, tasks in by_shape.items():
        # Tables of one shape are updated one after the other, alike.
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
                added += [(task, with_arrays(call, {shape: [(one,)]})) for one in others]
    return changed, added, removed


def _resize(edit: Editor, graph: Graph, groups: Sequence[Group]) -> None:
    """Whatever is as large as a table becomes its share of what comes in its group's place."""
    share_of: dict[int, float] = {}
    by_size: dict[int, list[float]] = {}
    for group in groups:
        share = group.nbytes / sum(spec.nbytes for spec in group.tables.values())
        share_of.update(dict.fromkeys(group.tables, share))
    for table, weight in {one.table: one.weight for one in matches(graph, lookups)}.items():
        by_size.setdefault(weight.nbytes, []).append(share_of.get(table, 1.0))
    memory = graph.memory
    parameters = set(graph.parameters.tolist())
    as_large = np.isin(memory.nbytes, list(by_size)) & np.isin(memory.role, _TABLE_ROLES)
    for one in np.flatnonzero(as_large).tolist():
        nbytes, storage = int(memory.nbytes[one]), int(memory.storage[one])
        if storage in share_of:
            edit.resize(one, round(nbytes * share_of[storage]))
        elif storage not in parameters:
            # A gradient or an optimizer's state: of one of the tables of this size.
            mean = sum(by_size[nbytes]) / len(by_size[nbytes])
            edit.resize(one, round(nbytes * mean))
