"""conv_bn_fold: the predicted step equals the folded one; outputs stay; refusals have reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import build, graph_of, images, inference
from torch import nn

from known_durations import KnownDurations
from slipstream.durations import Timing
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Graph
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind
from slipstream.techniques.conv_bn_fold import ConvBnFold
from slipstream.techniques.precision import Amp
from slipstream.workload import Workload


class Table(KnownDurations):
    """Every call takes a microsecond."""

    def lookup(self, call: Call) -> Timing:
        return Timing(1000.0, 0.01, Provenance.MICROBENCHMARK)


class Net(nn.Module):
    """Layers with and without a bias before norms, and a norm whose input is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.up, self.up_norm = nn.ConvTranspose2d(8, 6, 2), nn.BatchNorm2d(6)
        self.twice, self.twice_norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.head, self.head_norm = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, affine=False)
        for norm in (self.norm, self.up_norm, self.twice_norm, self.head_norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.up_norm(self.up(x))
        y = self.twice(x)
        return self.head_norm(self.head((y + self.twice_norm(y)).mean((2, 3))))


def net() -> Any:
    return Net().eval(), torch.randn(2, 3, 8, 8)


def folded_net() -> Any:
    return build(net, ConvBnFold())


def in_training_mode() -> Any:
    return Net(), torch.randn(2, 3, 8, 8)


def predicted(graph: Graph) -> Graph:
    return ConvBnFold().predict(graph, Context(durations=Table()))  # type: ignore[arg-type]


def calls(graph: Graph) -> Counter[str]:
    return Counter(graph.calls[c].key for c in graph.tasks.call if c >= 0)


def test_predicted_calls_equal_those_of_the_folded_model() -> None:
    assert calls(predicted(graph_of(net))) == calls(graph_of(folded_net))


def test_the_predicted_step_is_complete_for_later_techniques() -> None:
    ours, real = predicted(graph_of(net)), graph_of(folded_net)
    ours.check()
    context = Context(durations=Table())  # type: ignore[arg-type]
    assert calls(Amp().predict(ours, context)) == calls(Amp().predict(real, context))


def test_every_lookup_was_requested() -> None:
    graph, looked = graph_of(net), set()

    class Spy(Table):
        def lookup(self, call: Call) -> Timing:
            looked.add(call.key)
            return super().lookup(call)

    ConvBnFold().predict(graph, Context(durations=Spy()))  # type: ignore[arg-type]
    assert looked == {call.key for call in ConvBnFold().required_timings(graph)}


def test_outputs_stay_and_norms_are_removed() -> None:
    plain, folded = build(net), build(net, ConvBnFold())
    torch.testing.assert_close(folded.step(), plain.step(), rtol=1e-4, atol=1e-5)
    kinds = [type(m).__name__ for m in folded.model.modules()]
    # The one whose input is used twice stays.
    assert sum("BatchNorm" in kind for kind in kinds) == 1
    assert folded.model.twice_norm is not None
    assert folded.model.stem.bias is not None


def test_shared_weights_hooks_and_repeated_calls_are_left_alone() -> None:
    def sequence() -> list[nn.Module]:
        layers = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)]
        layers[1].running_mean.normal_()
        return layers

    shared = sequence()
    shared[2].weight = shared[0].weight
    hooked = sequence()[:2]
    hooked[1].register_forward_hook(lambda module, args, output: None)
    twice = sequence()[:2] * 2
    for layers in (shared, hooked, twice):
        model = nn.Sequential(*layers).eval()
        with pytest.raises(WorkloadError, match=r"\bbatch norm\b"):
            build(lambda model=model: (model, torch.randn(2, 3, 4, 4)), ConvBnFold())


def test_a_model_with_changed_outputs_is_restored() -> None:
    class Rewrites(nn.Module):
        """Computes something else without its norm."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.calls = nn.Linear(3, 3), nn.BatchNorm1d(3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.norm, nn.BatchNorm1d):
                return self.norm(self.layer(x))
            return self.norm(self.layer(x)) + 1

    model = Rewrites().eval()
    layer, norm = model.layer, model.norm
    with pytest.raises(WorkloadError, match=r"differs.*\d"):
        build(lambda: (model, torch.randn(4, 3)), ConvBnFold())
    assert model.layer is layer
    assert model.norm is norm


def test_training_is_refused_with_a_reason() -> None:
    assert "batch statistics" in str(ConvBnFold().why_not(graph_of(images)))
    assert "model.eval()" in str(ConvBnFold().why_not(graph_of(in_training_mode)))
    with pytest.raises(WorkloadError, match="batch statistics"):
        build(images, ConvBnFold())


def test_a_model_without_norms_has_a_reason() -> None:
    assert "no batch norm" in str(ConvBnFold().why_not(graph_of(inference)))


def test_a_norm_before_its_layer_has_a_reason() -> None:
    def before() -> Any:
        return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)).eval(), torch.randn(2, 3, 4, 4)

    assert "only reader" in str(ConvBnFold().why_not(graph_of(before)))


def test_it_applies_to_inference_and_changes_rounding() -> None:
    assert ConvBnFold().why_not(graph_of(net)) is None
    assert ConvBnFold().quality().kind is QualityKind.ROUNDING


def test_its_edit_folds_before_the_model_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "serve.py"
    path.write_text(SCRIPT)
    change = ConvBnFold().code(Workload.parse(f"{path}:make"))
    assert change is not None
    added = [line[1:] for line in change.diff.splitlines() if line[:1] == "+" and line[1:2] != "+"]
    assert added == [
        "    from torch.fx.experimental.optimization import fuse",
        "    model = fuse(model.eval())",
    ]
    edited = SCRIPT.replace("    return", "\n".join([*added, "    return"]))
    models = []
    for text in (SCRIPT, edited):
        scope: dict[str, Any] = {}
        exec(text, scope)
        torch.manual_seed(0)
        models.append(scope["make"]())
    (plain, x), (folded, _) = models
    torch.testing.assert_close(folded(x), plain.eval()(x))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())


SCRIPT = """\
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.eval()
    return model, torch.randn(2, 3, 8, 8)
"""
