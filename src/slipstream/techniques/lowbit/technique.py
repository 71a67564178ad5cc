"""lowbit: an inference's linear layers and convolutions in a few bits.

Source: Won et al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD Hardware",
MLSys 2022; training: Esser et al., "Learned Step Size Quantization", ICLR 2020.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.durations import common_spread, pace, rescale
from slipstream.durations import required_timings as both_of
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, calls_of, replay
from slipstream.graph.flow import matches
from slipstream.provenance import Provenance
from slipstream.source import NotPlacedError, Places, Source
from slipstream.technique import Choosing, CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.lowbit.cost import (
    Costs,
    Form,
    LayerShape,
    come_from_memory,
    required_timings,
)
from slipstream.techniques.lowbit.eight_bits import TorchInt8
from slipstream.techniques.lowbit.recorded import Handover, handover, held
from slipstream.techniques.lowbit.sites import NO_LAYER, LowBitSite, low_bit_layers
from slipstream.units import format_duration

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_EDGE_BITS = 8
# Within this, two times are called the same.
_SAME = 0.07
_TRAINING = (
    "by hand, before the loop: ranges = slipstream.quant.calibrate(model, batches); "
    "slipstream.lowbit.prepare_training(model, {}, {}, ranges); give "
    "slipstream.lowbit.added_parameters(model) to the optimizer, too; after it, "
    "slipstream.lowbit.convert(model.eval())"
)
_TRAINS = "the step trains, and low-bit kernels only infer"


@dataclass(frozen=True)
class LowBit(Choosing):
    """Weights of W and activations of A bits: ``lowbit:w3a3``, 1 to 8 each.

    The first and the last layer that run have eight bits, and so have depthwise convolutions. With
    ``train=yes`` a training step gets fake quantisation, so that the trained model can be
    converted; that is slower, not faster.

    Attributes:
        bits: ``wXaY``.
        scales: of weights: ``channel``, ``tensor``, or ``block64``.
        only, except_: patterns of modules' qualified names.
        train: whether to prepare a training step.
    """

    bits: str = "w3a3"
    scales: str = "channel"
    only: str = "*"
    except_: str = ""
    train: bool = False

    name: ClassVar[str] = "lowbit"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.PRECISION,
        conflicts=frozenset({"amp", "compile"}),
        variants=("lowbit:w3a3", "lowbit:w8a8"),
    )

    def __post_init__(self) -> None:
        if re.fullmatch(r"w[1-8]a[1-8]", self.bits) is None:
            raise InvalidArgumentError(
                "lowbit:bits", f"'{self.bits}' is not wXaY with X and Y from 1 to 8",
                remedy="for example lowbit:w3a3",
            )  # fmt: skip
        if re.fullmatch(r"tensor|channel|block(3[2-9]|[4-9]\d|1[01]\d|12[0-8])", self.scales) is (
            None
        ):
            raise InvalidArgumentError(
                "lowbit:scales", f"'{self.scales}' is not tensor, channel or blockN",
                remedy="N from 32 to 128, as lowbit:w4a8,scales=block64",
            )  # fmt: skip

    @property
    def wbits(self) -> int:
        """Bits of a weight."""
        return int(self.bits[1])

    @property
    def abits(self) -> int:
        """Bits of an activation."""
        return int(self.bits[3])

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no layer of the step has a low-bit form."""
        if (reason := already_compiled(graph) or already_autocast(graph)) is not None:
            return reason
        trains = bool((graph.tasks.phase >= StepPhase.BACKWARD).any())
        if trains and not self.train:
            return f"{_TRAINS}; lowbit:{self.bits},train=yes prepares the training"
        if self.train and not trains:
            return f"the step does not train; lowbit:{self.bits} without train"
        if any(spec.device != "cpu" for call in graph.calls for spec in call.inputs):
            return "its kernels are for CPUs, and the step runs on another device"
        return self.why_none_of(matches(graph, low_bit_layers), NO_LAYER)

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Layers that say how fast this machine is at these bits, and the step's own."""
        sites = self.sites(graph)
        asked = calls_of(graph, [site.task for site in sites])
        if self.train:
            return [*asked, *(call for site in sites for call in _rounding(site.layer))]
        depthwise = any(site.layer.depthwise for site in sites)
        for bits in sorted({(self.wbits, self.abits), *(site.bits for site in sites), (8, 8)}):
            asked += required_timings(*bits, depthwise)
        around = _handover(graph, sites)
        theirs = TorchInt8.of(graph, sites, self.selection)
        asked += [*both_of(graph, around.moved), *around.coded.values(), *theirs.required_timings]
        return asked

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Layers take what the fitted model says; what they do besides is gone.

        What stands between them works on codes where all around it do, else on images in the order
        that layers write.
        """
        sites = self.sites(graph)
        if self.train:
            return self._predict_training(graph, sites, context)
        depthwise = any(site.layer.depthwise for site in sites)
        costs = {
            bits: Costs.fitted(context.durations, *bits, depthwise)
            for bits in {(8, 8), (self.wbits, self.abits), *(site.bits for site in sites)}
        }
        changed = [site.task for site in sites]
        in_step = pace(graph, changed, context.durations)
        edit = Editor(graph, str(self))
        spread = common_spread(
            graph, changed, max((one.spread for one in costs.values() if one), default=0.5)
        )
        around = _handover(graph, sites)
        cold = come_from_memory(sum(one.layer.n * one.layer.k * one.bits[0] / 8 for one in sites))
        lowbit = eight = 0.0
        for site in sites:
            cost, other = costs[site.bits], costs[8, 8]
            now = float(graph.tasks.duration_ns[site.task])
            if cost is None or other is None:
                edit.set_duration(site.task, now, Provenance.ASSUMED, spread=0.5)
                continue
            layer = replace(
                site.layer, reads=around.reads.get(site.task, Form.FLOATS),
                gives=around.gives[site.task],
            )  # fmt: skip
            then = cost.nanoseconds(layer, cold) * in_step
            lowbit += then
            eight += other.nanoseconds(layer, cold) * in_step
            edit.set_duration(
                site.task, then, Provenance.FITTED, spread=min(spread, 1.0),
                call=layer.call(*site.bits),
            )  # fmt: skip
            # Calling the module is part of what was timed.
            edit.set_gap(site.task, 0.0)
        if any(costs[site.bits] is None for site in sites):
            return edit.apply(f"{len(sites)} layers in {self.bits}")
        for task in around.gone:
            edit.remove(task)
        for task, call in around.coded.items():
            answer = context.durations.lookup(call)
            if answer is not None:
                edit.set_price(task, answer.at(in_step), call=call)
        rescale(edit, graph, around.moved, context.durations)
        self._resize(edit, graph, sites, around)
        what = f"{len(sites)} layers in {self.bits}{_beside(lowbit, eight)}"
        theirs = TorchInt8.of(graph, sites, self.selection)
        torch_ns = theirs.step_ns(graph, context.durations, in_step)
        ours_ns = replay(edit.apply(what)).step_ns
        return edit.apply(what, self._cheaper(ours_ns, lowbit, eight, torch_ns))

    def apply(self, built: BuiltWorkload) -> None:
        """Calibrate on the workload's own batch, and put low-bit layers in.

        Raises:
            WorkloadError: the step hides its model, trains without ``train=yes``, or no layer of it
                has a low-bit form.
        """
        from slipstream.quant import calibrate
        from slipstream.techniques.lowbit.attention import open_up
        from slipstream.techniques.lowbit.qat import (
            added_parameters,
            chosen_layers,
            convert,
            convertible,
            prepare_training,
        )

        built.need_model(self.name, remedy="return (model, batch)")
        if built.training and not self.train:
            raise WorkloadError(f"lowbit: {_TRAINS}", remedy=f"lowbit:{self.bits},train=yes")
        try:
            if built.training:
                ranges = calibrate(built.model, [None], run=_forward_of(built))
                prepare_training(
                    built.model, self.wbits, self.abits, ranges,
                    scales=self.scales, only=self.only, except_=self.except_,
                )  # fmt: skip
                built.optimizer.add_param_group({"params": added_parameters(built.model)})
                return
            open_up(built.model)
            ranges = calibrate(built.model, [None], run=lambda _: built.step(), modules=convertible)
            chosen_layers(built.model, ranges, self.only, self.except_)
            built.model.eval()
            convert(
                built.model, wbits=self.wbits, abits=self.abits, ranges=ranges,
                scales=self.scales, only=self.only, except_=self.except_, run=built.step,
            )  # fmt: skip
        except InvalidArgumentError as error:
            raise WorkloadError(
                f"lowbit: {error.what}", where=error.where, remedy=error.remedy
            ) from error

    def quality(self, graph: Graph | None = None) -> Quality:
        """Eight bits round; fewer want training."""
        if min(self.wbits, self.abits) == 8:
            return Quality(
                QualityKind.ROUNDING,
                "Krishnamoorthi 2018: eight bits after training stay within 2 % of float",
            )
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "Esser et al. 2020: three and four bits reach float's accuracy when trained with "
            "rounding, and lose much without",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """The conversion before the model is returned, calibrated on the batch there."""
        call = "slipstream.lowbit.quantise_model(model, [inputs], wbits={}, abits={})"
        note = "calibrate on several batches of real data, and measure what accuracy is left"
        if self.train:
            return CodeChange("", _TRAINING.format(self.wbits, self.abits))
        return CodeChange.of(
            workload, self._edit, note=note,
            by_hand="import slipstream.lowbit\n" + call.format(self.wbits, self.abits),
        )  # fmt: skip

    def _edit(self, where: Places) -> Source:
        if where.function is None or len(where.inputs) != 1:
            raise NotPlacedError(
                "the batch to calibrate on is not one expression", where=str(where.source.path)
            )
        batch = where.source.segment(where.inputs[0])
        settings = f"wbits={self.wbits}, abits={self.abits}"
        for key, value in (("scales", self.scales), ("only", self.only), ("except_", self.except_)):
            if value != getattr(type(self), key):
                settings += f', {key}="{value}"'
        return where.before_return(
            "import slipstream",
            f"slipstream.lowbit.quantise_model({{model}}, [{batch}], {settings})",
        )

    def sites(self, graph: Graph) -> list[LowBitSite]:
        """The layers that can be taken, in program order, with their bits."""
        found = matches(graph, low_bit_layers)
        ends = {site.task for site in (*found[:1], *found[-1:])}
        bits = self.wbits, self.abits
        more = max(bits[0], _EDGE_BITS), max(bits[1], _EDGE_BITS)
        return [
            replace(site, bits=more if site.task in ends or site.layer.depthwise else bits)
            for site in self.chosen(found)
        ]

    @staticmethod
    def _resize(edit: Editor, graph: Graph, sites: Sequence[LowBitSite], around: Handover) -> None:
        """Activations in the form in which they are handed on, weights in their bits."""
        memory = graph.memory
        nbytes, release = held(graph, around)
        bits = {storage: site.bits[0] for site in sites for storage in site.weights}
        for number in np.flatnonzero((memory.producer < 0) & (memory.storage >= 0)).tolist():
            if (width := bits.get(int(memory.storage[number]))) is not None:
                nbytes[number] = -(-int(memory.nbytes[number]) * width // 32)
        changed = np.flatnonzero(nbytes != memory.nbytes)
        edit.resize(changed, nbytes[changed])
        longer = np.flatnonzero(release != memory.release)
        edit.release_after(longer, release[longer])

    def _cheaper(self, ours_ns: float, lowbit: float, eight: float, torch_ns: float | None) -> str:
        """What eight bits would take, and which choice is the cheaper.

        Args:
            ours_ns: the step in these bits.
            lowbit, eight: its layers in these bits and in our eight.
            torch_ns: the step in torch's own int8; None where it is not known.
        """
        w8a8_ns = ours_ns - lowbit + eight
        anew = "" if self.quality().kind is QualityKind.ROUNDING else ", and needs no training"
        near = 1 + _SAME if anew else 1 - _SAME
        if torch_ns is not None and torch_ns < min(near * ours_ns, w8a8_ns):
            return (
                f"8 bits are {_compared(ours_ns / torch_ns)}: torch's own int8 would take "
                f"{format_duration(torch_ns)} a step; it, or an export in int8 to ONNX Runtime or "
                f"OpenVINO, is the cheaper choice{anew}"
            )
        others = "" if torch_ns is None else f", torch's own int8 {format_duration(torch_ns)}"
        if anew and w8a8_ns < (1 + _SAME) * ours_ns:
            return (
                f"8 bits are {_compared(ours_ns / w8a8_ns)}: lowbit:w8a8 would take "
                f"{format_duration(w8a8_ns)} a step{others}; it is the cheaper choice{anew}"
            )
        if not anew:
            return f"no faster in other 8 bits{others} a step" if others else ""
        return (
            f"8 bits are slower: lowbit:w8a8 would take {format_duration(w8a8_ns)} a step{others}"
        )

    def _predict_training(
        self, graph: Graph, sites: Sequence[LowBitSite], context: Context
    ) -> Graph:
        """Rounding of every weight and input is put in, forward and backward in one task."""
        edit = Editor(graph, str(self))
        changed = [site.task for site in sites]
        in_step = pace(graph, changed, context.durations)
        for site in sites:
            for call in _rounding(site.layer):
                answer = context.durations.lookup(call)
                if answer is None:
                    continue
                edit.insert(
                    site.task, "fake_quantize", answer.nanoseconds * in_step, answer.provenance,
                    before=True, spread=max(answer.spread, 0.2), call=call,
                )  # fmt: skip
        return edit.apply(f"{len(sites)} layers rounded to {self.bits} while training")


def _handover(graph: Graph, sites: Sequence[LowBitSite]) -> Handover:
    behind = {site.task: site.behind for site in sites}
    return handover(graph, behind, {site.task: site.bits[1] for site in sites})


def _beside(lowbit: float, eight: float) -> str:
    """How that compares with eight bits, and why."""
    if not lowbit or not eight:
        return ""
    ratio = eight / lowbit
    if ratio > 1 + _SAME:
        return f"; {ratio:.1f}x as fast as the same layers in 8 bits"
    if ratio < 1 - _SAME:
        return f"; slower than the same layers in 8 bits ({ratio:.2f}x): stay with w8a8"
    return (
        "; 1.0x the same layers in 8 bits: they are bound by multiplications, and this processor "
        "multiplies 8-bit numbers as fast"
    )


def _compared(ratio: float) -> str:
    return "as fast" if abs(ratio - 1) <= _SAME else f"{ratio:.1f}x as fast"


def _rounding(layer: LayerShape) -> list[Call]:
    """What rounding the layer's input and weight takes in a training step."""
    from slipstream.techniques.lowbit.timing import rounding_call

    values = layer.image[0] * layer.image[1] * layer.image[2] * layer.image[3]
    return [rounding_call(values, 1), rounding_call(layer.n * layer.k, layer.n)]


def _forward_of(built: BuiltWorkload) -> Callable[[Any], object]:
    """One forward pass with the loss; no step of the optimizer."""
    from slipstream.workload.built import training_loss

    if not built.from_parts:
        raise WorkloadError(
            "lowbit needs the model and its batch to prepare a training",
            remedy="return (model, batch, loss, optimizer)",
        )
    return lambda _: training_loss(built)
