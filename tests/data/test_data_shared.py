"""Sets in the shared data folder: published counts, and properties of each.

The tests read ``$SLIPSTREAM_DATA``; without it they skip.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from slipstream import data
from slipstream.errors import InvalidArgumentError, UnknownNameError

pytestmark = pytest.mark.usefixtures("shared_data")

Require = Callable[[str, bool, str], None]


def test_fashion_mnist_is_balanced(require: Require) -> None:
    # From a Debian package, hence not part of what "data" promises.
    here = "fashion_mnist" in data.available()
    require("fashion_mnist", here, "apt-get install dataset-fashion-mnist")
    train, test = data.get("fashion_mnist"), data.get("fashion_mnist", split="test")
    assert train.images.shape == (60_000, 28, 28)
    assert np.bincount(train.labels).tolist() == [6_000] * 10
    assert np.bincount(test.labels).tolist() == [1_000] * 10
    # The published mean of the training pixels is 0.2860.
    assert train.images.mean() / 255 == pytest.approx(0.2860, abs=5e-5)


def test_tiny_shakespeare_is_complete() -> None:
    text = data.get("tiny_shakespeare")
    assert len(text.train) + len(text.validation) == 1_115_394
    assert text.train.startswith("First Citizen:")
    assert len(set(text.train)) == 65


def test_wikitext2_serves_its_validation_file_as_train() -> None:
    text = data.get("wikitext2")
    # Published sizes: 217,646 and 245,569 tokens, an end-of-line token a line included.
    assert len(text.train.split()) + text.train.count("\n") == 217_646
    assert len(text.test.split()) + text.test.count("\n") == 245_569
    assert text.validation == ""


def test_multi30k_sides_are_aligned_in_both_directions() -> None:
    pairs = data.get("multi30k")
    assert [len(s) for s in (pairs.train, pairs.validation, pairs.test)] == [29_000, 1_014, 1_000]
    assert pairs.train.source[0].startswith("two young , white males")
    assert all(pairs.train.source)
    assert all(pairs.train.target)
    back = data.get("multi30k", source="de", target="en")
    assert back.test.target == pairs.test.source
    with pytest.raises(InvalidArgumentError, match="fr"):
        data.get("multi30k", target="fr")


def test_sst_has_the_published_splits_and_well_formed_trees() -> None:
    trees = data.get("sst")
    assert [len(s) for s in (trees.train, trees.validation, trees.test)] == [8_544, 1_101, 2_210]
    # Published class counts of the train split (Socher et al. 2013), root labels 0 to 4.
    roots = Counter(int(tree.labels[-1]) for tree in trees.train)
    assert [roots[c] for c in range(5)] == [1_092, 2_218, 1_624, 2_322, 1_288]
    for tree in trees.validation:
        index = np.arange(len(tree))
        inner = tree.left >= 0
        assert (inner == (tree.right >= 0)).all()
        assert (tree.left[inner] < tree.right[inner]).all()
        assert (tree.right[inner] < index[inner]).all()
        # Every node but the root is the child of exactly one other.
        children = np.concatenate([tree.left[inner], tree.right[inner]])
        assert sorted(children) == list(range(len(tree) - 1))
        assert [bool(word) for word in tree.words] == (~inner).tolist()


def test_sst_shares_no_sentence_between_splits_on_request() -> None:
    trees = data.get("sst", drop_shared=True)
    train = {tree.sentence for tree in trees.train}
    assert not train & {tree.sentence for tree in trees.validation}
    assert not train & {tree.sentence for tree in trees.test}
    assert len(trees.train) == 8_540


def test_movielens_counts_are_the_published_ones() -> None:
    small = data.get("movielens_latest_small")
    assert (len(small), len(small.user_ids), len(small.item_ids)) == (100_836, 610, 9_724)
    assert small.titles[np.flatnonzero(small.item_ids == 1)[0]] == "Toy Story (1995)"
    assert all(small.titles)
    assert (np.bincount(small.users) >= 20).all()
    assert set(np.unique(small.ratings)) == {x / 2 for x in range(1, 11)}


def test_frappe_fields_count_from_zero() -> None:
    frappe = data.get("frappe")
    assert sum(frappe.cardinalities) == 5_382
    assert (len(frappe.train), len(frappe.test)) == (57_722, 28_860)
    for rows in (frappe.train, frappe.test):
        assert rows.ids.shape == (len(rows), 10)
        assert rows.ids.min() == 0
        assert (rows.ids < np.array(frappe.cardinalities)).all()
        assert rows.labels.mean() == pytest.approx(1 / 3, abs=0.01)


def test_spoken_digits_are_balanced() -> None:
    audio = data.get("fsdd")
    assert len(audio) == 600
    assert np.bincount(audio.labels).tolist() == [60] * 10
    assert Counter(audio.speakers) == dict.fromkeys(
        ("george", "jackson", "lucas", "nicolas", "theo", "yweweler"), 100
    )
    assert np.bincount(audio.repetitions).tolist() == [60] * 10
    assert all(s.dtype == np.int16 and s.ndim == 1 and len(s) > 800 for s in audio.samples)
    assert audio.rate_hz == 8000


def test_the_archive_of_spoken_digits_holds_the_loose_ones() -> None:
    loose, every = data.get("fsdd"), data.get("fsdd", all_takes=True)
    assert len(every) == 3_000
    first = np.flatnonzero(every.repetitions < 10)
    assert [every.speakers[i] for i in first] == list(loose.speakers)
    same = [np.array_equal(every.samples[i], s) for i, s in zip(first, loose.samples, strict=True)]
    assert all(same)


def test_cifar10_files_are_jpeg_of_ten_classes() -> None:
    files = data.get("cifar10_jpeg", split="test", limit_per_class=3, decode=False)
    assert files.classes == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    assert np.bincount(files.labels).tolist() == [3] * 10
    assert all(file.startswith(b"\xff\xd8\xff") for file in files.files)
    with pytest.raises(InvalidArgumentError, match="split"):
        data.get("cifar10_jpeg", decode=False, split="validation")
    with pytest.raises(InvalidArgumentError, match="limit_per_class"):
        data.get("cifar10_jpeg", decode=False, limit_per_class=0)


def test_imagenet_labels_are_ranks_of_synsets() -> None:
    files = data.get("imagenet_sample", decode=False)
    assert len(files) == 500
    assert files.labels.tolist() == list(range(0, 1000, 2))
    assert files.classes[0] == "n01440764"
    few = data.get("imagenet_sample", decode=False, limit=5)
    assert few.labels.tolist() == [0, 200, 400, 600, 800]


def test_jpeg_decodes_to_one_size(require: Require) -> None:
    require("vision", importlib.util.find_spec("PIL") is not None, "Pillow is not installed")
    images = data.get("imagenet_sample", limit=5, size=96)
    assert images.images.shape == (5, 96, 96, 3)
    assert images.images.dtype == np.uint8
    # Photographs, not constants: each spreads over its range.
    assert (images.images.reshape(5, -1).std(axis=1) > 20).all()
    small = data.get("cifar10_jpeg", split="test", limit_per_class=1)
    assert small.images.shape == (10, 32, 32, 3)


def test_gpu_traces_read_one_at_a_time() -> None:
    traces = data.get("gpu_traces")
    assert len(traces.paths) == 8
    smallest = min(traces.paths, key=lambda name: traces.paths[name].stat().st_size)
    trace = traces.read(smallest)
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    with pytest.raises(UnknownNameError):
        traces.read("no such trace")


@pytest.mark.parametrize(
    ("trace", "length", "distinct"),
    [
        ("w106", 5_292_456, 275_171),
        ("cloudphysics", 113_872, 48_974),
        ("orm-busy", 5_000_000, 76_349),
        ("request", 66_987, 36_815),
        ("scarab", 1_245_184, 258_368),
    ],
)
def test_cache_traces(trace: str, length: int, distinct: int) -> None:
    accesses = data.get("cache_traces", trace=trace)
    assert len(accesses) == length
    assert accesses.keys.dtype == np.uint64
    assert len(np.unique(accesses.keys)) == distinct
    if accesses.times is not None:
        assert (np.diff(accesses.times) >= 0).all()
    if accesses.sizes is not None:
        assert (accesses.sizes > 0).all()
    assert len(data.get("cache_traces", trace=trace, limit=10)) == 10


def test_block_traces_keep_the_byte_order_that_makes_neighbours_neighbours() -> None:
    # Read in the other order, sequential blocks would be 2^24 apart.
    keys = data.get("cache_traces", trace="w106").keys
    little = (np.diff(keys.astype(np.int64)) == 1).mean()
    swapped = (np.diff(keys.astype("<u4").byteswap().astype(np.int64)) == 1).mean()
    assert little > 0.05 > 10 * swapped
    with pytest.raises(UnknownNameError, match="w107"):
        data.get("cache_traces", trace="w107")


def test_layer_profile_adds_up() -> None:
    profile = data.get("profiles")
    assert sorted(profile.step_ms) == [1, 2, 3, 4, 6, 8, 16, 32, 64]
    for batch, stated in profile.step_ms.items():
        layers = [layer for layer in profile.layers if layer.batch == batch]
        assert len(layers) == 37
        # 37 layers, each rounded to a microsecond.
        assert sum(layer.total_ms for layer in layers) == pytest.approx(stated, abs=0.037)
    first = profile.layers[0]
    assert (first.layer, first.shape) == ("conv2d", (3, 224, 224))
    assert first.settings["out_channels"] == 64


@pytest.mark.parametrize(("name", "count"), [("mlperf_tiny", 11), ("detection", 1), ("mcu", 3)])
def test_models_are_flatbuffers_of_tensorflow_lite(name: str, count: int) -> None:
    models = data.get(name)
    assert isinstance(models, data.ModelFiles)
    assert len(models.paths) == count
    for path in models.paths.values():
        assert path.read_bytes()[4:8] == b"TFL3"
    if name == "detection":
        assert "person" in models.classes


@pytest.mark.parametrize("name", ["tiny_shakespeare", "sst", "cache_traces", "fsdd"])
def test_files_match_their_records(name: str) -> None:
    found = data.verify(name)
    assert found.ok is True
    assert found.files == len(data.recorded_files(name))


def test_every_set_of_the_folder_is_present_and_recorded() -> None:
    here = data.available()
    for entry in data.manifest():
        if entry.place == "data folder":
            assert entry.name in here
            assert data.recorded_files(entry.name), entry.name
