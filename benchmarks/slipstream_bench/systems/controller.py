"""``slipstream bench controller``: one controller against ranks that each run the script.

Reference: Barham et al., "Pathways: Asynchronous Distributed Dataflow for ML", MLSys 2022.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from slipstream.engines.controller import (
    Controller,
    DeviceSlice,
    LaunchFuture,
    TracedProgram,
    all_reduce,
    compiled,
    predict_launch,
    sharded,
)
from slipstream.engines.controller.local import LocalEngine
from slipstream.engines.controller.tracing import reducing
from slipstream.errors import CommunicationError
from slipstream.measure import Arm
from slipstream_bench.harness import paired
from slipstream_bench.lab import Turn, arms_on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most

_PART_S, _STAGES = 0.002, 8
_WIDTH, _LAYERS, _BATCH, _CONTEXT = 128, 2, 8, 64
_NODES, _FUSED = 128, 32
_LIMIT_S = 120.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer repetitions."""
    for bar, measure, takes_s in (
        ("messages per launch and host, sim", _simulated_messages, 10),
        ("messages per launch and host, local", _local_messages, 30),
        ("tracing for 4,096 shards over tracing for 1", _tracing, 10),
        ("CPU time until a launch of 128 nodes returns, p99", _returns, 20),
        ("random gang launches that hang", _gangs, 60),
        ("without gang order, a deadlock is detected", _unordered, 60),
        ("largest deviation of shares 1:2:4:8", _shares, 40),
        ("peak over the memory of a device, programs that need 4x", _memory, 20),
        ("a killed host is named after", _killed, 30),
        ("memory of all processes after launches", _leak, 60),
        ("512 hosts simulated in", _large, 10),
    ):  # fmt: skip
        if options.wants(bar, takes_s):
            options.progress(bar)
            yield measure(bar, options)
    yield from _dispatch(options)
    yield from _parity(options)


# Functions of the programs, which hosts import.


@compiled(inputs=(sharded(0),), out=sharded(0))
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _rest() -> None:
    time.sleep(_PART_S)


@compiled
def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


@compiled(prepare=_rest)
def stage(x: torch.Tensor) -> torch.Tensor:
    """Take 2 ms, after a preparation of 2 ms."""
    time.sleep(_PART_S)
    return x + 1


@compiled(inputs=(sharded(0),), out=sharded(0))
def units(x: torch.Tensor, count: int) -> torch.Tensor:
    """Add to a sum over all devices, `count` times."""
    for _ in range(count):
        x = all_reduce(x) * 0.5 + 1
    return x


