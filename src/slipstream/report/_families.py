"""Families of operators, which the page distinguishes by colour."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Graph, Kind

FAMILIES = (
    "matrix product",
    "convolution",
    "attention",
    "normalisation",
    "elementwise",
    "reduction",
    "lookup and copy",
    "optimizer",
    "communication",
    "host",
)
"""Names of families, in the order of the legend."""

_HOST = (Kind.HOST, Kind.LAUNCH, Kind.WAIT, Kind.COLLECTION)
# The first pattern found in the name of an operator or kernel determines its family.
_WORDS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|broadcast_|c10d"),
    ("attention", r"attention|flash|fmha|attn"),
    ("convolution", r"conv|wgrad|dgrad|winograd|im2col|col2im"),
    ("optimizer", r"fused_(adam|sgd|adagrad)|multi_tensor|_foreach|lerp|addcdiv|addcmul"),
    ("normalisation", r"norm"),
    ("matrix product", r"mm(?![a-z])|gemm|gemv|matmul|linear|einsum|mv(?![a-z])|lstm|gru|cutlass"),
    ("reduction", r"sum|mean|softmax|loss|argmax|amax|amin|norm|cumsum|pool|topk|sort|reduce"),
    (
        "lookup and copy",
        r"embedding|index|gather|scatter|copy|clone|contiguous|cat(?![a-z])|stack|view|reshape"
        r"|transpose|permute|expand|slice|select|split|unbind|empty|zeros|ones|full|fill|zero_"
        r"|memcpy|memset|detach|as_strided|squeeze|(?<![a-z])t(?![a-z])|arange|narrow|item",
    ),
)
_PATTERNS = tuple((FAMILIES.index(family), re.compile(words)) for family, words in _WORDS)
_ELEMENTWISE = FAMILIES.index("elementwise")


def families(graph: Graph) -> NDArray[np.uint8]:
    """Return the index in `FAMILIES` of every task, uint8 [n]."""
    tasks = graph.tasks
    by_name = np.full(len(graph.strings), _ELEMENTWISE, np.uint8)
    for name in np.unique(tasks.name).tolist():
        by_name[name] = _family(graph.strings[name].rpartition("::")[2].lower())
    indices: NDArray[np.uint8] = by_name[tasks.name]
    indices[np.isin(tasks.kind, _HOST)] = FAMILIES.index("host")
    indices[tasks.kind == Kind.COMMUNICATION] = FAMILIES.index("communication")
    return indices


def _family(name: str) -> int:
    for family, pattern in _PATTERNS:
        if pattern.search(name):
            return family
    return _ELEMENTWISE
