"""lowbit: run linear layers and convolutions of inference in a few bits.

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
from slipstream.durations import required_timings as both_timings
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, calls_of, replay
from slipstream.graph.flow import matches
from slipstream.provenance import Provenance
from slipstream.source import EditLocationError, Places, Source
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.lowbit.cost import (
    Costs,
    Form,
    LayerShape,
    exceed_cache,
    required_timings,
)
from slipstream.techniques.lowbit.eight_bits import TorchInt8
from slipstream.techniques.lowbit.recorded import Handover, handover, held
from slipstream.techniques.lowbit.sites import NO_LAYER, LowBitSite, low_bit_layers
from slipstream.units import format_duration

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_EDGE_BITS = 8
# Times within this relative difference count as equal.
_TIE = 0.07
_TRAINING = (
    "by hand, before the loop: ranges = slipstream.quant.calibrate(model, batches); "
    "slipstream.lowbit.prepare_training(model, {}, {}, ranges); add "
    "slipstream.lowbit.added_parameters(model) to the optimizer; after the loop: "
    "slipstream.lowbit.convert(model.eval())"
)
_TRAINS = "the step trains, but low-bit kernels support only inference"


@dataclass(frozen=True)
class LowBit(ModuleTechnique):
    """Technique with X-bit weights and Y-bit activations: ``lowbit:wXaY``, 1 to 8 each.

    The first and the last layer and depthwise convolutions use eight bits. With ``train=yes`` fake
    quantisation is added to a training step, so that the trained model can be converted; training
    becomes slower.

    Attributes:
        bits: ``wXaY``.
        scales: granularity of the weights' scales: ``channel``, ``tensor``, or ``blockN``.
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
                remedy="pass for example lowbit:w3a3",
            )  # fmt: skip
        if re.fullmatch(r"tensor|channel|block(3[2-9]|[4-9]\d|1[01]\d|12[0-8])", self.scales) is (
            None
        ):
            raise InvalidArgumentError(
                "lowbit:scales", f"'{self.scales}' is not tensor, channel or blockN",
                remedy="pass N from 32 to 128, for example lowbit:w4a8,scales=block64",
            )  # fmt: skip

    @property
    def wbits(self) -> int:
        """Bits per weight."""
        return int(self.bits[1])

    @property
    def abits(self) -> int:
        """Bits per activation."""
        return int(self.bits[3])

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no layer of the step can be converted, or None."""
        if (reason := already_compiled(graph) or already_autocast(graph)) is not None:
            return reason
        trains = bool((graph.tasks.phase >= StepPhase.BACKWARD).any())
        if trains and not self.train:
            return f"{_TRAINS}; lowbit:{self.bits},train=yes prepares the training"
        if self.train and not trains:
            return f"the step does not train; use lowbit:{self.bits} without train"
        if any(spec.device != "cpu" for call in graph.calls for spec in call.inputs):
            return "its kernels run on CPUs, but the step runs on another device"
        return self.no_match_reason(matches(graph, low_bit_layers), NO_LAYER)

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the calls to fit the cost model at these bits, and the step's layers."""
        sites = self.sites(graph)
        calls = calls_of(graph, [site.task for site in sites])
        if self.train:
            return [*calls, *(call for site in sites for call in _rounding(site.layer))]
        depthwise = any(site.layer.depthwise for site in sites)
        for bits in sorted({(self.wbits, self.abits), *(site.bits for site in sites), (8, 8)}):
            calls += required_timings(*bits, depthwise)
        around = _handover(graph, sites)
        torch_int8 = TorchInt8.of(graph, sites, self.selection)
        calls += [
            *both_timings(graph, around.moved),
            *around.coded.values(),
            *torch_int8.required_timings,
        ]
        return calls

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Predict layers by the fitted cost model, and remove the tasks fused into them.

        Tasks between layers work on codes if their neighbours do, else on channels-last images.
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
            graph, changed, max((fit.spread for fit in costs.values() if fit), default=0.5)
        )
        around = _handover(graph, sites)
        cold = exceed_cache(sum(site.layer.n * site.layer.k * site.bits[0] / 8 for site in sites))
        lowbit_ns = eight_bit_ns = 0.0
        for site in sites:
            cost, cost_8_bit = costs[site.bits], costs[8, 8]
            recorded_ns = float(graph.tasks.duration_ns[site.task])
            if cost is None or cost_8_bit is None:
                edit.set_duration(site.task, recorded_ns, Provenance.ASSUMED, spread=0.5)
                continue
            layer = replace(
                site.layer, reads=around.reads.get(site.task, Form.FLOATS),
                writes=around.writes[site.task],
            )  # fmt: skip
            predicted_ns = cost.nanoseconds(layer, cold) * in_step
            lowbit_ns += predicted_ns
            eight_bit_ns += cost_8_bit.nanoseconds(layer, cold) * in_step
            edit.set_duration(
                site.task, predicted_ns, Provenance.FITTED, spread=min(spread, 1.0),
                call=layer.call(*site.bits),
            )  # fmt: skip
            # The module's call is part of the timing.
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
        summary = f"{len(sites)} layers in {self.bits}{_comparison(lowbit_ns, eight_bit_ns)}"
        torch_int8 = TorchInt8.of(graph, sites, self.selection)
        torch_ns = torch_int8.step_ns(graph, context.durations, in_step)
        step_ns = replay(edit.apply(summary)).step_ns
        return edit.apply(summary, self._cheaper(step_ns, lowbit_ns, eight_bit_ns, torch_ns))

    def apply(self, built: BuiltWorkload) -> None:
        """Calibrate on the workload's batch, and convert layers.

        Raises:
            WorkloadError: the step hides its model, trains without ``train=yes``, or has no layer
                that can be converted.
        """
        from slipstream.quant import calibrate
        from slipstream.techniques.lowbit.attention import split_attention
        from slipstream.techniques.lowbit.qat import (
            added_parameters,
            chosen_layers,
            convert,
            convertible,
            prepare_training,
        )

        built.need_model(self.name, remedy="return (model, batch)")
        if built.training and not self.train:
            raise WorkloadError(f"lowbit: {_TRAINS}", remedy=f"use lowbit:{self.bits},train=yes")
        try:
            if built.training:
                ranges = calibrate(built.model, [None], run=_forward_of(built))
                prepare_training(
                    built.model, self.wbits, self.abits, ranges,
                    scales=self.scales, only=self.only, except_=self.except_,
                )  # fmt: skip
                built.optimizer.add_param_group({"params": added_parameters(built.model)})
                return
            split_attention(built.model)
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
        """Return rounding for eight bits, and a need for training for fewer."""
        if min(self.wbits, self.abits) == 8:
            return Quality(
                QualityKind.ROUNDING,
                "Krishnamoorthi 2018: eight bits after training are within 2 % of float's accuracy",
            )
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "Esser et al. 2020: three and four bits reach the accuracy of float if trained with "
            "quantisation, and lose much accuracy otherwise",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit that converts the model on its batch before it is returned."""
        call = "slipstream.lowbit.quantise_model(model, [inputs], wbits={}, abits={})"
        note = "calibrate on several batches of real data, and measure the accuracy"
        if self.train:
            return CodeChange("", _TRAINING.format(self.wbits, self.abits))
        return CodeChange.of(
            workload, self._edit, note=note,
            by_hand="import slipstream.lowbit\n" + call.format(self.wbits, self.abits),
        )  # fmt: skip

    def _edit(self, places: Places) -> Source:
        if places.function is None or len(places.inputs) != 1:
            raise EditLocationError(
                "the batch for calibration is not a single expression",
                where=str(places.source.path),
            )
        batch = places.source.segment(places.inputs[0])
        settings = f"wbits={self.wbits}, abits={self.abits}"
        for name, value in (
            ("scales", self.scales),
            ("only", self.only),
            ("except_", self.except_),
        ):
            if value != getattr(type(self), name):
                settings += f', {name}="{value}"'
        return places.before_return(
            "import slipstream",
            f"slipstream.lowbit.quantise_model({{model}}, [{batch}], {settings})",
        )

    def sites(self, graph: Graph) -> list[LowBitSite]:
        """Return the selected layers that can be converted, in program order, with their bits."""
        candidates = matches(graph, low_bit_layers)
        ends = {site.task for site in (*candidates[:1], *candidates[-1:])}
        bits = self.wbits, self.abits
        edge_bits = max(bits[0], _EDGE_BITS), max(bits[1], _EDGE_BITS)
        return [
            replace(site, bits=edge_bits if site.task in ends or site.layer.depthwise else bits)
            for site in self.chosen(candidates)
        ]

    @staticmethod
    def _resize(edit: Editor, graph: Graph, sites: Sequence[LowBitSite], around: Handover) -> None:
        """Resize activations to their form, and weights to their bits."""
        memory = graph.memory
        nbytes, release = held(graph, around)
        bits = {storage: site.bits[0] for site in sites for storage in site.weights}
        for number in np.flatnonzero((memory.producer < 0) & (memory.storage >= 0)).tolist():
            if (width := bits.get(int(memory.storage[number]))) is not None:
                nbytes[number] = -(-int(memory.nbytes[number]) * width // 32)
        changed = np.flatnonzero(nbytes != memory.nbytes)
        edit.resize(changed, nbytes[changed])
        extended = np.flatnonzero(release != memory.release)
        edit.release_after(extended, release[extended])

    def _cheaper(
        self, step_ns: float, lowbit_ns: float, eight_bit_ns: float, torch_ns: float | None
    ) -> str:
        """Return a note that compares the step with eight bits, and names the cheaper choice.

        Args:
            step_ns: time of the step in these bits.
            lowbit_ns, eight_bit_ns: time of its layers in these bits and in lowbit's eight bits.
            torch_ns: time of the step in torch's int8; None if unknown.
        """
        w8a8_ns = step_ns - lowbit_ns + eight_bit_ns
        and_training = (
            "" if self.quality().kind is QualityKind.ROUNDING else ", and needs no training"
        )
        threshold = 1 + _TIE if and_training else 1 - _TIE
        if torch_ns is not None and torch_ns < min(threshold * step_ns, w8a8_ns):
            return (
                f"8 bits are {_compared(step_ns / torch_ns)}: torch's int8 would take "
                f"{format_duration(torch_ns)} per step; it, or an int8 export to ONNX Runtime or "
                f"OpenVINO, is the cheaper choice{and_training}"
            )
        alternative = "" if torch_ns is None else f", torch's int8 {format_duration(torch_ns)}"
        if and_training and w8a8_ns < (1 + _TIE) * step_ns:
            return (
                f"8 bits are {_compared(step_ns / w8a8_ns)}: lowbit:w8a8 would take "
                f"{format_duration(w8a8_ns)} per step{alternative}; it is the cheaper choice"
                f"{and_training}"
            )
        if not and_training:
            return f"torch's 8 bits are not faster{alternative} per step" if alternative else ""
        return (
            f"8 bits are slower: lowbit:w8a8 would take {format_duration(w8a8_ns)} per step"
            f"{alternative}"
        )

    def _predict_training(
        self, graph: Graph, sites: Sequence[LowBitSite], context: Context
    ) -> Graph:
        """Insert a task per weight and input that rounds it, forward and backward."""
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
        return edit.apply(f"{len(sites)} layers quantised to {self.bits} in training")


def _handover(graph: Graph, sites: Sequence[LowBitSite]) -> Handover:
    fused = {site.task: site.fused for site in sites}
    return handover(graph, fused, {site.task: site.bits[1] for site in sites})


def _comparison(lowbit_ns: float, eight_bit_ns: float) -> str:
    """Return a note on the speed compared with eight bits."""
    if not lowbit_ns or not eight_bit_ns:
        return ""
    ratio = eight_bit_ns / lowbit_ns
    if ratio > 1 + _TIE:
        return f"; {ratio:.1f}x as fast as the same layers in 8 bits"
    if ratio < 1 - _TIE:
        return f"; slower than the same layers in 8 bits ({ratio:.2f}x): use w8a8"
    return (
        "; 1.0x the same layers in 8 bits: they are bound by multiplications, and this processor "
        "multiplies 8-bit integers as fast"
    )


def _compared(ratio: float) -> str:
    return "as fast" if abs(ratio - 1) <= _TIE else f"{ratio:.1f}x as fast"


def _rounding(layer: LayerShape) -> list[Call]:
    """Return the calls that round the layer's input and weight in a training step."""
    from slipstream.techniques.lowbit.timing import rounding_call

    values = layer.image[0] * layer.image[1] * layer.image[2] * layer.image[3]
    return [rounding_call(values, 1), rounding_call(layer.n * layer.k, layer.n)]


def _forward_of(built: BuiltWorkload) -> Callable[[Any], object]:
    """Return a function that runs a forward pass with the loss, without an optimizer step."""
    from slipstream.workload.built import training_loss

    if not built.from_parts:
        raise WorkloadError(
            "lowbit needs the model and its batch to prepare training",
            remedy="return (model, batch, loss, optimizer)",
        )
    return lambda _: training_loss(built)
