"""Drop-in replacements of torch modules."""

from slipstream.techniques.dropout.nn import Dropout, dropout
from slipstream.techniques.embedding.formats.codes import QuantizedTable
from slipstream.techniques.embedding.formats.hashed import HashedTable
from slipstream.techniques.embedding.formats.lowdim import LowDimTable
from slipstream.techniques.embedding.formats.robe import (
    ROBEEmbedding,
    ROBEEmbeddingBag,
    ROBEEmbeddingCollection,
)
from slipstream.techniques.embedding.formats.shared_array import SharedArray
from slipstream.techniques.embedding.formats.tt import TTEmbedding, TTEmbeddingBag
from slipstream.techniques.embedding.modules import TableEmbedding, TableEmbeddingBag
from slipstream.techniques.scan.nn import GRU, LSTM, RNN

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
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
