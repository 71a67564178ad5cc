"""masked_head and unpad: equal losses and gradients, and predictions of recorded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoders import (
    BATCH,
    LENGTH,
    LENGTHS,
    VOCABULARY,
    Encoder,
    bert,
    loss_of,
    plain,
    roberta,
    tokens,
)
from recorded import build, graph_of
from torch import Tensor, nn

from known_durations import context_for, timed_by_bytes
from model_uses import check_uses
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Graph, replay
from slipstream.technique import combine
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.pretraining import masked_head, packed_attention, unpad
from slipstream.techniques.pretraining.technique import FusedLamb, MaskedHead, Unpad
from slipstream.workload import BuiltWorkload
from slipstream.workload.batch import find_tokens
from slipstream.workload.built import training_loss

MAKERS = (plain, bert, roberta)
COMBINATIONS = ((MaskedHead(),), (Unpad(),), (MaskedHead(), Unpad()))


def gradients(built: BuiltWorkload) -> tuple[float, list[Tensor]]:
    built.model.zero_grad()
    loss = training_loss(built)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in built.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("techniques", COMBINATIONS)
def test_loss_and_gradients_equal_the_padded_dense_reference(make: Any, techniques: Any) -> None:
    dense, ours = build(make), build(make, *techniques)
    for _ in range(2):
        (expected, theirs), (loss, own) = gradients(dense), gradients(ours)
        assert loss == pytest.approx(expected, rel=1e-5)
        scale = max(float(g.abs().max()) for g in theirs)
        for actual, gradient in zip(own, theirs, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-5 * scale)
        dense.step(), ours.step()


def test_without_labels_all_logits_come_back_with_padding() -> None:
    dense, ours = (build(bert, *extra).model.eval() for extra in ((), (MaskedHead(), Unpad())))
    batch = tokens(1)
    mask = batch["attention_mask"]
    expected, actual = (model(batch["input_ids"], mask).logits for model in (dense, ours))
    assert not actual[mask == 0].any()
    expected, actual = expected[mask == 1], actual[mask == 1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [bert, roberta])
def test_padding_may_be_on_the_left(make: Any) -> None:
    dense, ours = (build(make, *extra).model.eval() for extra in ((), (Unpad(),)))
    batch = {name: part.flip(1) for name, part in tokens(1).items()}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids[mask == 0] = dense.config.pad_token_id
    expected, actual = (model(ids, mask).logits[mask == 1] for model in (dense, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_may_have_a_label_for_every_token_that_is_not_padding() -> None:
    model, (inputs, targets), _, _ = plain()
    rows = masked_head(model, lambda: model(*inputs), targets)
    unpad(model, lambda: model(*inputs), inputs[1])
    selected = rows.select(inputs[0].masked_fill(inputs[1] == 0, -100))
    assert selected.shape == (1, sum(LENGTHS))
    assert model(*inputs).shape == (*selected.shape, VOCABULARY)


def test_a_sequence_never_changes_another_in_its_pack() -> None:
    model, batch, *_ = bert()
    model.eval()
    del batch["labels"]
    unpad(model, lambda: model(**batch), batch["attention_mask"])
    before = model(**batch).logits
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][2, :7] = 5
    after = model(**batch).logits
    others = [0, 1, 3, 4]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[2], after[2])


def test_packed_attention_masks_and_causality_are_those_of_each_sequence() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    bias = torch.randn(1, 2, 10, 10)
    ours = packed_attention((4, 6), q, k, v, attn_mask=bias)
    causal = packed_attention((4, 6), q, k, v, is_causal=True)
    attend = nn.functional.scaled_dot_product_attention
    for part in (slice(0, 4), slice(4, 10)):
        cut = [x[:, :, part] for x in (q, k, v)]
        expected = attend(*cut, attn_mask=bias[..., part, part])
        torch.testing.assert_close(ours[:, :, part], expected)
        torch.testing.assert_close(causal[:, :, part], attend(*cut, is_causal=True))


class FromIds(nn.Module):
    """An encoder for ids, of which zeros are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder()

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).long()
        logits: Tensor = self.encoder(ids, mask)
        return logits * mask[..., None]


def test_common_uses_of_a_changed_model() -> None:
    batch = tokens()
    inputs = batch["input_ids"], batch["attention_mask"]

    def make() -> nn.Module:
        model = FromIds()
        inner = model.encoder
        masked_head(inner, lambda: inner(*inputs), batch["labels"])
        unpad(inner, lambda: inner(*inputs), inputs[1])
        return model

    # Integer inputs have no other precision; the encoder needs a batch.
    check_uses(make, inputs[0], except_=("unbatched", "precisions"))