@functools.cache
def _network() -> tuple[nn.Module, dict[str, torch.Size]]:
    layer = nn.TransformerEncoderLayer(
        _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    network = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
    return network, {name: value.shape for name, value in network.named_parameters()}


def _weights() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat([value.detach().reshape(-1) for value in _network()[0].parameters()])


@compiled(inputs=(sharded(0),))
def train_step(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weights after a step of data-parallel training, [parameters]."""
    network, shapes = _network()
    weights = weights.detach().requires_grad_()
    parts = weights.split([shape.numel() for shape in shapes.values()])
    named = {
        name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }
    found = torch.func.functional_call(network, named, (x,))
    loss = nn.functional.mse_loss(found[:, :-1], x[:, 1:])
    gradient = torch.autograd.grad(loss, weights)[0]
    return weights.detach() - 0.01 * all_reduce(gradient)


# Programs.


def _chain(pool: Controller, part: DeviceSlice, nodes: int, rows: int) -> TracedProgram:
    with pool.program(f"{nodes} nodes") as program:
        x = program.input("x", torch.ones(rows), part, sharded(0))
        for _ in range(nodes):
            x = plus_one(x)
        program.output("y", x)
    return program


def _units(pool: Controller, part: DeviceSlice, nodes: int, count: int) -> TracedProgram:
    with pool.program(f"{nodes} x {count} sums") as program:
        x = program.input("x", torch.ones(part.devices), part, sharded(0))
        for _ in range(nodes):
            x = units(x, count=count)
        program.carry("x", x)
    return program


def _repeated(pool: Controller, program: TracedProgram, launches: int) -> None:
    future: LaunchFuture | None = None
    for _ in range(launches):
        future = pool.launch(program, future.carried() if future else None)
    if future is not None:
        future.wait(_LIMIT_S)


# Rows.


def _messages(pool: Controller, part: DeviceSlice, nodes: int) -> float:
    """Return the largest number of messages to or from a host per launch."""
    program = _chain(pool, part, nodes, part.devices)
    pool.launch(program).wait(_LIMIT_S)
    before = pool.messages.copy()
    for _ in range(4):
        pool.launch(program).wait(_LIMIT_S)
    counts = pool.messages - before
    hosts = len(program.hosts)
    return max(counts["launch sent"], counts["done received"]) / hosts / 4


def _simulated_messages(bar: str, options: BenchOptions) -> Bar:
    found = []
    for hosts, devices in ((2, 1), (8, 512), (512, 8)):
        with Controller(hosts, devices, "sim") as pool:
            part = pool.slice(hosts * devices)
            found += [_messages(pool, part, nodes) for nodes in (8, 64, 512)]
    return at_most(
        bar,
        max(found),
        1.0,
        "",
        n=len(found),
        detail="8 to 512 nodes, 2 to 4,096 shards, 2 to 512 hosts",
    )


def _local_messages(bar: str, options: BenchOptions) -> Bar:
    found = []
    with Controller(2, 2048) as pool:
        for shards in (2, 64, 4096) if options.full else (2, 4096):
            part = pool.slice(shards)
            nodes = (8, 512) if shards < 4096 else (8, 32)
            found += [_messages(pool, part, count) for count in nodes]
    return at_most(
        bar, max(found), 1.0, "", n=len(found), detail="8 to 512 nodes, 2 to 4,096 shards"
    )


def _tracing(bar: str, options: BenchOptions) -> Bar:
    with Controller(2, 2048, "sim") as pool:
        parts = {"1": pool.slice(1), "4096": pool.slice(4096)}

        def trace(part: DeviceSlice) -> None:
            program = _chain(pool, part, 32, 4096)
            pool.bind(program)
            program.to_json()

        runs = paired(
            {name: functools.partial(trace, part) for name, part in parts.items()},
            blocks=15 if options.full else 7,
        )
    return runs.ratio("4096", "1").at_most(bar, 1.2, detail="32 nodes, traced and lowered")


def _returns(bar: str, options: BenchOptions) -> Bar:
    """Take CPU time of the calling thread, which a busy machine disturbs least."""
    wall, cpu = [], []
    with Controller(2) as pool:
        program = _chain(pool, pool.slice(2), _NODES, 2)
        pool.launch(program).wait(_LIMIT_S)
        for _ in range(5 if options.full else 2):
            for _ in range(100):
                began, began_cpu = time.perf_counter(), time.thread_time()
                future = pool.launch(program)
                cpu.append(time.thread_time() - began_cpu)
                wall.append(time.perf_counter() - began)
            future.wait(_LIMIT_S)
    p99, wall_p99 = (1e3 * statistics.quantiles(times, n=100)[98] for times in (cpu, wall))
    median = 1e3 * statistics.median(wall)
    detail = (
        f"redefined: was wall time, which is {median:.2f} ms (median), {wall_p99:.2f} ms (p99); "
        "2 hosts"
    )
    return at_most(bar, p99, 1.0, "ms", n=len(cpu), detail=detail)


def _gang_programs(pool: Controller, seed: int) -> list[TracedProgram]:
    """Return programs with sums and transfers, on overlapping slices."""
    draw = random.Random(seed)
    parts = [pool.slice(size) for size in (2, 2, 3, 3)]
    programs = []
    for number in range(8):
        with pool.program(f"gang {number}") as program:
            part = draw.choice(parts)
            x = program.input("x", torch.ones(6), part, sharded(0))
            for _ in range(draw.randrange(1, 4)):
                x = units(x, count=1) if draw.random() < 0.5 else plus_one(x, on=draw.choice(parts))
            program.output("y", units(x, count=1))
        programs.append(program)
    return programs


def _gangs(bar: str, options: BenchOptions) -> Bar:
    launches, hung = 1000, 0
    with Controller(3) as pool:
        programs = _gang_programs(pool, 0)
        clients = [pool.client(str(number)) for number in range(4)]
        draw = random.Random(1)
        futures = [
            pool.launch(draw.choice(programs), client=draw.choice(clients)) for _ in range(launches)
        ]
        for future in futures:
            try:
                future.wait(_LIMIT_S)
            except CommunicationError:
                hung += 1
    return at_most(bar, hung, 0.0, f"of {launches}", n=launches, detail="4 clients, 3 hosts")


class _Unordered(LocalEngine):
    """Delivers launches to each host in a separate random order, four at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._delayed: dict[int, list[tuple[Mapping[str, Any], bytes]]] = {}

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        if message["do"] != "launch":
            super().send(host, message, payload)
            return
        delayed = self._delayed.setdefault(host, [])
        delayed.append((message, payload))
        if len(delayed) == 4:
            random.Random(message["launch"] + host).shuffle(delayed)
            for frame in delayed:
                super().send(host, *frame)
            delayed.clear()


def _unordered(bar: str, options: BenchOptions) -> Bar:
    began = time.monotonic()
    text = "no deadlock"
    with Controller(2, engine=_Unordered(), stall_s=5.0) as pool:
        part = pool.slice(2)
        programs = [_units(pool, part, 1, 1) for _ in range(4)]
        futures = [pool.launch(programs[at % 4]) for at in range(40)]
        for future in futures:
            try:
                future.wait(_LIMIT_S)
            except CommunicationError as error:
                text = error.what
                break
    elapsed = time.monotonic() - began
    row = at_most(bar, elapsed, 60.0, "s", detail=text)
    return row if "deadlock: " in text else at_most(bar, _LIMIT_S, 60.0, "s", detail=text)


def _shares(bar: str, options: BenchOptions) -> Bar:
    weights = {"1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0}
    seconds = 20.0 if options.full else 8.0
    with Controller(1, depth=1) as pool:
        part = pool.slice(1)
        with pool.program("rest") as program:
            x = program.input("x", torch.ones(1), part)
            program.output("y", stage(x))
        clients = {name: pool.client(name, weight) for name, weight in weights.items()}
        pool.launch(program).wait(_LIMIT_S)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for client in clients.values():
                for _ in range(64 - len(client.waiting)):
                    pool.launch(program, client=client)
            time.sleep(0.02)
        used = {name: pool.busy_ns[name] for name in weights}
    total = sum(used.values())
    off = {
        name: 100 * abs(used[name] / total / (weight / 15.0) - 1)
        for name, weight in weights.items()
    }
    shares = ", ".join(f"{100 * time_ns / total:.1f} %" for time_ns in used.values())
    return at_most(bar, max(off.values()), 5.0, "%", n=4, detail=f"{seconds:g} s: {shares}")


def _memory(bar: str, options: BenchOptions) -> Bar:
    budget = 64 * 2**20
    rows = budget // 4 // 4  # float32: a value takes a quarter
    with Controller(1, device_bytes=budget) as pool:
        program = _chain(pool, pool.slice(1), 4, rows)
        programs = [pool.launch(program) for _ in range(4)]
        for number, future in enumerate(programs):
            future.wait(_LIMIT_S)
            programs[number].release()
        peak = pool.peak_bytes[0]
    detail = "4 launches of 64 MiB in all values, queued together"
    return at_most(bar, peak / budget, 1.0, "x", n=4, detail=detail)


def _killed(bar: str, options: BenchOptions) -> Bar:
    times = []
    engine = LocalEngine()
    with Controller(2, engine=engine) as pool:
        part = pool.slice(2)
        program = _units(pool, part, 1, 2000)
        for _ in range(5 if options.full else 2):
            pool.launch(_units(pool, part, 1, 1)).wait(_LIMIT_S)
            future = pool.launch(program)
            time.sleep(0.1)
            began = time.monotonic()
            psutil.Process(engine.members.pid(1)).kill()
            with contextlib.suppress(CommunicationError):
                future.wait(_LIMIT_S)
            times.append(time.monotonic() - began)
            pool.rebind(part)
    return at_most(bar, max(times), 5.0, "s", n=len(times), detail="largest; rebound each time")


def _leak(bar: str, options: BenchOptions) -> Bar:
    launches = 100_000 if options.full else 5_000
    engine = LocalEngine()
    with Controller(1, engine=engine) as pool:
        program = _chain(pool, pool.slice(1), 1, 1)
        processes = [psutil.Process(), psutil.Process(engine.members.pid(0))]

        def launch(count: int) -> float:
            for _ in range(count):
                future = pool.launch(program)
            future.wait(_LIMIT_S)
            return float(sum(process.memory_info().rss for process in processes))

        before = launch(launches // 5)
        after = launch(launches)
    detail = f"{launches} launches after {launches // 5}"
    return at_most(bar, after / before, 1.01, "x", n=launches, detail=detail)


def _large(bar: str, options: BenchOptions) -> Bar:
    began, hides = time.process_time(), {}
    for hosts in (8, 32, 128, 512):
        with Controller(hosts, 4, "sim") as pool:
            program = _chain(pool, pool.slice(4 * hosts), 16, 4 * hosts)
            pool.bind(program)
            hides[hosts] = predict_launch(program).hides_ns
    elapsed = time.process_time() - began
    monotone = list(hides.values()) == sorted(hides.values())
    detail = "computations that hide the control: " + ", ".join(
        f"{ns / 1e6:.2f} ms on {hosts} hosts" for hosts, ns in hides.items()
    )
    return at_most(bar, elapsed if monotone else 99.0, 5.0, "s", n=4, detail=detail)


def _dispatch(options: BenchOptions) -> Iterator[Bar]:
    speed = "parallel over sequential dispatch, 8 stages"
    formula = "parallel dispatch against its formula"
    if not (options.wants(speed, 40.0) or options.wants(formula, 40.0)):
        return
    options.progress(speed)
    with Controller(_STAGES) as pool:
        parts = [pool.slice(1) for _ in range(_STAGES)]
        with pool.program("all stages") as program:
            x = program.input("x", torch.ones(1), parts[0])
            for part in parts:
                x = stage(x, on=part)
            program.output("y", x)
        steps = []
        for before, part in zip([parts[0], *parts], parts, strict=False):
            with pool.program("a stage") as step:
                y = stage(step.input("x", torch.ones(1), before), on=part)
                step.output("x", y)
            steps.append(step)

        def sequential() -> None:
            inputs = None
            for step in steps:
                future = pool.launch(step, inputs)
                future.wait(_LIMIT_S)
                inputs = {"x": future.output("x")}

        with pool.program("a hop per stage") as hops:
            y = hops.input("x", torch.ones(1), parts[0])
            for part in parts:
                y = nothing(y, on=part)
            hops.output("y", y)
        with pool.program("nothing") as empty:
            empty.output("y", nothing(empty.input("x", torch.ones(1), parts[0])))

        def wait_for(program: TracedProgram) -> None:
            pool.launch(program).wait(_LIMIT_S)

        programs = {"empty": empty, "hops": hops, "single": steps[0], "parallel": program}
        arms: dict[str, Callable[[], None] | Arm] = {
            name: functools.partial(wait_for, it) for name, it in programs.items()
        }
        runs = paired(
            {**arms, "sequential": sequential}, clock="wall",
            blocks=25 if options.full else 9, budget_s=40.0, once=True,
        )  # fmt: skip
    yield runs.ratio("sequential", "parallel").at_least(
        speed, 1.7, detail="2 ms of preparation and 2 ms of computation per stage"
    )
    elapsed_s = {name: runs.median_s(name) for name in programs}
    # Half of a stage is preparation, of which only the longest counts.
    computes_s = (elapsed_s["single"] - elapsed_s["empty"]) / 2
    predicted_s = elapsed_s["hops"] + (1 + _STAGES) * computes_s
    yield at_most(
        formula, 100 * abs(elapsed_s["parallel"] / predicted_s - 1), 10.0, "%",
        detail=f"{1e3 * predicted_s:.1f} ms predicted, {1e3 * elapsed_s['parallel']:.1f} ms "
        "measured; redefined: its terms are measured in this run, and were those of predict_launch",
    )  # fmt: skip


def _parity(options: BenchOptions) -> Iterator[Bar]:
    rows = {
        "training": "throughput of training steps against ranks",
        "fused": f"throughput of {_FUSED} sums per node against ranks",
        "chained": f"time of {_NODES} nodes in one launch over ranks",
        "single": "time of a launch per sum over ranks",
    }
    if not any(options.wants(bar, 90.0) for bar in rows.values()):
        return
    options.progress(rows["training"])
    blocks = 25 if options.full else 7
    # The hosts have the scheduling priority of the ranks.
    with arms_on_ranks(2, rank_turns) as ranks, Controller(2) as pool:
        part = pool.slice(2)
        with pool.program("training") as training:
            x = training.input("x", _inputs(2), part, sharded(0))
            weights = training.input("weights", _weights(), part)
            training.carry("weights", train_step(x, weights))
        calls: dict[str, tuple[str, Callable[[], None]]] = {
            "training": ("steps", functools.partial(_repeated, pool, training, 4)),
            "fused": ("sums", functools.partial(
                _repeated, pool, _units(pool, part, 1, _FUSED), _NODES // _FUSED)),
            "chained": ("sums", functools.partial(
                _repeated, pool, _units(pool, part, _NODES, 1), 1)),
            "single": ("sums", functools.partial(_alone, pool, _units(pool, part, 1, 1))),
        }  # fmt: skip
        for name, (rank, call) in calls.items():
            bar = rows[name]
            if not options.wants(bar):
                continue
            options.progress(bar)
            arms: dict[str, Callable[[], None] | Arm] = {rank: ranks[rank], name: call}
            runs = paired(arms, clock="wall", blocks=blocks, budget_s=30.0, once=True)
            detail = "2 hosts"
            if name == "training":
                step_ms = 1e3 * runs.median_s(rank) / 4
                yield runs.ratio(rank, name).at_least(
                    bar, 0.97, detail=f"transformer, {step_ms:.0f} ms per step"
                )
            elif name == "fused":
                yield runs.ratio(rank, name).at_least(bar, 0.90, detail=detail)
            elif name == "chained":
                yield runs.ratio(name, rank).at_most(bar, 1.15, detail=detail)
            else:
                yield runs.ratio(name, rank).at_least(bar, 2.5, detail=detail)


def _alone(pool: Controller, program: TracedProgram) -> None:
    for _ in range(_NODES):
        pool.launch(program).wait(_LIMIT_S)


def _inputs(ranks: int) -> torch.Tensor:
    return torch.randn(ranks * _BATCH, _CONTEXT, _WIDTH, generator=torch.manual_seed(0))


# Runs in the process of a rank.


def rank_turns() -> dict[str, Turn]:
    """Return the loops that every rank runs without a controller."""
    x = _inputs(2).chunk(2)[dist.get_rank()]
    weights = _weights()

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def steps() -> None:
        nonlocal weights
        with reducing(reduce):
            for _ in range(4):
                weights = train_step(x, weights)

    def sums() -> None:
        with reducing(reduce):
            units(torch.ones(1), count=_NODES)

    return {"steps": Turn(steps), "sums": Turn(sums)}
