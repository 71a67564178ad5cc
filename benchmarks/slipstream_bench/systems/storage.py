"""``slipstream bench storage``: cache policies, learned and classic, against peers and real files.

The peer is libCacheSim: its rows are measured if the package ``libcachesim`` can be imported.
Public traces are those of the data set ``cache_traces``; sizes are shares of all objects' bytes.
"""

from __future__ import annotations

import functools
import heapq
import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from slipstream.data import ORACLE_GENERAL, get
from slipstream.engines.storage import (
    AccessPredictor,
    AccessTrace,
    CachedDataset,
    PriceSheet,
    ShardCache,
    StorageOrigin,
    StorageTier,
    import_trace,
    predict_cache,
    predict_tiers,
    record_trace,
    simulate,
    throttled,
)
from slipstream.engines.storage.policies import CachePolicy, next_requests, numbered
from slipstream.engines.storage.predictor import Observations, observations
from slipstream.engines.storage.recording import recording_environment
from slipstream.engines.storage.simulating import capacity_of
from slipstream.engines.storage.tokens import ContextClasses
from slipstream_bench.generators.accesses import (
    JOBS,
    TrainingJob,
    tier_accesses,
    training_accesses,
)
from slipstream_bench.harness import paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_TRACES = ("cloudphysics", "request", "w106", "scarab", "orm-busy")
_SHARES = ("1%", "5%", "10%")
_CLASSIC = ("lru", "s3fifo", "lirs", "wtinylfu")
_PEERS = {"lru": "LRU", "fifo": "FIFO", "belady": "Belady", "s3fifo": "S3FIFO", "sieve": "Sieve",
          "lirs": "LIRS"}  # fmt: skip
