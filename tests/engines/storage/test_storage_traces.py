"""Import, recording and simulation of storage traces."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data import ORACLE_GENERAL
from slipstream.data.kinds import Accesses
from slipstream.engines.storage import (
    AccessTrace,
    StorageOrigin,
    TraceError,
    import_trace,
    importing,
    predict_cache,
    profile_storage,
    record_trace,
)
from slipstream.engines.storage.simulating import capacity_of
from slipstream.engines.storage.tokens import key_tokens, tokens_of
from slipstream.engines.storage.traces import OPS
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError

SPAN = {
    "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174",
    "parentSpanId": "EEE19B7EC3C1B173", "name": "read", "startTimeUnixNano": "1544712660000000007",
    "attributes": [
        {"key": "file.path", "value": {"stringValue": "/data/a.tar"}},
        {"key": "file.size", "value": {"intValue": "9007199254740993"}},
    ],
}  # fmt: skip
PARENT = {"traceId": SPAN["traceId"], "spanId": "eee19b7ec3c1b173", "name": "epoch",
          "startTimeUnixNano": "1"}  # fmt: skip
JAEGER = {"traceID": "1", "spanID": "2", "operationName": "write shard", "startTime": 3,
          "processID": "p1", "tags": [{"key": "file.path", "value": "/b"},
                                      {"key": "size", "value": 7}]}  # fmt: skip


def otlp(*spans: Any) -> dict[str, Any]:
    service = {"key": "service.name", "value": {"stringValue": "trainer"}}
    resource = {"attributes": [service]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_otlp_json_has_hexadecimal_ids_and_integers_as_strings(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path / "spans.json", otlp(SPAN, PARENT, SPAN)))
    assert trace.names == ("/data/a.tar",)
    assert trace.sizes.tolist() == [9007199254740993]
    assert trace.time_ns.tolist() == [1544712660000000007]
    assert trace.context_texts == ((("service.name", "trainer"), ("span", "epoch/read")),)
    assert trace.notes == {"duplicate spans skipped": 1}


def field(number: int, value: bytes | int | str | float) -> bytes:
    """Encode a field in protobuf's wire format: a varint, a double, or bytes with their length."""
    if isinstance(value, float):
        return bytes([number << 3 | 1]) + struct.pack("<d", value)
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value % (1 << 64))
    content = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    low = bytes([value & 127])
    return low if value < 128 else bytes([low[0] | 128]) + varint(value >> 7)


def pair(key: str, value: bytes) -> bytes:
    return field(1, key) + field(2, value)


def proto_span(source: dict[str, Any], **changes: bytes) -> bytes:
    """Encode a span of OTLP JSON; `changes` replace its ids."""
    ids = {key: bytes.fromhex(source.get(key, "")) for key in ("traceId", "spanId", "parentSpanId")}
    content = b"".join(
        field(at, each) for at, each in zip((1, 2, 4), (ids | changes).values(), strict=True)
    )
    content += (
        field(5, source["name"]) + b"\x39" + struct.pack("<Q", int(source["startTimeUnixNano"]))
    )
    for each in source.get("attributes", ()):
        ((kind, value),) = each["value"].items()
        any_value = field(1, value) if kind == "stringValue" else field(3, int(value))
        content += field(9, pair(each["key"], any_value))
    return content


def proto(*spans: bytes) -> bytes:
    """Encode the message of `otlp`; the resource follows the spans, as it may."""
    scope = field(2, b"".join(field(2, span) for span in spans))
    resource = field(1, field(1, pair("service.name", field(1, "trainer"))))
    return field(1, scope + resource)


def proto_trace(path: Path, content: bytes, skip_bad: bool = False) -> AccessTrace:
    path.write_bytes(content)
    return import_trace(path, skip_bad=skip_bad)


def columns(trace: AccessTrace) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in vars(trace).items()}


