"""Sharded corpora: every sequence once, in an order that does not depend on the ranks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.pretraining import (
    CorpusError,
    MaskedBatches,
    ShardedTokens,
    write_shards,
)

VOCABULARY = 50


def sequences(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, VOCABULARY, rng.integers(1, 20)).tolist() for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> ShardedTokens:
    return write_shards(sequences(101), tmp_path / "corpus", 4, VOCABULARY)


def test_sequences_come_back(corpus: ShardedTokens) -> None:
    assert len(corpus) == 101
    assert [corpus[n].tolist() for n in range(101)] == sequences(101)


def test_the_longest_sequence_of_all_shards_is_known(tmp_path: Path) -> None:
    corpus = write_shards([[5], [5, 6, 7], [5, 6]], str(tmp_path / "three"), 2, VOCABULARY)
    assert corpus.longest == ShardedTokens(tmp_path / "three").longest == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_an_epoch_has_every_sequence_once_whatever_the_ranks(
    corpus: ShardedTokens, ranks: int
) -> None:
    batches = MaskedBatches(corpus, rows=101, length=20, mask_token=3)
    parts = [batches.numbers(0, rank, ranks) for rank in range(ranks)]
    assert sorted(number for part in parts for _, number in part) == list(range(101))
    order = batches.numbers(0)
    assert all(part == order[rank::ranks] for rank, part in enumerate(parts))
    assert order != [(0, n) for n in range(101)]
    assert [n for _, n in batches.numbers(1)] != [n for _, n in order]


def test_masks_depend_on_seed_epoch_and_sequence_alone(corpus: ShardedTokens) -> None:
    batches = MaskedBatches(corpus, rows=8, length=20, mask_token=3, share=0.4)
    numbers = batches.numbers(3)
    whole, part = batches.batch(numbers), batches.batch(numbers[2:3])
    width = part["labels"].shape[1]
    for name in whole:
        assert torch.equal(whole[name][2:3, :width], part[name])
    (_, number), *_ = numbers[2:3]
    other = batches.batch([(1, number)])
    assert not torch.equal(other["labels"], part["labels"])
    labelled = whole["labels"] != -100
    assert labelled.any()
    assert not labelled[whole["attention_mask"] == 0].any()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_their_own_files(corpus: ShardedTokens, duplicate: Any) -> None:
    expected = corpus[7]
    copied = duplicate(corpus)
    np.testing.assert_array_equal(copied[7], expected)
    del copied
    np.testing.assert_array_equal(corpus[7], expected)


def test_damage_is_named(corpus: ShardedTokens, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    path = folder / "shard-00001.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CorpusError, match=r"shard 1 is damaged") as error:
        ShardedTokens(folder)
    assert "shard-00001.bin" in str(error.value)
    # Another rank checks it.
    ShardedTokens(folder, rank=0, ranks=2)
    path.write_bytes(b"")
    with pytest.raises(CorpusError, match="shard 1 is missing or not of"):
        ShardedTokens(folder, rank=0, ranks=2)
    (folder / "index.json").write_text("{}")
    with pytest.raises(CorpusError, match="no readable index"):
        ShardedTokens(folder)
    (folder / "index.json").write_text('{"vocabulary": 9, "dtype": "<u2", "shards": []}')
    with pytest.raises(CorpusError, match="no readable index: it lists no shards"):
        ShardedTokens(folder)


def test_invalid_corpora_are_refused(corpus: ShardedTokens, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="contains a corpus"):
        write_shards([[5]], tmp_path / "corpus", 1, VOCABULARY)
    with pytest.raises(InvalidArgumentError, match="sequence 1 has a token that is not below"):
        write_shards([[5], [VOCABULARY]], tmp_path / "other", 1, VOCABULARY)
    for number, sequence in enumerate(([], [5.5], [[5], [6]], 5)):
        with pytest.raises(InvalidArgumentError, match="sequence 0 is not a list of integers"):
            write_shards([sequence], tmp_path / f"invalid-{number}", 1, VOCABULARY)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match=r"folder: .*file cannot be created"):
        write_shards([[5]], tmp_path / "file", 1, VOCABULARY)
    with pytest.raises(InvalidArgumentError, match="fewer sequences than 3 shards"):
        write_shards([[5], [6]], tmp_path / "third", 3, VOCABULARY)
    batches = MaskedBatches(corpus, rows=101, length=10, mask_token=3)
    with pytest.raises(CorpusError, match="more than the 10 positions") as error:
        batches.batch(batches.numbers(0))
    assert "corpus/shard-0000" in str(error.value)