_EXACT = ("lru", "fifo", "belady")
_QUICK_REQUESTS = 100_000


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: the first 100,000 requests of each trace, one seed, fewer spans."""
    yield from _peer_rows(options)
    yield from _speed_row(options)
    yield from _epoch_rows(options)
    yield from _trace_rows(options)
    yield from _drift_row(options)
    yield from _calibration_rows(options)
    yield from _later_row(options)
    yield from _decision_row(options)
    yield from _growth_rows(options)
    yield from _tier_rows(options)
    yield from _import_rows(options)
    yield from _recorder_row(options)
    yield from _training_rows(options)


@functools.cache
def _public(name: str, limit: int | None) -> AccessTrace:
    trace = import_trace(f"cache_traces:{name}")
    return trace if limit is None else trace.first(limit)


def _limit(options: BenchOptions) -> int | None:
    return None if options.full else _QUICK_REQUESTS


def _peer_rows(options: BenchOptions) -> Iterator[Bar]:
    exact = "LRU, FIFO, Belady: requests whose outcome differs from libCacheSim's"
    near = "S3-FIFO, SIEVE, LIRS: largest difference from libCacheSim's hit rate"
    if not (options.wants(exact, 60) or options.wants(near, 60)):
        return
    if importlib.util.find_spec("libcachesim") is None:
        for bar, unit, target in ((exact, "requests", "= 0"), (near, "points", "<= 0.3")):
            yield not_judged(bar, unit, target, "the package libcachesim is not installed")
        return
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    lengths: dict[str, int] = {}
    for name in (*_TRACES, "epochs"):
        options.progress(f"libCacheSim, {name}")
        trace = training_accesses(0) if name == "epochs" else _public(name, 400_000)
        trace = trace.first(400_000 if options.full else 50_000)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.oracleGeneral.bin")
            _write_oracle_general(trace, path)
            for share in _SHARES:
                capacity = capacity_of(trace, share)
                lengths[f"{name}, {share}"] = len(trace)
                counts[f"{name}, {share}"] = {
                    policy: (
                        int(simulate(trace, policy, capacity).sum()),
                        _peer_hits(path, peer, capacity, len(trace)),
                    )
                    for policy, peer in _PEERS.items()
                }
    differing = sum(
        abs(ours - theirs)
        for row in counts.values()
        for policy, (ours, theirs) in row.items()
        if policy in _EXACT
    )
    detail = f"{len(counts)} pairs of trace and size"
    yield Bar(exact, differing, "requests", "= 0", differing == 0, len(counts), detail, 0.0,
              data=counts)  # fmt: skip
    largest = {
        f"{policy}, {cell}": 100 * abs(ours - theirs) / lengths[cell]
        for cell, row in counts.items()
        for policy, (ours, theirs) in row.items()
        if policy not in _EXACT
    }
    worst = max(largest, key=lambda cell: largest[cell])
    yield at_most(near, largest[worst], 0.3, "points", n=len(largest), detail=worst, data=largest)


def _write_oracle_general(trace: AccessTrace, path: Path) -> None:
    following = next_requests(trace.objects)
    records = np.zeros(len(trace), ORACLE_GENERAL)
    records["time"] = np.arange(len(trace))
    records["key"] = trace.objects + 1
    records["size"] = trace.sizes
    records["next_access"] = np.where(following > len(trace), -1, following)
    records.tofile(path)


def _peer_hits(path: Path, peer: str, capacity: int, requests: int) -> int:
    import libcachesim  # type: ignore[import-not-found, unused-ignore]

    reader = libcachesim.TraceReader(
        str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE
    )
    missed: float = getattr(libcachesim, peer)(cache_size=capacity).process_trace(reader)[0]
    return round((1 - missed) * requests)


def _speed_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "LRU, numbering of keys included, one thread"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    keys = get("cache_traces", trace="w106").keys[:2_000_000]

    def run() -> None:
        numbers, _ = numbered(keys)
        trace = AccessTrace.checked(numbers, np.ones(keys.size, np.int64))
        simulate(trace, "lru", 20_000)

    seconds = times_s(run, 7)
    yield at_least(bar, keys.size / float(np.median(seconds)) / 1e6, 5.0, "M requests/s", n=7,
                   detail="w106, first 2 M requests; CPU time")  # fmt: skip


def _epoch_rows(options: BenchOptions) -> Iterator[Bar]:
    for share, limit in (("10%", 0.462), ("20%", 0.235)):
        miss = f"epoch workload, {share}: miss ratio of learned"
        gap = f"epoch workload, {share}: gap from W-TinyLFU to Belady that is closed"
        text = f"epoch workload, {share}: hits that contexts add"
        if not any(options.wants(bar, 10) for bar in (miss, gap, text)):
            continue
        options.progress(miss)
        seeds = range(3 if options.full else 1)
        rows = []
        for seed in seeds:
            found = predict_cache(
                training_accesses(seed), share, ("learned", "auto", "wtinylfu", "belady")
            )
            rows.append(
                {outcome.policy: 1 - outcome.hit_rate for outcome in found.outcomes}
                | {"gain": found.text_gain or 0.0, "matters": bool(found.text_matters)}
            )
        worst = max(row["learned"] for row in rows)
        yield at_most(miss, worst, limit, "", n=len(rows), detail="worst seed", data={"rows": rows})
        closed = [
            (row["wtinylfu"] - row["learned"]) / (row["wtinylfu"] - row["belady"]) for row in rows
        ]
        yield at_least(gap, 100 * min(closed), 60.0, "%", n=len(rows), detail="worst seed")
        gains = [100 * row["gain"] for row in rows]
        yield Bar(text, min(gains), "points", "> 0, p < 0.05", all(row["matters"] for row in rows),
                  len(rows), "worst seed; paired, over blocks of requests")  # fmt: skip


def _trace_rows(options: BenchOptions) -> Iterator[Bar]:
    never = "public traces: auto's hit rate below the best classic policy's, at most"
    better = "public traces on which auto is better than every classic policy"
    if not (options.wants(never, 60) or options.wants(better, 60)):
        return
    below, below_at_first = dict[str, float](), dict[str, float]()
    for name in _TRACES:
        for share in _SHARES:
            options.progress(f"{name}, {share}")
            trace = _public(name, _limit(options))
            hits = {policy: 100 * simulate(trace, policy, share) for policy in (*_CLASSIC, "auto")}
            for result, start in ((below, len(trace) // 2), (below_at_first, 0)):
                rates = {policy: float(hit[start:].mean()) for policy, hit in hits.items()}
                auto = rates.pop("auto")
                result[f"{name}, {share}"] = max(rates.values()) - auto
    worst = max(below, key=lambda cell: below[cell])
    first = max(below_at_first, key=lambda cell: below_at_first[cell])
    shown = (
        f"second half of each trace, after the first; first definition, over both: "
        f"{below_at_first[first]:.2f} ({first}); "
    ) + "; ".join(f"{cell}: {value:.2f}" for cell, value in below.items())
    yield at_most(never, below[worst], 0.5, "points", n=len(below), detail=shown, data=below)
    won = {cell.partition(",")[0] for cell, value in below.items() if value < 0}
    detail = ", ".join(sorted(won)) + "; at one size or more"
    yield at_least(better, len(won), 3, f"of {len(_TRACES)}", n=len(below), detail=detail)


def _drift_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "drift: epochs until auto has 0.9 of the hits that a new cache has in the same epoch"
    if not options.wants(bar, 10):
        return
    options.progress(bar)
    before = training_accesses(0, JOBS[:2])
    late = [TrainingJob("epsilon", 300, 30, 1.0), TrainingJob("zeta", 100, 60, 1.5)]
    after = training_accesses(1, late)
    names = [before.names[n] for n in before.objects] + [after.names[n] for n in after.objects]
    sizes = np.concatenate([before.sizes, after.sizes])
    both = AccessTrace.of(names, sizes)
    capacity = int(after.object_bytes.sum() * 0.2)
    alone = simulate(AccessTrace.of(names[len(before) :], after.sizes), "auto", capacity)
    changed = simulate(both, "auto", capacity)[len(before) :]
    epoch = len(after) // 30
    pairs = [
        (float(now.mean()), float(fresh.mean()))
        for now, fresh in zip(np.array_split(changed, 30), np.array_split(alone, 30), strict=True)
    ]
    recovered = next((n for n, (now, fresh) in enumerate(pairs) if now >= 0.9 * fresh), 30)
    late_rate = float(alone[len(alone) // 2 :].mean())
    settled, settled_alone = (
        next((n for n, rates in enumerate(pairs) if rates[which] >= 0.95 * late_rate), 30)
        for which in (0, 1)
    )
    yield at_most(
        bar, recovered, 2, "epochs", data={"pairs": pairs, "late_rate": late_rate},
        detail=f"an epoch is {epoch} requests; first definition, until 0.95 of the new cache's "
        f"rate over its second half: {settled}, and {settled_alone} for the new cache itself",
    )  # fmt: skip


def _planted(
    samples: int, censored: bool
) -> tuple[Observations, list[dict[str, str]], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw log-normal values of 40 contexts, of which 30 % are cut off if `censored`."""
    random = np.random.default_rng(7)
    features = [{"job": f"job{a}", "kind": f"kind{b}"} for a in range(8) for b in range(5)]
    mean, sd = random.uniform(0, 8, 40), random.uniform(0.3, 1.5, 40)
    classes = np.repeat(np.arange(40), samples).astype(np.int32)
    value = random.normal(mean[classes], sd[classes])
    # A normal limit with the same spread is exceeded by 30 % of the values.
    limit = random.normal(mean[classes] + 0.7416 * sd[classes], sd[classes])
    cut = (value > limit) & censored
    return Observations(classes, np.exp(np.where(cut, limit, value)), cut), features, mean, sd


