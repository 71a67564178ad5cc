"""Loader of the Stanford Sentiment Treebank (Socher et al., EMNLP 2013)."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from slipstream.data._files import check_positive, read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import Tree, Trees

_CLASSES = ("very negative", "negative", "neutral", "positive", "very positive")
# Only plain spaces separate words; some words contain a no-break space ("2 1/2").
_TOKEN = re.compile(r"[()]|[^ ()]+")


def sst(entry: Entry, *, limit: int | None = None, drop_shared: bool = False) -> Trees:
    """Load film reviews as binary trees with a sentiment (0 to 4) at every node.

    The train file also contains the dev trees. Each dev tree is removed once, which leaves the
    published 8,544 trees. One dev and three test sentences are in the published train split too,
    and are retained unless `drop_shared`.

    Args:
        limit: maximum number of trees per split.
        drop_shared: whether to drop sentences of validation and test from train.
    """
    check_positive(limit=limit)
    folder = find(entry)
    lines = {file: read_lines(entry, folder / file) for file in entry.files}
    merged = Counter(lines["dev.txt"])
    train = []
    for line in lines["train.txt"]:
        if merged[line]:
            merged[line] -= 1
        else:
            train.append(line)
    if drop_shared:
        held_out = {_words(line) for line in lines["dev.txt"] + lines["test.txt"]}
        train = [line for line in train if _words(line) not in held_out]

    def trees(chosen: list[str], file: str) -> tuple[Tree, ...]:
        return tuple(
            parse_tree(line, name=entry.name, where=f"{folder / file}: tree {i + 1}")
            for i, line in enumerate(chosen[:limit])
        )

    return Trees(
        entry.name,
        trees(train, "train.txt"),
        trees(lines["dev.txt"], "dev.txt"),
        trees(lines["test.txt"], "test.txt"),
        _CLASSES,
    )


def parse_tree(line: str, *, name: str = "tree", where: str | None = None) -> Tree:
    """Parse an s-expression: ``(LABEL word)`` or ``(LABEL left right)``.

    Raises:
        CorruptDataError: brackets are unbalanced, a node is not binary, or a label is unknown.
    """
    labels: list[int] = []
    left: list[int] = []
    right: list[int] = []
    words: list[str] = []
    # A stack instead of recursion, so that a malicious file cannot exceed the recursion limit.
    # Each open node has a label, the children finished so far, and its word.
    open_nodes: list[tuple[int, list[int], list[str]]] = []
    tokens = iter(_TOKEN.findall(line))
    for token in tokens:
        if words and not open_nodes:
            raise CorruptDataError(name, "text after the tree", where=where)
        if token == "(":
            label = next(tokens, "")
            if label not in {"0", "1", "2", "3", "4"}:
                raise CorruptDataError(name, f"label '{label}' is not 0 to 4", where=where)
            open_nodes.append((int(label), [], []))
        elif not open_nodes:
            raise CorruptDataError(name, "no bracket is open", where=where)
        elif token != ")":
            open_nodes[-1][2].append(token)
        else:
            label_number, children, leaf = open_nodes.pop()
            if (len(children), len(leaf)) not in {(2, 0), (0, 1)}:
                raise CorruptDataError(name, "a node is neither a word nor a pair", where=where)
            labels.append(label_number)
            left.append(children[0] if children else -1)
            right.append(children[1] if children else -1)
            words.append(leaf[0] if leaf else "")
            if open_nodes:
                open_nodes[-1][1].append(len(words) - 1)
    if open_nodes or not words:
        raise CorruptDataError(name, "a bracket is not closed", where=where)
    return Tree(
        np.array(labels, dtype=np.int64),
        np.array(left, dtype=np.int64),
        np.array(right, dtype=np.int64),
        tuple(words),
    )


def _words(line: str) -> tuple[str, ...]:
    # A word precedes a closing bracket; a label precedes a space.
    return tuple(re.findall(r"([^ ()]+)\)", line))
