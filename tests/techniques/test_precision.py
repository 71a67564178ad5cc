"""``amp``: its effect on a model, and its predictions."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from known_durations import KnownDurations
from slipstream.durations import Timing
from slipstream.errors import WorkloadError
from slipstream.graph import PROVENANCES, Call, Graph, StepPhase, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques import precision
from slipstream.techniques.autocast import plan
from slipstream.techniques.precision import Amp
from slipstream.verbs.profiling import profile
from slipstream.workload import BuiltWorkload, Workload
from tiny_models import captured, parts, workload


class Table(KnownDurations):
    """Durations by rule: nanoseconds for a call, or None if unknown."""

    def __init__(self, full_ns: float | None, low_ns: float | None, cast_ns: float | None) -> None:
        self.full_ns, self.low_ns, self.cast_ns = full_ns, low_ns, cast_ns

    def lookup(self, call: Call) -> Timing | None:
        low = any(spec.dtype == "bfloat16" for spec in call.inputs)
        found = self.low_ns if low else self.full_ns
        if call.name == "aten::_to_copy":
            found = self.cast_ns
        return None if found is None else Timing(found, 0.1, Provenance.MICROBENCHMARK)


def predicted(graph: Graph, table: Any) -> Graph:
    return Amp().predict(graph, Context(table))


def work_ns(graph: Graph) -> float:
    """Return a step's tasks, without the gaps between them."""
    return float(graph.tasks.duration_ns.sum())


TRAINED = ["mlp", "transformer", "conv", "lstm"]


@pytest.mark.parametrize("name", [*TRAINED, "mlp inference"])
def test_outputs_are_float32_and_close(name: str, bf16_lstm: Callable[[str], None]) -> None:
    bf16_lstm(name)
    plain, amp = workload(name).build(), workload(name).with_technique(Amp()).build()
    inputs = plain.batch if plain.optimizer is None else plain.batch[0]
    with torch.no_grad():
        expected, found = plain.model(inputs), amp.model(inputs)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    # bfloat16 has 8 bits; the error of a sum grows with the depth, not its length.
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_has_a_close_loss_and_close_float32_gradients(
    name: str, bf16_lstm: Callable[[str], None]
) -> None:
    bf16_lstm(name)
    plain, amp = workload(name).build(), workload(name).with_technique(Amp()).build()
    expected, found = plain.step(), amp.step()
    assert found.dtype == torch.float32
    assert found == pytest.approx(float(expected), rel=0.02)
    ours, theirs = ([p.grad for p in workload.model.parameters()] for workload in (amp, plain))
    assert {grad.dtype for grad in ours} == {torch.float32}
    # Of the whole gradient: a bias before a batch norm has only rounding errors.
    difference = [own - yours for own, yours in zip(ours, theirs, strict=True)]
    assert norm(difference) < 0.05 * norm(theirs)


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def test_applying_changes_no_parameter() -> None:
    built = workload("transformer").build()
    before = copy.deepcopy(built.model.state_dict())
    Amp().apply(built)
    after = built.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_autocast_ends_with_the_forward_pass() -> None:
    built = workload("mlp").with_technique(Amp()).build()
    built.step()
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_outputs_in_containers_and_of_other_types_pass_through() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"logits": y, "best": y.argmax(-1), "note": "text", "more": (y, None)}

    built = Workload.of(Several(), torch.randn(2, 3)).with_technique(Amp()).build()
    output = built.step()
    assert output["logits"].dtype == output["more"][0].dtype == torch.float32
    assert output["best"].dtype == torch.int64
    assert (output["note"], output["more"][1]) == ("text", None)


def test_a_step_that_hides_its_model_cannot_be_changed() -> None:
    with pytest.raises(WorkloadError, match="hides it"):
        Amp().apply(BuiltWorkload(None))


def test_a_changed_operator_is_scaled_by_the_ratio() -> None:
    graph = captured("mlp")
    table = Table(full_ns=1000.0, low_ns=250.0, cast_ns=0.0)
    after = predicted(graph, table)
    found = plan(graph, "bfloat16")
    saved = 0.75 * sum(graph.tasks.duration_ns[t] for t in found.changed)
    assert work_ns(after) == pytest.approx(work_ns(graph) - saved, rel=1e-6)


def test_output_and_workspace_of_a_16_bit_kernel_are_measured() -> None:
    class Measured(Table):
        def lookup(self, call: Call) -> Timing | None:
            answer = super().lookup(call)
            if answer is None or call.name != "aten::addmm":
                return answer
            return replace(answer, workspace=3 << 30, made=(5 << 30,))

    graph = captured("mlp")
    after = predicted(graph, Measured(1.0, 1.0, 1.0))
    sizes = after.memory.nbytes.tolist()
    assert (5 << 30) in sizes
    assert (3 << 30) in sizes
    assert replay(after).peak_bytes >= 8 << 30, "both at once"
    assert (5 << 30) not in predicted(graph, Table(1.0, 1.0, 1.0)).memory.nbytes.tolist()


def test_every_cast_costs_its_time() -> None:
    graph = captured("mlp")
    found = plan(graph, "bfloat16")
    # Benchmarks at the step's own pace: their sum equals that of the tasks.
    mean_ns = float(np.mean([graph.tasks.duration_ns[t] for t in found.changed]))
    after = predicted(graph, Table(mean_ns, mean_ns, 5000.0))
    casts = len(found.casts)
    assert len(after) == len(graph) + casts
    assert work_ns(after) == pytest.approx(work_ns(graph) + 5000 * casts, rel=1e-6)


