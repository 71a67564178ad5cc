"""Compressed embedding tables.

Names are imported on first use; importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
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
    from slipstream.techniques.embedding.modules import (
        CompressedEmbedding,
        TableEmbedding,
        TableEmbeddingBag,
    )
    from slipstream.techniques.embedding.onnx_export import export
    from slipstream.techniques.embedding.planning import TablePlan, plan
    from slipstream.techniques.embedding.tt_shape import TTShape

_HOMES = {
    "CompressedEmbedding": "modules",
    "HashedTable": "formats.hashed",
    "LowDimTable": "formats.lowdim",
    "TablePlan": "planning",
    "QuantizedTable": "formats.codes",
    "ROBEEmbedding": "formats.robe",
    "ROBEEmbeddingBag": "formats.robe",
    "ROBEEmbeddingCollection": "formats.robe",
    "SharedArray": "formats.shared_array",
    "TableEmbedding": "modules",
    "TableEmbeddingBag": "modules",
    "export": "onnx_export",
    "plan": "planning",
    "TTEmbedding": "formats.tt",
    "TTEmbeddingBag": "formats.tt",
    "TTShape": "tt_shape",
}

__all__ = [
    "CompressedEmbedding",
    "HashedTable",
    "LowDimTable",
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
    "TablePlan",
    "export",
    "plan",
]

__getattr__, __dir__ = late(__name__, _HOMES, __all__)
