"""sdpa: the pattern is found in real steps, replaced in real models, or refused with reasons."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import build, graph_of, mlp
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from known_durations import KnownDurations
from slipstream.durations import Timing
from slipstream.durations.microbenchmark import run
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Graph, StepPhase
from slipstream.graph.flow import Flow, matches
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind, combine, parse
from slipstream.techniques.attention import attentions
from slipstream.techniques.sdpa import Sdpa
from slipstream.workload import BuiltWorkload, Workload
from tiny_models import record

VOCABULARY, WIDTH, LENGTH, HEADS, BATCH = 31, 16, 12, 2, 3


class Attention(nn.Module):
    """Causal attention written out, as in many language models."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rate = rate
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        return self.out(self.mixed(q, k, v, t).transpose(1, 2).reshape(n, t, d))

    def mixed(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf")).softmax(-1)
        return (dropout(weights, self.rate, self.training) if self.rate else weights) @ v


class Fused(Attention):
    """The recommended form of the same."""

    def mixed(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:t, :t] != 0)


class Shown(Attention):
    """Stores its weights for others to read."""

    def mixed(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v + weights.mean()


class Biased(Attention):
    """A learned bias on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))

    def mixed(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v


class Averaging(nn.Module):
    """Torch's own attention, with returned weights that are never read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def language_model(make: Callable[[], nn.Module], trained: bool = True) -> Any:
    attention = [make(), make()]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *attention, nn.Linear(WIDTH, VOCABULARY), nn.Flatten(0, 1)
    )
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    if not trained:
        return model.eval(), tokens
    targets = torch.randint(0, VOCABULARY, (BATCH * LENGTH,))
    return model, (tokens, targets), cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_script_with_its_loss_in_the_loop_is_checked_by_the_models_output() -> None:
    model, (tokens, _), _, optimizer = language_model(Attention)
    built = BuiltWorkload(model, batch=(tokens,), optimizer=optimizer, samples=BATCH)
    before = model.eval()(tokens)
    Sdpa().apply(built)
    assert "forward" in vars(model[1])
    torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-5)


def written_out() -> Any:
    return language_model(Attention)


def written_out_inference() -> Any:
    return language_model(Attention, trained=False)


def fused() -> Any:
    return language_model(Fused)


def fused_inference() -> Any:
    return language_model(Fused, trained=False)


def dropping_out() -> Any:
    return language_model(functools.partial(Attention, 0.1))


def shown() -> Any:
    return language_model(Shown)


def biased() -> Any:
    return language_model(Biased)


def averaging() -> Any:
    return language_model(Averaging)


class Table(KnownDurations):
    """Micro-benchmarks with set times: fused calls take less than others."""

    def __init__(self, fused_ns: float | None = 100.0) -> None:
        self._fused_ns = fused_ns
        self.looked: set[str] = set()

    def lookup(self, call: Call) -> Timing | None:
        self.looked.add(call.key)
        nanoseconds = self._fused_ns if "scaled_dot_product" in call.name else 1000.0
        return nanoseconds and Timing(nanoseconds, 0.01, Provenance.MICROBENCHMARK)  # type: ignore[return-value]


def predicted(graph: Graph, table: Table) -> Graph:
    return Sdpa().predict(graph, Context(durations=table))  # type: ignore[arg-type]


def names(graph: Graph, phase: StepPhase) -> list[str]:
    """Return operators that are not views, with the fused call in either recorded form."""
    return [
        graph.string(int(graph.tasks.name[t]))
        for t in range(len(graph))
        if graph.tasks.phase[t] == phase
    ]


@pytest.mark.parametrize("make", [written_out, written_out_inference, averaging])
def test_every_attention_is_found(make: Callable[[], Any]) -> None:
    graph = graph_of(make)
    found = matches(graph, attentions)
    assert len(found) == 2
    assert [attention.refusal for attention in found] == [None, None]
    assert Sdpa().why_not(graph) is None
    trained = (graph.tasks.phase == StepPhase.BACKWARD).any()
    assert all(
        bool(attention.backward) == trained == (attention.backward_call is not None)
        for attention in found
    )


def test_the_fused_call_equals_that_of_a_rewritten_model() -> None:
    """Shapes and strides of queries, keys, values and output, against a real fused step."""
    ours = matches(graph_of(written_out), attentions)
    real = [
        call
        for call in graph_of(fused).calls
        if call.name == "aten::_scaled_dot_product_flash_attention_for_cpu"
    ]
    assert {attention.call.inputs[:3] for attention in ours} == {call.inputs[:3] for call in real}
    assert {attention.call.outputs[0] for attention in ours} == {call.outputs[0] for call in real}
    backward = [
        call
        for call in graph_of(fused).calls
        if call.name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    ]
    expected = {call.inputs[1:6] for call in backward}
    assert {
        attention.backward_call.inputs[1:6] for attention in ours if attention.backward_call
    } == expected


