"""One Python script that places work on slices of many devices.

    import slipstream as ss
    from slipstream.engines.controller import compiled, sharded

    @compiled(inputs=(sharded(0),), out=sharded(0))
    def hidden(x, weight):
        return torch.relu(x @ weight)

    with ss.controller.Controller(hosts=2) as pool:
        both = pool.slice(2)
        with pool.program("forward") as program:
            x = program.input("x", torch.randn(64, 32), both, sharded(0))
            w = program.input("w", torch.randn(32, 8), both)
            program.output("y", hidden(x, w))
        y = pool.launch(program).result("y")

Source: Barham et al., "Pathways: Asynchronous Distributed Dataflow for ML", MLSys 2022.
"""

from __future__ import annotations

from slipstream.engines.controller.controller import ControlClient, Controller
from slipstream.engines.controller.engine import Engine, engine_by_name
from slipstream.engines.controller.launches import KeptValue, LaunchFuture
from slipstream.engines.controller.layout import PARTIAL, REPLICATED, Sharding, sharded
from slipstream.engines.controller.running import (
    ControlPlan,
    ControlRun,
    plan_program,
    run_program,
    trace_program,
)
from slipstream.engines.controller.simulating import (
    ControlCosts,
    ControlPrediction,
    predict_launch,
)
from slipstream.engines.controller.timeline import launch_graph
from slipstream.engines.controller.tracing import (
    CompiledFunction,
    DeviceSlice,
    TracedProgram,
    TracedValue,
    all_reduce,
    compiled,
)

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "CompiledFunction",
    "ControlClient",
    "ControlCosts",
    "ControlPlan",
    "ControlPrediction",
    "ControlRun",
    "Controller",
    "DeviceSlice",
    "Engine",
    "KeptValue",
    "LaunchFuture",
    "Sharding",
    "TracedProgram",
    "TracedValue",
    "all_reduce",
    "compiled",
    "engine_by_name",
    "launch_graph",
    "plan_program",
    "predict_launch",
    "run_program",
    "sharded",
    "trace_program",
]
