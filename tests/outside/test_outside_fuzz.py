"""Any content of a file gives a typed error or a usable result, within 1 GiB and 20 seconds.

Each format has a small file as we write it. Of it come files that are cut, have bits turned, pieces
doubled, or other values where JSON and TOML have theirs and SQLite has its columns; gzip files are
broken before and after they are zipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import random
import re
import resource
import signal
import sqlite3
import struct
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from known_durations import BytesMoved
from slipstream.cli.xray import _pipeline
from slipstream.cluster import Cluster, Collective
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError, UsageError
from slipstream.files import read_array
from slipstream.graph import Call, TensorSpec, load, replay, save
from slipstream.graph.graph import Graph
from slipstream.graph.io.chakra import read_chakra, to_chakra
from slipstream.graph.io.kineto import read_kineto
from slipstream.measure.claims import claims
from slipstream.measure.environment import from_facts
from slipstream.measure.ledger import Ledger
from slipstream.measure.records import (
    ArmRecord,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    PredictionRecord,
    Series,
)
from slipstream.measure.store import Store
from slipstream.mlperf.training import log as training_log
from slipstream.provenance import Provenance
from slipstream.runtimes.paths import DeviceMatrix
from slipstream.runtimes.preprocessing import image_pipeline
from slipstream.runtimes.samples import read_samples
from slipstream.search import Choice as SubSpace
from slipstream.search import Float, Halving, Int, Space, StoredStudy, Study
from slipstream.search.listing import Listing
from slipstream.ship import xray
from slipstream.ship.firmware import Network, Operator, Quantization, Tensor
from slipstream.ship.firmware.tflite import read_network
from slipstream.ship.firmware.writer import write_network
from slipstream.ship.xray.comparing import read_labels
from slipstream.sparse.dedup import dedup
from slipstream.techniques.embedding.planning import Alternative, Choice, TablePlan
from slipstream.verbs.explaining.lines import lines_report
from slipstream.verbs.predicting import predict

_INPUTS = 4000
_SAMPLE = 120
_MAX_BYTES = 1 << 30
_MAX_S = 20
_SPEC = TensorSpec("float32", (4, 8), (8, 1))
_CALL = Call("aten::relu(Tensor self) -> Tensor", (_SPEC,), (_SPEC,))
_JUNK = (
    True, None, 0, -1, 2**31, 10**30, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\ud800",
    [], [[]], {}, {"a": 1}, [1, "x"], [0] * 50,
)  # fmt: skip
_TOML_JUNK = (
    "true", "nan", "inf", "-1", "0", "1e400", "99999999999", '""', '"x"', "[]", "{}", "2026-01-01",
    "[[1]]",
)  # fmt: skip


def trace_text() -> bytes:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::op{n}", "pid": 1, "tid": 1, "ts": 10.0 * n,
         "dur": 8, "args": {"Sequence number": n, "correlation": n}}
        for n in range(4)
    ]  # fmt: skip
    for n in range(3):
        args = {
            "correlation": 10 + n,
            "device": 0,
            "stream": 7,
            "grid": [4, 1, 1],
            "block": [32, 1, 1],
        }
        events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
             "ts": 10.0 * n + 2, "dur": 2, "args": {"correlation": 10 + n}},
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10.0 * n + 5,
             "dur": 3, "args": args},
        ]  # fmt: skip
    args = {"Device Type": 0, "Addr": 64, "Bytes": 128, "Total Allocated": 128}
    memory = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 3.0, "args": args}
    head = {"schemaVersion": 1, "profile_memory": 1, "deviceProperties": [{"name": "made"}]}
    return json.dumps({**head, "traceEvents": [*events, memory]}).encode()


def write_trace(path: Path) -> None:
    path.write_bytes(trace_text())


def a_graph(folder: Path) -> Graph:
    write_trace(folder / "made.json")
    return read_kineto(folder / "made.json", "all")


def write_store(path: Path) -> None:
    rng = np.random.default_rng(5)
    place = from_facts({"cpu.model": "Testor 3000", "torch.threads": 1})
    blocks = np.arange(12, dtype=np.int32)
    series = {
        (arm, metric, Phase.MEASURE): Series(1e7 * factor * rng.lognormal(0, 0.02, 12), blocks)
        for arm, factor in (("base", 1.0), ("fast", 0.8))
        for metric in ("wall", "cpu")
    }
    record = PredictionRecord(
        "toy", "fast", "cpu", 0.8, 0.7, 0.9, "simulated", "2026-01-01", place.env_id
    )
    made = Experiment(
        "toy", "2026-01-02T03:04:05Z", place, ExperimentSettings("base", primary="cpu"),
        (ArmRecord("base"), ArmRecord("fast")), series,
        (Event(0, "gate", {"state": "green"}), Event(12, "stop", {"reason": "budget"})),
        {"fast": record},
    )  # fmt: skip
    with Store(path) as store:
        store.save(made, claims(made))
        store.record_prediction(record, place)


def read_store(path: Path) -> None:
    with Store(path) as store:
        store.environments()
        Ledger(store).scores()
        for summary in store.list():
            claims(store.load(summary.experiment_id))
            store.claims(summary.experiment_id)


def write_durations(path: Path) -> None:
    durations = Durations(path=path)
    answer = {"nanoseconds": 1e3, "spread": 0.1, "workspace": 64, "made": [128]}
    durations._save([(durations.missing([_CALL])[0], answer)])


def read_durations(path: Path) -> None:
    durations = Durations(path=path)
    durations.lookup(_CALL)
    durations._measured("aten::relu")


def write_cluster(path: Path) -> None:
    Cluster.load("workers=4,link=1gbit,latency=50us,device=h100-sxm").save(path)


def read_cluster(path: Path) -> None:
    found = Cluster.load(path)
    cost = found.cost(Collective("all_reduce", 1 << 20))
    assert cost.duration_ns >= 0


def write_plan(path: Path) -> None:
    TablePlan(
        {"t": Choice("robe", {"block": 8}, 1024, 0.1)}, 4096, 512, "robe",
        (Alternative("robe", 1024, 0.1, None, ""),), Provenance.ASSUMED, 8,
    ).save(path)  # fmt: skip


def usable(graph: Graph) -> None:
    graph.check()
    assert np.isfinite(replay(graph).step_ns)


# Arrays that a profile stores in addition.
_META = {
    "workload": "train.py:make", "created": "2026-01-01T00:00:00Z", "training": True,
    "machine": {"cpu.model": "Testor 3000", "cpu.logical": 2}, "torch": "2.13.0",
    "optimizer": {"class": "SGD", "settings": {"lr": 0.1, "foreach": None}, "zeros": [0.0],
                  "tensors": [["float32", [4, 8], [8, 1], "cpu"]]},
    "parameters": 32, "modules": {"model": "Linear"}, "inference_mode": False,
    "step_ns": {"wall_median": 2e3, "cpu_median": 2e3, "relative_spread": 0.1},
    "baseline": {"amp": "", "compiled": False, "distributed": None},
    "lines": {"functions": {"train.py:4": "make"}, "callers": {"train.py:4": [["train.py:9"]]},
              "made": {"model": "train.py:4"}, "files": {}},
    "device": "cpu", "threads": 2, "cpu_capability": "AVX2", "contended": False, "steps": 24,
    "aligned_steps": 24, "unaligned_share": 0.0, "events_per_step": 4, "residual_scale": 1.0,
    "profiler_ns_per_event": 70.0, "shrunk": {"samples": 4, "of": 8},
    "recipe": {"target": "train.py:make", "arguments": {}, "script_arguments": [], "threads": 0},
    "source": {"file": "train.py", "place": "ab", "sha256": "cd"},
}  # fmt: skip
_TECHNIQUES = (
    "amp:bf16", "fused_optimizer", "batch_size:16", "accumulation:2", "ddp:4", "channels_last",
)  # fmt: skip


def write_recording(path: Path) -> None:
    made = a_graph(path.parent)
    calls = dataclasses.replace(made.tasks, call=np.zeros(len(made), np.int32))
    save(dataclasses.replace(made, meta=_META, samples=8, tasks=calls, calls=(_CALL,)), path)


def read_recording(path: Path) -> None:
    graph = load(path)
    usable(graph)
    lines_report(replay(graph), 3)
    predict(graph, _TECHNIQUES, durations=BytesMoved())  # type: ignore[arg-type]


def _study(path: Path) -> Study:
    def train(config: dict[str, Any], run: Any) -> dict[str, float]:
        return {"error": (100 * config["lr"] - 1) ** 2 + 9 / config["width"] / run.fidelity}

    parameters = {
        "lr": Float(1e-4, 1e-1, log=True), "width": Int(8, 256, log=True),
        "net": SubSpace(deep={"depth": Int(1, 4)}, flat={}),
    }  # fmt: skip
    space = Space(parameters, ties={"double": "2 * width"}, forbid=["width > 200 and lr > 0.05"])
    return Study("digits", space, "error", estimator=train, constraints={"error": "<= 50"},
                 strategy="evolution", rungs=Halving(1, 3), store=path)  # fmt: skip


def read_study(path: Path) -> None:
    listing = Listing.of(StoredStudy(path))
    for table in (listing.status(), listing.top(5), listing.pareto()):
        table.to_markdown()
    listing.to_json()
    _study(path).replay()


def _record(path: Path, inputs: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).eval()
    with xray.record(path, "layers") as recorder:
        for sample in inputs:
            recorder.run(model, sample[None])


def write_network_file(path: Path) -> None:
    grid = Quantization(np.array([0.1], np.float32), np.array([0], np.int64))
    tensors = tuple(Tensor(name, (1, 4), "int8", grid) for name in "ab")
    path.write_bytes(
        write_network(
            Network("n", tensors, (Operator("softmax", (0,), (1,), {"beta": 1.0}),), (0,), (1,))
        )
    )


def write_training_log(path: Path) -> None:
    log = training_log.Log(path)
    log.start("run_start")
    log.event("eval_accuracy", 0.9, epoch_num=1)
    log.stop("run_stop", status="success")
    log.close()


_INPUT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)

FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "trace.json": (write_trace, lambda path: usable(read_kineto(path, "all"))),
    "trace.json.gz": (
        lambda path: path.write_bytes(gzip.compress(trace_text())) and None,
        lambda path: usable(read_kineto(path, "all")),
    ),
    "run.slipgraph": (write_recording, read_recording),
    "chakra.et": (
        lambda path: path.write_bytes(to_chakra(a_graph(path.parent))) and None,
        lambda path: usable(read_chakra(path)),
    ),
    "cluster.toml": (write_cluster, read_cluster),
    "results.db": (write_store, read_store),
    "durations.db": (write_durations, read_durations),
    "plan.json": (write_plan, TablePlan.load),
    "corpus.jsonl": (
        lambda path: path.write_text('{"text": "one two three four five six"}\n' * 4) and None,
        dedup,
    ),
    "study.db": (lambda path: _study(path).run() and None, read_study),
    "inputs.npy": (
        lambda path: np.save(path, _INPUT),
        lambda path: _record(path.with_suffix(".xr"), read_array(path, UsageError)),
    ),
    "samples.npz": (
        lambda path: np.savez_compressed(path, x=_INPUT, y=np.arange(4)),
        lambda path: read_samples(str(path), None),  # type: ignore[arg-type]
    ),
    "labels.json": (lambda path: path.write_text('{"a": 1, "b": 2}') and None, read_labels),
    "edge.xr": (
        lambda path: _record(path, _INPUT),
        lambda path: xray.compare(path, path.with_name("edge.xr"), labels=[0, 1, 0, 1]),
    ),
    "pipeline.json": (
        lambda path: path.write_text(json.dumps(image_pipeline(8).to_dict())) and None,
        lambda path: _pipeline(str(path))(np.zeros((9, 9, 3), np.uint8)),
    ),
    "paths.toml": (
        lambda path: path.write_text('[paths]\nphone = "camera:edge+codec:jpeg,quality=75"\n')
        and None,
        lambda path: DeviceMatrix.read(path, image_pipeline(8)),
    ),
    "network.tflite": (write_network_file, read_network),
    "train.log": (write_training_log, training_log.read),
}  # fmt: skip


class Breaker:
    """Generator of damaged files from a valid one."""

    def __init__(self, seed: int, whole: Path) -> None:
        self.random, self.whole, self.data = random.Random(seed), whole, whole.read_bytes()

    def write(self, path: Path) -> None:
        """Return one of them."""
        kind = self.whole.name.partition(".")[2]
        ways: list[Callable[[], bytes]] = [lambda: self.bytes_of(self.data)]
        if kind in ("json", "jsonl"):
            ways += [lambda: self.json_of(self.data)] * 3
        elif kind == "toml":
            ways += [self.toml] * 3
        elif kind == "json.gz":
            ways += [
                lambda: gzip.compress(self.json_of(trace_text())),
                lambda: gzip.compress(self.bytes_of(trace_text())),
                self.bomb,
            ]
        elif kind == "slipgraph":
            ways += [self.archive] * 3
        elif kind == "npy":
            ways += [self.header] * 3
        elif kind == "xr":
            ways += [self.pieces] * 3
        elif kind == "db" and self.random.random() < 0.75:
            self.database(path)
            return
        path.write_bytes(self.random.choice(ways)())

    def bytes_of(self, data: bytes) -> bytes:
        """Truncate, flip bits, duplicate or replace."""
        broken = bytearray(data)
        for _ in range(self.random.choice((1, 1, 3, 20))):
            at = self.random.randrange(len(broken) + 1)
            match self.random.randrange(5):
                case 0:
                    del broken[at:]
                case 1 if at < len(broken):
                    broken[at] ^= 1 << self.random.randrange(8)
                case 2:
                    broken[at:at] = broken[at : at + self.random.randrange(200)]
                case 3:
                    del broken[at : at + self.random.randrange(50)]
                case _:
                    broken[at : at + 1] = self.random.choice(
                        (b"\0", b"[" * 5000, b"9" * 400, b"\xff")
                    )
        return bytes(broken)

    def json_of(self, data: bytes) -> bytes:
        """Replace a value somewhere."""
        lines = data.splitlines()
        number = self.random.randrange(len(lines))
        document = (
            json.loads(lines[number])
            if len(lines) > 1 and data[:1] == b"{" and b"\n{" in data
            else json.loads(data)
        )
        places = list(_places(document))
        if not places:
            return data
        for _ in range(self.random.choice((1, 1, 2, 8))):
            holder, key = self.random.choice(places)
            if isinstance(holder, dict) and self.random.random() < 0.2:
                holder.pop(key, None)
            else:
                holder[key] = self.random.choice(_JUNK)
        made = json.dumps(document).encode("utf-8", "surrogatepass")
        return b"\n".join([*lines[:number], made]) if b"\n{" in data else made

    def toml(self) -> bytes:
        """Replace a value somewhere, or remove, duplicate or move a line."""
        lines = self.data.decode().splitlines()
        for _ in range(self.random.choice((1, 1, 2))):
            at = self.random.randrange(len(lines))
            match self.random.randrange(4):
                case 0:
                    del lines[at]
                    lines = lines or [""]
                case 1:
                    lines.insert(self.random.randrange(len(lines) + 1), lines[at])
                case _:
                    values = list(re.finditer(r"(?<== )[^,}\n]+", lines[at]))
                    if values:
                        here = self.random.choice(values)
                        junk = self.random.choice(_TOML_JUNK)
                        lines[at] = lines[at][: here.start()] + junk + lines[at][here.end() :]
        return "\n".join(lines).encode()

    def archive(self) -> bytes:
        """Replace an entry in the zip file."""
        made = io.BytesIO()
        with zipfile.ZipFile(self.whole) as old, zipfile.ZipFile(made, "w") as new:
            names = old.namelist()
            chosen = self.random.choice([*names, *["meta.json"] * 10])
            for name in names:
                data = old.read(name)
                if name == chosen:
                    broken = self.json_of(data) if name == "meta.json" else self.bytes_of(data)
                    if self.random.random() < 0.05:
                        new.writestr(name, bytes(200 << 20), zipfile.ZIP_DEFLATED, 1)
                        continue
                    data = broken
                new.writestr(name, data)
        return made.getvalue()

    def header(self) -> bytes:
        """Change dtype, order or shape of an array."""
        old = self.random.choice((b"<f4", b"False", b"4", b"3", b"shape", b"(4, 3)"))
        new = self.random.choice(
            (b"|O", b"<U3", b"<f8", b"True", b"0", b"-1", b"9" * 12, b"(", b"()", b"None", b"'")
        )
        made = self.data.replace(old, new, 1)
        size = len(made) - len(self.data) + int.from_bytes(self.data[8:10], "little")
        return made[:8] + struct.pack("<H", size) + made[10:]

    def pieces(self) -> bytes:
        """Replace a value in a piece of a log, with the matching checksum."""
        made, at, pieces = bytearray(self.data[:8]), 8, []
        while at < len(self.data):
            tag, size, _ = struct.unpack_from("<4sII", self.data, at)
            pieces.append((tag, self.data[at + 12 : at + 12 + size]))
            at += 12 + size
        chosen = self.random.randrange(len(pieces))
        for number, (tag, content) in enumerate(pieces):
            if number == chosen and tag in (b"HEAD", b"DECL", b"FRAM"):
                content = self.json_of(content)
            elif number == chosen:
                content = self.bytes_of(content)
            made += struct.pack("<4sII", tag, len(content), zlib.crc32(content)) + content
        return bytes(made)

    def bomb(self) -> bytes:
        """Return a small gzip file that expands to very much."""
        if self.random.random() < 0.9:
            return gzip.compress(self.json_of(trace_text()))
        event = json.dumps(json.loads(trace_text())["traceEvents"][0]).encode()
        chunk = self.random.choice((b" ", b"{},", b"[],", b"0", event + b","))
        return gzip.compress(b'{"traceEvents": [' + chunk * ((300 << 20) // len(chunk)), 1)

    def database(self, path: Path) -> None:
        """Replace a value in a column of a table."""
        path.write_bytes(self.data)
        with sqlite3.connect(path) as db:
            tables = [
                n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            table = self.random.choice([n for n in tables if not n.startswith("sqlite_")])
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            column = self.random.choice(columns)
            old = db.execute(f'SELECT "{column}" FROM {table} LIMIT 1').fetchone()
            junk: list[Any] = [
                None, -1, 2**40, 1e308, "", "x", "[]", "{}", "null", b"", b"\0" * 8,
                zlib.compress(b"[" * 5000), zlib.compress(bytes(200 << 20), 1),
            ]  # fmt: skip
            if old and isinstance(old[0], str) and old[0].startswith(("[", "{")):
                junk += [self.json_of(old[0].encode()).decode("utf-8", "replace")] * 20
            elif old and isinstance(old[0], bytes):
                junk += [self.bytes_of(old[0])] * 10
            try:
                db.execute(f'UPDATE {table} SET "{column}" = ?', (self.random.choice(junk),))
            except sqlite3.IntegrityError:
                db.execute(f"DELETE FROM {table}")
        db.close()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _places(document[key])


def verdict(read: Callable[[Path], Any], path: Path) -> str:
    """Return the failure of reading `path` in a separate process; empty if there is none."""
    read_end, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MAX_S)
        result = ""
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with contextlib.suppress(SlipstreamError):
                read(path)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            result = f"took {grown >> 10} MiB" if grown << 10 > _MAX_BYTES else ""
        except BaseException:
            result = traceback.format_exc()[-1500:]
        finally:
            os.write(tell, result.encode("utf-8", "replace"))
            os._exit(0)
    os.close(tell)
    with os.fdopen(read_end, "rb") as pipe:
        result = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return result or (f"took {_MAX_S} s or died: status {status}" if status else "")


def fuzzed(name: str, folder: Path, inputs: range) -> list[str]:
    """Return the damaged inputs of these numbers that gave neither."""
    write, read = FORMATS[name]
    whole, broken = folder / name, folder / f"broken {name}"
    write(whole)
    assert verdict(read, whole) == "", "the valid file can be read"
    found = []
    for number in inputs:
        for file in folder.glob(f"{broken.name}*"):
            file.unlink()
        Breaker(number, whole).write(broken)
        if failure := verdict(read, broken):
            found.append(f"input {number} of {name}: {failure}")
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_damaged_files(name: str, tmp_path: Path) -> None:
    assert fuzzed(name, tmp_path, range(_SAMPLE // len(FORMATS))) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    assert fuzzed(name, tmp_path, range(100, 100 + -(-_INPUTS // len(FORMATS)))) == []