def test_the_pattern_is_removed_completely() -> None:
    for make, fused_one in ((written_out, fused), (written_out_inference, fused_inference)):
        ours, real = predicted(graph_of(make), Table()), graph_of(fused_one)
        ours.check()
        for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
            for name in ("aten::_softmax", "aten::bmm", "aten::_softmax_backward_data"):
                assert names(ours, phase).count(name) == names(real, phase).count(name) == 0
        # Except for the mask before the call: the fused one was written by hand.
        assert abs(len(names(ours, StepPhase.BACKWARD)) - len(names(real, StepPhase.BACKWARD))) <= 2


def test_the_predicted_step_saves_no_matrix_of_scores() -> None:
    graph = graph_of(written_out)
    size = BATCH * HEADS * LENGTH * LENGTH * 4
    before = int((graph.memory.nbytes == size).sum())
    after = int((predicted(graph, Table()).memory.nbytes == size).sum())
    assert before >= 4
    assert after < before


def test_a_faster_kernel_gives_a_faster_step_and_none_is_assumed() -> None:
    graph = graph_of(written_out)
    fast, slow = predicted(graph, Table(100.0)), predicted(graph, Table(1e6))
    assert fast.tasks.duration_ns.sum() < slow.tasks.duration_ns.sum()
    unknown = predicted(graph, Table(None))
    assert unknown.tasks.spread.max() >= 0.5


def test_every_lookup_was_requested_and_can_be_measured() -> None:
    graph, table = graph_of(written_out), Table()
    predicted(graph, table)
    calls = Sdpa().required_timings(graph)
    assert table.looked == {call.key for call in calls}
    found = run([call.to_json() for call in calls if "scaled_dot" in call.op], threads=1)
    assert [timing.get("error") for timing in found] == [None] * len(found)


@pytest.mark.parametrize("make", [written_out, averaging, dropping_out, biased])
def test_a_real_model_trains_equally(make: Callable[[], Any]) -> None:
    """Including dropout: both draw the same random numbers."""
    losses = []
    for techniques in ((), (Sdpa(),)):
        built = build(make, *techniques)
        torch.manual_seed(1)
        losses.append([float(built.step()) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_real_model_runs_the_fused_kernel() -> None:
    def converted() -> Any:
        return build(written_out_inference, Sdpa())

    called = {call.name for call in graph_of(converted).calls}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert "aten::_softmax" not in called
    assert "already" in str(Sdpa().why_not(graph_of(converted)))


def test_a_single_module_can_be_fused() -> None:
    """Predicted and applied: the second of two that write attention out."""
    graph, second = graph_of(written_out), Sdpa(only="2")
    assert second.why_not(graph) is None
    step = second.predict(graph, Context(durations=Table()))  # type: ignore[arg-type]
    left = names(step, StepPhase.FORWARD)
    assert left.count("aten::_softmax") == 1
    built = build(written_out, second)
    assert ["forward" in vars(module) for module in built.model[1:3]] == [False, True]
    assert "only=nowhere" in str(Sdpa(only="nowhere").why_not(graph))
    with pytest.raises(WorkloadError, match="only=nowhere"):
        build(written_out, Sdpa(only="nowhere"))


def test_parameters_and_names_stay() -> None:
    plain, changed = build(written_out), build(written_out, Sdpa())
    assert list(plain.model.state_dict()) == list(changed.model.state_dict())
    assert [type(m) for m in plain.model.modules()] == [type(m) for m in changed.model.modules()]
    assert all(m.training for m in changed.model.modules())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mlp, "no unfused attention"),
        (fused, "already"),
        (dropping_out, "drops out"),
        (shown, "used elsewhere"),
        (biased, "learned"),
    ],
)
def test_an_inapplicable_step_has_a_reason(make: Callable[[], Any], reason: str) -> None:
    assert reason in str(Sdpa().why_not(graph_of(make)))


@pytest.mark.parametrize(("make", "reason"), [(mlp, "no unfused attention"), (fused, "already")])
def test_apply_gives_the_same_reason(make: Callable[[], Any], reason: str) -> None:
    why = str(Sdpa().why_not(graph_of(make)))
    assert reason in why
    with pytest.raises(WorkloadError, match="does not apply") as caught:
        build(make, Sdpa())
    assert why in str(caught.value)


