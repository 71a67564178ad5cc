"""slipstream storage: from a trace of another tool to a prediction and a proof."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from slipstream.cli._main import _command
from slipstream.errors import SlipstreamError, UsageError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Import six shuffled epochs of 30 files; a line is broken."""
    rng = np.random.default_rng(0)
    rows = [f"{n},/train/{shard:03d},100" for n in range(6) for shard in rng.permutation(30)]
    source = tmp_path / "run.csv"
    source.write_text("\n".join(["time,object,size", *rows, "7,/train/000"]) + "\n")
    with pytest.raises(SlipstreamError, match="malformed"):
        _command(["storage", "import", str(source), "-o", str(tmp_path / "run.npz")])
    arguments = ["storage", "import", str(source), "--skip-bad", "-o", str(tmp_path / "run.npz")]
    assert _command(arguments) == 0
    return tmp_path / "run.npz"


def test_a_trace_is_profiled_predicted_and_proved(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(*arguments: str) -> dict[str, object]:
        capsys.readouterr()
        assert _command(["storage", *arguments, "--json"]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    profiled = result("profile", str(trace), "--svg", str(trace.with_suffix(".svg")))
    assert (profiled["requests"], profiled["objects"]) == (180, 30)
    drawn = ElementTree.parse(trace.with_suffix(".svg"))
    curves = [element for element in drawn.iter() if element.tag.endswith("polyline")]
    assert [curve[0].text for curve in curves] == list(profiled["curve"])  # type: ignore[call-overload]
    assert curves[-1][0].text == "belady"
    assert profiled["notes"] == {"bad entries skipped": 1}
    predicted = result("predict", str(trace), "--size", "50%", "--policies", "lru,learned")
    outcomes = predicted["outcomes"]
    assert isinstance(outcomes, list)
    rates = {outcome["policy"]: outcome["hit_rate"] for outcome in outcomes}
    assert rates["lru"] < rates["learned"]
    fast = ("--latency", "0.1ms", "--bandwidth", "1GB/s", "--reads", "60")
    proved = result("prove", str(trace), "--size", "50%", "--skip-bad", *fast)
    assert proved["reads"] == 60
    assert _command(["storage", "predict", str(trace)]) == 0
    assert "belady" in capsys.readouterr().out


def test_bad_options_are_refused(trace: Path) -> None:
    for arguments, what in (
        (["predict", str(trace), "--size", "200%"], "--size: '200%'"),
        (["prove", str(trace), "--size", "0"], "--size: 0"),
        (["predict", str(trace), "--policies", "lruu"], "lruu"),
        (["predict", str(trace), "--policies", ","], "names no policy"),
        (["predict", str(trace), "--latency", "soon"], "--latency"),
        (["prove", str(trace), "--policies", "belady"], "belady"),
        (["record", "-o", "run.txt", "--", "true"], "run.txt"),
        (["profile", str(trace), "--svg", "."], "svg"),
    ):
        with pytest.raises(UsageError, match=what):
            _command(["storage", *arguments])
