"""ShardCache against real files: equal to the simulation, and to the origin whatever fails."""

from __future__ import annotations

import errno
import gc
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from slipstream.engines.storage import (
    AccessTrace,
    CachedDataset,
    ShardCache,
    StorageOrigin,
    prove_cache,
    simulate,
    throttled,
)
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """Return a folder of 40 files of 100 bytes."""
    folder = tmp_path / "origin"
    (folder / "train").mkdir(parents=True)
    for number in range(40):
        (folder / "train" / f"shard-{number:03d}").write_bytes(bytes([number]) * 100)
    return folder


def names(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"train/shard-{n:03d}" for n in rng.zipf(1.3, 10 * count) if n < 40][:count]


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "wtinylfu", "learned", "auto"])
def test_hits_are_those_of_the_simulation(tmp_path: Path, origin: Path, policy: str) -> None:
    reads = names(400)
    cache = ShardCache(tmp_path / "fast", 1000, origin, policy=policy)
    for name in reads:
        assert cache.read(name) == (origin / name).read_bytes()
        held = list((tmp_path / "fast").iterdir())
        assert sum(path.stat().st_size for path in held) <= 1000
    trace = AccessTrace.of(reads, [100] * len(reads))
    assert cache.counts.hits == simulate(trace, policy, 1000).sum()
    assert cache.counts.origin_bytes == 100 * (400 - cache.counts.hits)


def test_a_new_cache_uses_what_the_last_one_left(tmp_path: Path, origin: Path) -> None:
    for number in range(4):
        ShardCache(tmp_path / "fast", 1000, origin).read(f"train/shard-{number:03d}")
    again = ShardCache(tmp_path / "fast", 300, origin, policy="lru")
    assert len(list((tmp_path / "fast").iterdir())) == 3
    again.read("train/shard-003")
    assert again.counts.hits == 1
    again.read("train/shard-000")
    assert again.counts.hits == 1


