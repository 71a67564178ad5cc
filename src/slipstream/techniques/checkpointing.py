"""Activation checkpointing: drop activations of a block and recompute them for its gradient.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174);
in PyTorch ``torch.utils.checkpoint`` with ``use_reentrant=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.recomputation import CHECKPOINT
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, Kind, StepPhase, price, price_columns
from slipstream.source import Places, Source, checkpoint_blocks
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques._recomputation import Blocks, edit_memory, find_blocks, recomputed
from slipstream.workload import BuiltWorkload, Workload

_ROOT = "model"
# Containers are not repeated blocks.
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
# The cache misses of its Python code differ between models.
_SPREAD = 0.25


@dataclass(frozen=True)
class Checkpointing(ModuleTechnique):
    """Save only the inputs of some modules, and recompute their forward in the backward pass.

    The default is the repeated blocks of a network: siblings of the same class with submodules,
    such as a transformer's layers. ``only`` and ``except`` select by qualified name.
    """

    only: str | None = None
    except_: str | None = None

    name: ClassVar[str] = "checkpointing"
    # Recomputation runs in the precision that precision techniques choose.
    traits: ClassVar[Traits] = Traits(
        stage=Stage.PRECISION + 5, conflicts=frozenset({"compile", "cuda_graphs"})
    )
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "the same operators on the same numbers")

    def __str__(self) -> str:
        return super().__str__().replace(":none,", ":").removesuffix(":none")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is nothing to recompute; None if there is."""
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step has no backward pass"
        if (reason := already_compiled(graph)) is not None:
            return reason
        classes: Mapping[str, str] = graph.meta.get("modules") or {}
        if not classes:
            return "the graph does not know the model's modules; record the step with its model"
        chosen = self._choose(classes)
        if not chosen and self.only is not None:
            return f"no module is called '{self.only}'"
        if not chosen:
            return "no block repeats in the model; choose modules with only=GLOB"
        blocks = find_blocks(graph, tuple(chosen))
        if not len(blocks):
            return "the chosen modules save nothing for the backward pass"
        if (again := recomputed(graph, blocks)).all():
            return "the model already recomputes these modules in the backward pass"
        if again.any():
            name = blocks.module[int(again.argmax())].removeprefix(f"{_ROOT}.")
            return f"the model already recomputes '{name}'; choose others with only=GLOB"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the overhead of checkpointing for each number of saved tensors of a block."""
        return [_overhead(saved) for saved in dict.fromkeys(self._blocks(graph).saved.tolist())]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Repeat a block's forward before its backward, and allocate saved tensors from there."""
        edit = Editor(graph, str(self))
        blocks = self._blocks(graph)
        count = int(blocks.again.sum())
        handles = np.empty(count, np.int64)
        places = np.empty(len(blocks.task), np.int64)
        places[blocks.again] = np.arange(count)
        distinct_saved, which = np.unique(blocks.saved, return_inverse=True)
        overhead_ns, provenance, _ = price_columns(
            [price(context.durations, _overhead(saved), 0.0) for saved in distinct_saved.tolist()]
        )
        for group in _groups(blocks):
            chosen = np.flatnonzero(group)
            edit.insert_all(
                blocks.resume[chosen], "checkpoint", overhead_ns[which[chosen]],
                provenance[which[chosen]],
                before=True, spread=_SPREAD, kind=Kind.HOST,
            )  # fmt: skip
            again = np.flatnonzero(group[blocks.of] & blocks.again)
            where = blocks.resume[blocks.of[again]]
            handles[places[again]] = edit.repeat(blocks.task[again], where, before=True)
        edit_memory(edit, graph, self._modules(graph), handles)
        return edit.apply(f"{count} operators of {len(blocks)} blocks run again in the backward")

    def apply(self, built: BuiltWorkload) -> None:
        """Checkpoint the forward of the chosen modules.

        Raises:
            WorkloadError: the step hides its model, or no module is chosen.
        """
        built.need_model(self.name)
        modules = {
            f"{_ROOT}.{name}" if name else _ROOT: module
            for name, module in built.model.named_modules()
        }
        chosen = self._choose({name: type(module).__name__ for name, module in modules.items()})
        if not chosen:
            raise WorkloadError(
                "no module to checkpoint", remedy="select modules: checkpointing:only=blocks.*"
            )
        for name in chosen:
            modules[name].forward = _checkpointed(modules[name].forward)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit of the model's forward that checkpoints its repeated blocks."""

        def edit(where: Places) -> Source:
            if self.only is not None or self.except_ is not None:
                raise where.source.location_error(
                    "the source does not determine which modules the patterns select"
                )
            return checkpoint_blocks(where)

        return CodeChange.of(
            workload,
            edit,
            by_hand="from torch.utils.checkpoint import checkpoint\n"
            "x = checkpoint(block, x, use_reentrant=False)  # instead of x = block(x)",
            note="without gradients, checkpoint only calls the block",
            technique=self,
        )

    def _blocks(self, graph: Graph) -> Blocks:
        return find_blocks(graph, self._modules(graph))

    def _modules(self, graph: Graph) -> tuple[str, ...]:
        return tuple(self._choose(graph.meta.get("modules") or {}))

    def _choose(self, classes: Mapping[str, str]) -> list[str]:
        """Return the names of the outermost modules to checkpoint, given classes by name."""
        selection = self.selection
        parts = _repeated(classes) if self.only is None else set(classes) - {_ROOT}
        selected = {name for name in parts if name.removeprefix(f"{_ROOT}.") in selection}
        return [
            name
            for name in classes
            if name in selected and not any(name.startswith(f"{outer}.") for outer in selected)
        ]


def _repeated(classes: Mapping[str, str]) -> set[str]:
    """Return siblings of the same class with submodules."""
    parents = {name.rpartition(".")[0] for name in classes}
    families: dict[tuple[str, str], list[str]] = {}
    for name, kind in classes.items():
        if name in parents and kind not in _CONTAINERS:
            families.setdefault((name.rpartition(".")[0], kind), []).append(name)
    return {name for family in families.values() if len(family) > 1 for name in family}


def _groups(blocks: Blocks) -> list[NDArray[np.bool_]]:
    """Group blocks so that no two of a group are recomputed before the same task."""
    order = np.argsort(blocks.resume, kind="stable")
    resume = blocks.resume[order]
    before = np.arange(len(order)) - np.searchsorted(resume, resume)
    group = np.empty(len(order), np.int64)
    group[order] = before
    return [group == number for number in range(int(before.max(initial=-1)) + 1)]


def _overhead(saved: int) -> Call:
    return Call(f"{CHECKPOINT}(int saved)", (saved,))


def _checkpointed(forward: Any) -> Any:
    """Return `forward` with checkpointing if gradients are enabled."""
    import functools

    import torch
    from torch.utils.checkpoint import checkpoint

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return wrapped
