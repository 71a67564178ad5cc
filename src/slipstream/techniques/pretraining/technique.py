"""masked_head, unpad and fused_lamb: encoders are pre-trained on the tokens that count.

Source: Lin, Li and Pekhimenko, "Multi-node Bert-pretraining: Cost-efficient Approach", 2020; packed
attention: Zeng et al., "Boosting Distributed Training Performance of the Unpadded BERT Model",
2022; LAMB: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import pace, required_timings, rescale
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, TensorSpec, calls_of, price
from slipstream.graph.flow import flow_of, matches
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_compiled, update_tasks, updated_tensors
from slipstream.techniques.pretraining.recorded import (
    ATTENTION,
    Rows,
    heads,
    rows_of,
    tokens_of,
)
from slipstream.techniques.pretraining.timing import attention_call, lamb_call
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.built import HIDDEN_BATCH, model_output

_GATHER = "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor"
_CONFLICTS = frozenset({"compile", "cuda_graphs"})
_NO_LABELS = (
    "no tokens without a loss: labels [batch, length] with -100 for them are not in the batch"
)


@dataclass(frozen=True)
class MaskedHead(TechniqueSettings):
    """Computation of a masked-language model's head and loss at labelled tokens only."""

    name: ClassVar[str] = "masked_head"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL, conflicts=_CONFLICTS)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "rows without a label have no loss and no gradient"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no rows of the head can be left out; None if they can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        if self._rows(graph) is None:
            return _NO_LABELS
        if not matches(graph, heads):
            return "the step has no cross-entropy with a row per token of its batch"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the head's operators as recorded and with fewer rows, and the gather."""
        rows, changed = self._changed(graph)
        return [*required_timings(graph, changed), *_gather(graph, rows)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale the head's operators to labelled rows, and add the gather."""
        rows, changed = self._changed(graph)
        edit = Editor(graph, str(self))
        rescale(edit, graph, changed, context.durations)
        rows.resize(edit, graph, list(changed))
        in_step = pace(graph, changed, context.durations)
        first = min(changed)
        for call in _gather(graph, rows):
            cost = price(context.durations, call, 0.0, pace=in_step)
            edit.put(first, call, cost, before=True)
        return edit.apply(f"{len(changed)} operators of the head at {rows.rows} tokens")

    def apply(self, built: BuiltWorkload) -> None:
        """Gather labelled rows before the head; see `slipstream.pretraining.masked_head`.

        Raises:
            WorkloadError: the step hides model or batch, or has no rows to leave out.
        """
        from slipstream.techniques.pretraining.hooks import (
            labelled_targets,
            masked_head,
            takes_labels,
        )

        built.need_model(self.name)
        labels = built.tokens.labels
        if labels is None:
            raise WorkloadError(f"masked_head: {_NO_LABELS}", remedy=HIDDEN_BATCH)
        if built.loss is None and not takes_labels(built.model):
            raise WorkloadError(
                "masked_head: the loss is computed where the step's targets are hidden",
                remedy="return (model, (inputs, targets), loss, optimizer), or let the model take "
                "labels=",
            )
        forward = built
        if built.loss is not None:
            # The loss of the whole batch does not fit outputs of some rows.
            forward = replace(built, loss=lambda output, targets: output)
        rows = masked_head(built.model, functools.partial(model_output, forward), labels)
        if rows.takes_labels:
            return
        loss: Any = built.loss

        def before(module: Any, args: Any) -> None:
            # None if every token has a label.
            if (labels := built.tokens.labels) is not None:
                rows.select(labels)

        built.model.register_forward_pre_hook(before, prepend=True)
        built.loss = lambda output, targets: loss(output, labelled_targets(targets))

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the call after the model is created, by hand."""
        return _by_hand("masked_head(model, lambda: model(**batch), batch['labels'])")

    def _rows(self, graph: Graph) -> Rows | None:
        def labelled(tokens: dict[str, Any]) -> int | None:
            count, all_tokens = tokens["labelled"], math.prod(tokens["shape"])
            return count if count and count < all_tokens else None

        return rows_of(graph, labelled)

    def _changed(self, graph: Graph) -> tuple[Rows, dict[int, Call]]:
        rows = self._rows(graph)
        assert rows is not None
        tasks = sorted({task for match in matches(graph, heads) for task in match.tasks})
        return rows, rows.calls(graph, tasks)


def _by_hand(call: str) -> CodeChange:
    return CodeChange(
        "", f"by hand, with a batch at hand:\nimport slipstream as ss\nss.pretraining.{call}"
    )


def _gather(graph: Graph, rows: Rows) -> list[Call]:
    """Return the gather of the head's input, and its gradient's counterpart."""
    x = matches(graph, heads)[0].x
    width = x.shape[-1]
    full = replace(x, shape=(rows.batch * rows.length, width), strides=(width, 1))
    part = replace(full, shape=(rows.rows, width))
    index = TensorSpec("int64", (rows.rows,), (1,), x.device)
    back = TensorSpec("int64", (rows.batch * rows.length,), (1,), x.device)
    return [Call(_GATHER, (full, 0, index), (part,)), Call(_GATHER, (part, 0, back), (full,))]


@dataclass(frozen=True)
class Unpad(TechniqueSettings):
    """Batches without padding: sequences are packed, and attention is computed within each."""

    name: ClassVar[str] = "unpad"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=_CONFLICTS | {"checkpointing", "pipeline"}
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "padding is neither attended to nor in the loss"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the batch cannot be packed; None if it can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        if self._rows(graph) is None:
            return (
                "no padding: the batch has no mask of several sequences [batch, length] with zeros"
            )
        if not any(call.name.startswith(ATTENTION) for call in graph.calls):
            return (
                "the step runs no fused attention: combine it as sdpa+unpad; on a CPU, attention "
                "with dropout is never fused"
            )
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return operators as recorded and on fewer rows, and packed attention."""
        _, changed, attention = self._changed(graph)
        calls = [call for old, new in attention.items() for call in (*calls_of(graph, [old]), new)]
        return [*required_timings(graph, changed), *dict.fromkeys(calls)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale token-wise operators to tokens, and replace attention."""
        rows, changed, attention = self._changed(graph)
        edit = Editor(graph, str(self))
        rescale(edit, graph, changed, context.durations)
        in_step = pace(graph, attention, context.durations)
        for task, call in attention.items():
            recorded_ns = float(graph.tasks.duration_ns[task])
            cost = price(context.durations, call, recorded_ns * rows.share, pace=in_step)
            edit.set_price(task, cost, call=call)
        rows.resize(edit, graph, [*changed, *attention])
        return edit.apply(f"{len(changed) + len(attention)} operators on {rows.rows} tokens")

    def apply(self, built: BuiltWorkload) -> None:
        """Pack batches inside the model; see `slipstream.pretraining.unpad`.

        Raises:
            WorkloadError: the step hides its model or batch, or the model cannot be packed.
        """
        from slipstream.techniques.pretraining.hooks import unpad

        built.need_model(self.name)
        mask = built.tokens.mask
        if mask is None:
            raise WorkloadError("unpad: the batch has no mask of padding", remedy=HIDDEN_BATCH)
        unpad(built.model, functools.partial(model_output, built), mask)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the call after the model is created, by hand."""
        return _by_hand("unpad(model, lambda: model(**batch), batch['attention_mask'])")

    def _rows(self, graph: Graph) -> Rows | None:
        def retained(tokens: dict[str, Any]) -> int | None:
            lengths = tokens["lengths"]
            # One sequence does not show that none reads another one.
            padded = len(lengths or ()) > 1 and sum(lengths) < math.prod(tokens["shape"])
            return sum(lengths) if padded else None

        return rows_of(graph, retained)

    def _changed(self, graph: Graph) -> tuple[Rows, dict[int, Call], dict[int, Call]]:
        rows = self._rows(graph)
        assert rows is not None

        def attends(task: int) -> bool:
            call = graph.task(task).call
            return call is not None and call.name.startswith(ATTENTION)

        lengths = tokens_of(graph)["lengths"]
        attention: dict[int, Call] = {}
        forward = np.flatnonzero(graph.tasks.phase != StepPhase.BACKWARD).tolist()
        for task in filter(attends, forward):
            for part in (task, *filter(attends, flow_of(graph).backward[task])):
                packed = rows.call(graph.task(part).known_call)
                attention[part] = attention_call(lengths, packed, part != task)
        passes = np.flatnonzero(graph.tasks.phase != StepPhase.OPTIMIZER).tolist()
        others = [task for task in passes if task not in attention]
        return rows, rows.calls(graph, others), attention


@dataclass(frozen=True)
class FusedLamb(TechniqueSettings):
    """Replacement of a user's LAMB by `slipstream.pretraining.FusedLAMB`."""

    name: ClassVar[str] = "fused_lamb"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.OPTIMIZER, conflicts=frozenset({"fused_optimizer"})
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same update; sums are rounded differently"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is no LAMB to replace; None if there is."""
        described: Any = graph.meta.get("optimizer")
        if not described or not len(update_tasks(graph)):
            return "the step has no optimizer, or hides it"
        if described["class"] == "FusedLAMB":
            return "the optimizer is FusedLAMB already"
        if described["class"].casefold() != "lamb":
            return f"the optimizer is {described['class']}, not LAMB"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the whole fused update."""
        return [lamb_call(updated_tensors(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the update's tasks by one."""
        tasks = update_tasks(graph)
        before = float(graph.tasks.duration_ns[tasks].sum() + graph.tasks.gap_ns[tasks].sum())
        call = lamb_call(updated_tensors(graph))
        edit = Editor(graph, str(self))
        edit.remove(tasks)
        edit.put(int(tasks[-1]), call, price(context.durations, call, before), name="fused LAMB")
        return edit.apply(f"{len(tasks)} operators of the update in one")

    def apply(self, built: BuiltWorkload) -> None:
        """Replace the optimizer by one with the same groups and state.

        Raises:
            WorkloadError: there is no LAMB, its update is another one, or a script holds it.
        """
        from slipstream.techniques.pretraining.lamb import FusedLAMB, updates_like_lamb

        if built.optimizer is None or type(built.optimizer).__name__.casefold() != "lamb":
            raise WorkloadError("fused_lamb: the workload has no optimizer LAMB")
        if built.from_script:
            raise WorkloadError(
                "fused_lamb: the optimizer is created in a script",
                remedy="write slipstream.pretraining.FusedLAMB(...) there",
            )
        if not updates_like_lamb(built.optimizer):
            raise WorkloadError(
                f"fused_lamb: {type(built.optimizer).__name__} does not compute LAMB's update with "
                "correction of bias and without limits of norms",
                remedy="create slipstream.pretraining.FusedLAMB, and tune its settings",
            )
        built.optimizer = FusedLAMB.like(built.optimizer)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the other class, by hand."""
        return CodeChange(
            "",
            "by hand:\nimport slipstream as ss\n"
            "optimizer = ss.pretraining.FusedLAMB(model.parameters(), lr=...)",
        )
