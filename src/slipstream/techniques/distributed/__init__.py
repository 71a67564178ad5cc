"""Distributed training: compressed, sharded and prioritised exchange between ranks.

import slipstream as ss

model = DistributedDataParallel(model)
ss.distributed.compress(model, "powersgd:rank=4")

# Alternatively, keep the learning rate of one worker.
optimizer = ss.distributed.AdasumOptimizer(optimizer)

# Alternatively, update a share of the parameters on each rank.
optimizer = ss.distributed.ShardedUpdate(optimizer, model)

# Alternatively, let each layer wait for its own weights only.
model = ss.distributed.PriorityDDP(model, optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import CommunicationError
from slipstream.late import late
from slipstream.techniques.distributed.compression import (
    ACP,
    Auto,
    BlockInt,
    Cast,
    Compressor,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)

if TYPE_CHECKING:
    from slipstream.ranks.lines import shares
    from slipstream.techniques.distributed.adasum.hook import (
        AdasumState,
        adasum_all_reduce,
        adasum_hook,
    )
    from slipstream.techniques.distributed.adasum.optimizer import AdasumOptimizer, average_buffers
    from slipstream.techniques.distributed.adasum.rule import (
        adasum_benefit,
        orthogonality,
    )
    from slipstream.techniques.distributed.collectives.scatter import all_gather, reduce_scatter
    from slipstream.techniques.distributed.collectives.two_d import (
        TwoDState,
        two_d_allreduce,
        two_d_hook,
    )
    from slipstream.techniques.distributed.compression.hook import Compression, compress
    from slipstream.techniques.distributed.compression.simulated import SimulatedWorkers
    from slipstream.techniques.distributed.priority.wrapper import PriorityDDP
    from slipstream.techniques.distributed.sharded.layerwise import Lamb, Lars
    from slipstream.techniques.distributed.sharded.optimizer import ShardedUpdate

# These import torch, and are therefore imported on first use.
_LATE = {
    "AdasumOptimizer": "adasum.optimizer",
    "AdasumState": "adasum.hook",
    "Compression": "compression.hook",
    "Lamb": "sharded.layerwise",
    "Lars": "sharded.layerwise",
    "PriorityDDP": "priority.wrapper",
    "ShardedUpdate": "sharded.optimizer",
    "SimulatedWorkers": "compression.simulated",
    "TwoDState": "collectives.two_d",
    "adasum_all_reduce": "adasum.hook",
    "adasum_benefit": "adasum.rule",
    "adasum_hook": "adasum.hook",
    "all_gather": "collectives.scatter",
    "average_buffers": "adasum.optimizer",
    "compress": "compression.hook",
    "orthogonality": "adasum.rule",
    "reduce_scatter": "collectives.scatter",
    "shares": "collectives.scatter",
    "two_d_allreduce": "collectives.two_d",
    "two_d_hook": "collectives.two_d",
}

__all__ = [
    "ACP",
    "AdasumOptimizer",
    "AdasumState",
    "Auto",
    "BlockInt",
    "Cast",
    "CommunicationError",
    "Compression",
    "Compressor",
    "Lamb",
    "Lars",
    "PowerSGD",
    "PriorityDDP",
    "RandomK",
    "ShardedUpdate",
    "Sign",
    "SimulatedWorkers",
    "TopK",
    "TwoDState",
    "adasum_all_reduce",
    "adasum_benefit",
    "adasum_hook",
    "all_gather",
    "average_buffers",
    "compress",
    "orthogonality",
    "reduce_scatter",
    "shares",
    "two_d_allreduce",
    "two_d_hook",
]

__getattr__, __dir__ = late(__name__, _LATE, __all__)
