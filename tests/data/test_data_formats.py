"""External files: read exactly if valid, refused with a message if not."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import random
import struct
import tarfile
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream import data
from slipstream.data._files import members
from slipstream.data._images import read_idx
from slipstream.data._trees import parse_tree

Folder = Callable[[], Path]


def _idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes())


def _wav(samples: np.ndarray, rate_hz: int = 8000) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.astype("<i2").tobytes())
    return target.getvalue()


def _tar(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


_FRAPPE_ROW = "204:1 4798:1 5041:1 5046:1 5053:1 5055:1 5058:1 5060:1 5073:1 5183:1\n"
_IMAGES = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)

SMALL: dict[str, dict[str, bytes]] = {
    "fashion_mnist": {
        "fashion_mnist/train-images-idx3-ubyte.gz": _idx(_IMAGES),
        "fashion_mnist/train-labels-idx1-ubyte.gz": _idx(np.array([9, 3], dtype=np.uint8)),
        "fashion_mnist/t10k-images-idx3-ubyte.gz": _idx(_IMAGES),
        "fashion_mnist/t10k-labels-idx1-ubyte.gz": _idx(np.array([1, 2], dtype=np.uint8)),
    },
    "tiny_shakespeare": {"text/tinyshakespeare.txt": b"To be,\r\nor not \xc3\xa9"},
    "wikitext2": {"text/wikitext2-valid.txt": b"a b\n", "text/wikitext2-test.txt": b"c\n"},
    "multi30k": {
        f"multi30k/{part}.{language}": b"one\ntwo\n"
        for part in ("train", "val", "test_2016_flickr")
        for language in ("en", "de")
    },
    "sst": {
        "sst/train.txt": b"(3 (2 a) (1 b))\n(0 c)\n(0 c)\n",
        "sst/dev.txt": b"(0 c)\n",
        "sst/test.txt": b"(4 (2 d) (3 (2 e) (2 f)))\n",
    },
    "movielens_latest_small": {
        "movielens_latest_small/ratings.csv": b"userId,movieId,rating,timestamp\n7,5,4.5,99\n",
        "movielens_latest_small/movies.csv": b'movieId,title,genres\n5,"A, B",C\n',
        "movielens_latest_small/README.txt": b"terms",
    },
    "frappe": {
        "recsys/frappe.validation.libfm": f"1 {_FRAPPE_ROW}".encode(),
        "recsys/frappe.test.libfm": f"-1 {_FRAPPE_ROW}".encode(),
    },
    "fsdd": {
        "fsdd/3_theo_1.wav": _wav(np.array([1, -2, 3])),
        "fsdd/3_theo_0.wav": _wav(np.array([-32768, 32767])),
    },
    "cifar10_jpeg": {
        "cifar10_jpeg/cifar.tar.xz": _tar(
            {"README.md": b"r", "train/cat/0001.jpg": b"c1", "train/ant/0000.jpg": b"a0"}
        )
    },
    "imagenet_sample": {
        "imagenet_sample/synsets.txt": b"n1\nn2\n",
        "imagenet_sample/n2_dog.JPEG": b"jpeg",
    },
    "cache_traces": {"cache_traces/w106.trace.xz": lzma.compress(struct.pack("<3I", 1, 2, 1))},
    "profiles": {
        "profiles/vgg16-a100.prof": b' ReLU{"inplace":true}[4][64,2,2] 4.9 12 37\n SUM(avg) 4.9'
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr("slipstream.data._find.DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    return lambda: tmp_path


def _write(root: Path, name: str) -> None:
    for path, content in SMALL[name].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def _load(name: str) -> data.Dataset:
    options = {"decode": False} if name in ("cifar10_jpeg", "imagenet_sample") else {}
    return data.get(name, **options)


@pytest.mark.parametrize("name", SMALL)
def test_a_valid_file_loads(name: str, folder: Folder) -> None:
    _write(folder(), name)
    assert _load(name).name == name
    assert name in data.available()


@pytest.mark.parametrize("name", SMALL)
def test_a_damaged_file_gives_our_error_or_is_read(name: str, folder: Folder) -> None:
    """Truncated, with flipped bytes, or emptied: never an error other than ours."""
    generator = random.Random(name)
    for path, content in SMALL[name].items():
        for kind in ("cut", "flip", "empty") * 8:
            _write(folder(), name)
            broken = bytearray(content)
            if kind == "cut":
                del broken[generator.randrange(len(broken)) :]
            elif kind == "flip":
                for _ in range(4):
                    broken[generator.randrange(len(broken))] = generator.randrange(256)
            else:
                broken.clear()
            (folder() / path).write_bytes(broken)
            with contextlib.suppress(data.CorruptDataError):
                _load(name)


def test_values_are_those_of_the_files(folder: Folder) -> None:
    for name in SMALL:
        _write(folder(), name)
    clothing = data.get("fashion_mnist", limit=1)
    assert np.array_equal(clothing.images, _IMAGES[:1])
    assert clothing.labels.tolist() == [9]
    # Line endings are preserved.
    text = data.get("tiny_shakespeare")
    assert text.train + text.validation == "To be,\r\nor not \u00e9"
    # One of two equal lines is the dev tree; the other is train's.
    trees = data.get("sst")
    assert [tree.sentence for tree in trees.train] == ["a b", "c"]
    small = data.get("movielens_latest_small")
    assert small.titles == ("A, B",)
    assert small.ratings.tolist() == [4.5]
    frappe = data.get("frappe")
    assert frappe.train.ids[0].tolist() == [204, 3841, 2, 0, 0, 0, 0, 0, 4, 34]
    assert (frappe.train.labels.tolist(), frappe.test.labels.tolist()) == ([1], [0])
    audio = data.get("fsdd")
    assert [s.tolist() for s in audio.samples] == [[-32768, 32767], [1, -2, 3]]
    images = data.get("cifar10_jpeg", decode=False)
    assert (images.classes, images.files) == (("ant", "cat"), (b"a0", b"c1"))
    assert data.get("imagenet_sample", decode=False).labels.tolist() == [1]
    assert data.get("profiles").step_ms == {4: 4.9}


def test_debian_comes_before_the_data_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(folder(), "fashion_mnist")
    debian = folder() / "debian" / "fashion-mnist"
    debian.mkdir(parents=True)
    for path, content in SMALL["fashion_mnist"].items():
        (debian / Path(path).name).write_bytes(content)
    (debian / "train-labels-idx1-ubyte.gz").write_bytes(_idx(np.array([4, 4], dtype=np.uint8)))
    assert data.get("fashion_mnist").labels.tolist() == [4, 4]


def test_idx_headers_are_not_trusted(tmp_path: Path) -> None:
    huge = struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    for content in (huge, struct.pack(">HBBI", 0, 13, 1, 4) + b"\0" * 16, b"\0\0\x08"):
        path = tmp_path / "x.gz"
        path.write_bytes(gzip.compress(content))
        with pytest.raises(data.CorruptDataError):
            read_idx("x", path, 3 if content == huge else 1, None)


def test_archives_may_not_point_outside(tmp_path: Path) -> None:
    link = tarfile.TarInfo("train/a/0.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("train/a/0.jpg")
    hard.type, hard.linkname = tarfile.LNKTYPE, "../../x"
    device = tarfile.TarInfo("null")
    device.type = tarfile.CHRTYPE
    hostile = [link, hard, device]
    hostile += [tarfile.TarInfo(name) for name in ("/abs", "../up", "a/../../b", "a\\..\\b")]
    for member in hostile:
        archive = tmp_path / "x.tar"
        with tarfile.open(archive, "w") as tar:
            tar.addfile(member)
        with pytest.raises(data.CorruptDataError):
            list(members("x", archive))


def test_archives_may_not_expand_beyond_their_declared_size(tmp_path: Path) -> None:
    member = tarfile.TarInfo("big")
    member.size = 1 << 40
    archive = tmp_path / "x.tar"
    archive.write_bytes(member.tobuf() + b"\0" * 1024)
    with pytest.raises(data.CorruptDataError, match="larger than 64 MiB"):
        list(members("x", archive))


def test_trees_are_read_from_the_leaves_up() -> None:
    tree = parse_tree("(4 (2 not) (3 (1 bad\u00a0at) (2 all)))")
    assert tree.words == ("not", "bad\u00a0at", "all", "", "")
    assert tree.labels.tolist() == [2, 1, 2, 3, 4]
    assert tree.left.tolist() == [-1, -1, -1, 1, 0]
    assert tree.right.tolist() == [-1, -1, -1, 2, 3]


@pytest.mark.parametrize(
    "line",
    ["", "word", "(2 a", "(2 a))", "(2 a) b", "(2 a) (2 b)", "(7 a)", "(2 (2 a))", "()", "(2 a b)",
     "(2 (2 a) (2 b) (2 c))", "(2 (2 a) b)", ")"],
)  # fmt: skip
def test_malformed_trees_are_refused(line: str) -> None:
    with pytest.raises(data.CorruptDataError):
        parse_tree(line)


def test_deep_trees_need_no_recursion() -> None:
    deep = "(1 " * 50_000 + "(2 a)" + " (2 b))" * 50_000
    assert len(parse_tree(deep)) == 100_001


def test_a_trace_that_is_not_an_object_is_refused(folder: Folder) -> None:
    place = folder() / "gpu_traces"
    place.mkdir()
    for content in (gzip.compress(b"[1]"), gzip.compress(b"{"), b"no gzip", b""):
        (place / "t.json.gz").write_bytes(content)
        with pytest.raises(data.CorruptDataError):
            data.get("gpu_traces").read("t")
    (place / "t.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert data.get("gpu_traces").read("t") == {"traceEvents": []}
