"""The possible results of a user's function, and one step of each."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from slipstream.errors import WorkloadError
from slipstream.technique import TechniqueSettings, Traits
from slipstream.workload import BuiltWorkload, build_from

WHERE = "train.py:7"


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pair(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 3), torch.randn(n, 1)


def build(result: Any, *techniques: Any) -> BuiltWorkload:
    return build_from(result, techniques, 0, "train.py:make", WHERE)


class Labelled(nn.Module):
    """Like Hugging Face models: named inputs, and an output that contains the loss."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.inner, self.wrap = linear(), wrap

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.wrap(nn.functional.mse_loss(self.inner(x), labels))


class Lightning(nn.Module):
    """Like Lightning modules, which provide their loss and optimizer."""

    def __init__(self, wrap: Any = lambda loss: loss, configured: Any = None) -> None:
        super().__init__()
        self.inner, self.wrap, self.configured = linear(), wrap, configured

    def training_step(self, batch: Any, index: int) -> Any:
        return self.wrap(nn.functional.mse_loss(self.inner(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.configured(sgd(self))


@pytest.mark.parametrize("kind", [tuple, list, dict, BuiltWorkload])
def test_a_training_workload_steps_its_parameters(kind: Any) -> None:
    model = linear()
    parts = (model, pair(), nn.functional.mse_loss, sgd(model))
    names = ("model", "batch", "loss", "optimizer")
    fields = dict(zip(names, parts, strict=True))
    built = build(kind(**fields) if kind in (dict, BuiltWorkload) else kind(parts))
    before = model.weight.detach().clone()
    losses = [float(built.step()) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert not torch.equal(model.weight, before)
    assert built.training


def test_a_step_equals_the_textbook_loop() -> None:
    own, theirs = linear(), linear()
    built = build((own, pair(), nn.functional.mse_loss, sgd(own)))
    optimizer = sgd(theirs)
    inputs, targets = pair()
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(theirs(inputs), targets)
        loss.backward()
        optimizer.step()
        assert torch.equal(built.step(), loss.detach())
    assert torch.equal(own.weight, theirs.weight)


def test_without_an_optimizer_a_step_is_a_forward_pass_without_gradients() -> None:
    model = linear()
    built = build((model, pair()[0]))
    output = built.step()
    assert torch.equal(output, model(pair()[0]))
    assert not output.requires_grad
    assert not built.training


def test_a_loss_without_an_optimizer_is_evaluated() -> None:
    model = linear()
    inputs, targets = pair()
    loss = build((model, (inputs, targets), nn.functional.mse_loss)).step()
    assert torch.equal(loss, nn.functional.mse_loss(model(inputs), targets).detach())


def test_a_function_is_used_as_the_step() -> None:
    built = build(lambda: 7)
    assert built.step() == 7
    assert built.model is None


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_an_explicit_step_is_not_replaced(as_dictionary: bool) -> None:
    fields: dict[str, Any] = {"model": linear(), "batch": pair()[0], "step": lambda: "mine"}
    assert build(fields if as_dictionary else BuiltWorkload(**fields)).step() == "mine"


@pytest.mark.parametrize(
    "wrap",
    [lambda loss: loss, lambda loss: SimpleNamespace(loss=loss), lambda loss: {"loss": loss}],
)
def test_a_model_may_return_its_loss_alone_or_inside_its_output(wrap: Any) -> None:
    inputs, labels = pair()
    model = Labelled(wrap)
    built = build((model, {"x": inputs, "labels": labels}, None, sgd(model)))
    assert float(built.step()) > float(built.step())
    assert built.samples == 5


@pytest.mark.parametrize(
    "configured",
    [
        lambda optimizer: optimizer,
        lambda optimizer: [optimizer],
        lambda optimizer: ([optimizer], []),
        lambda optimizer: {"optimizer": optimizer, "lr_scheduler": None},
        lambda optimizer: [{"optimizer": optimizer}],
    ],
)
def test_a_lightning_module_provides_its_optimizer(configured: Any) -> None:
    model = Lightning(configured=configured)
    built = build((model, pair()))
    assert built.training
    assert float(built.step()) > float(built.step())


def test_a_lightning_module_whose_optimizer_is_none_is_not_trained() -> None:
    model = Lightning(configured=lambda optimizer: None)
    model.forward = lambda x, y: model.inner(x)  # type: ignore[method-assign]
    assert not build((model, pair())).training


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(6, 3), 6),
        ((torch.zeros(4, 3), torch.zeros(4)), 4),
        ({"x": torch.zeros(2, 3), "mask": None}, 2),
        ([[torch.zeros(9, 1)]], 9),
        (torch.tensor(1.0), 1),
        (None, 0),
        ("text", 0),
    ],
)
def test_samples_are_counted_along_the_first_dimension(batch: Any, samples: int) -> None:
    assert build({"model": linear(), "batch": batch, "step": lambda: None}).samples == samples


def test_an_explicit_number_of_samples_is_used() -> None:
    assert build({"model": linear(), "batch": torch.zeros(6, 3), "samples": 2}).samples == 2


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned nothing"),
        (3, "returned an int"),
        ((), "tuple of nothing"),
        (("model", 1), "tuple of str, int"),
        ((linear(),), "tuple of Linear"),
        ({"modell": linear()}, "['modell']"),
        ({"batch": 1}, "['batch']"),
        ({"model": 3, "batch": 1}, " int"),
        ({"model": None}, "neither a model nor a step"),
        ((linear(), pair(), nn.functional.mse_loss, 0.1), "optimizer is a float"),
        ((linear(), sgd(linear()), pair()[0]), "another order"),
        ((linear(), pair(), pair()[0], sgd(linear())), "another order"),
    ],
)
def test_other_results_are_refused_with_the_result_and_what_to_return(
    result: Any, message: str
) -> None:
    with pytest.raises(WorkloadError) as caught:
        build(result)
    assert message in caught.value.what
    assert caught.value.where == WHERE
    assert "return" in str(caught.value.remedy) or "keys" in str(caught.value.remedy)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_nonscalar_loss_is_refused(outputs: int) -> None:
    model = nn.Linear(3, outputs)
    with pytest.raises(WorkloadError, match=rf"\bscalar\b.*\(5, {outputs}\)"):
        build((model, pair()[0], None, sgd(model))).step()