def _calibration_rows(options: BenchOptions) -> Iterator[Bar]:
    bars = {
        "planted contexts, 1,000 samples: error of log-mean": (0.05, ""),
        "planted contexts, 1,000 samples: error of log-sd": (0.05, ""),
        "30 % censored: change of the log-mean": (3.0, "%"),
    }
    covers = "planted contexts: new values in the 90 % interval"
    if not any(options.wants(bar) for bar in (*bars, covers)):
        return
    options.progress(covers)
    forecasts = {}
    for censored in (False, True):
        seen, features, mean, sd = _planted(1000, censored)
        predictor = AccessPredictor(("interval_s",)).fit_observations(
            {"interval_s": seen}, features, ("job", "kind")
        )
        forecasts[censored] = [
            predictor.predict_tokens(tuple(context.items()), "interval_s") for context in features
        ]
    means, censored_means = (
        np.array([forecast.mean_log for forecast in forecasts[key]]) for key in (False, True)
    )
    sds = np.array([forecast.sd_log for forecast in forecasts[False]])
    change = 100 * float(np.mean(abs(censored_means - means)) / np.mean(abs(means)))
    values = float(np.mean(abs(means - mean))), float(np.mean(abs(sds - sd))), change
    for (bar, (limit, unit)), value in zip(bars.items(), values, strict=True):
        yield at_most(bar, value, limit, unit, n=len(means), detail="mean over 40 contexts")
    new = np.random.default_rng(8).normal(mean, sd, (5000, len(mean)))
    low, high = (
        np.log([forecast.quantile(share) for forecast in forecasts[False]])
        for share in (0.05, 0.95)
    )
    share = 100 * float(np.mean((low <= new) & (new <= high)))
    yield Bar(covers, share, "%", "88 to 92", 88 <= share <= 92, new.size)