@pytest.mark.parametrize("wrap", [dict, lambda **parts: SimpleNamespace(**parts)])
def test_a_model_that_returns_an_object_is_checked(wrap: Callable[..., Any]) -> None:
    """Find tensors in attributes or values, to compare them."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(loss=None, logits=self.attention(x))

    built = build(lambda: (Wrapped(), torch.randn(BATCH, LENGTH, WIDTH)))
    Sdpa().apply(built)
    assert "forward" in vars(built.model.attention)


def test_a_model_that_cannot_be_rewritten_gets_lines_to_write() -> None:
    with pytest.raises(WorkloadError, match="could be rewritten") as caught:
        build(shown, Sdpa())
    assert "used elsewhere" in str(caught.value.where)
    assert "F.scaled_dot_product_attention" in str(caught.value.remedy)


def test_weights_that_are_read_are_restored() -> None:
    """Without its weights the model fails or computes something else; then nothing is changed."""

    class Reads(Averaging):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed, weights = self.attention(x, x, x)
            return mixed + weights.mean()

    model = nn.Sequential(Reads()).eval()
    with pytest.raises(WorkloadError, match="computes something else"):
        build(lambda: (model, torch.randn(2, 5, WIDTH)), Sdpa())
    assert "forward" not in vars(model[0].attention)


def test_a_models_own_switch_is_used() -> None:
    """A fake with the two attributes of Hugging Face models, without the library."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.fused = Attention(), Fused()
            self.fused.load_state_dict(self.plain.state_dict())
            self.config = SimpleNamespace(_attn_implementation="eager")

        def set_attn_implementation(self, name: str) -> None:
            self.config._attn_implementation = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            eager = self.config._attn_implementation == "eager"
            return self.plain(x) if eager else self.fused(x)

    built = build(lambda: (Switched().eval(), torch.randn(2, LENGTH, WIDTH)), Sdpa())
    assert built.model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(built.model.plain)


def test_it_changes_rounding() -> None:
    assert Sdpa().quality().kind is QualityKind.ROUNDING


def test_its_edit_is_a_line_to_write_by_hand() -> None:
    change = Sdpa().code(Workload.of(nn.Linear(2, 2), torch.ones(1, 2)))
    assert change is not None
    assert change.diff == ""
    assert "F.scaled_dot_product_attention(" in change.note


def bf16_attention(graph: Graph) -> list[Call]:
    """Return calls of attention, forward and backward, that take bfloat16."""
    return [
        graph.calls[number]
        for number in graph.tasks.call
        if number >= 0
        and "scaled_dot_product" in graph.calls[number].name
        and graph.calls[number].inputs[0].dtype == "bfloat16"
    ]


def casts(graph: Graph) -> int:
    return sum(
        graph.string(int(name)) == "aten::_to_copy" for name in graph.tasks.name[1:].tolist()
    )


@pytest.mark.parametrize("combination", ["sdpa+amp:bf16", "amp:bf16+sdpa"])
@pytest.mark.parametrize("make", [written_out, written_out_inference, averaging])
def test_amp_after_it_computes_attention_in_bfloat16(
    make: Callable[[], Any], combination: str
) -> None:
    techniques, table = parse(combination), Table()
    context: Any = Context(durations=table)  # type: ignore[arg-type]
    after = combine(graph_of(make), techniques, context)
    after.check()

    def converted() -> Any:
        return build(make, *techniques)

    real = record(converted())
    trained = (real.tasks.phase == StepPhase.BACKWARD).any()
    found = bf16_attention(after)
    assert len(found) == len(bf16_attention(real)) == (4 if trained else 2)
    for call in found:
        widths = {spec.dtype for spec in call.inputs[:3]}
        assert widths == {"bfloat16"}
        assert call.outputs[0].dtype == "bfloat16"
        assert call.key in table.looked  # its price is that of the new call
    assert casts(after) == pytest.approx(casts(real), abs=3)
    timed = run([call.to_json() for call in found], threads=1)
    assert [timing.get("error") for timing in timed] == [None] * len(found)


def test_the_fused_call_has_the_storages_of_the_replaced_ones() -> None:
    graph = graph_of(written_out)
    after = predicted(graph, Table())
    flow = Flow(after)
    (first, _) = [
        t for t in range(len(after)) if names_of(after, t) == "aten::scaled_dot_product_attention"
    ]
    # Queries, keys and values are views of the output of one linear layer.
    makers = {names_of(after, t) for t in flow.makers[first][:3]}
    assert makers == {"aten::addmm"}
    assert [names_of(after, t) for t in flow.readers[first]]
    back = next(t for t in range(len(after)) if "for_cpu_backward" in names_of(after, t))
    assert after.tasks.sequence[back] in after.tasks.sequence[:back]
    assert flow.readers[back]


def names_of(graph: Graph, task: int) -> str:
    return graph.string(int(graph.tasks.name[task]))


def test_the_fused_call_saves_its_arguments() -> None:
    """Views of all three projections, of which matmuls had saved separate copies."""
    size = BATCH * LENGTH * 3 * WIDTH * 4

    def saved(graph: Graph) -> int:
        memory, phase = graph.memory, graph.tasks.phase
        until_backward = phase[memory.release] == StepPhase.BACKWARD
        since_forward = (memory.producer >= 0) & (phase[memory.producer] == StepPhase.FORWARD)
        return int((since_forward & until_backward & (memory.nbytes == size)).sum())

    graph = graph_of(written_out)
    assert saved(graph) == 0
    assert saved(predicted(graph, Table())) == saved(graph_of(fused)) == 2
