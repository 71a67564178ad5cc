"""Search for a microcontroller: nothing that does not fit is trained, and the result fits."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from slipstream.cli import nas
from slipstream.cli.ship import app
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.nas import Footprint, Supernet, derive_space, search_for_board
from slipstream.nas.board_search import describe_change, limits_of, nearest_fit
from slipstream.search.metrics import State
from slipstream.ship import DoesNotFitError
from slipstream.ship.boards import Board, Fit, board, boards
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.firmware import costs, target

_BOARD = Board("small", "cortex-m4", 12_000, 12_000, 100e6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images whose brightest quarter is their class."""
    generator = torch.Generator().manual_seed(n)
    images, classes = torch.rand(n, 1, 12, 12, generator=generator), torch.arange(n) % 4
    for image, number in zip(images, classes.tolist(), strict=True):
        image[0, 6 * (number // 2) :, 6 * (number % 2) :][:6, :6] += 1
    return images, classes


@functools.cache
def footprint() -> Footprint:
    inputs = data(8)[0]
    net = Supernet(derive_space(network(), inputs, channel_multiple=4))
    return Footprint(net, inputs)


def test_only_networks_that_fit_are_trained() -> None:
    limit_ms = 2.0
    assert _BOARD.latency_ms(footprint().predict({}).instructions) > limit_ms
    found = search_for_board(
        network(), data(64), data(32), board=_BOARD, latency_ms=limit_ms, budget="4", epochs=1
    )
    limits = limits_of(_BOARD, limit_ms)
    trained = [trial for trial in found.study.trials if trial.state is State.COMPLETE]
    assert len(trained) == 4
    for trial in trained:
        predicted = footprint().predict(trial.candidate)
        assert predicted.ram <= limits["ram"]
        assert predicted.instructions <= limits["instructions"]
    assert found.fit.fits
    assert found.fit.latency_ms <= limit_ms
    assert found.to_json()["trained"] == 4
    assert "4 trainings, all of networks that fit" in found.tables()[0].notes
    channels = found.module.get_submodule("3").weight.shape
    assert {channels[0], channels[1]} == set(found.config.values())


def test_a_board_that_is_too_small_is_refused_with_its_limit() -> None:
    tiny = Board("tiny", "cortex-m4", 500, 500_000, 100e6)
    with pytest.raises(DoesNotFitError) as refused:
        search_for_board(network(), data(64), data(32), board=tiny)
    assert "of RAM (largest at operator 2, CONV_2D, '3'), and tiny has 500 B" in str(refused.value)


def test_the_nearest_change_is_one_width_where_that_is_enough() -> None:
    found = footprint()
    whole = found.predict({}).instructions
    config = nearest_fit(found, {"instructions": 0.9 * whole})
    assert config is not None
    assert found.predict(config).instructions <= 0.9 * whole
    assert sum(config[name] != size for name, size in found.net.space.full.items()) == 1
    assert "32 -> 28 (at 3)" in describe_change(found, config)
    assert nearest_fit(found, {"flash": 100}) is None


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (torch.zeros(3), "not a pair of tensors"),
        ((torch.zeros(3, 1, 4, 4), torch.zeros(2, dtype=torch.int64)), "3 inputs and 2 classes"),
        ((torch.zeros(3, 1, 4, 4), torch.zeros(3)), "classes of torch.float32"),
        ((data(8)[0].double(), data(8)[1]), "inputs of torch.float64"),
        ((data(8)[0] / 0, data(8)[1]), "NaN or infinity"),
    ],
)
def test_data_that_are_no_classes_are_refused(train: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        search_for_board(network(), train, data(8), board="nrf52840")
    with pytest.raises(UnknownNameError, match="stm32f446"):
        search_for_board(network(), data(8), data(8), board="stm32f446")


def test_the_first_failure_of_all_trainings_is_reported() -> None:
    def augment(images: torch.Tensor) -> torch.Tensor:
        return images[:, :, 12]

    with pytest.raises(WorkloadError, match=r"no candidate was trained.*index 12 is out of bounds"):
        search_for_board(
            network(), data(8), data(8), board=_BOARD, epochs=1, budget="70", augment=augment
        )


@pytest.mark.parametrize(
    ("valid", "text"),
    [
        ((data(8)[0], torch.full((8,), 7)), "valid: classes are 7 to 7, but the model scores 0 to"),
        ((data(8)[0].repeat(1, 3, 1, 1), data(8)[1]), r"valid: shape \[2, 3, 12, 12\] is not"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(valid: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        search_for_board(network(), data(8), valid, board=_BOARD)
    with pytest.raises(InvalidArgumentError, match=r"model: its output is not"):
        search_for_board(network()[:6], data(8), data(8), board=_BOARD)  # type: ignore[index]


def test_the_output_folder_is_checked_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    words = ["search", "missing.py:task", "--board", "nrf52840", "-o", str(tmp_path)]
    error = CliRunner().invoke(nas.app, words).exception
    assert "does not hold firmware" in str(error)


def test_boards_have_a_processor_with_measured_costs() -> None:
    for entry in boards():
        assert costs.fitted(target(entry.target))
        assert entry.instructions(entry.latency_ms(1e6)) == pytest.approx(1e6, abs=1)
    with pytest.raises(UnknownNameError, match="cortex-m4"):
        Footprint(footprint().net, data(8)[0], device="host")


def test_fit_reports_every_limit(tmp_path: Path) -> None:
    model = tmp_path / "net.tflite"
    model.write_bytes(write_network(quantize_model(network(), [data(8)[0]])))
    words = ["fit", str(model), "--board", "stm32f446re", "--json"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0
    answer = json.loads(ran.stdout)
    assert answer["fits"]
    assert answer["peaks"]["latency"] == "operator 2, CONV_2D, '3'"
    assert CliRunner().invoke(app, [*words, "--latency", "0.1ms"]).exit_code == 1
    found = Fit(board("stm32f446re"), footprint().predict({}), 0.1)
    assert [row[3] for row in found.table().rows] == ["yes", "yes", "no"]
