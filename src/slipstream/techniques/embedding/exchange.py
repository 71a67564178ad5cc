"""What techniques that put other modules in the place of embedding tables have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, TensorSpec
from slipstream.native import library, why_no_library
from slipstream.provenance import Provenance
from slipstream.source import NotPlacedError, Places, Source
from slipstream.technique import CodeChange, Context
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.embedding.tables import Lookup, lookups

if TYPE_CHECKING:
    from slipstream.workload import Workload

_UNKNOWN_SPREAD = 0.5
_TABLE_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER, Role.TEMPORARY)


def chosen(graph: Graph, rows: int) -> list[Lookup]:
    """Look-ups of float32 tables with at least so many rows, on the first one's device."""
    large = [
        one
        for one in lookups(graph)
        if one.weight.shape[0] >= rows and one.weight.dtype == "float32"
    ]
    return [one for one in large if one.weight.device == large[0].weight.device]


def weights_of(found: Sequence[Lookup]) -> dict[int, TensorSpec]:
    """Tables by their storage, in the order of their look-ups."""
    return {lookup.table: lookup.weight for lookup in found}


def why_none(graph: Graph, rows: int) -> str | None:
    """None, or why no table can be exchanged for a module with kernels for processors."""
    if (reason := already_compiled(graph)) is not None:
        return reason
    every = lookups(graph)
    if not every:
        return "no embedding table is looked up in this step"
    found = chosen(graph, rows)
    if not found:
        most = max(lookup.weight.shape[0] for lookup in every)
        return f"the largest table has {most} rows; below {rows} they are not worth it"
    if any(lookup.weight.device != "cpu" for lookup in found):
        return "the kernels are for processors, and the tables are on another device"
    if library() is None:
        return f"it needs the compiled library: {why_no_library()}"
    return None


def retime(
    edit: Editor,
    graph: Graph,
    context: Context,
    lookup: Lookup,
    pass_of: Callable[[Lookup, bool], Call],
) -> None:
    """Give a look-up and its backward the durations of the module's passes."""
    for task, backward in zip(lookup.tasks, (False, True), strict=False):
        answer = context.durations.lookup(pass_of(lookup, backward))
        now = float(graph.tasks.duration_ns[task])
        duration = now if answer is None else answer.nanoseconds
        edit.set_duration(
            task, duration, Provenance.ASSUMED if answer is None else answer.provenance,
            spread=_UNKNOWN_SPREAD if answer is None else answer.spread,
        )  # fmt: skip


def insert(edit: Editor, task: int, call: Call, context: Context) -> None:
    """A further call, after a task."""
    answer = context.durations.lookup(call)
    edit.insert(
        task, call.name, 0.0 if answer is None else answer.nanoseconds,
        Provenance.ASSUMED if answer is None else answer.provenance,
        spread=_UNKNOWN_SPREAD if answer is None else answer.spread, call=call,
    )  # fmt: skip


def shrink(edit: Editor, graph: Graph, found: Sequence[Lookup], share: Mapping[int, float]) -> None:
    """Whatever is as large as a table becomes that share, by bytes, of it."""
    memory = graph.memory
    others = set(graph.parameters.tolist()) - set(weights_of(found))
    for one in range(len(memory)):
        nbytes = int(memory.nbytes[one])
        if nbytes not in share or int(memory.role[one]) not in _TABLE_ROLES:
            continue
        if int(memory.storage[one]) not in others:
            edit.resize(one, round(nbytes * share[nbytes]))


def exchangeable(model: Any, rows: int) -> list[tuple[str, Any]]:
    """Modules by name, of at least so many rows, whose weights nothing else holds."""
    from torch import nn

    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Embedding, nn.EmbeddingBag)
        and module.num_embeddings >= rows
        and module.weight.dtype.is_floating_point
        and holders[id(module.weight)] == 1
        and module.max_norm is None
        and not module.scale_grad_by_freq
    ]


def check_built(name: str, built: Any, what: str) -> None:
    """See that a model is there, and an optimizer that takes dense gradients.

    Raises:
        WorkloadError: the step hides its model, or the optimizer takes sparse gradients only.
    """
    if built.model is None:
        raise WorkloadError(
            f"{name} needs the model, and this workload's step hides it",
            remedy="return (model, batch, loss, optimizer)",
        )
    if type(built.optimizer).__name__ == "SparseAdam":
        raise WorkloadError(
            f"SparseAdam takes sparse gradients only, and {what} dense",
            remedy="torch.optim.Adam or Adagrad",
        )


def by_hand(workload: Workload, lines: str) -> CodeChange | None:
    """Tables are made in too many ways to place the edit: the lines to write."""
    return CodeChange.of(workload, _no_edit, by_hand=lines)


def _no_edit(where: Places) -> Source:
    raise NotPlacedError(
        "which tables to exchange is not in the source", where=str(where.source.path)
    )
