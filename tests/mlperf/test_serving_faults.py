"""Failures of a system under test are reported with their cause, in time, and leave no process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.mlperf.serving import SCENARIOS, LoadTestConfig, Session, Test, run_scenario
from slipstream.runtimes import ModelError

HERE = Path(__file__).parent
SYSTEMS = HERE / "serving_systems.py"
IN_TIME_S = 5.0
PATIENCE_S = 2.0


def session(system: str, data: str = "samples") -> Session:
    return Session(f"{SYSTEMS}:{system}", f"{SYSTEMS}:{data}", patience_s=PATIENCE_S)


def single_stream(opened: Session) -> None:
    run_scenario(opened, SCENARIOS["single-stream"], LoadTestConfig(seconds=30.0))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("system", "cause"),
    [
        ("raises", "the hundredth call"),
        ("hangs", "has not returned for"),
        ("too_many", "was given 1 samples and answered 2"),
        ("never", "never answered"),
        ("twice", "answered twice"),
    ],
)
def test_failing_system_is_reported_with_its_cause(system: str, cause: str) -> None:
    before = children()
    with session(system) as opened:
        began = time.monotonic()
        with pytest.raises(SlipstreamError, match=cause) as caught:
            single_stream(opened)
        assert time.monotonic() - began < IN_TIME_S
    if system in ("raises", "hangs"):
        assert str(SYSTEMS) in str(caught.value.where)
    assert children() <= before


def test_refuses_an_empty_sample_set() -> None:
    with pytest.raises(InvalidArgumentError, match="no samples"), session("honest", "nothing"):
        pass


def test_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with session("honest") as opened:
        with pytest.raises(SlipstreamError, match="cannot be written") as caught:
            opened.run(Test("offline"), tmp_path / "file" / "results")
        assert str(tmp_path / "file") in str(caught.value.where)


@pytest.mark.parametrize("setting", [{"rate": -5.0}, {"seconds": 0.0}, {"bound_ns": -1.0}])
def test_refuses_negative_settings(setting: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="not above zero"):
        LoadTestConfig(**setting)


@pytest.mark.parametrize("percentile", [0.0, 1.0])
def test_refuses_percentiles_that_no_latency_has(percentile: float) -> None:
    with pytest.raises(InvalidArgumentError, match="not between 0 and 1"):
        Test("server", percentile=percentile)


def test_refuses_queries_that_do_not_fit_into_memory() -> None:
    test = Test("offline", rate=1e12)
    with session("honest") as opened, pytest.raises(SlipstreamError, match="are free") as caught:
        opened.run(test)
    assert "offline for 600 s" in caught.value.what
    assert "--time" in str(caught.value.remedy)


def test_server_that_drops_connections_is_reported() -> None:
    """The server describes its model, and closes every connection with an inference request."""
    described = (
        b'{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}], '
        b'"outputs": []}'
    )
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(described), described)

    def serve(listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            while request := connection.recv(65536):
                if b"infer" in request:
                    break
                connection.sendall(answer)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v2/models/m"
        with (
            pytest.raises(ModelError, match="dropped the connection"),
            Session(url, f"{SYSTEMS}:samples", patience_s=PATIENCE_S) as opened,
        ):
            single_stream(opened)
        listening.shutdown(socket.SHUT_RDWR)


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    # A faster system would finish before the signal.
    command = [
        sys.executable, "-m", "slipstream", "mlperf", "serve", f"{SYSTEMS}:slow", "--data",
        f"{SYSTEMS}:samples", "--scenario", "single-stream", "--time", "60s",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "answered" in line:
            break
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    message = process.stderr.read()
    assert process.wait(IN_TIME_S) == 130
    assert "interrupted" in message
    assert time.monotonic() - began < IN_TIME_S
    assert not [child for child in started if child.is_running()]
    assert not list(tmp_path.iterdir())