def _later_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "second half of generated traces: new values in the 90 % interval, worst task"
    if not options.wants(bar, 10):
        return
    options.progress(bar)
    found = {}
    # The sizes of the jobs' files are constant.
    for name, trace, tasks in (
        ("jobs", training_accesses(0), ("interval", "interval_s")),
        ("files", tier_accesses(0, 1500), ("interval", "interval_s", "size")),
    ):
        half, (classes, tokens) = len(trace) // 2, trace.classes()
        for task in tasks:
            predictor = AccessPredictor((task,)).fit(trace.first(half))
            # Most of the intervals that begin in the third quarter end in the trace.
            seen = observations(trace, task, classes)
            part = np.arange(len(trace))
            part = part[(part >= half) & (part < half + half // 2) & ~seen.censored]
            ends = np.array([
                [predictor.predict_tokens(text, task).quantile(share) for share in (0.05, 0.95)]
                for text in tokens
            ])[seen.classes[part]]  # fmt: skip
            value = seen.value[part]
            covered = (ends[:, 0] <= value) & (value <= ends[:, 1])
            found[f"{name}, {task}"] = 100 * float(np.mean(covered))
    worst = max(found, key=lambda task: abs(found[task] - 90))
    detail = "; ".join(f"{task}: {value:.1f}" for task, value in found.items())
    fine = 88 <= found[worst] <= 92
    yield Bar(bar, found[worst], "%", "88 to 92", fine, len(found), detail)


def _decision_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "class of a memoised context"
    if not options.wants(bar):
        return
    options.progress(bar)
    classes = ContextClasses()
    contexts = [(("job", "alpha"), ("object", f"/a/train/{n:05d}.tar")) for n in range(1000)]
    number = classes.number
    for context in contexts:
        number(context)

    def run() -> None:
        for context in contexts:
            number(context)

    seconds = np.median(times_s(run, 15)) / len(contexts)
    yield at_most(bar, 1e6 * float(seconds), 1.0, "us", n=15, detail="1,000 contexts of 2 keys")


def _growth_rows(options: BenchOptions) -> Iterator[Bar]:
    fit = "fit of the predictor: time per request of a long trace over that of a short one"
    policy = "learned: time per request with 64 times the entries"
    if not (options.wants(fit, 30) or options.wants(policy, 20)):
        return
    options.progress(fit)
    short, long = 10_000, 1_000_000 if options.full else 100_000
    random = np.random.default_rng(0)
    names = [f"/{job}/train/{n:05d}" for job in ("a", "b") for n in range(2000)]
    objects = random.integers(0, len(names), long).astype(np.int32)
    trace = AccessTrace.checked(objects, np.ones(long, np.int64), names=tuple(names))
    seconds = [
        float(np.median(times_s(functools.partial(AccessPredictor().fit, part), 3))) / len(part)
        for part in (trace.first(short), trace)
    ]
    detail = f"{short:,} and {long:,} requests, {1e6 * seconds[1]:.2f} us each; CPU time"
    yield at_most(fit, seconds[1] / seconds[0], 1.5, "x", n=3, detail=detail)
    keys = random.zipf(1.2, 400_000) % 200_000
    numbers, _ = numbered(keys.astype(np.uint64))
    ones = AccessTrace.checked(numbers, np.ones(numbers.size, np.int64))
    entries = (512, 32_768)
    spent = [
        float(np.median(times_s(functools.partial(simulate, ones, "learned", size), 3)))
        for size in entries
    ]
    detail = f"{entries[0]:,} and {entries[1]:,}; {1e6 * spent[1] / len(ones):.2f} us; CPU time"
    yield at_most(policy, spent[1] / spent[0], 2.0, "x", n=3, detail=detail)


def _tier_rows(options: BenchOptions) -> Iterator[Bar]:
    oracle = "tiers: savings over those of known futures"
    folders = "tiers: savings over those of hot directories"
    never = "tiers: smallest saving at any price, of the slow tier's cost"
    if not any(options.wants(bar, 10) for bar in (oracle, folders, never)):
        return
    options.progress(oracle)
    found: dict[str, dict[str, float]] = {}
    for seed in range(3 if options.full else 1):
        trace = tier_accesses(seed, 6000 if options.full else 1500)
        for read in (1e-5, 1e-4, 3e-4, 1e-3, 3e-3):
            sheet = PriceSheet(StorageTier(0.10), StorageTier(0.02, read=4e-7, gb_read=read))
            tiers = predict_tiers(trace, sheet)
            found[f"seed {seed}, {read:g} per GB read"] = {
                row.rule: row.saved / tiers.slow_cost for row in tiers.outcomes
            }
    share = {cell: 100 * row["learned"] / row["future known"] for cell, row in found.items()}
    worst = min(share, key=lambda cell: share[cell])
    yield at_least(oracle, share[worst], 80.0, "%", n=len(share), detail=worst, data=found)
    # Where the rule saves nothing, any saving is more.
    over = {
        cell: row["learned"] / row["hot directories"]
        for cell, row in found.items()
        if row["hot directories"] > 0
    }
    shown = "; ".join(f"{cell}: {value:.2f}" for cell, value in over.items())
    saved_none = len(found) - len(over)
    yield at_least(
        folders, min(over.values(), default=0.0), 1.5, "x", n=len(over),
        detail=f"hot directories save nothing in {saved_none} of {len(found)} cases; {shown}; a "
        "larger factor is impossible where they have two thirds of the known futures' savings",
    )  # fmt: skip
    least = 100 * min(row["learned"] for row in found.values())
    yield at_least(never, least, 0.0, "%", n=len(found), detail="generated files of 4 kinds")


def _import_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "OTLP protobuf: import over python-protobuf, parsing and reading the same fields"
    if not options.wants(bar, 30):
        return
    try:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )
    except ImportError:
        yield not_judged(bar, "x", ">= 3", "the package opentelemetry-proto is not installed")
        return

    options.progress(bar)
    count = 200_000 if options.full else 20_000
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add().scope_spans.add().spans
    for n in range(count):
        span = spans.add(name="read", start_time_unix_nano=n)
        span.trace_id, span.span_id = n.to_bytes(16, "big"), (n + 1).to_bytes(8, "big")
        for key, value in (("file.path", f"/a/{n % 500:05d}.tar"), ("job", "alpha")):
            span.attributes.add(key=key).value.string_value = value
    content = message.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spans.pb")
        path.write_bytes(content)

        def parse() -> ExportTraceServiceRequest:
            parsed = ExportTraceServiceRequest()
            parsed.ParseFromString(content)
            return parsed

        def read() -> list[Any]:
            return [
                (span.trace_id, span.span_id, span.parent_span_id, span.name,
                 span.start_time_unix_nano,
                 {pair.key: pair.value.string_value for pair in span.attributes})
                for resource in parse().resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]  # fmt: skip

        trace, rows = import_trace(path), read()
        assert [trace.names[n] for n in trace.objects] == [row[5]["file.path"] for row in rows]
        taken = paired(
            {"import": lambda: import_trace(path), "read": read, "parse": parse}, blocks=7
        )
    detail = (
        f"{count:,} spans of 2 attributes; first definition, over parsing alone: "
        f"{taken.ratio('parse', 'import')}; {taken}"
    )
    yield taken.ratio("read", "import").at_least(bar, 3.0, detail=detail)


_READER = """
import sys
import torch
model = torch.nn.Linear(1024, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for start in range(0, int(sys.argv[2]), 20):
    rows = []
    for number in range(start, start + 20):
        with open(f"{sys.argv[1]}/{number:06d}.bin", "rb") as file:
            rows.append(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8))
    loss = model(torch.stack(rows).float()).square().mean()
    loss.backward()
    optimizer.step()
"""


def _recorder_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "recording: time of a training program over the time without, log not yet read"
    if not options.wants(bar, 60):
        return
    options.progress(bar)
    count = 20_000 if options.full else 4_000
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            Path(folder, f"{number:06d}.bin").write_bytes(bytes(1024))
        script = Path(folder, "train.txt")
        script.write_text(_READER)
        command = [sys.executable, str(script), folder, str(count)]
        trace, _ = record_trace(command)
        lost = count - sum(name.endswith(".bin") for name in trace.names)
        environment = recording_environment(Path(folder, "log"))
        taken = paired(
            {
                "plain": lambda: subprocess.run(command, check=True),
                "recorded": lambda: subprocess.run(command, check=True, env=environment),
                "record_trace": lambda: record_trace(command),
            },
            clock="wall", blocks=9 if options.full else 5, budget_s=180.0,
        )  # fmt: skip
    detail = (
        f"{count:,} files of 1 KiB; lost events: {lost}; first definition, with the log read into "
        f"a trace: {taken.ratio('record_trace', 'plain')}; {taken}"
    )
    yield taken.ratio("recorded", "plain").at_most(bar, 1.03, detail=detail)


@dataclass
class _Training:
    """Two jobs that train at once through one cache; seconds by job."""

    hit_rate: float = 0.0
    elapsed_s: dict[str, float] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    @property
    def epoch_s(self) -> float:
        """Mean time of an epoch, over the epochs of both jobs."""
        return sum(self.elapsed_s.values()) / sum(job.epochs for job in _TRAINED)


_ORIGIN = StorageOrigin(20e6, 50e6)
_TRAINED = (TrainingJob("small", 40, 20, 0.0), TrainingJob("large", 200, 4, 0.0))


def _train(
    folder: Path, policy: str, shard_bytes: int, origin: StorageOrigin = _ORIGIN
) -> _Training:
    """Train both jobs over shards in `folder`; the cache holds a fifth of them."""
    result = _Training()
    shards = sum(job.shards for job in _TRAINED)
    plain = throttled(
        lambda name: (folder / name).read_bytes(), origin.latency_ns / 1e9, origin.bytes_per_s
    )
    cache = ShardCache(folder / f"cache-{policy}", shards * shard_bytes // 5, plain, policy=policy)

    def decode(content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)[:4096].float() / 255

    def run(job: TrainingJob) -> None:
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(job.shards)
        model = torch.nn.Sequential(torch.nn.Linear(4096, 32), torch.nn.Linear(32, 4096))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        names = [f"{job.name}-{number:04d}" for number in range(job.shards)]
        dataset = CachedDataset(names, cache, decode, {"job": job.name})
        for _ in range(job.epochs):
            for batch in DataLoader(dataset, shuffle=True, generator=generator):
                optimizer.zero_grad()
                (model(batch) - batch).square().mean().backward()
                optimizer.step()
        result.elapsed_s[job.name] = time.perf_counter() - began

    read = cache.read

    def noted(name: str | Path, context: Any = None) -> bytes:
        result.reads.append(str(name))
        return read(name, context)

    cache.read = noted  # type: ignore[method-assign]
    threads = [threading.Thread(target=run, args=(job,)) for job in _TRAINED]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.hit_rate = cache.counts.hit_rate
    return result


@dataclass(frozen=True)
class _JobOutcome:
    """Jobs that read through one cache, each as fast as its reads let it.

    Attributes:
        hit_rate: of all reads together.
        elapsed_ns: by job, in order of the first read.
    """

    hit_rate: float
    elapsed_ns: dict[str, float]


def _simulate_jobs(
    trace: AccessTrace,
    jobs: Sequence[str],
    policy: str,
    capacity: int | str,
    origin: StorageOrigin,
    between_reads_ns: Mapping[str, float],
) -> _JobOutcome:
    """Simulate jobs whose reads keep their order per job, but interleave by their durations.

    A job that hits more often proceeds faster and reads earlier than it was recorded.

    Args:
        jobs: of each request.
        between_reads_ns: time of a job from the end of a read to its next one.
    """
    engine = CachePolicy(policy, capacity_of(trace, capacity))
    classes, sizes = trace.classes()[0].tolist(), trace.sizes.tolist()
    order: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        order.setdefault(job, []).append(number)
    waiting = [(0.0, job, 0) for job in sorted(order)]
    elapsed, hits = {}, 0
    read_ns = origin.read_ns(trace.sizes).tolist()
    while waiting:
        now, job, place = heapq.heappop(waiting)
        number = order[job][place]
        hit, _ = engine.request(int(trace.objects[number]), sizes[number], classes[number])
        hits += hit
        elapsed[job] = now + between_reads_ns.get(job, 0.0) + (0.0 if hit else read_ns[number])
        if place + 1 < len(order[job]):
            heapq.heappush(waiting, (elapsed[job], job, place + 1))
    return _JobOutcome(hits / max(len(trace), 1), elapsed)


def _training_rows(options: BenchOptions) -> Iterator[Bar]:
    speed = "two jobs, real files: sum of the times of both with auto over LRU"
    larger = "two jobs: time of the one with more files with auto over LRU"
    rate = "two jobs: hit rate with auto, measured against predicted from the run with LRU"
    duration = "two jobs: mean time of an epoch with auto, measured against predicted from LRU's"
    if not any(options.wants(bar, 75) for bar in (speed, larger, rate, duration)):
        return
    options.progress(speed)
    shard_bytes = 200_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for job in _TRAINED:
            for number in range(job.shards):
                Path(folder, f"{job.name}-{number:04d}").write_bytes(
                    np.random.default_rng(number).bytes(shard_bytes)
                )
        # The first training also loads code.
        _train(folder, "fifo", shard_bytes, StorageOrigin(0.0, 1e12))
        arms = {policy: _train(folder, policy, shard_bytes) for policy in ("lru", "auto")}
    reads = arms["lru"].reads
    trace = AccessTrace.of(
        reads, [shard_bytes] * len(reads),
        contexts=[{"job": name.partition("-")[0]} for name in reads],
    )  # fmt: skip
    capacity = sum(job.shards for job in _TRAINED) * shard_bytes // 5
    jobs = [name.partition("-")[0] for name in reads]
    run = functools.partial(_simulate_jobs, trace, jobs, capacity=capacity, origin=_ORIGIN)
    # What the prediction leaves out (training, and reads that hit) is measured with LRU.
    waits = run(policy="lru", between_reads_ns={}).elapsed_ns
    between_ns = {
        job.name: max(0.0, arms["lru"].elapsed_s[job.name] * 1e9 - waits[job.name])
        / (job.shards * job.epochs)
        for job in _TRAINED
    }
    found = run(policy="auto", between_reads_ns=between_ns)
    predicted_s = sum(found.elapsed_ns.values()) / 1e9 / sum(job.epochs for job in _TRAINED)
    lru, auto = arms["lru"], arms["auto"]
    data = {
        "lru": {"epoch_s": lru.epoch_s, "hit_rate": lru.hit_rate, "elapsed_s": lru.elapsed_s},
        "auto": {"epoch_s": auto.epoch_s, "hit_rate": auto.hit_rate, "elapsed_s": auto.elapsed_s},
        "predicted": {"epoch_s": predicted_s, "hit_rate": found.hit_rate},
    }
    shown = "; ".join(
        f"{job.name}, {job.epochs} epochs: lru {lru.elapsed_s[job.name]:.1f} s, "
        f"auto {auto.elapsed_s[job.name]:.1f} s"
        for job in _TRAINED
    )
    in_order = float(simulate(trace, "auto", capacity).mean())
    both = max(auto.elapsed_s.values()) / max(lru.elapsed_s.values())
    by_job = np.mean([auto.elapsed_s[job.name] / job.epochs for job in _TRAINED]) / np.mean(
        [lru.elapsed_s[job.name] / job.epochs for job in _TRAINED]
    )
    yield at_most(
        speed, auto.epoch_s / lru.epoch_s, 0.75, "x", data=data,
        detail=f"20 ms, 50 MB/s, cache of 20 %; first definition, until both jobs have ended: "
        f"{both:.2f}x; second, mean of the jobs' times of an epoch: {by_job:.2f}x; {shown}",
    )  # fmt: skip
    large = max(_TRAINED, key=lambda job: job.shards)
    held = capacity // shard_bytes
    yield at_most(
        larger, auto.elapsed_s[large.name] / lru.elapsed_s[large.name], 0.75, "x",
        detail=f"the cache holds {held} files; all of them for this job of {large.shards} would "
        f"give {1 - held / large.shards:.2f}x of its reads from the origin",
    )  # fmt: skip
    yield at_most(
        rate, 100 * abs(auto.hit_rate - found.hit_rate), 2.0, "points",
        detail=f"{auto.hit_rate:.3f} measured, {found.hit_rate:.3f} predicted; first definition, "
        f"reads in the order of the run with LRU: {in_order:.3f} predicted",
    )  # fmt: skip
    both_s, predicted_both_s = max(auto.elapsed_s.values()), max(found.elapsed_ns.values()) / 1e9
    yield at_most(
        duration, 100 * abs(predicted_s / auto.epoch_s - 1), 10.0, "%",
        detail=f"{auto.epoch_s:.2f} s measured, {predicted_s:.2f} s predicted; first definition, "
        f"until both jobs have ended: {both_s:.1f} s measured, {predicted_both_s:.1f} s predicted",
    )  # fmt: skip