@pytest.mark.parametrize("technique", [MaskedHead(), Unpad()])
def test_recorded_rows_shrink_to_those_that_count(technique: Any) -> None:
    graph = timed_by_bytes(graph_of(bert))
    assert graph.meta["tokens"]["lengths"] == list(LENGTHS)
    assert technique.why_not(graph) is None
    after = technique.predict(graph, context_for(technique, graph))
    assert after.tasks.duration_ns.sum() < 0.95 * graph.tasks.duration_ns.sum()
    assert after.memory.nbytes.sum() < graph.memory.nbytes.sum()


def with_ten() -> Any:
    """Twice the sequences, half of which have as many tokens as a layer is wide."""
    model, batch, *rest = bert(intermediate_size=5 * LENGTH)
    return model, {name: torch.cat([part, part]) for name, part in batch.items()}, *rest


def linear_shapes(graph: Graph) -> set[tuple[int, ...]]:
    calls = (graph.calls[number] for number in graph.tasks.call.tolist() if number >= 0)
    return {call.inputs[2].shape for call in calls if call.name == "aten::addmm"}


@pytest.mark.parametrize(("factor", "count"), [("x2", 20), ("x0.5", 5)])
def test_rows_follow_the_size_of_the_batch_and_weights_do_not(factor: str, count: int) -> None:
    graph = graph_of(with_ten)
    size = BatchSize(factor)
    resized = combine(graph, (size,), context_for(size, graph))
    for technique in (MaskedHead(), Unpad()):
        assert technique.why_not(resized) is None
        small, large = (
            technique.predict(step, context_for(technique, step)) for step in (graph, resized)
        )
        rows = [
            max(c.outputs[0].shape[0] for c in step.calls if c.name == "aten::addmm")
            for step in (small, large)
        ]
        assert rows[1] == count / 10 * rows[0]
        assert linear_shapes(large) == linear_shapes(graph)


@pytest.mark.parametrize("techniques", COMBINATIONS)
def test_predicted_peak_memory_is_that_of_the_changed_model(techniques: Any) -> None:
    def changed() -> Any:
        model, batch, *rest = with_ten()
        for technique in techniques:
            if isinstance(technique, MaskedHead):
                masked_head(model, lambda: model(**batch), batch["labels"])
            else:
                unpad(model, lambda: model(**batch), batch["attention_mask"])
        return model, batch, *rest

    predicted = graph_of(with_ten)
    for technique in techniques:
        predicted = technique.predict(predicted, context_for(technique, predicted))
    recorded = replay(graph_of(changed)).peak_bytes
    tolerance = 0.05 if Unpad() in techniques else 0.01
    assert replay(predicted).peak_bytes == pytest.approx(recorded, rel=tolerance)


def test_predicted_head_has_the_tasks_of_the_live_one() -> None:
    technique = MaskedHead()
    graph = graph_of(bert)
    predicted = technique.predict(graph, context_for(technique, graph))
    live = build(bert, technique)
    labelled = int((tokens()["labels"] != -100).sum())
    shapes = [
        call.outputs[0].shape for call in predicted.calls if call.name == "aten::_log_softmax"
    ]
    logits = live.model(**live.batch).logits
    assert (labelled, logits.shape[-1]) in shapes
    assert logits.shape[1] == labelled


def test_steps_without_labels_or_padding_are_refused_with_the_reason() -> None:
    def dense() -> Any:
        model, batch, *rest = bert()
        batch["attention_mask"].fill_(1)
        batch["labels"] = batch["input_ids"]
        return model, batch, *rest

    graph = graph_of(dense)
    assert "labels" in str(MaskedHead().why_not(graph))
    assert "no padding" in str(Unpad().why_not(graph))
    assert "not LAMB" in str(FusedLamb().why_not(graph))


def test_models_that_mix_tokens_elsewhere_are_refused() -> None:
    class Mixing(Encoder):
        def attention(self, x: Tensor, mask: Tensor) -> Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    batch = tokens()
    inputs = batch["input_ids"], batch["attention_mask"]
    model = Mixing().eval()
    with pytest.raises(WorkloadError, match="computes something else"):
        unpad(model, lambda: model(*inputs), batch["attention_mask"])
    assert "forward" not in vars(model)

    class Pooled(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask).mean(1)

    pooled = Pooled().eval()
    with pytest.raises(WorkloadError, match="independently"):
        masked_head(pooled, lambda: pooled(*inputs), batch["labels"])