def test_otlp_protobuf_equals_json(tmp_path: Path) -> None:
    other = SPAN | {"spanId": "00" * 7 + "01", "parentSpanId": SPAN["spanId"], "name": "create b",
                    "startTimeUnixNano": "5"}  # fmt: skip
    loop = SPAN | {"spanId": "00" * 7 + "02", "parentSpanId": "00" * 7 + "02"}
    sources = SPAN, PARENT, SPAN, other, loop
    expected = columns(import_trace(write(tmp_path / "spans.json", otlp(*sources))))
    whole = proto(*map(proto_span, sources))
    assert columns(proto_trace(tmp_path / "spans.pb", whole)) == expected
    assert expected["notes"] == {"duplicate spans skipped": 1}
    # The collector's file exporter, one message per span.
    framed = (proto(proto_span(source)) for source in sources)
    framed_content = b"".join(struct.pack(">I", len(each)) + each for each in framed)
    assert columns(proto_trace(tmp_path / "framed.pb", framed_content)) == expected


def test_otlp_protobuf_has_values_of_every_type(tmp_path: Path) -> None:
    values = {
        "a": (field(3, -7), "-7"), "b": (field(2, 1), "True"), "c": (field(4, 0.5), "0.5"),
        "d": (b"", ""), "e": (field(7, b"\xff"), "\\xff"),
        "f": (field(5, field(1, field(1, "x"))), "x"),
    }  # fmt: skip
    attributes = b"".join(field(9, pair(key, value)) for key, (value, _) in values.items())
    trace = proto_trace(tmp_path / "t.pb", proto(proto_span(SPAN) + attributes))
    context = dict(trace.context_texts[0])
    assert {key: context[key].strip("\n\x01\x03") for key in values} == {
        key: text for key, (_, text) in values.items()
    }


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (proto_span(SPAN, traceId=b"1"), "trace id does not have 16 bytes"),
        (proto_span(SPAN, parentSpanId=b"1"), "its parent does not have 8 bytes"),
        (proto_span(SPAN | {"startTimeUnixNano": str(1 << 63)}), "2\\^63 ns"),
        (proto_span(SPAN) + field(9, pair("size", field(3, 1 << 57))), "64 PiB"),
        (proto_span(SPAN) + field(9, pair("size", field(1, "7 MB"))), "64 PiB"),
        (proto_span(SPAN) + field(9, pair("job", b"\x21\0")), "cut off"),
        (proto_span(SPAN) + b"\x07", "malformed"),
        (proto_span(SPAN) + b"\x80" * 11, "malformed"),
    ],
)
def test_a_bad_span_names_its_byte_or_is_counted(tmp_path: Path, changed: bytes, what: str) -> None:
    fine = proto_span(PARENT), proto_span(SPAN | {"spanId": "00" * 8})
    content = proto(fine[0], changed, fine[1])
    with pytest.raises(TraceError, match=what) as caught:
        proto_trace(tmp_path / "t.pb", content)
    begin = content.index(changed)
    assert begin <= int(caught.value.where.rpartition(" ")[2]) <= begin + len(changed)
    trace = proto_trace(tmp_path / "t.pb", content, skip_bad=True)
    assert (len(trace), trace.notes) == (1, {"bad entries skipped": 1})


