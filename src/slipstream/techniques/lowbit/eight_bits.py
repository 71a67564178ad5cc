"""Prediction of a step in torch's int8, to report where that is the cheaper choice.

Torch quantises the same layers as `lowbit`, and grouped convolutions; norms and ReLUs are fused,
sums and max pooling work on codes. All are measured with torch's operators; concatenations are
assumed to be as fast on torch's codes as on ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.durations import Durations
from slipstream.graph import Call, Editor, Graph, replay
from slipstream.graph.flow import Match, flow_of, matches
from slipstream.graph.layers import layers
from slipstream.provenance import Provenance
from slipstream.surgery import ModuleSelection
from slipstream.techniques.lowbit.recorded import POOLS, SUMS, Handover, handover, window_of
from slipstream.techniques.lowbit.sites import LowBitSite, fused_tasks
from slipstream.techniques.lowbit.timing import (
    torch_layer_call,
    torch_pool_call,
    torch_sum_call,
)
from slipstream.techniques.lowbit.windows import pair

_BITS = 8


@dataclass(frozen=True)
class TorchInt8:
    """A step as torch would quantise it.

    Attributes:
        calls: torch's int8 calls of layers, sums and poolings, by task.
        around: changes to other tasks.
    """

    calls: dict[int, Call]
    around: Handover

    @classmethod
    def of(cls, graph: Graph, sites: Sequence[LowBitSite], selection: ModuleSelection) -> TorchInt8:
        """Build the step from `sites` and the selected grouped convolutions."""
        flow = flow_of(graph)
        followed = {site.task: site.fused for site in sites}
        by_task = {match.forward[0]: match for match in matches(graph, layers)}
        followed |= {
            task: fused_tasks(flow, task)
            for task, match in by_task.items()
            if match.settings.groups > 1
            and not match.settings.transposed
            and len(match.x.shape) == 4
            and match.module in selection
        }
        around = handover(graph, followed, dict.fromkeys(followed, _BITS))
        first = min(followed, default=-1)
        calls = {task: _torch_call(by_task[task], task == first) for task in sorted(followed)}
        for task in flow.calling((*SUMS, *POOLS)).tolist() if followed else ():
            call = flow.call(task)
            if call is not None and call.name in SUMS and task in around.gone:
                calls[task] = torch_sum_call(call.inputs[0].shape)
            if call is not None and call.name in POOLS and len(call.inputs[0].shape) == 4:
                calls[task] = torch_pool_call(call.inputs[0].shape, *window_of(call))
        return cls(calls, around)

    @property
    def required_timings(self) -> list[Call]:
        """Calls to measure for `step_ns`."""
        return [*self.calls.values(), *self.around.coded.values()]

    def step_ns(self, graph: Graph, durations: Durations, in_step: float) -> float | None:
        """Predict the step's time in nanoseconds; None if a call was not measured.

        Args:
            in_step: ratio of a call's time in the step to its time in isolation.
        """
        edit = Editor(graph, "torch int8")
        for task, call in {**self.around.coded, **self.calls}.items():
            answer = durations.lookup(call)
            if answer is None:
                return None
            edit.set_duration(task, answer.nanoseconds * in_step, Provenance.MICROBENCHMARK)
            if task not in self.around.coded:
                edit.set_gap(task, 0.0)
        for task in self.around.gone - self.calls.keys():
            edit.remove(task)
        return replay(edit.apply("layers in torch's int8")).step_ns


def _torch_call(match: Match, first: bool) -> Call:
    settings, shape = match.settings, match.settings.weight_shape(match.x)
    if not settings.kernel:
        return torch_layer_call(match.x.shape, shape)
    window = map(pair, (settings.stride, settings.padding, settings.dilation))
    return torch_layer_call(match.x.shape, shape, (*window, settings.groups), first)
