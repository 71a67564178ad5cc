"""One interface to models in torch, ONNX Runtime, LiteRT, behind HTTP, and to functions.

    from slipstream import runtimes

    with runtimes.load("model.onnx") as model:
        print(model.inputs)                   # names, dtypes, shapes; None: any size
        (scores,) = model.run([images])       # [N, ...] in, [N, ...] out

A runtime's library is imported only when a model needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.runtimes.batching import Batcher, BatchPolicy
    from slipstream.runtimes.fitting import fit
    from slipstream.runtimes.opening import kind_of, load
    from slipstream.runtimes.runtime import ModelError, OverloadedError, Runtime, TensorSpec
    from slipstream.runtimes.server import serving

_HOME_OF = {
    "Batcher": "batching",
    "BatchPolicy": "batching",
    "ModelError": "runtime",
    "OverloadedError": "runtime",
    "Runtime": "runtime",
    "TensorSpec": "runtime",
    "fit": "fitting",
    "kind_of": "opening",
    "load": "opening",
    "serving": "server",
}

__all__ = [
    "BatchPolicy",
    "Batcher",
    "ModelError",
    "OverloadedError",
    "Runtime",
    "TensorSpec",
    "fit",
    "kind_of",
    "load",
    "serving",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
