"""Embedding tables in a fraction of their memory.

Everything is imported on first use; naming the room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.embedding.low_dimension import LowDimTable
    from slipstream.techniques.embedding.onnx_export import export
    from slipstream.techniques.embedding.planning import Plan, plan
    from slipstream.techniques.embedding.protocol import CompressedEmbedding
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
    from slipstream.techniques.embedding.tt_shape import TTShape

_HOMES = {
    "CompressedEmbedding": "protocol",
    "HashedTable": "shared_rows",
    "LowDimTable": "low_dimension",
    "Plan": "planning",
    "QuantizedTable": "quantized_rows",
    "ROBEEmbedding": "robe",
    "ROBEEmbeddingBag": "robe",
    "ROBEEmbeddingCollection": "robe",
    "SharedArray": "shared_array",
    "TableEmbedding": "table_modules",
    "TableEmbeddingBag": "table_modules",
    "export": "onnx_export",
    "plan": "planning",
    "TTEmbedding": "tt",
    "TTEmbeddingBag": "tt",
    "TTShape": "tt_shape",
}

__all__ = [
    "CompressedEmbedding",
    "HashedTable",
    "LowDimTable",
    "Plan",
    "QuantizedTable",
    "ROBEEmbedding",
    "ROBEEmbeddingBag",
    "ROBEEmbeddingCollection",
    "SharedArray",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTShape",
    "TableEmbedding",
    "TableEmbeddingBag",
    "export",
    "plan",
]

__getattr__, __dir__ = late(__name__, _HOMES, __all__)
