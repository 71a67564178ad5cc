"""Data sets of the benches: valid files are read exactly, and damaged ones are rejected."""

from __future__ import annotations

import contextlib
import io
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from slipstream.data import CorruptDataError, MissingDataError
from slipstream_bench import datasets


def _tar(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


def _adjacency() -> bytes:
    # Two users, three items: user 0 took items 0 and 2, user 1 item 1.
    pairs = scipy.sparse.csr_matrix(np.array([[1, 0, 1], [0, 1, 0]], dtype=np.float32))
    target = io.BytesIO()
    scipy.sparse.save_npz(target, scipy.sparse.bmat([[None, pairs], [pairs.T, None]], "csr"))
    return target.getvalue()


SMALL: dict[str, dict[str, bytes]] = {
    "newsgroups": {
        "newsgroups/20newsgroups.tar.xz": _tar(
            {"./n-train/b/2": b"caf\xe9", "./n-train/a/1": b"x", "./n-test/a/3": b"y"}
        )
    },
    "movielens_100k": {"recsys/ml-100k.inter": b"u\ti\tr\tt\n196\t242\t3\t881250949\n"},
    "gowalla": {"recsys/gowalla_s_adj_mat.npz": _adjacency(),
                "recsys/gowalla_test.txt": b"0 1\n1 0 2\n"},
    "mlperf_v07": {
        "mlperf_v07/mlperf_v07_google_runs.txt": b"('s', 'b') n 5 min 1.0 med 2.0 max 3.0 "
        b"olympic-mean 2.1 s (0.0 min) gbs 8 evals [1, 1]\n",
        "mlperf_v07/mlperf_v07_google_steps.txt": b"('s', 'b') {'run_s': 1.5, 'blocks': 7, "
        b"'med_block_ms': 3, 'epochs_per_block': 1, 'first_block_ms': 4, 'train_s': 1.2, "
        b"'gbs': 8, 'train_samples': 9}\n",
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    for name in SMALL:
        _write(tmp_path, name)
    return tmp_path


def _write(root: Path, name: str) -> None:
    for path, content in SMALL[name].items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(content)


def test_values_equal_those_of_the_files(folder: Path) -> None:
    posts = datasets.newsgroups()
    assert posts.train == ("x", "caf\u00e9")
    assert posts.train_labels.tolist() == [0, 1]
    gowalla = datasets.gowalla()
    assert list(zip(gowalla.users, gowalla.items, strict=True)) == [(0, 0), (0, 2), (1, 1)]
    assert (gowalla.user_count, gowalla.item_count) == (2, 3)
    assert datasets.mlperf_v07().steps[0].step_ms is None
    ratings = datasets.movielens_100k()
    assert (ratings.ratings.tolist(), ratings.user_ids.tolist()) == ([3.0], [196])


@pytest.mark.parametrize("name", SMALL)
def test_damaged_files_raise_no_other_error(name: str, folder: Path) -> None:
    """Truncated, with bytes flipped, or empty."""
    generator = random.Random(name)
    for path, content in SMALL[name].items():
        for kind in ("cut", "flip", "empty") * 8:
            _write(folder, name)
            broken = bytearray(content)
            if kind == "cut":
                del broken[generator.randrange(len(broken)) :]
            elif kind == "flip":
                for _ in range(4):
                    broken[generator.randrange(len(broken))] = generator.randrange(256)
            else:
                broken.clear()
            (folder / path).write_bytes(broken)
            with contextlib.suppress(CorruptDataError):
                getattr(datasets, name)()


def test_missing_files_are_reported(folder: Path) -> None:
    assert datasets.why_absent("gowalla") is None
    (folder / "recsys/gowalla_test.txt").unlink()
    assert isinstance(datasets.why_absent("gowalla"), MissingDataError)
    assert datasets.why_absent("python_topics") is None


def test_nothing_is_unpickled(folder: Path) -> None:
    target = io.BytesIO()
    np.savez(target, indptr=np.array([object()]), indices=1, shape=1, format=1)
    (folder / "recsys/gowalla_s_adj_mat.npz").write_bytes(target.getvalue())
    with pytest.raises(CorruptDataError, match="allow_pickle"):
        datasets.gowalla()


@pytest.mark.usefixtures("shared_data")
def test_newsgroups_are_split_by_date() -> None:
    posts = datasets.newsgroups(limit_per_class=20)
    assert len(posts.classes) == 20
    assert "sci.space" in posts.classes
    assert np.bincount(posts.train_labels).tolist() == [20] * 20
    assert len(posts.test) == len(posts.test_labels) == 400
    assert sum("Subject:" in post for post in posts.train) > 300


@pytest.mark.usefixtures("shared_data")
def test_movielens_has_the_published_counts() -> None:
    ratings = datasets.movielens_100k()
    assert (len(ratings), len(ratings.user_ids), len(ratings.item_ids)) == (100_000, 943, 1_682)
    # The first line of the published file: user 196 gave item 242 three stars.
    assert ratings.user_ids[ratings.users[0]] == 196
    assert ratings.item_ids[ratings.items[0]] == 242
    assert ratings.ratings[0] == 3


@pytest.mark.usefixtures("shared_data")
def test_gowalla_has_the_published_split_and_no_pair_twice() -> None:
    gowalla = datasets.gowalla()
    assert (gowalla.user_count, gowalla.item_count) == (29_858, 40_981)
    assert len(gowalla) == 810_128
    assert len(gowalla.test_users) == 217_242
    key = gowalla.users * gowalla.item_count + gowalla.items
    test_key = gowalla.test_users * gowalla.item_count + gowalla.test_items
    assert (np.diff(key) > 0).all()
    assert not np.isin(test_key, key).any()
    assert gowalla.items.min() == 0
    assert gowalla.items.max() == gowalla.item_count - 1


@pytest.mark.usefixtures("shared_data")
def test_training_times_are_consistent() -> None:
    times = datasets.mlperf_v07()
    assert (len(times.runs), len(times.steps)) == (35, 32)
    for run in times.runs:
        assert 0 < run.fastest_s <= run.median_s <= run.slowest_s
        assert run.fastest_s <= run.olympic_mean_s <= run.slowest_s
    runs = {(run.system, run.benchmark): run for run in times.runs}
    for step in times.steps:
        run = runs[step.system, step.benchmark]
        assert step.global_batch == run.global_batch
        # One of the runs was taken apart, so its time lies among theirs (rounded to 0.1 s).
        assert run.fastest_s - 0.1 <= step.run_s <= run.slowest_s + 0.1