def test_a_cast_also_costs_the_gap_between_operators() -> None:
    graph = captured("mlp")
    after = predicted(graph, Table(1.0, 1.0, 1.0))
    new = [t for t in range(len(after)) if after.string(after.tasks.name[t]) == "aten::_to_copy"]
    gaps = after.tasks.gap_ns[new]
    assert after.tasks.gap_ns.sum() == pytest.approx(graph.tasks.gap_ns.sum() + gaps.sum())
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
        theirs = graph.tasks.gap_ns[graph.tasks.phase == phase]
        (ours,) = set(gaps[after.tasks.phase[new] == phase])
        # Gaps within an operator are nearly zero; the longest ones are rare.
        assert np.median(theirs) <= ours <= np.percentile(theirs, 90)


def test_casts_follow_the_pace_of_the_step_and_not_of_benchmarks() -> None:
    """On a machine whose benchmarks ran at half its speed the prediction is the same."""
    graph = captured("mlp")
    full, half = Table(1000.0, 600.0, 300.0), Table(2000.0, 1200.0, 600.0)
    steps = [work_ns(predicted(graph, table)) for table in (full, half)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)


def test_a_cast_is_placed_where_it_is_needed() -> None:
    after = predicted(captured("mlp inference"), Table(1.0, 1.0, 1.0))
    names = [after.string(name) for name in after.tasks.name]
    work = [name for name in names if name not in ("step", "aten::t")]
    cast, product = "aten::_to_copy", "aten::addmm"
    # Bias, input and weight; later inputs are in bfloat16 already; the output is widened.
    assert work == [
        cast, cast, cast, product, "aten::relu",
        cast, cast, product, "aten::gelu",
        cast, cast, product, cast,
    ]  # fmt: skip


def test_an_unknown_call_keeps_its_time_and_is_marked_assumed() -> None:
    graph = captured("mlp")
    found = plan(graph, "bfloat16")
    after = predicted(graph, Table(None, None, 100.0))
    assert work_ns(after) == pytest.approx(work_ns(graph) + 100 * len(found.casts), rel=1e-6)
    assumed = after.tasks.provenance == PROVENANCES.index(Provenance.ASSUMED)
    assert assumed.sum() == len(found.changed)
    assert (after.tasks.spread[assumed] >= 0.5).all()


def test_an_unknown_cast_takes_the_time_of_its_bytes() -> None:
    graph = captured("mlp")
    after = predicted(graph, Table(1.0, 1.0, None))
    assert len(after) > len(graph)
    assert replay(after).step_ns > replay(graph).step_ns


def test_a_prediction_preserves_the_graph_and_notes_the_edit() -> None:
    graph = captured("mlp")
    before = graph.tasks.duration_ns.copy()
    after = predicted(graph, Table(1.0, 2.0, 3.0))
    assert (graph.tasks.duration_ns == before).all()
    (edit,) = after.edits
    assert edit.technique == "amp:bf16"
    assert "casts" in edit.what
    after.check()


def test_every_lookup_was_requested() -> None:
    graph = captured("transformer")
    requested = {call.key for call in Amp().required_timings(graph)}
    looked_up: set[str] = set()

    class Spy(Table):
        def lookup(self, call: Call) -> Timing | None:
            looked_up.add(call.key)
            return super().lookup(call)

    predicted(graph, Spy(1.0, 1.0, 1.0))
    assert looked_up == requested


def test_why_not_is_none_if_it_applies() -> None:
    assert Amp().why_not(captured("mlp")) is None


@pytest.mark.parametrize("supported", [True, False])
def test_why_not_of_an_lstm_depends_on_the_cpu(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "onednn_has_bf16", lambda: supported)
    reason = Amp().why_not(captured("lstm"))
    assert reason is None if supported else re.search(r"\bLSTM\b.*\bbfloat16\b", str(reason))
    assert Amp().why_not(captured("conv")) is None


def test_fp16_recommends_bf16() -> None:
    assert "amp:bf16" in str(Amp("fp16").why_not(captured("mlp")))


def test_a_step_already_in_16_bits_reports_it() -> None:
    already = profile(workload("mlp").with_technique(Amp()), warmup=1, steps=3, threads=1)
    assert "already" in str(Amp().why_not(already))


def test_a_hidden_model_has_a_reason() -> None:
    model, batch, _, _ = parts("mlp")

    def step() -> None:
        torch.nn.functional.linear(batch[0], model[0].weight)

    graph = profile(Workload.of(None, step=step), warmup=1, steps=3, threads=1)
    for name in ("amp:bf16", "channels_last", "fusion", "sdpa", "scan", "rewrite"):
        (technique,) = parse(name)
        assert "hides its model" in str(technique.why_not(graph)), name


def test_a_step_without_operators_to_lower_has_a_reason() -> None:
    graph = profile(Workload.of(nn.ReLU(), torch.randn(9)), warmup=1, steps=3, threads=1)
    assert "no operator" in str(Amp().why_not(graph))


def test_it_changes_rounding_only() -> None:
    assert Amp().quality().kind is QualityKind.ROUNDING