def test_a_protobuf_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    spans = [proto_span(SPAN | {"spanId": f"{n:016x}"}) for n in range(9)]
    content = proto(*spans)
    for length in (5, content.index(spans[4]) - 1, content.index(spans[4]) + 7, len(content) - 1):
        with pytest.raises(TraceError, match="cut off"):
            proto_trace(tmp_path / "t.pb", content[:length])
        trace = proto_trace(tmp_path / "t.pb", content[:length], skip_bad=True)
        assert len(trace) == sum(span in content[:length] for span in spans)
        assert trace.notes == {"bad entries skipped": 1}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_protobuf_never_crashes(data: st.DataObject) -> None:
    content = bytearray(proto(proto_span(SPAN), proto_span(PARENT)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile(suffix=".pb") as file:
        for skip_bad in (True, False):
            with contextlib.suppress(TraceError):
                assert len(proto_trace(Path(file.name), bytes(content), skip_bad)) <= 2


def test_jaeger_json(tmp_path: Path) -> None:
    document = {"data": [{"spans": [JAEGER], "processes": {"p1": {"serviceName": "etl"}}}]}
    trace = import_trace(write(tmp_path / "jaeger.json", document))
    assert (trace.names, trace.sizes.tolist(), trace.time_ns.tolist()) == (("/b",), [7], [3000])
    assert OPS[trace.ops[0]] == "write"
    assert dict(trace.context_texts[0])["service.name"] == "etl"


CSV = "time,object,size,op,job\n0.5,a,10,read,x\n0.2,b,20,write,y\n"


def test_csv_keeps_the_order_and_counts_clock_jumps(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path / "t.csv", CSV))
    assert trace.names == ("a", "b")
    assert trace.time_ns.tolist() == [500_000_000, 500_000_000]
    assert trace.notes == {"clock jumps": 1}
    assert trace.context_texts == ((("job", "x"),), (("job", "y"),))


@pytest.mark.parametrize(
    "row",
    [
        "0.1,a,-5,read,x",
        "0.1,a,99999999999999999999,read,x",
        "1e30,a,5,read,x",
        "0.1,a,5,peek,x",
        "0.1,a",
        "soon,a,5,read,x",
    ],
)
def test_a_bad_row_names_its_line_or_is_counted(tmp_path: Path, row: str) -> None:
    path = write(tmp_path / "t.csv", CSV + row + "\n")
    with pytest.raises(TraceError) as caught:
        import_trace(path)
    assert caught.value.where == f"{path}, line 4"
    trace = import_trace(path, skip_bad=True)
    assert len(trace) == 2
    assert trace.notes["bad entries skipped"] == 1


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("t.json", json.dumps(otlp(SPAN))[:-9], "not complete JSON"),
        ("t.json", otlp(SPAN | {"spanId": "zz"}), "malformed"),
        ("t.json", otlp(SPAN | {"spanId": "ab"}), "hexadecimal digits"),
        ("t.json", {"spans": []}, "neither resourceSpans"),
        ("t.json", {"resourceSpans": [1]}, "message is malformed"),
        ("t.json", {"data": [{"spans": [JAEGER, {}]}]}, "span 2"),
        ("t.json", {"data": [{"spans": [JAEGER | {"startTime": float("inf")}]}]}, "OverflowError"),
        ("t.json", "[" * 100_000, "not complete JSON"),
        ("t.csv", "x,y\n1,2\n", "no column for the object"),
        ("t.csv", "", "no column for the object"),
        ("t.csv", 'object,size\n"a,1\n' + "b,1\n" * 50_000, "the row is malformed"),
        ("t.npz", "not a zip", "NumPy"),
        ("t.oracleGeneral", "half a record", "13 of 24 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: Any, what: str) -> None:
    with pytest.raises(TraceError, match=what):
        import_trace(write(tmp_path / name, content))


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV, encoding="utf-8-sig")
    assert import_trace(tmp_path / "t.csv").notes == {"clock jumps": 1}


def test_public_traces_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.array([7, 9, 7], np.uint64)
    found = Accesses("cache_traces", "w106", keys, None, np.array([5, 5, 8]))
    monkeypatch.setattr(importing, "get", lambda *args, **options: found)
    trace = import_trace("cache_traces:w106")
    assert (trace.objects.tolist(), trace.time_ns.tolist()) == ([0, 1, 0], [0, 1, 2])


def test_unknown_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown"):
        import_trace("trace.txt")
    with pytest.raises(TraceError, match="no file"):
        import_trace(str(tmp_path / "missing.csv"))


def test_oracle_general(tmp_path: Path) -> None:
    records = np.array([(1, 9, 10, 2), (2, 7, 20, -1), (3, 9, 10, -1)], ORACLE_GENERAL)
    records.tofile(tmp_path / "t.oracleGeneral")
    trace = import_trace(str(tmp_path / "t.oracleGeneral"))
    assert trace.objects.tolist() == [0, 1, 0]
    assert trace.sizes.tolist() == [10, 20, 10]


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    trace = import_trace(write(tmp_path / "t.csv", CSV))
    trace.save(tmp_path / "t.npz")
    again = AccessTrace.load(tmp_path / "t.npz")
    assert vars(again).keys() == vars(trace).keys()
    for name, value in vars(trace).items():
        np.testing.assert_array_equal(getattr(again, name), value)


def test_tokens_leave_out_what_identifies_a_request() -> None:
    text = "/data/trainA/shard-00012.tar"
    assert tokens_of(text) == ("data", "train", "a", "shard", "<num:5>", "tar")
    assert tokens_of("tmp-3f2504e0-4f89-11d3-9a0c-0305e82c3301") == ("tmp", "<hash>")
    assert tokens_of("HTTPServer2") == ("http", "server", "<num:1>")
    assert key_tokens((("span_id", "12"), ("job", "a b"))) == (("job", "a b"),)


def epochs(count: int = 12) -> AccessTrace:
    """Return shuffled epochs of one job's 100 shards, each followed by a checkpoint."""
    rng = np.random.default_rng(0)
    names = []
    for epoch in range(count):
        names += [f"/train/shard-{item:04d}.tar" for item in rng.permutation(100)]
        names.append(f"/checkpoint-{epoch:04d}.pt")
    return AccessTrace.of(names, [400 if "check" in name else 100 for name in names])


def test_prediction_of_epochs() -> None:
    trace = epochs()
    origin = StorageOrigin(latency_ns=1e6, bytes_per_s=1e6, price_per_gb=2.0)
    found = predict_cache(trace, "20%", ("lru", "learned", "belady"), origin)
    outcome = {item.policy: item for item in found.outcomes}
    assert outcome["lru"].hit_rate < outcome["learned"].hit_rate
    lru = outcome["lru"]
    misses = round((1 - lru.hit_rate) * len(trace))
    assert lru.stall_ns == pytest.approx(misses * 1e6 + lru.origin_bytes * 1e3)
    assert lru.stall_per_epoch_ns == pytest.approx(lru.stall_ns / 12)
    assert lru.cost == pytest.approx(lru.origin_bytes * 2e-9)
    assert found.text_gain is not None
    json.dumps(found.table().to_markdown())


def test_profile_recognises_epochs() -> None:
    found = profile_storage(epochs())
    assert [(group.objects, group.epochs) for group in found.epochs] == [(100, 12)]
    assert found.objects == 112
    assert found.once == pytest.approx(12 / 112)
    assert list(found.information) == ["object"]
    for curve in found.curve.values():
        assert min(curve.values()) >= 112 / len(epochs())


def test_profile_reports_that_contexts_do_not_matter() -> None:
    """A key with many values that are unrelated to the requests explains nothing."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(300)]
    trace = AccessTrace.of(
        ["x"] * 3000, [1] * 3000, contexts=[{"job": str(word)} for word in rng.choice(words, 3000)]
    )
    order = rng.permutation(3000) % 50
    mixed = dataclasses.replace(trace, objects=order.astype(np.int32), names=())
    found = profile_storage(mixed)
    assert found.information["job"] < 0.01
    assert "no key explains it" in found.tables()[1].to_markdown()


def test_a_trace_without_contexts_does_not_judge_text() -> None:
    trace = AccessTrace.checked(np.arange(18, dtype=np.int32) % 2, [1] * 18)
    found = predict_cache(trace, 1, ("lru", "learned"))
    assert found.text_gain is None


def test_bad_requests_are_refused() -> None:
    trace = epochs(1)
    for size in ("0%", "101%", "x%", "12 parsecs"):
        with pytest.raises(InvalidArgumentError, match="capacity: "):
            capacity_of(trace, size)
    with pytest.raises(InvalidArgumentError, match="no reads"):
        predict_cache(AccessTrace.of(["a"], [1], ops=[OPS.index("create")]))
    with pytest.raises(InvalidArgumentError, match="negative"):
        AccessTrace.of(["a"], [-1])
    for values in ((-1.0,), (0.0, 0.0), (0.0, 1.0, float("nan"))):
        with pytest.raises(InvalidArgumentError, match="origin"):
            StorageOrigin(*values)
    with pytest.raises(InvalidArgumentError, match="shape"):
        AccessTrace.of(["a"], [1, 2])
    for bad in (["x"], [float("nan")], np.array([np.nan]), [1 << 70], None):
        with pytest.raises(InvalidArgumentError, match="sizes: is not of integers"):
            AccessTrace.of(["a"], bad)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="cannot be written"):
        trace.save(Path("/proc/run.npz"))


PROGRAM = """
import os, sys
for name in ("a", "b", "a"):
    open(name + ".bin", "rb").read()
with open("out\\n.bin", "wb") as file:
    file.write(b"x")
os.remove("gone.bin")
if os.fork() == 0:
    open("b.bin", "rb").read()
    os._exit(0)
os.wait()
sys.exit(int(sys.argv[1]))
"""


def test_recording_follows_forks_and_keeps_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 3), ("b", 5), ("gone", 7)):
        Path(f"{name}.bin").write_bytes(bytes(size))
    write(Path("program.txt"), PROGRAM)
    trace, status = record_trace([sys.executable, "program.txt", "3"])
    names = [Path(trace.names[item]).name for item in trace.objects]
    ops = [OPS[op] for op in trace.ops]
    seen = [each for each in zip(names, ops, trace.sizes.tolist(), strict=True) if "bin" in each[0]]
    assert seen == [
        ("a.bin", "read", 3), ("b.bin", "read", 5), ("a.bin", "read", 3),
        ("out\n.bin", "create", 1), ("gone.bin", "delete", 0), ("b.bin", "read", 5),
    ]  # fmt: skip
    assert status == 3
    assert trace.notes == {}
    assert "program.txt 3" in dict(trace.context_texts[trace.contexts[-1]])["process"]


THREADS = """
import mmap, sys, threading
sys.setswitchinterval(1e-6)
def work():
    for number in range(500):
        open(f"{number % 9}.bin", "rb").close()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with open("0.bin", "rb") as file:
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
"""


def test_recording_loses_nothing_of_threads_and_counts_memory_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(9):
        Path(f"{number}.bin").write_bytes(b"x")
    trace, _ = record_trace([sys.executable, "-c", THREADS])
    assert sum(trace.names[item].endswith(".bin") for item in trace.objects) == 4001
    assert trace.notes == {"memory maps, whose reads are not recorded": 1}


_SIGNALS = """
import signal
count = 0
def read(number, frame):
    global count
    count += 1
    open("b.bin", "rb").close()
signal.signal(signal.SIGALRM, read)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 7e-4)
for _ in range(60_000):
    open("a.bin", "rb").close()