def test_reads_go_to_the_origin_if_the_fast_disk_fails(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ShardCache(tmp_path / "fast", 1000, origin, policy="lru")
    cache.read("train/shard-001")

    def fail(*args: object) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        for _ in range(2):
            assert cache.read("train/shard-002") == bytes([2]) * 100
    assert cache.counts.disk_errors == 2
    next((tmp_path / "fast").iterdir()).unlink()
    assert cache.read("train/shard-001") == bytes([1]) * 100
    cache.read("train/shard-001")
    assert cache.counts.hits == 1


def test_a_killed_process_leaves_a_usable_folder(tmp_path: Path) -> None:
    """Remove what it was writing; use whole files."""
    code = (
        "import itertools, sys\n"
        "from slipstream.engines.storage import ShardCache\n"
        "cache = ShardCache(sys.argv[1], 20_000, lambda n: n.encode() * 500, policy='lru')\n"
        "for n in itertools.count(): cache.read(f'{n % 40:02d}'), print(n, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"60\n" in iter(running.stdout.readline, b"")
        running.kill()
    (tmp_path / ".99.cached.0123abcd").write_bytes(b"9")
    cache = ShardCache(tmp_path, 20_000, lambda name: name.encode() * 500, policy="lru")
    assert all(cache.read(name) == name.encode() * 500 for name in ("01", "99"))
    assert {path.name.partition(".")[2] for path in tmp_path.iterdir()} == {"cached"}
    held = [path for path in tmp_path.iterdir() if path.name != "99.cached"]
    assert all(path.read_bytes() == path.name[:2].encode() * 500 for path in held)


def test_training_continues_when_the_fast_disk_is_full(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing partly written remains, and workers get the right bytes."""

    def fill(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = ShardCache(tmp_path / "fast", 10_000, origin)
    dataset = CachedDataset(names(40), cache, lambda content: content[0])
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context="fork")
    monkeypatch.setattr(Path, "write_bytes", fill)
    got = [int(value) for batch in loader for value in batch]
    assert got == [int(name[-3:]) for name in dataset.names]
    assert list((tmp_path / "fast").iterdir()) == []
    assert (cache.counts.hits, cache.counts.disk_errors > 0) == (0, True)


def test_an_origin_that_fails_is_named_and_the_cache_still_serves(tmp_path: Path) -> None:
    state = {"up": True}

    def fetch(name: str) -> bytes:
        if not state["up"]:
            raise ConnectionError("refused")
        return b"content"

    cache = ShardCache(tmp_path / "fast", 1000, fetch)
    cache.read("a")
    state["up"] = False
    assert cache.read("a") == b"content"
    with pytest.raises(SlipstreamError, match="ConnectionError: refused") as caught:
        cache.read("b")
    assert caught.value.where == "b"


def test_files_that_cannot_be_cached_are_read(tmp_path: Path, origin: Path) -> None:
    """One is larger than the cache, one is empty, one has a name too long for a file."""
    (origin / "large").write_bytes(bytes(5000))
    (origin / "empty").write_bytes(b"")
    cache = ShardCache(tmp_path / "fast", 1000, origin, policy="lru")
    for name, size in (("large", 5000), ("empty", 0), ("large", 5000)):
        assert len(cache.read(name)) == size
    long = ShardCache(tmp_path / "other", 1000, lambda name: b"x")
    assert long.read("a/" * 300) == long.read("a/" * 300) == b"x"
    assert long.counts.hits == 1
    ShardCache(tmp_path / "other", 1000, origin)
    assert list((tmp_path / "other").iterdir()) == []


def test_names_that_are_not_utf8_are_cached(tmp_path: Path) -> None:
    for hits in (0, 1):
        cache = ShardCache(tmp_path, 1000, lambda name: b"x")
        assert cache.read("\udcff") == b"x"
        assert cache.counts.hits == hits


def test_a_file_that_was_replaced_is_another_object(tmp_path: Path) -> None:
    sizes = iter([100, 900, 50])
    cache = ShardCache(tmp_path / "fast", 1000, lambda name: bytes(next(sizes)), policy="lru")
    cache.read("a")
    (tmp_path / "fast" / "a.cached").unlink()
    cache.read("a")
    cache.read("b")
    held = sum(path.stat().st_size for path in (tmp_path / "fast").iterdir())
    assert held <= 1000


def test_paths_and_numbers_are_names_and_contexts(tmp_path: Path, origin: Path) -> None:
    cache = ShardCache(tmp_path / "fast", 1000, origin, policy="lru")
    cache.read("train/shard-001")
    cache.read(Path("train/shard-001"), {"epoch": 1})  # type: ignore[dict-item]
    assert cache.counts.hits == 1
    with pytest.raises(SlipstreamError, match="cannot be read: TypeError"):
        ShardCache(tmp_path / "text", 1000, lambda name: name).read("a")  # type: ignore[arg-type, return-value]


def test_urls_are_read_with_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/shards/a", b"remote")
    cache = ShardCache(tmp_path / "fast", "1MB", "memory://shards")
    assert cache.read("a") == cache.open("a").read() == b"remote"
    with pytest.raises(SlipstreamError, match="fsspec cannot open"):
        ShardCache(tmp_path, 10, "nothing://shards")


def test_a_loader_reads_through_the_cache(tmp_path: Path, origin: Path) -> None:
    cache = ShardCache(tmp_path / "fast", 10_000, origin)
    dataset = CachedDataset(names(30), cache, lambda content: content[0], {"split": "train"})
    for _ in range(2):
        loader = DataLoader(dataset, batch_size=10)
        assert [int(value) for batch in loader for value in batch] == [
            int(name[-3:]) for name in dataset.names
        ]
    assert cache.counts.hit_rate >= 0.5


def test_threads_share_a_cache(tmp_path: Path, origin: Path) -> None:
    cache = ShardCache(tmp_path / "fast", 800, origin)
    wrong: list[str] = []

    def work(seed: int) -> None:
        wrong.extend(
            name for name in names(200, seed) if cache.read(name) != bytes([int(name[-3:])]) * 100
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.counts.reads == 800
    assert sum(path.stat().st_size for path in (tmp_path / "fast").iterdir()) <= 800


def test_workers_read_through_the_process_that_created_the_cache(
    tmp_path: Path, origin: Path
) -> None:
    cache = ShardCache(tmp_path / "fast", 10_000, origin)
    dataset = CachedDataset(names(40), cache, lambda content: content[0])
    for _ in range(2):
        loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context="fork")
        assert [int(value) for batch in loader for value in batch] == [
            int(name[-3:]) for name in dataset.names
        ]
    assert cache.counts.reads == 80
    assert cache.counts.hits >= 40


def test_a_copy_reads_through_the_first(tmp_path: Path, origin: Path) -> None:
    cache = ShardCache(tmp_path / "fast", 1000, origin)
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.read(Path("train/shard-001")) == bytes([1]) * 100
    with copy.open("train/shard-001") as file:
        assert file.read() == bytes([1]) * 100
    assert (cache.counts.reads, cache.counts.hits) == (2, 1)
    with pytest.raises(SlipstreamError, match="cannot be read") as caught:
        copy.read("missing")
    assert caught.value.where == "missing"
    del cache
    gc.collect()
    with pytest.raises(SlipstreamError, match="does not answer"):
        copy.read("train/shard-001")


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="future"):
        ShardCache(tmp_path, 10, tmp_path, policy="belady")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SlipstreamError, match="folder"):
        ShardCache(tmp_path / "file", 10, tmp_path)


def test_a_proof_measures_what_was_predicted() -> None:
    trace = AccessTrace.of(names(60), [100] * 60)
    proof = prove_cache(trace, 500, ("lru", "auto", "lru"), StorageOrigin(1e5, 1e9))
    for outcome in proof.outcomes:
        assert outcome.measured_hit_rate == pytest.approx(outcome.predicted_hit_rate, abs=0.05)
        assert outcome.measured_ns >= outcome.predicted_ns
    assert len(proof.table().rows) == 2


def test_a_proof_refuses_bad_policies_before_it_replays() -> None:
    trace = AccessTrace.of(["a"], [100])
    lines: list[str] = []
    for bad in ("belady", "lruu"):
        with pytest.raises(UsageError, match=bad):
            prove_cache(trace, 500, ("lru", bad), progress=lines.append)
    assert lines == []
    with pytest.raises(InvalidArgumentError, match="max_reads"):
        prove_cache(trace, 500, max_reads=0)


def test_a_throttled_origin_returns_the_content() -> None:
    assert throttled(lambda name: name.encode(), 0.0, 1e9)("abc") == b"abc"
