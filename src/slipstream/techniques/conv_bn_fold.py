"""conv_bn_fold: batch norms folded into the preceding layers, for inference.

In eval mode a batch norm multiplies each channel by a constant and adds another, which can be
merged into the weights and bias of the layer before it.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", CVPR 2018, section 3.2; ``torch.nn.utils.fusion``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import required_timings, rescale
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, TensorSpec
from slipstream.graph.flow import Flow, Match, matches
from slipstream.graph.layers import layers
from slipstream.surgery import consecutive_pairs, difference, outputs_of, place
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
from slipstream.workload import BuiltWorkload, Workload

_NORMS = {"aten::native_batch_norm": 5, "aten::cudnn_batch_norm": 5}
"""Index of the argument that enables training, by name of the batch norm."""
_EVALUATED = ("aten::_native_batch_norm_legit_no_training",)
_ADDMM = (
    "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
)
_IMPORT = "from torch.fx.experimental.optimization import fuse"
_TRAINS = "batch statistics are needed while training"


@dataclass(frozen=True)
class ConvBnFold(ModuleTechnique):
    """Folding of every batch norm that follows a convolution or linear layer, for inference.

    Attributes:
        only, except_: patterns of batch norms' qualified names.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "conv_bn_fold"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same constants, multiplied into the weights beforehand"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no batch norm can be folded; None if one can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        norms = [call for call in graph.calls if call.name in (*_NORMS, *_EVALUATED)]
        if not norms:
            return "the step has no batch norm"
        if (graph.tasks.phase == StepPhase.BACKWARD).any():
            return _TRAINS
        if not any(map(_evaluates, norms)):
            return f"{_TRAINS}; for inference call model.eval()"
        return self.no_match_reason(
            matches(graph, _foldable),
            "no batch norm is the only reader of the output of a convolution or linear layer",
        )

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return every layer that gets a bias, without and with it."""
        return required_timings(graph, _biased(graph, self.chosen(matches(graph, _foldable))))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Remove the batch norms, and add a bias to layers without one."""
        folds = self.chosen(matches(graph, _foldable))
        biased = _biased(graph, folds)
        edit = Editor(_rewired(graph, folds, biased), str(self))
        rescale(edit, graph, biased, context.durations)
        edit.remove(np.array([task for fold in folds for task in fold.removed], np.int64))
        return edit.apply(f"{len(folds)} batch norms folded, {len(biased)} layers get a bias")

    def apply(self, built: BuiltWorkload) -> None:
        """Fold the modules, and check that the outputs are unchanged.

        Raises:
            WorkloadError: the step trains or hides its model, nothing can be folded, or the folded
                model computes something else; then the model is restored.
        """
        from torch import nn

        if built.training:
            raise WorkloadError(f"conv_bn_fold is for inference: {_TRAINS}")
        built.need_model(self.name, remedy="return (model, batch)")
        model = built.model
        layers = (*_plain_layers(), *_transposed_layers())
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        before = outputs_of(model, built.step)
        pairs = [
            pair
            for pair in consecutive_pairs(model, built.step, layers, norms)
            if _why_not_folded(model, pair.first, pair.second) is None
        ]
        if not pairs:
            raise WorkloadError(
                "no batch norm of the model can be folded",
                where=_first_reason(model, norms),
                remedy="a batch norm must directly follow its layer and be in eval mode",
            )
        self.require_match([pair.second for pair in pairs])
        pairs = [pair for pair in pairs if pair.second in self.selection]
        names = [name for pair in pairs for name in (pair.first, pair.second)]
        recorded = {name: model.get_submodule(name) for name in names}
        for pair in pairs:
            place(model, pair.first, _folded(recorded[pair.first], recorded[pair.second]))
            place(model, pair.second, nn.Identity())
        wrong = difference(before, outputs_of(model, built.step))
        if wrong is not None:
            for name, module in recorded.items():
                place(model, name, module)
            raise WorkloadError(
                f"folded, the model computes something else: {wrong}",
                where=", ".join(pair.second for pair in pairs[:3]),
                remedy="is the layer's output used elsewhere too, or does the model replace "
                "its weights while it runs?",
            )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return torch's fold before the model is returned, after its weights are loaded."""
        if not self.selection.everything:
            return CodeChange("", "fold the selected modules by hand, with torch.nn.utils.fusion")

        return CodeChange.of(
            workload,
            lambda where: where.before_return(_IMPORT, "{model} = fuse({model}.eval())"),
            by_hand=f"{_IMPORT}\nmodel = fuse(model.eval())",
            note="it folds convolutions, in models that torch.fx can trace; fold linear layers "
            "with torch.nn.utils.fusion.fuse_linear_bn_eval",
        )


@dataclass(frozen=True, eq=False)
class _Fold(Match):
    """A layer and the batch norm after it, which is folded into the layer.

    Attributes:
        removed: tasks of the norm.
    """

    removed: tuple[int, ...] = ()


