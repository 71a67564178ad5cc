"""Exact distances between sparse rows, nearest neighbours and near-duplicates.

The estimators need scikit-learn, which is imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import MissingExtraError
from slipstream.late import late
from slipstream.sparse.dedup import DedupResult, dedup
from slipstream.sparse.join import Pairs, radius_join
from slipstream.sparse.metrics import METRICS
from slipstream.sparse.neighbours import knn_graph
from slipstream.sparse.pairwise import Tile, distance_tiles, pairwise_distances
from slipstream.sparse.semiring import Semiring

if TYPE_CHECKING:
    from slipstream.sparse.estimators import KNeighborsTransformer, NearestNeighbors
    from slipstream.sparse.patch import patch_sklearn

__all__ = [
    "METRICS",
    "DedupResult",
    "KNeighborsTransformer",
    "NearestNeighbors",
    "Pairs",
    "Semiring",
    "Tile",
    "dedup",
    "distance_tiles",
    "knn_graph",
    "pairwise_distances",
    "patch_sklearn",
    "radius_join",
]

_WITH_SKLEARN = {
    "KNeighborsTransformer": "estimators",
    "NearestNeighbors": "estimators",
    "patch_sklearn": "patch",
}


_find, __dir__ = late(__name__, _WITH_SKLEARN, __all__)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise MissingExtraError(f"slipstream.sparse.{name}", "scikit-learn", "sparse") from error
