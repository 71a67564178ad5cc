"""Modules to use in place of torch's own."""

from slipstream.techniques.dropout.nn import Dropout, dropout
from slipstream.techniques.embedding.low_dimension import LowDimTable
from slipstream.techniques.embedding.quantized_rows import QuantizedTable
from slipstream.techniques.embedding.robe import (
    ROBEEmbedding,
    ROBEEmbeddingBag,
    ROBEEmbeddingCollection,
)
from slipstream.techniques.embedding.shared_array import SharedArray
from slipstream.techniques.embedding.shared_rows import HashedTable
from slipstream.techniques.embedding.table_modules import TableEmbedding, TableEmbeddingBag
from slipstream.techniques.embedding.tt import TTEmbedding, TTEmbeddingBag

__all__ = [
    "Dropout",
    "HashedTable",
    "LowDimTable",
    "QuantizedTable",
    "ROBEEmbedding",
    "ROBEEmbeddingBag",
    "ROBEEmbeddingCollection",
    "SharedArray",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TableEmbedding",
    "TableEmbeddingBag",
    "dropout",
]