def _evaluates(call: Call) -> bool:
    if call.name in _EVALUATED:
        return True
    place_ = _NORMS.get(call.name)
    return place_ is not None and not call.arguments[place_]


def _foldable(flow: Flow) -> Iterator[_Fold]:
    """Find batch norms in eval mode that are the only reader of a layer's output."""
    for layer in matches(flow.graph, layers):
        (task,) = layer.forward
        (*norms,) = flow.behind(task, (*_NORMS, *_EVALUATED)) if layer.weights else ()
        biased = flow.name(task) == "aten::addmm"
        if not norms or (biased and flow.operands(task)[0][0] not in flow.parameters):
            continue
        (norm,) = norms
        view = flow.graph.task(norm)
        if _evaluates(view.known_call):
            removed = (*_preparations(flow.graph, norm), norm)
            module = view.module.partition(".")[2]
            yield _Fold(
                "norm", module, (task, norm), (), layer.x, layer.y, layer.weights, layer.settings,
                removed=removed,
            )  # fmt: skip


def _preparations(graph: Graph, norm: int) -> list[int]:
    """Return the tasks before `norm` that belong to the same batch norm."""
    tasks, preparations, t = graph.tasks, [], norm - 1
    while (
        t > 0
        and tasks.scope[t] == tasks.scope[norm]
        and tasks.module[t] == tasks.module[norm]
        and "aten::batch_norm" in graph.task(t).scope
    ):
        preparations.append(t)
        t -= 1
    return preparations


def _biased(graph: Graph, folds: Sequence[_Fold]) -> dict[int, Call]:
    """Return the calls of layers without a bias, with one added, by task."""
    changed = {}
    for fold in folds:
        task, output = fold.forward[0], fold.y
        call = graph.task(task).known_call
        bias = TensorSpec(output.dtype, (output.shape[1],), (1,), output.device)
        if call.name == "aten::mm":
            changed[task] = Call(_ADDMM, (bias, *call.arguments, 1, 1), call.outputs)
        elif not fold.settings.bias:
            arguments = (*call.arguments[:2], bias, *call.arguments[3:])
            changed[task] = Call(call.op, arguments, call.outputs)
    return changed


def _rewired(graph: Graph, folds: Sequence[_Fold], biased: dict[int, Call]) -> Graph:
    """Return `graph` with layers that read the norms' biases and write the norms' outputs.

    Later techniques then find consistent calls and storages, as in a recorded step.
    """
    start, changed = graph.operand_start, {}
    for fold in folds:
        task, last = fold.forward
        layer, norm = graph.task(task).storages, graph.task(last)
        inputs, outputs = norm.operands
        between = graph.operands[start[task + 1] : start[last]]
        if outputs[0] not in between:
            layer[-1] = outputs[0]
        if task in biased:
            # The running mean represents the bias of a norm without weights.
            place = 0 if graph.task(task).known_call.name == "aten::mm" else 2
            layer.insert(place, inputs[min(2, len(inputs) - 1)])
        changed[task] = np.array(layer, np.int32)
    order = np.arange(len(graph))
    order[list(changed)] = -1
    starts, operands = graph.gathered(order, changed)
    return replace(graph, operand_start=starts, operands=operands)


def _plain_layers() -> tuple[type, ...]:
    from torch import nn

    return nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear


def _transposed_layers() -> tuple[type, ...]:
    from torch import nn

    return nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def _folded(layer: Any, norm: Any) -> Any:
    """Return a copy of `layer` with `norm` folded into it."""
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    folded = copy.deepcopy(layer)
    # A linear layer is a convolution of width 1.
    folded.weight, folded.bias = fuse_conv_bn_weights(
        layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps,
        norm.weight, norm.bias, transpose=isinstance(layer, _transposed_layers()),
    )  # fmt: skip
    return folded


def _why_not_folded(model: Any, layer_name: str, norm_name: str) -> str | None:
    """Return why a batch norm is not folded into a layer; None if it is."""
    layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
    if norm.training or layer.training:
        return f"{norm_name} is in training mode"
    if norm.running_mean is None:
        return f"{norm_name} has no running statistics"
    for name, module in ((layer_name, layer), (norm_name, norm)):
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks, which folding would affect"
    if getattr(layer, "groups", 1) != 1 and isinstance(layer, _transposed_layers()):
        return f"{layer_name} is transposed and grouped"
    weight = layer.weight
    holders = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
    return f"{layer_name} shares its weight" if len(holders) > 1 else None


def _first_reason(model: Any, norms: tuple[type, ...]) -> str | None:
    """Return why the model's first batch norm is not folded."""
    for name, module in model.named_modules():
        if type(module) in norms:
            if module.training:
                return f"{name} is in training mode"
            return f"{name} is not called exactly once with the output of a layer"
    return "the model has no batch norm"
