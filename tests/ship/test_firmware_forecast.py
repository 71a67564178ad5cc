"""Predictions of firmware costs, compared with emulated runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from models import MICRO_SPEECH, PERSON_DETECT, need_emulator
from random_networks import RandomNetwork

from slipstream.cli._main import _command
from slipstream.errors import UnknownNameError
from slipstream.ship.export import write_network
from slipstream.ship.firmware import export_firmware, forecast, random_inputs, run_emulated
from slipstream.ship.firmware.costs import counts

Require = Callable[[str, bool, str], None]
NETWORKS = (
    PERSON_DETECT, MICRO_SPEECH, "mlperf_tiny/kws_ref_model.tflite",
    "mlperf_tiny/str_ww_ref_model.tflite",
)  # fmt: skip


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m7", "cortex-m55"])
@pytest.mark.parametrize("name", NETWORKS)
def test_forecasts_match_emulated_runs(
    name: str, device: str, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_emulator(require)
    firmware = export_firmware(shared_data / name, device=device)
    found = forecast(firmware)
    inputs = random_inputs(firmware.interface, 1)
    ran = run_emulated(firmware.sources, firmware.interface, inputs, tmp_path, firmware.target)
    assert ran.size is not None
    assert found.instructions == pytest.approx(ran.instructions[0], rel=0.05)
    assert found.flash == pytest.approx(ran.size.flash, rel=0.03)
    assert found.constants == ran.size.constants
    # Memory is exact.
    assert found.ram == firmware.arena.size + ran.size.ram + ran.stack


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m55"])
def test_operations_are_counted_in_integers(device: str) -> None:
    firmware = export_firmware(write_network(RandomNetwork(2).network(24)), device=device)
    for step in firmware.program.steps:
        assert all(float(count).is_integer() for count in counts(step, firmware.target).values())


def test_reports_missing_memory_with_a_remedy(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shared_data / PERSON_DETECT)
    assert _command(["ship", "predict", model, "--ram", "32KiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert "reduce channels" in found["remedies"][0]
    # The text has the numbers of the JSON.
    needed = found["ram_bytes"]
    sizes = re.findall(r"([\d,]+) B", found["remedies"][0])[:3]
    assert sizes == [f"{size:,}" for size in (needed, 32 * 1024, needed - 32 * 1024)]
    assert _command(["ship", "predict", model, "--ram", "32k", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == found
    assert _command(["ship", "predict", model, "--ram", "64KiB", "--flash", "512KiB"]) == 0


def test_refuses_predictions_for_the_host(shared_data: Path) -> None:
    firmware = export_firmware(shared_data / MICRO_SPEECH, device="host")
    with pytest.raises(UnknownNameError, match="target of predictions"):
        forecast(firmware)
