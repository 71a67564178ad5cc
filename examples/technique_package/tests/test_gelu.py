"""Both formulas on a small network: what is predicted, what is applied, how far they are apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slipstream_gelu import Gelu
from torch import nn
from torch.nn.functional import gelu

import slipstream as ss
from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Graph
from slipstream.technique import Context
from slipstream.workload import build_from


def parts(approximate: str = "tanh") -> tuple:
    model = nn.Sequential(nn.Linear(16, 512), nn.GELU(approximate=approximate), nn.Linear(512, 4))
    batch = torch.randn(64, 16), torch.randn(64, 4)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return ss.profile(ss.Workload.of(*parts()), steps=3, threads=1)


def test_it_is_found_by_its_name_and_written_back() -> None:
    assert [str(settings) for settings in technique.parse("gelu:tanh")] == ["gelu:tanh"]


def test_forward_and_backward_are_predicted_by_the_ratio(graph: Graph, tmp_path: Path) -> None:
    gelu, durations = Gelu(), Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(gelu.required_timings(graph))
    after = gelu.predict(graph, Context(durations))
    changed = [
        task for task in range(len(graph))
        if graph.tasks.duration_ns[task] != after.tasks.duration_ns[task]
    ]  # fmt: skip
    names = [graph.string(int(graph.tasks.name[task])) for task in changed]
    assert names == ["aten::gelu", "aten::gelu_backward"]
    for task in changed:
        old, new = (durations.lookup(g.calls[g.tasks.call[task]]) for g in (graph, after))
        ratio = after.tasks.duration_ns[task] / graph.tasks.duration_ns[task]
        assert ratio == pytest.approx(new.nanoseconds / old.nanoseconds)
    assert Gelu().why_not(after) == "its GELU is computed by erf already"


def test_what_does_not_change_is_refused_in_words(graph: Graph) -> None:
    assert "already" in Gelu("tanh").why_not(graph)
    other = replace(graph, meta={**graph.meta, "modules": {"model.0": "Linear"}})
    assert "no nn.GELU" in Gelu().why_not(other)


@pytest.mark.parametrize("form", ["erf", "tanh"])
def test_applied_the_model_computes_the_other_formula(form: str) -> None:
    other = {"erf": "tanh", "tanh": "none"}[form]
    built = build_from(parts(other), [Gelu(form)], 0, "test")
    inputs = built.batch[0]
    hidden = gelu(built.model[0](inputs), approximate={"erf": "none", "tanh": "tanh"}[form])
    assert torch.equal(built.model(inputs), built.model[2](hidden))


def test_a_model_without_it_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no nn\.GELU"):
        build_from((nn.Linear(2, 2), torch.randn(1, 2)), [Gelu()], 0, "test")


def test_the_two_formulas_differ_by_as_much_as_we_say() -> None:
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    furthest = (gelu(x) - gelu(x, approximate="tanh")).abs().max()
    assert 4e-4 < furthest < 5e-4


def test_the_edit_of_the_source(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from torch import nn\n\n\ndef make():\n"
        '    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate="tanh"))\n'
        "    return model, None\n"
    )
    change = Gelu().code(ss.Workload.parse(f"{file}:make"))
    assert '+    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate="none"))' in change.diff
