"""Images in tiles on several ranks, batch-norm groups, and evaluation and input on many hosts.

import slipstream as ss

ss.spatial.partition(model, images, rows=2, columns=2)
model = DistributedDataParallel(model)
with ss.spatial.Evaluation(score, len(dataset), 32, metric) as evaluation:
    pending = evaluation.start(model)
    train()
    print(pending.result())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late
from slipstream.techniques.spatial.input import InputModel
from slipstream.techniques.spatial.technique import BatchNormGroups, Spatial
from slipstream.techniques.spatial.window import Window

if TYPE_CHECKING:
    from slipstream.techniques.spatial.evaluation import Evaluation, PendingMetric
    from slipstream.techniques.spatial.nn import group_batch_norm, partition

# These import torch, and are therefore imported on first use.
_LATE = {
    "Evaluation": "evaluation",
    "PendingMetric": "evaluation",
    "group_batch_norm": "nn",
    "partition": "nn",
}

__all__ = [
    "BatchNormGroups",
    "Evaluation",
    "InputModel",
    "PendingMetric",
    "Spatial",
    "Window",
    "group_batch_norm",
    "partition",
]

__getattr__, __dir__ = late(__name__, _LATE, __all__)
