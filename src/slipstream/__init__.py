"""Predict, apply and prove what makes a PyTorch model cheaper.

    import slipstream as ss

    graph = ss.profile("train.py:make_workload")     # run the step, record what ran
    ss.predict(graph, ["amp:bf16"])                  # what if?
    ss.apply("train.py:make_workload", "amp:bf16")   # the real transformation

Everything is imported on first use; ``import slipstream`` itself does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream import (
        cluster,
        data,
        hardware,
        measure,
        nas,
        nn,
        quant,
        ranks,
        search,
        ship,
        sparse,
    )
    from slipstream import synthesis as synth
    from slipstream.cluster import Cluster
    from slipstream.engines import aggregation, controller, storage
    from slipstream.graph import Graph, load
    from slipstream.nas import codesign
    from slipstream.report import write_report
    from slipstream.search import Space, study
    from slipstream.ship import stability, xray
    from slipstream.techniques import (
        burst,
        distributed,
        embedding,
        ensembles,
        loops,
        lowbit,
        lowrank,
        pipeline,
        pretraining,
        quadratic,
        recursive,
        scan,
        spatial,
    )
    from slipstream.verbs.advising import advise
    from slipstream.verbs.applying import ApplyResult, apply
    from slipstream.verbs.batch.model import BatchModel
    from slipstream.verbs.batch.search import batch_model
    from slipstream.verbs.devices.accelerators import predict_accelerator
    from slipstream.verbs.devices.elsewhere import DevicePrediction, predict_device
    from slipstream.verbs.explaining.explain import diff, explain
    from slipstream.verbs.exporting import export
    from slipstream.verbs.predicting import predict
    from slipstream.verbs.profiling import profile
    from slipstream.verbs.proving.sides import prove
    from slipstream.verbs.results import Prediction
    from slipstream.workload import BuiltWorkload, Workload

_HOMES = {
    "slipstream.cluster": ("Cluster",),
    "slipstream.graph": ("Graph", "load"),
    "slipstream.report": ("write_report",),
    "slipstream.search": ("Space", "study"),
    "slipstream.verbs.advising": ("advise",),
    "slipstream.verbs.applying": ("ApplyResult", "apply"),
    "slipstream.verbs.batch.search": ("batch_model",),
    "slipstream.verbs.batch.model": ("BatchModel",),
    "slipstream.verbs.devices.accelerators": ("predict_accelerator",),
    "slipstream.verbs.devices.elsewhere": ("DevicePrediction", "predict_device"),
    "slipstream.verbs.explaining.explain": ("diff", "explain"),
    "slipstream.verbs.exporting": ("export",),
    "slipstream.verbs.predicting": ("predict",),
    "slipstream.verbs.profiling": ("profile",),
    "slipstream.verbs.proving.sides": ("prove",),
    "slipstream.verbs.results": ("Prediction",),
    "slipstream.workload": ("BuiltWorkload", "Workload"),
}
_PACKAGES = {
    "aggregation": "slipstream.engines.aggregation",
    "burst": "slipstream.techniques.burst",
    "cluster": "slipstream.cluster",
    "codesign": "slipstream.nas.codesign",
    "controller": "slipstream.engines.controller",
    "data": "slipstream.data",
    "distributed": "slipstream.techniques.distributed",
    "embedding": "slipstream.techniques.embedding",
    "ensembles": "slipstream.techniques.ensembles",
    "hardware": "slipstream.hardware",
    "loops": "slipstream.techniques.loops",
    "lowbit": "slipstream.techniques.lowbit",
    "lowrank": "slipstream.techniques.lowrank",
    "measure": "slipstream.measure",
    "nas": "slipstream.nas",
    "nn": "slipstream.nn",
    "pipeline": "slipstream.techniques.pipeline",
    "pretraining": "slipstream.techniques.pretraining",
    "quadratic": "slipstream.techniques.quadratic",
    "quant": "slipstream.quant",
    "recursive": "slipstream.techniques.recursive",
    "ranks": "slipstream.ranks",
    "search": "slipstream.search",
    "ship": "slipstream.ship",
    "scan": "slipstream.techniques.scan",
    "sparse": "slipstream.sparse",
    "spatial": "slipstream.techniques.spatial",
    "stability": "slipstream.ship.stability",
    "storage": "slipstream.engines.storage",
    "synth": "slipstream.synthesis",
    "xray": "slipstream.ship.xray",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ApplyResult",
    "BatchModel",
    "BuiltWorkload",
    "Cluster",
    "DevicePrediction",
    "Graph",
    "Prediction",
    "Space",
    "Workload",
    "advise",
    "aggregation",
    "apply",
    "batch_model",
    "burst",
    "cluster",
    "codesign",
    "controller",
    "data",
    "diff",
    "distributed",
    "embedding",
    "ensembles",
    "explain",
    "export",
    "hardware",
    "load",
    "loops",
    "lowbit",
    "lowrank",
    "measure",
    "nas",
    "nn",
    "pipeline",
    "predict",
    "predict_accelerator",
    "predict_device",
    "pretraining",
    "profile",
    "prove",
    "quadratic",
    "quant",
    "ranks",
    "recursive",
    "scan",
    "search",
    "ship",
    "sparse",
    "spatial",
    "stability",
    "storage",
    "study",
    "synth",
    "write_report",
    "xray",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
