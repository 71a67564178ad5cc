"""The store returns exactly the stored values, despite failures in between."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import ENVIRONMENT, claim, environment, experiment, prediction, series

from slipstream.errors import StoreError, UnknownNameError
from slipstream.measure import _codec as codec
from slipstream.measure.claims import claims
from slipstream.measure.environment import differences
from slipstream.measure.records import (
    BlockRows,
    Claim,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    Series,
    Sink,
)
from slipstream.measure.store import Store, default_path


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "results.db") as opened:
        yield opened


def _same(a: Experiment, b: Experiment) -> bool:
    """Equal except for the id that the store assigned; arrays bit for bit."""
    plain = [replace(e, series={}, experiment_id="", status="") for e in (a, b)]
    return plain[0] == plain[1] and _columns(a) == _columns(b)


def _columns(e: Experiment) -> dict[object, tuple[bytes, bytes]]:
    return {key: (s.values.tobytes(), s.blocks.tobytes()) for key, s in e.series.items()}


def test_a_stored_experiment_is_equal(store: Store) -> None:
    original = experiment(predictions={"fast": prediction()})
    found = claims(original)
    identity = store.save(original, found)
    loaded = store.load(identity)
    assert _same(loaded, original)
    assert (loaded.experiment_id, loaded.status) == (identity, "complete")
    assert store.claims(identity) == found


_floats = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_floats, st.integers(-(2**31), 2**31 - 1)), max_size=50))
def test_any_column_packs_and_unpacks_bit_for_bit(samples: list[tuple[float, int]]) -> None:
    blocks = sorted(block for _, block in samples)
    # Differences between blocks are 32 bits wide.
    if blocks and blocks[-1] - blocks[0] > 2**31 - 1:
        blocks = [0] * len(blocks)
    column = series([value for value, _ in samples], blocks)
    again = codec.unpack_series(*codec.pack_series(column))
    assert again.values.tobytes() == column.values.tobytes()
    assert again.blocks.tobytes() == column.blocks.tobytes()
    assert (again.values.dtype, again.blocks.dtype) == (np.float64, np.int32)


@given(st.builds(
    claim, ratio=_floats, low=_floats, high=_floats, detectable=_floats,
    further_blocks=st.none() | st.integers(0, 10**9), reason=st.text(), arm=st.text(),
))  # fmt: skip
def test_any_claim_round_trips_exactly(original: Claim) -> None:
    assert repr(codec.from_json(Claim, codec.to_json(original))) == repr(original)


@given(
    st.builds(ExperimentSettings, baseline=st.text(), looks=st.lists(st.integers(1, 9)).map(tuple))
)
def test_any_settings_round_trip(original: ExperimentSettings) -> None:
    assert codec.from_json(ExperimentSettings, codec.to_json(original)) == original


def test_damaged_bytes_are_an_error() -> None:
    n, values, blocks = codec.pack_series(series([1.0, 2.0]))
    with pytest.raises(StoreError, match="damaged"):
        codec.unpack_series(n, values[:-3], blocks)
    with pytest.raises(StoreError, match="damaged"):
        codec.unpack_series(n + 1, values, blocks)
    with pytest.raises(StoreError, match="newer slipstream"):
        codec.from_json(Claim, '{"metric": "wall", "colour": "blue"}')


def _record(store: Store, original: Experiment, blocks: int):
    """Start storing `original` and append its first `blocks` blocks like a runner."""
    recording = store.begin(original)
    for phase in (Phase.WARMUP, Phase.MEASURE):
        for block in range(2 if phase is Phase.WARMUP else blocks):
            samples = {
                key: s.values[s.blocks == block]
                for key, s in original.series.items()
                if key[2] is phase and block in s.blocks
            }
            events = [e for e in original.events if e.block == block and phase is Phase.MEASURE]
            recording.append(block, samples, events)
    return recording


def test_appended_blocks_are_stored_immediately(store: Store) -> None:
    original = experiment(blocks=20)
    recording = _record(store, original, 7)
    running = store.load(recording.experiment_id)
    assert running.status == "running"
    assert store.claims(recording.experiment_id) == ()
    for key, column in running.series.items():
        whole = original.series[key]
        assert np.array_equal(column.values, whole.values[whole.blocks < 7])
    assert [s.blocks for s in store.list()] == [9]


def test_an_appended_recording_equals_one_stored_whole(store: Store) -> None:
    original = experiment(blocks=20)
    recording = _record(store, original, 20)
    recording.finish(original, claims(original))
    loaded = store.load(recording.experiment_id)
    assert _columns(loaded) == _columns(original)
    assert sorted(map(repr, loaded.events)) == sorted(map(repr, original.events))
    assert store.recompute(recording.experiment_id) == claims(original)
    # Incremental appends leave no empty pages in the file.
    with contextlib.closing(sqlite3.connect(store.path)) as file:
        assert file.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_measured_values_are_never_replaced(store: Store) -> None:
    original = experiment(blocks=20)
    recording = _record(store, original, 20)
    key = ("base", "cpu", Phase.MEASURE)
    better = original.series[key].values.copy()
    better[3] *= 0.5
    tampered = replace(original, series={**original.series, key: series(better)})
    with pytest.raises(StoreError, match="samples other than") as caught:
        recording.finish(tampered, ())
    assert caught.value.where == "arm base, metric cpu, phase measure"
    assert _columns(store.load(recording.experiment_id)) == _columns(original)


def test_blocks_missing_at_the_end_are_kept(store: Store) -> None:
    original = experiment(blocks=5)
    recording = _record(store, original, 5)
    recording.event(Event(2, "failed", {"arm": "fast"}))
    recording.finish(replace(original, series={}, events=()), ())
    loaded = store.load("last")
    assert _columns(loaded) == _columns(original)
    assert Event(2, "failed", {"arm": "fast"}) in loaded.events


def test_the_runner_s_sink(store: Store) -> None:
    original = experiment(blocks=30)
    sink: Sink = store.sink()
    sink.begin(original)
    for block in range(30):
        values = {
            (arm, metric): float(s.values[s.blocks == block][0])
            for (arm, metric, phase), s in original.series.items()
            if phase is Phase.MEASURE and block in s.blocks
        }
        events = tuple(e for e in original.events if e.block == block)
        sink.block(BlockRows(Phase.MEASURE, block, values, events))
    sink.finish(original)
    assert store.claims("last") == claims(original)
    assert _columns(store.load("last")) == _columns(original)


_WRITER = """
    import sys
    from made_up import experiment
    from slipstream.measure.records import Event, Phase
    from slipstream.measure.store import Store
    with Store(sys.argv[1]) as store:
        recording = store.begin(experiment(blocks=5))
        print(recording.experiment_id, flush=True)
        for block in range(int(sys.argv[2])):
            value = float(block)
            samples = {("base", m, Phase.MEASURE): value for m in ("wall", "cpu")}
            recording.append(block, samples, [Event(block, "gate", {"state": "green"})])
            print(block, flush=True)
        recording.finish(store.load(recording.experiment_id), ())
    """


def _writer(path: Path, blocks: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WRITER), str(path), str(blocks)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )


def test_kill_minus_9_loses_at_most_the_running_block_and_it_resumes(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    writer = _writer(path, 1_000_000)
    assert writer.stdout is not None
    identity = writer.stdout.readline().strip()
    while int(writer.stdout.readline()) < 150:
        pass
    with Store(path) as store:
        assert store.load(identity).status == "running"
        with pytest.raises(StoreError, match=rf"{identity}.*\brunning\b"):
            store.resume(identity)
    writer.send_signal(signal.SIGKILL)
    reported = [int(line) for line in writer.communicate()[0].split()]
    durable = max([150, *reported]) + 1

    with Store(path) as store:
        cut = store.load(identity)
        assert cut.status == "interrupted"
        columns = {key: s.values.tolist() for key, s in cut.series.items()}
        n_stored = len(columns["base", "wall", Phase.MEASURE])
        # A block is durable before it is reported; one more may have been written and not reported.
        assert n_stored in (durable, durable + 1)
        assert set(map(tuple, columns.values())) == {tuple(map(float, range(n_stored)))}
        assert len(cut.events) == n_stored

        recording = store.resume(identity)
        recording.append(n_stored, {("base", "wall", Phase.MEASURE): 1.5})
        recording.finish(store.load(identity), ())
        whole = store.load(identity)
        assert whole.status == "complete"
        assert whole.series["base", "wall", Phase.MEASURE].blocks.tolist() == [*range(n_stored + 1)]
        with pytest.raises(StoreError, match="is complete"):
            store.resume(identity)


def test_two_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    writers = [_writer(path, 60) for _ in range(2)]
    outputs = [writer.communicate(timeout=600)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    with Store(path, read_only=True) as store:
        assert {s.experiment_id for s in store.list()} == {lines[0] for lines in outputs}
        for summary in store.list():
            loaded = store.load(summary.experiment_id)
            assert (loaded.status, summary.blocks) == ("complete", 60)
            assert loaded.series["base", "cpu", Phase.MEASURE].values.tolist() == [*range(60)]


def test_a_claim_that_no_longer_follows_from_its_samples_is_named(store: Store) -> None:
    original = experiment()
    found = claims(original)
    identity = store.save(original, found)
    assert store.recompute(identity) == found
    first = found[0]
    nudged = replace(first, low=float(np.nextafter(first.low, 0)))
    other = store.save(original, (nudged, *found[1:]))
    with pytest.raises(
        StoreError, match=rf"\blow\b.*\b{first.metric}\b.*\b{first.arm}\b"
    ) as caught:
        store.recompute(other)
    assert repr(first.low) in str(caught.value)
    with pytest.raises(StoreError, match="0 claims are stored"):
        store.recompute(store.save(original, ()))


def test_one_changed_sample_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    original = experiment(blocks=11)
    with Store(path) as store:
        identity = store.save(original, claims(original))
    key = ("fast", "cpu", Phase.MEASURE)
    values = original.series[key].values
    # The middle of the ratios: the median moves.
    ratios = values / original.series["base", "cpu", Phase.MEASURE].values
    values[np.argsort(ratios)[5]] *= 1.0001
    _, packed, _ = codec.pack_series(Series(values, original.series[key].blocks))
    raw = sqlite3.connect(path)
    with raw:
        raw.execute(
            'UPDATE sample_blob SET "values" = ? WHERE arm = ? AND metric = ? AND phase = ?',
            (packed, *key),
        )
    raw.close()
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="ratio of the"):
        store.recompute(identity)


def test_samples_cost_at_most_16_bytes_and_grow_linearly(tmp_path: Path) -> None:
    sizes, counts = [], []
    for arms in (2, 8, 32):
        path = tmp_path / f"{arms}.db"
        with Store(path) as store:
            for _ in range(2):  # the first experiment pays for the tables
                before, rng = path.stat().st_size, np.random.default_rng(1)
                recording, count = store.begin(experiment(blocks=1)), 0
                for block in range(200):
                    samples = {
                        (f"arm{a}", m, Phase.MEASURE): rng.lognormal(16, 0.1)
                        for a in range(arms)
                        for m in ("wall", "cpu")
                    }
                    gate = Event(block, "gate", {"state": "green", "load": rng.random()})
                    recording.append(block, samples, [gate])
                    count += len(samples)
                recording.finish(store.load(recording.experiment_id), ())
                checkpoint = sqlite3.connect(path)
                checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                checkpoint.close()
                sizes.append(path.stat().st_size - before)
                counts.append(count)
    small, large = sizes[1] / counts[1], sizes[5] / counts[5]
    # 800 samples also pay for arms, settings and pages of 4 KiB, which 12,800 hardly notice.
    assert large <= 16
    assert sizes[5] - sizes[3] <= 16 * (counts[5] - counts[3])
    assert small <= 40


def test_momentary_facts_belong_to_the_experiment(store: Store) -> None:
    ids = [store.save(experiment(environment=environment(now_load=n)), ()) for n in (1, 2)]
    loaded = [store.load(identity).environment for identity in ids]
    assert [e.facts["now.load"] for e in loaded] == [1, 2]
    assert loaded[0].env_id == loaded[1].env_id == ENVIRONMENT.env_id
    assert len(store.environments()) == 1
    assert differences(store.environment(ENVIRONMENT.env_id), ENVIRONMENT) == ()


def test_experiments_are_found_by_a_prefix_of_their_id(store: Store) -> None:
    first, second = (store.save(experiment(title=t), ()) for t in ("one", "two"))
    assert store.load("last").title == "two"
    assert store.load(first[:6]).title == "one"
    assert [s.title for s in store.list()] == ["one", "two"]
    for wrong in ("", "no such", second + "0"):
        with pytest.raises(UnknownNameError):
            store.load(wrong)


def test_the_outline_is_the_experiment_without_samples(store: Store) -> None:
    original = experiment()
    identity = store.save(original, ())
    assert _same(store.outline(identity), replace(original, series={}))


def test_a_prediction_is_stored_once(store: Store) -> None:
    for _ in range(2):
        store.record_prediction(prediction())
    store.save(experiment(predictions={"fast": prediction()}), ())
    store.record_prediction(prediction(ratio=0.6))
    assert store.predictions() == (prediction(), prediction(ratio=0.6))


def test_reading_creates_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store(tmp_path / "r.db", read_only=True)
    assert caught.value.where == str(tmp_path / "r.db")
    assert "slipstream demo" in (caught.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_refuses_to_write(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    Store(path).close()
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="readonly"):
        store.save(experiment(), ())


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    Store(path).close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(StoreError, match="schema version 99") as caught:
        Store(path)
    assert "upgrade slipstream" in (caught.value.remedy or "")


def test_an_interrupted_experiment_of_an_older_store_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    original = experiment(blocks=20)
    with Store(path) as store:
        name = _record(store, original, 7).experiment_id
        before = _columns(store.load(name))
    raw = sqlite3.connect(path)
    raw.executescript(
        "INSERT INTO block SELECT experiment, sequence, block, at_ms FROM chunk;"
        "ALTER TABLE chunk DROP COLUMN block; ALTER TABLE chunk DROP COLUMN at_ms;"
        "PRAGMA user_version = 1;"
    )
    raw.close()
    with Store(path) as store:
        assert _columns(store.load(name)) == before
        assert [s.blocks for s in store.list()] == [9]


def test_a_full_disk_keeps_the_earlier_blocks(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    with Store(path) as store:
        recording = store.begin(experiment(blocks=1))
        store._database._connection.execute("PRAGMA max_page_count = 40")
        key, written = ("base", "wall", Phase.MEASURE), 0

        def write() -> None:
            nonlocal written
            for block in range(1000):
                recording.append(block, {key: np.random.default_rng(block).random(100)})
                written += 1

        with pytest.raises(StoreError, match="full") as caught:
            write()
        assert "disk space" in (caught.value.remedy or "")
        assert written > 3
    with Store(path, read_only=True) as store:
        assert store.load("last").series[key].values.size == 100 * written


def test_a_really_full_disk_keeps_the_earlier_blocks(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with Store(disk / "r.db") as store:
            recording = store.begin(experiment(blocks=1))

            def write() -> None:
                for block in range(10_000):
                    recording.append(block, {("base", "wall", Phase.MEASURE): [float(block)] * 50})

            with pytest.raises(StoreError) as caught:
                write()
            assert "disk space" in (caught.value.remedy or "")
        with Store(disk / "r.db", read_only=True) as store:
            assert store.list()[0].blocks > 10
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_location_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_STORE", raising=False)
    assert default_path() == Path(".slipstream/results.db")
    monkeypatch.setenv("SLIPSTREAM_STORE", "elsewhere.db")
    assert default_path() == Path("elsewhere.db")


@pytest.mark.parametrize("facts", ["[]", "null", "7", '"text"', "{"])
def test_an_environment_without_facts_is_an_error_that_names_the_store(
    tmp_path: Path, facts: str
) -> None:
    path = tmp_path / "results.db"
    with Store(path) as store:
        store.save(experiment(), [])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE environment SET facts = ?", (facts,))
    db.close()
    with Store(path) as store, pytest.raises(StoreError) as refusal:
        store.environments()
    assert refusal.value.where == str(path)