class Whole(nn.Module):
    """Takes inputs and targets, and returns an output that contains the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Any, labels: Any = None) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.inner(x), labels))


def test_a_loss_of_one_argument_gets_the_output() -> None:
    model = Whole()
    inputs, targets = pair()
    expected = model(inputs, targets).loss.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in ((inputs, targets), {"x": inputs, "labels": targets}):
        built = build((model, batch, lambda out: out.loss, optimizer))
        assert float(built.step()) == pytest.approx(expected)
        assert built.samples == len(inputs)


def test_a_loss_of_one_argument_over_a_model_of_one() -> None:
    model = linear()
    inputs, targets = pair()
    expected = model(inputs).square().mean().item()
    built = build((model, (inputs, targets), lambda output: output.square().mean(), sgd(model)))
    assert float(built.step()) == pytest.approx(expected)


def test_a_training_step_may_omit_the_batch_index() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def training_step(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    built = build((Plain(), pair()))
    assert built.training
    assert float(built.step()) > float(built.step())


class Wrapper:
    """Not a module, but contains one."""

    def __init__(self) -> None:
        self.network = linear()


@pytest.mark.parametrize(
    ("result", "message", "remedy"),
    [
        (linear(), "Linear alone", "(model, batch) for inference"),
        ((linear(), pair(), nn.MSELoss, sgd(linear())), "the class MSELoss", "MSELoss()"),
        (
            (linear(), pair(), nn.MSELoss(), torch.optim.SGD),
            "the class SGD",
            "SGD(model.parameters(), ...)",
        ),
        (
            (linear(), torch.utils.data.DataLoader([0.0]), nn.MSELoss(), sgd(linear())),
            "DataLoader",
            "next(iter(loader))",
        ),
        ((Wrapper(), pair(), nn.MSELoss(), sgd(linear())), "tuple of Wrapper", "its 'network' is"),
        ({"model": Wrapper(), "step": print}, "Wrapper", "its 'network' is"),
        ((character for character in "abc"), "returned a generator", "yield"),
    ],
)
def test_near_misses_explain_what_to_write(result: Any, message: str, remedy: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        build(result)
    assert message in caught.value.what
    assert remedy in str(caught.value.remedy)
    assert caught.value.where == WHERE


@dataclass(frozen=True)
class Noting(TechniqueSettings):
    """A technique that records when it was applied."""

    name: str  # type: ignore[misc]
    notes: ClassVar[list[str]] = []

    def apply(self, built: BuiltWorkload) -> None:
        self.notes.append(self.name)


class Late(Noting):
    traits: ClassVar[Traits] = Traits(stage=5)


def test_techniques_are_applied_in_order_of_their_stages() -> None:
    Noting.notes.clear()
    build((linear(), pair()[0]), Late("late"), Noting("early"))
    assert Noting.notes == ["early", "late"]


class OtherBatch(Noting):
    def apply(self, built: BuiltWorkload) -> None:
        built.batch = torch.zeros(2, 3)


def test_a_technique_may_replace_the_input_of_the_step() -> None:
    assert build((linear(), torch.zeros(9, 3)), OtherBatch("two")).step().shape == (2, 1)
