"""Data sets that Python and scikit-learn include."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from slipstream import data

Require = Callable[[str, bool, str], None]


@pytest.fixture
def sklearn(require: Require) -> None:
    require(
        "sklearn",
        importlib.util.find_spec("sklearn") is not None,
        "scikit-learn is not installed: pip install 'slipstream[data]'",
    )


def test_python_topics_are_english_with_a_tenth_held_out() -> None:
    text = data.get("python_topics")
    assert len(text.train) > 200_000
    assert 0.07 < len(text.validation) / (len(text.train) + len(text.validation)) <= 0.1
    assert "the" in text.train.split()


def test_no_paragraph_of_the_topics_is_in_both_splits() -> None:
    text = data.get("python_topics")

    def paragraphs(split: str) -> set[str]:
        return {" ".join(paragraph.split()) for paragraph in split.split("\n\n")} - {""}

    assert not paragraphs(text.train) & paragraphs(text.validation)


def test_text_as_bytes_is_its_utf8() -> None:
    text = data.Text("t", train="na\u00efve", validation="", test="x")
    assert text.as_bytes().tobytes().decode("utf-8") == "na\u00efve"
    assert text.as_bytes("test").tolist() == [ord("x")]
    assert text.as_bytes("validation").shape == (0,)
    with pytest.raises(ValueError, match=r"\bname\b.*\btrain\b.*\bvalidation\b.*\btest\b"):
        text.as_bytes("name")  # type: ignore[arg-type]


def test_standard_library_source_is_cut_at_the_requested_size() -> None:
    text = data.get("stdlib_source", limit_bytes=300_000)
    assert 300_000 <= len((text.train + text.validation).encode()) < 1_000_000
    assert "\nimport " in text.train
    assert text.validation
    with pytest.raises(ValueError, match="limit_bytes"):
        data.get("stdlib_source", limit_bytes=0)


@pytest.mark.usefixtures("sklearn")
def test_digits_preserve_all_ink_levels() -> None:
    digits = data.get("digits")
    assert digits.images.shape == (1797, 8, 8)
    assert digits.images.dtype == np.uint8
    assert digits.labels.dtype == np.int64
    # 17 ink levels, 0 to 16, stay distinct and span the whole range.
    assert len(np.unique(digits.images)) == 17
    assert digits.images.max() == 255
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.usefixtures("sklearn")
@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("breast_cancer", (569, 30), 2),
        ("wine", (178, 13), 3),
        ("iris", (150, 4), 3),
        ("diabetes", (442, 10), 0),
    ],
)
def test_tables(name: str, shape: tuple[int, int], classes: int) -> None:
    table = data.get(name)
    assert isinstance(table, data.Tabular)
    assert table.features.shape == shape
    assert len(table.feature_names) == shape[1]
    assert len(table.classes) == classes
    if classes:
        assert set(table.targets) == set(range(classes))


@pytest.mark.usefixtures("sklearn")
@pytest.mark.parametrize("name", ["china", "flower"])
def test_photographs(name: str, require: Require) -> None:
    require("vision", importlib.util.find_spec("PIL") is not None, "Pillow is not installed")
    photograph = data.get(name)
    assert isinstance(photograph, data.Images)
    assert photograph.images.shape == (1, 427, 640, 3)
    assert photograph.images.dtype == np.uint8


def test_checksums_of_carried_sets_repeat_and_differ() -> None:
    assert data.checksum("python_topics") == data.checksum("python_topics")
    assert data.checksum("python_topics") != data.checksum("stdlib_source")
    assert data.verify("python_topics").ok is None


@pytest.mark.usefixtures("sklearn")
def test_every_set_of_scikit_learn_has_a_checksum() -> None:
    names = [entry.name for entry in data.manifest() if entry.place == "scikit-learn"]
    assert len({data.checksum(name) for name in names}) == len(names)