def test_the_model_in_a_wrapper_is_named() -> None:
    model, batch, _, _ = bert()
    wrapped = nn.DataParallel(model)
    with pytest.raises(WorkloadError) as error:
        masked_head(wrapped, lambda: wrapped(**batch), batch["labels"])
    assert error.value.remedy == "pass the model inside DataParallel: model.module"
    with pytest.raises(WorkloadError) as error:
        unpad(wrapped, lambda: wrapped(**batch), batch["attention_mask"])
    assert error.value.remedy == "pass the model inside DataParallel: model.module"


def test_a_changed_model_can_be_compiled() -> None:
    dense, (inputs, targets), _, _ = plain()
    model, _, _, _ = plain()
    rows = masked_head(model, lambda: model(*inputs), targets)
    unpad(model, lambda: model(*inputs), inputs[1])
    compiled = torch.compile(model, backend="eager")
    selected = rows.select(targets)
    actual = compiled(*inputs)
    expected = dense(*inputs)[targets != -100]
    assert selected.shape == actual.shape[:2]
    torch.testing.assert_close(actual[0], expected, rtol=1e-4, atol=1e-5)


def test_attention_that_is_written_out_is_never_packed() -> None:
    model, batch, *_ = bert(attn_implementation="eager")
    with pytest.raises(WorkloadError, match="computes something else"):
        unpad(model, lambda: model(**batch), batch["attention_mask"])
    single = {name: part[:1] for name, part in batch.items()}
    with pytest.raises(InvalidArgumentError, match="at least two sequences"):
        unpad(model, lambda: model(**single), single["attention_mask"])


@pytest.mark.parametrize(("change", "message"), [(MaskedHead(), "already"), (Unpad(), "packed")])
def test_a_head_is_changed_once_and_before_packing(change: Any, message: str) -> None:
    built = build(bert, change)
    with pytest.raises(WorkloadError, match=message):
        masked_head(built.model, lambda: built.model(**built.batch), built.batch["labels"])


@pytest.mark.parametrize("targets", [[1], torch.full((5, 12), -100), torch.ones(5, 12).long()])
def test_targets_of_no_token_or_all_are_refused(targets: Any) -> None:
    model, batch, *_ = bert()
    with pytest.raises(InvalidArgumentError, match="targets"):
        masked_head(model, lambda: model(**batch), targets)


def test_a_pack_ends_with_its_forward_pass() -> None:
    (dense, batch, *_), (model, *_) = bert(), bert()
    unpad(model, lambda: model(**batch), batch["attention_mask"])
    interrupted = model.bert.encoder.register_forward_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    interrupted.remove()
    assert model(**batch).loss.item() == pytest.approx(dense(**batch).loss.item(), rel=1e-5)
    nothing = torch.zeros_like(batch["attention_mask"])
    assert model(batch["input_ids"], nothing).logits.shape == (BATCH, LENGTH, VOCABULARY)
    with pytest.raises(WorkloadError, match="is padding"):
        model(**batch | {"labels": batch["input_ids"]})


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_recomputation_outside_of_the_pack_is_refused() -> None:
    class Checkpointed(Encoder):
        def attention(self, x: Tensor, mask: Tensor) -> Tensor:
            run = super().attention
            if not torch.is_grad_enabled():
                return run(x, mask)
            attended: Tensor = torch.utils.checkpoint.checkpoint(run, x, mask, use_reentrant=False)
            return attended

    batch = tokens()
    inputs = batch["input_ids"], batch["attention_mask"]
    model = Checkpointed()
    unpad(model, lambda: model(*inputs), batch["attention_mask"])
    with pytest.raises(WorkloadError, match="checkpointing"):
        model(*inputs)
    # The failed call leaves no packed batch behind.
    with torch.no_grad():
        assert loss_of(model(*inputs), batch["labels"]).isfinite()


def test_tokens_are_found_by_name_or_as_integers() -> None:
    batch = tokens()
    mask, labels = batch["attention_mask"], batch["labels"]
    assert find_tokens(batch) == (labels, mask)
    flat = find_tokens(((batch["input_ids"], mask), labels.flatten()))
    assert flat.mask is mask
    assert torch.equal(flat.labels, labels)
    # Features of zeros and ones, and segments, are no masks.
    assert find_tokens((mask.float(), torch.rand(BATCH))) == (None, None)
    assert find_tokens({"token_type_ids": mask, "labels": labels}).mask is None
    assert find_tokens(None).describe() == {}
