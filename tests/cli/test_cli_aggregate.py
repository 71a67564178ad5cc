"""slipstream cluster aggregate: an aggregator in a process, comparisons and predictions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.cli._main import _command
from slipstream.engines.aggregation import AggregationError, JobMember
from slipstream.errors import InvalidArgumentError, SlipstreamError

SMALL = [
    "cluster", "aggregate", "predict", "--cluster", "workers=8,link=10gbit,latency=2us", "--jobs",
    "2", "--workers", "4", "--all-reduce", "200kB", "--compute", "1ms", "--seeds", "2",
]  # fmt: skip


def test_serve_prints_its_address_and_token_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    with subprocess.Popen(
        [sys.executable, "-m", "slipstream", "cluster", "aggregate", "serve", "--listen",
         "127.0.0.1:0"],
        stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split(";")[0].split()[-1]
            token = process.stdout.readline().strip().rpartition("=")[2]
            member = JobMember([address], "job", 0, 1, token)
            out = torch.empty(3)
            member.sum(torch.ones(3), out)
            assert out.tolist() == [1.0] * 3
            member.close()
            with pytest.raises(AggregationError, match="token is wrong"):
                JobMember([address], "job", 0, 1, token + "x")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_predict_has_a_row_per_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(SMALL) == 0
    shown = capsys.readouterr().out
    assert "job iteration" in shown
    assert "short flow p99" in shown
    assert _command([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["provenance"] == "simulated"
    assert _command([*SMALL, "--load=0"]) == 0
    assert "short flow" not in capsys.readouterr().out
    ring, tree = found["ring"], found["aggregated"]
    # Each cable carries 2 (n - 1) / n S with a ring, and S with a tree.
    assert ring["busiest_link_bytes"][0] / tree["busiest_link_bytes"][0] == pytest.approx(1.5)
    assert ring["job_iteration_ns"][0] > tree["job_iteration_ns"][0]


@pytest.mark.parametrize(
    ("option", "match"),
    [("--workers=9", "do not fit on the 8 hosts"), ("--load=1.5", "from 0 to below 1"),
     ("--all-reduce=0B", "nbytes|all_reduce"), ("--period=-1ms", "period")],
)  # fmt: skip
def test_impossible_loads_are_refused(option: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        _command([*SMALL, option])


def test_serve_refuses_addresses_that_it_cannot_have() -> None:
    for listen, match in (("0.0.0.0:4700", "every network"), ("203.0.113.1:0", "listened on")):
        with pytest.raises(SlipstreamError, match=match):
            _command(["cluster", "aggregate", "serve", "--listen", listen])
