"""sdpa: attention of matmul, softmax and matmul replaced by a fused call.

``torch.nn.functional.scaled_dot_product_attention`` computes softmax(q k^T s + mask) v block by
block: the matrix of scores, quadratic in the sequence's length, is never stored.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
NeurIPS 2022; Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import pace
from slipstream.errors import WorkloadError
from slipstream.graph import (
    Allocations,
    Call,
    Editor,
    Graph,
    Price,
    calls_of,
    price,
    price_columns,
    unique_in_order,
)
from slipstream.graph.flow import matches
from slipstream.source import fuse_attention
from slipstream.surgery import (
    ModuleCall,
    NotRewrittenError,
    callers,
    difference,
    outputs_of,
    with_attention,
)
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_compiled, hidden_model
from slipstream.techniques.attention import attentions
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.built import model_output

_FUSED = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
_FUNCTION = "scaled_dot_product_attention"
_SCOPE = f"aten::{_FUNCTION}"
_BY_HAND = "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=s)"
_ALREADY = "its attention already uses scaled_dot_product_attention"
_NONE = "the step has no unfused attention (matmul, softmax, matmul)"
_REMEDY = f"write {_BY_HAND} instead of the two matmuls and the softmax"


@dataclass(frozen=True)
class Sdpa(ModuleTechnique):
    """Replacement of every unfused attention by ``scaled_dot_product_attention``.

    Attributes:
        only, except_: patterns of the qualified names of modules with unfused attention.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "sdpa"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "Dao et al. 2022: exact attention with a different order of sums"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no attention can be fused; None if one can."""
        if (reason := already_compiled(graph) or hidden_model(graph)) is not None:
            return reason
        fused = any(call.name.startswith(_FUSED) for call in graph.calls) or any(
            _SCOPE in graph.string(scope)
            for scope in unique_in_order(graph.tasks.scope, len(graph.strings)).tolist()
        )
        return self.no_match_reason(matches(graph, attentions), _ALREADY if fused else _NONE)

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the replaced and the fused calls, forward and backward."""
        timings: dict[Hashable, list[Call]] = {}
        for site in self.chosen(matches(graph, attentions)):
            fused = [
                call for call in (site.call, site.backward_call, site.keep) if call is not None
            ]
            recorded = tuple(graph.tasks.call[list(site.work)].tolist())
            key = recorded, *(call.key for call in fused)
            if key not in timings:
                timings[key] = [*calls_of(graph, site.work), *fused]
        return [call for calls in timings.values() for call in calls]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace each attention by one task, and its backward pass by another."""
        chosen = self.chosen(matches(graph, attentions))
        edit = Editor(graph, str(self))
        # Two attentions may share a task.
        replaced = dict.fromkeys(task for site in chosen for task in site.work)
        in_step = pace(graph, replaced, context.durations)

        cached, recorded = dict[str, Price](), len(graph)
        places, calls, prices, gaps_ns, sequences = [], [], [], [], []
        storages: list[Sequence[int]] = []

        def insert(
            position: int, call: Call, cost: Price, gap_ns: float, stored: Sequence[int], n: int
        ) -> int:
            places.append(position)
            calls.append(call)
            prices.append(cost)
            gaps_ns.append(gap_ns)
            storages.append(stored)
            sequences.append(n)
            return recorded + len(places) - 1

        def fuse(
            position: int, call: Call, old: Sequence[int], stored: Sequence[int], sequence: int
        ) -> int:
            if call.key not in cached:
                cached[call.key] = price(context.durations, call, math.nan, pace=in_step)
            cost = cached[call.key]
            if math.isnan(cost.nanoseconds):
                cost = replace(cost, nanoseconds=float(graph.tasks.duration_ns[list(old)].sum()))
            gap_ns = float(graph.tasks.gap_ns[old[-1]])
            return insert(position, call, cost, gap_ns, stored, sequence if stored else -1)

        by_storage = np.argsort(graph.memory.storage, kind="stable")
        in_order = graph.memory.storage[by_storage].astype(np.int64)
        saved, holders = [by_storage[:0]], [by_storage[:0]]
        for site in chosen:
            operands, gradient_operands = ((), ()) if site.storages is None else site.storages
            if site.keep is not None:
                answer = context.durations.lookup(site.keep)
                if answer is not None:
                    insert(site.forward[-1], site.keep, answer.at(in_step), 0.0, (), -1)
            fuse(site.forward[-1], site.call, site.forward, operands, site.sequence)
            if site.backward and site.backward_call is not None:
                position = site.backward[0]
                handle = fuse(
                    position, site.backward_call, site.backward, gradient_operands, site.sequence
                )
                # The fused call saves views, its arguments, instead of copies made by matmul.
                runs = np.searchsorted(in_order, [operands[:-1], np.add(operands[:-1], 1)])
                held = [by_storage[first:last] for first, last in runs.T.tolist()]
                found = np.concatenate([by_storage[:0], *held])
                saved.append(_freed_before(graph.memory, found, site.forward, position))
                holders.append(np.full(len(saved[-1]), handle))
        durations_ns, provenance, spread = price_columns(prices)
        edit.insert_all(
            np.array(places), [call.name for call in calls], durations_ns, provenance, before=True,
            spread=spread, gap_ns=gaps_ns, call=[edit.call_number(call) for call in calls],
            storages=storages, sequence=sequences,
        )  # fmt: skip
        edit.remove(np.array([task for site in chosen for task in site.tasks]))
        edit.release_after(np.concatenate(saved), np.concatenate(holders))
        removed = sum(len(site.forward) + len(site.backward) for site in chosen)
        return edit.apply(f"{removed} operators of {len(chosen)} attentions in one kernel each")

    def apply(self, built: BuiltWorkload) -> None:
        """Rewrite the forward of modules with unfused attention, and check the outputs.

        Raises:
            WorkloadError: the step hides its model or its batch, has no unfused attention, no
                module could be rewritten, or the rewritten model computes something else; then
                the model is restored.
        """
        built.need_model(self.name)
        run = _forward_of(built)
        before = outputs_of(built.model, run)
        if not before:
            raise WorkloadError(
                "sdpa cannot be checked: the step does not call its model", remedy=_REMEDY
            )
        sites = _sites(built.model, run)
        self.require_match([site.name for site in sites])
        undo = _by_library(built.model) if self.selection.everything else None
        undo = undo or _by_rewriting([site for site in sites if site.name in self.selection])
        try:
            wrong = difference(before, outputs_of(built.model, run))
        except Exception as error:
            wrong = f"it fails with {type(error).__name__}: {error}"
        if wrong is not None:
            undo()
            raise WorkloadError(
                f"with scaled_dot_product_attention the model computes something else: {wrong}",
                remedy=_REMEDY,
            )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the fused call in the model's forward, or the line to write by hand."""
        if not self.selection.everything:
            return CodeChange("", note=_REMEDY)
        change = CodeChange.of(
            workload,
            fuse_attention,
            by_hand=_BY_HAND,
            note="the order of sums changes; a fully masked row may differ",
        )
        return CodeChange("", note=_REMEDY) if change is None else change


