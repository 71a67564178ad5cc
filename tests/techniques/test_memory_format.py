"""channels_last: the planned calls equal those of a real channels-last step."""

from __future__ import annotations

from collections import Counter

import torch
from recorded import build, graph_of, images, mlp

from slipstream.graph import Graph
from slipstream.techniques.memory_format import ChannelsLast, _plan


def convolutions(
    graph: Graph, changed: dict[int, object] | None = None
) -> Counter[tuple[object, ...]]:
    """Return strides of image and weight of every convolution, forward and backward."""
    found: Counter[tuple[object, ...]] = Counter()
    for t, call_index in enumerate(graph.tasks.call):
        call = graph.calls[call_index]
        if changed and t in changed:
            call = changed[t]  # type: ignore[assignment]
        if "convolution" in call.name and call_index >= 0:
            pictures = [spec for spec in call.inputs if len(spec.shape) == 4]
            found[(call.name, *((spec.shape, spec.strides) for spec in pictures))] += 1
    return found


def test_the_plan_agrees_with_a_real_channels_last_step() -> None:
    graph = graph_of(images)

    def converted() -> object:
        return build(images, ChannelsLast())

    changed, _ = _plan(graph)
    calls = {
        int(task): changed.pairs[pair][1]
        for task, pair in zip(changed.tasks, changed.pair, strict=True)
    }
    assert convolutions(graph, calls) == convolutions(graph_of(converted))


def test_real_steps_give_equal_losses() -> None:
    plain, converted = build(images), build(images, ChannelsLast())
    for _ in range(3):
        torch.testing.assert_close(plain.step(), converted.step(), rtol=1e-4, atol=1e-5)


def test_the_batch_and_the_weights_are_converted() -> None:
    built = build(images, ChannelsLast())
    assert built.batch[0].is_contiguous(memory_format=torch.channels_last)
    assert built.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_without_images_has_a_reason() -> None:
    assert "convolution" in str(ChannelsLast().why_not(graph_of(mlp)))