signal.setitimer(signal.ITIMER_REAL, 0)
open(f"{count}.txt", "w").close()
"""


def test_recording_loses_nothing_of_signal_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    trace, _ = record_trace([sys.executable, "-c", _SIGNALS])
    (count,) = tmp_path.glob("*.txt")
    names = [Path(trace.names[item]).name for item in trace.objects]
    assert names.count("a.bin") == 60_000
    assert names.count("b.bin") == int(count.stem)
    assert trace.notes == {}


def test_recording_refuses_what_it_cannot_see() -> None:
    with pytest.raises(UsageError, match="empty"):
        record_trace([])
    with pytest.raises(UsageError, match="cannot be run"):
        record_trace(["no-such-program-here"])
    with pytest.raises(SlipstreamError, match="no data files"):
        record_trace(["true"])


_INTERRUPTED = """
import sys, time
open("data.bin", "rb").close()
open("ready", "w").close()
time.sleep(600)
"""


def test_an_interrupt_gives_the_trace_until_then(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(10))
    (tmp_path / "program.txt").write_text(_INTERRUPTED)
    record = [sys.executable, "-m", "slipstream", "storage", "record", "-o", "run.npz", "--"]
    with subprocess.Popen(
        [*record, sys.executable, "program.txt"], cwd=tmp_path, start_new_session=True
    ) as running:
        while not (tmp_path / "ready").exists():
            assert running.poll() is None
            time.sleep(0.05)
        # As Ctrl-C does, to both.
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait() == 1
    assert any(name.endswith("data.bin") for name in AccessTrace.load(tmp_path / "run.npz").names)