def _freed_before(
    memory: Allocations, found: NDArray[np.int64], forward: Sequence[int], backward: int
) -> NDArray[np.int64]:
    """Return the allocations in `found` that live in `forward` but not at `backward`."""
    release = memory.release[found]
    alive = (memory.producer[found] <= forward[-1]) & (release >= forward[0])
    return found[alive & (release < backward)]


def _forward_of(built: BuiltWorkload) -> Callable[[], object]:
    """Return a function that runs a forward pass of the built model, without an update.

    Raises:
        WorkloadError: the step trains and hides its batch.
    """
    if not built.training:
        return built.step
    if built.batch is None:
        raise WorkloadError(
            "sdpa needs a batch to check the rewritten model, but this step hides it",
            remedy="return (model, batch, loss, optimizer)",
        )
    return lambda: model_output(built)


def _by_library(model: Any) -> Callable[[], None] | None:
    """Select a model's built-in sdpa (as in Hugging Face); return a function to undo it."""
    choose = getattr(model, "set_attn_implementation", None)
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not callable(choose) or chosen in (None, "sdpa"):
        return None
    try:
        choose("sdpa")
    except (ValueError, ImportError):
        # The architecture does not support it, so its modules may be rewritten.
        return None
    return lambda: choose(chosen)


def _sites(model: Any, run: Callable[[], object]) -> list[ModuleCall]:
    """Return the modules that may have unfused attention.

    Raises:
        WorkloadError: there is none, with the reason of `Sdpa.why_not`.
    """
    from torch import nn

    sites: list[ModuleCall] = []
    fused: list[ModuleCall] = []

    kinds = (nn.MultiheadAttention,)
    outputs_of(model, lambda: sites.extend(callers(model, run, ("softmax",), kinds)))
    if not sites:
        outputs_of(model, lambda: fused.extend(callers(model, run, (_FUNCTION,))))
        raise WorkloadError(f"sdpa does not apply: {_ALREADY if fused else _NONE}")
    return sites


def _by_rewriting(sites: Sequence[ModuleCall]) -> Callable[[], None]:
    """Rewrite the forward of modules with unfused attention; return a function to undo it.

    Raises:
        WorkloadError: no module could be rewritten.
    """
    from torch import nn

    changed: list[Any] = []
    reasons: list[str] = []
    for site in sites:
        try:
            if "forward" in vars(site.module):
                raise NotRewrittenError("its forward was already replaced")
            lean = isinstance(site.module, nn.MultiheadAttention)
            forward = (
                _without_weights(site) if lean else with_attention(site.module, site.arguments)
            )
            site.module.forward = forward
            changed.append(site.module)
        except NotRewrittenError as reason:
            reasons.append(f"{site.name or 'the model'}: {reason}")
    if not changed:
        raise WorkloadError(
            "no module's attention could be rewritten",
            where="; ".join(dict.fromkeys(reasons)),
            remedy=_REMEDY,
        )

    def undo() -> None:
        for module in changed:
            del module.forward

    return undo


def _without_weights(site: ModuleCall) -> Callable[..., Any]:
    """Return the forward of an ``nn.MultiheadAttention`` with ``need_weights=False``."""
    if not site.arguments.get("need_weights", True):
        raise NotRewrittenError("it is already called with need_weights=False")
    forward = site.module.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def lean(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["need_weights"] = False
        return forward(*bound.args, **bound.kwargs)

    return lean
