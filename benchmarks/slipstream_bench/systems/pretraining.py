"""``slipstream bench pretraining``: the ladder of pre-training on real encoders and real text.

The baseline trains as with Hugging Face: padded to the longest sequence of a batch, logits of every
token, LAMB with operators per tensor. Times are CPU time of one thread, of all rungs alternately.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream.child import Child
from slipstream.measure.memory import read_status_bytes
from slipstream.technique import combination_name, parse
from slipstream.techniques.pretraining import (
    FusedLAMB,
    MaskedBatches,
    ShardedTokens,
    masked_head,
    unpad,
    write_shards,
)
from slipstream.techniques.pretraining.training import PretrainingConfig, TrainingPhase
from slipstream.verbs.pretraining import plan_pretraining
from slipstream.workload import build_from
from slipstream.workload.built import training_loss
from slipstream_bench import encoders
from slipstream_bench.harness import one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

_FULL_PRECISION = ("masked_head", "masked_head+unpad", "masked_head+unpad+fused_lamb")
RUNGS = (*_FULL_PRECISION, f"{_FULL_PRECISION[-1]}+amp:bf16")
"""The ladder; every rung adds a technique to the one before it."""
_BASELINE = "baseline"
_LAMB_UPDATES = 200
# Bytes per parameter: FusedLAMB reads four tensors and writes two, then reads three and writes one.
_LAMB_BYTES, _ADAMW_BYTES = 40, 28
_SEEDS, _UPDATES, _ROWS, _HELD_OUT = 3, 400, 4, 1 << 20
# Of the rates 0.0005 to 0.004 and 0.005 to 0.04, those with the lowest losses.
_ADAMW_RATE, _LAMB_RATE = 1e-3, 2e-2
_GROWTH, _SMALL_UPDATES = 16, 2000
_HERE = "slipstream_bench.systems.pretraining"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: the smallest encoder."""
    with one_thread():
        yield from _exact_rows(options)
        yield from _lamb_rows(options)
        for name in ("mini", "small", "wide") if options.full else ("mini",):
            yield from _ladder_rows(options, name)
        yield from _plan_rows(options)
        yield from _quality_rows(options)
        yield from _large_batch_rows(options)
        yield from _data_rows(options)


def _built(name: str, rung: str = "") -> Any:
    make = getattr(encoders, name)
    return build_from(make(), parse(rung) if rung else (), 0, name)


def _target(name: str) -> str:
    return f"{Path(encoders.__file__)}:{name}"


@functools.cache
def _recorded(name: str) -> Any:
    return slipstream.profile(_target(name), threads=1)


def _exact_rows(options: BenchOptions) -> Iterator[Bar]:
    loss_bar, gradient_bar = "loss over the padded dense one: error", "gradients: error"
    if options.wants(loss_bar, 20) or options.wants(gradient_bar, 20):
        options.progress("losses and gradients")
        errors, losses = {}, {}
        dense = _built("mini")
        expected = training_loss(dense)
        expected.backward()
        scale = max(float(p.grad.abs().max()) for p in dense.model.parameters())
        for rung in _FULL_PRECISION[:2]:
            ours = _built("mini", rung)
            loss = training_loss(ours)
            loss.backward()
            losses[rung] = abs(loss.item() / expected.item() - 1)
            pairs = zip(ours.model.parameters(), dense.model.parameters(), strict=True)
            errors[rung] = max(float((p.grad - q.grad).abs().max()) for p, q in pairs) / scale
        yield at_most(loss_bar, max(losses.values()), 1e-5, "", n=len(losses), data=losses)
        yield at_most(
            gradient_bar, max(errors.values()), 1e-4, "", n=len(errors), data=errors,
            detail="largest difference over the largest gradient",
        )  # fmt: skip
    bar = "another sequence in the pack changed: largest change of an output"
    if options.wants(bar, 5):
        options.progress(bar)
        model, batch = encoders.encoder(4, 256).eval(), encoders.batch_of(0)
        del batch["labels"]
        unpad(model, lambda: model(**batch), batch["attention_mask"])
        with torch.no_grad():
            before = model(**batch).logits
            batch["input_ids"][0, 1:5] = 7
            after = model(**batch).logits
        yield at_most(bar, float((before[1:] - after[1:]).abs().max()), 0.0, "", n=len(before) - 1)


def _lamb_rows(options: BenchOptions) -> Iterator[Bar]:
    exact = "fused LAMB over float64: error after 200 updates"
    if options.wants(exact, 5):
        options.progress(exact)
        yield at_most(exact, _lamb_error(), 1e-5, "", n=_LAMB_UPDATES)
    slow, fast = "LAMB per tensor over fused", "fused LAMB over torch's fused AdamW"
    if options.wants(slow, 20) or options.wants(fast, 20):
        options.progress(slow)
        shapes = [tuple(p.shape) for p in encoders.encoder(4, 256).parameters()]
        arms = {}
        for name, make in (
            ("fused LAMB", FusedLAMB),
            ("LAMB", encoders.LAMB),
            ("AdamW", functools.partial(torch.optim.AdamW, fused=True)),
        ):
            weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
            for weight in weights:
                weight.grad = torch.randn_like(weight) * 0.01
            arms[name] = make(weights).step
        taken = paired(arms, blocks=30 if options.full else 12)
        numbers = sum(torch.Size(s).numel() for s in shapes)
        rate = _ADAMW_BYTES * numbers / taken.median_s("AdamW")
        limit_s = _LAMB_BYTES * numbers / rate
        faster = taken.median_s("LAMB") / limit_s
        detail = (
            f"{numbers / 1e6:.1f} M parameters; {taken}; at AdamW's {rate / 1e9:.1f} GB/s two "
            f"passes over memory take {1e3 * limit_s:.1f} ms, 1/{faster:.1f} of LAMB per tensor "
            f"and {_LAMB_BYTES / _ADAMW_BYTES:.2f} times that of AdamW"
        )
        yield taken.ratio("LAMB", "fused LAMB").at_least(slow, 8.0, detail=detail)
        yield taken.ratio("fused LAMB", "AdamW").at_most(fast, 1.5, detail=detail)


def _lamb_error() -> float:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((300, 64), (64, 64))]
    exact = [torch.nn.Parameter(weight.detach().double()) for weight in weights]
    ours, theirs = FusedLAMB(weights, lr=1e-2), encoders.LAMB(exact, lr=1e-2)
    for _ in range(_LAMB_UPDATES):
        for p, q in zip(weights, exact, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        ours.step()
        theirs.step()
    pairs = zip(weights, exact, strict=True)
    return max(float(((p - q).abs().max() / q.abs().max()).detach()) for p, q in pairs)


def _ladder_rows(options: BenchOptions, name: str) -> Iterator[Bar]:
    total = f"{name}: all rungs over the baseline"
    if not options.wants(total, 60):
        return
    options.progress(f"{name}: predictions")
    predicted = {
        rung: prediction.speedup
        for rung, prediction in zip(RUNGS, slipstream.predict(_recorded(name), RUNGS), strict=True)
    }
    options.progress(f"{name}: measurements")
    arms = {rung: _built(name, rung).step for rung in reversed(RUNGS)}
    taken = paired(
        {**arms, _BASELINE: _built(name).step},
        blocks=12 if options.full else 6, settle_s=1.0, budget_s=120 if options.full else 60,
    )  # fmt: skip
    yield taken.ratio(_BASELINE, RUNGS[-1]).at_least(total, 3.2, detail=str(taken))
    before, errors, gains = _BASELINE, {}, {}
    for number, rung in enumerate(RUNGS):
        added = combination_name(parse(rung)[-1:]) if number == 0 else rung.rpartition("+")[2]
        gains[added] = taken.ratio(before, rung).value
        base = 1.0 if number == 0 else predicted[before]
        errors[added] = 100 * (predicted[rung] / base / gains[added] - 1)
        before = rung
    shown = ", ".join(f"{k} {v:.2f}x, predicted {v * (1 + errors[k] / 100):.2f}x"
                      for k, v in gains.items())  # fmt: skip
    yield at_least(f"{name}: smallest rung", min(gains.values()), 1.0, "x", n=len(gains),
                   detail=shown, data=gains)  # fmt: skip
    yield at_most(f"{name}: error of a predicted rung, largest",
                  max(map(abs, errors.values())), 6.0, "%", n=len(errors), detail=shown,
                  data=errors)  # fmt: skip
    ratio, measured = predicted[RUNGS[-1]], taken.ratio(_BASELINE, RUNGS[-1]).value
    yield at_most(f"{name}: error of the predicted total",
                  100 * abs(ratio / measured - 1), 8.0, "%",
                  detail=f"predicted {ratio:.2f}x, measured {measured:.2f}x")  # fmt: skip


def _plan_rows(options: BenchOptions) -> Iterator[Bar]:
    cost = "plan after the recording: CPU time"
    efficiency = "plan for 256 devices, 10 Gbit/s: weak-scaling efficiency"
    if not (options.wants(cost, 60) or options.wants(efficiency, 60)):
        return
    options.progress(cost)
    config = PretrainingConfig(
        workload=_target("mini"), phases=(TrainingPhase(9000, 1 << 16, encoders.LENGTH),),
        cluster="workers=256,link=10gbit,latency=50us",
    )  # fmt: skip
    plan_pretraining(config, _recorded("mini"))  # times operators once per machine
    began = time.process_time()
    run = plan_pretraining(config, _recorded("mini")).chosen
    yield at_most(cost, time.process_time() - began, 5.0, "s")
    assert run is not None
    yield at_least(
        efficiency, 100 * run.efficiency, 70.0, "%",
        detail=f"simulated; {run.workers} devices, {run.accumulation[0]} x {run.micro_batch} "
        f"sequences, {run.wire or 'float32 gradients'}",
    )  # fmt: skip


def _quality_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "mini: loss of other batches over the baseline's, equal tokens"
    if not options.full or not options.wants(bar, 900):
        return
    losses: dict[str, list[float]] = {_BASELINE: [], RUNGS[-1]: []}
    seconds = dict.fromkeys(losses, 0.0)
    for seed in range(_SEEDS):
        for name, ends in losses.items():
            options.progress(f"{bar}: seed {seed}, {name}")
            techniques = "" if name == _BASELINE else name
            built = build_from(
                encoders.mini(seed), parse(techniques) if techniques else (), seed, "mini"
            )
            for group in built.optimizer.param_groups:
                group["lr"] = 1e-2
            began = time.thread_time()
            for number in range(_UPDATES):
                built.batch = encoders.batch_of(seed * _UPDATES + number, _ROWS)
                built.optimizer.zero_grad()
                training_loss(built).backward()
                built.optimizer.step()
            seconds[name] += time.thread_time() - began
            with torch.no_grad():
                total = 0.0
                for number in range(4):
                    built.batch = encoders.batch_of(_HELD_OUT + number, encoders.BATCH)
                    total += float(training_loss(built))
                ends.append(total / 4)
    dense, ours = losses.values()
    spread = statistics.stdev(dense) / statistics.mean(dense)
    error = statistics.mean(a / b - 1 for a, b in zip(ours, dense, strict=True))
    yield at_most(
        bar, 100 * abs(error), 0.5, "%", n=_SEEDS, data=losses,
        detail=f"{_UPDATES} updates of {_ROWS} sequences: {statistics.mean(dense):.3f} and "
        f"{statistics.mean(ours):.3f}, after {seconds[_BASELINE] / seconds[RUNGS[-1]]:.2f} times "
        f"the CPU time; standard deviation of seeds {100 * spread:.1f} %",
    )  # fmt: skip


def _large_batch_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "loss with LAMB and a batch 16 times as large over AdamW's, equal tokens"
    scaled = "loss with AdamW, that batch and a rate 16 times as large over AdamW's"
    if not options.full or not (options.wants(bar, 300) or options.wants(scaled, 300)):
        return
    losses: dict[str, list[float]] = {}
    for seed in range(_SEEDS):
        for name, make, growth, rate in (
            ("AdamW", torch.optim.AdamW, 1, _ADAMW_RATE),
            ("LAMB", FusedLAMB, _GROWTH, _LAMB_RATE),
            ("AdamW, large batch", torch.optim.AdamW, _GROWTH, _GROWTH * _ADAMW_RATE),
        ):
            options.progress(f"{bar}: seed {seed}, {name}")
            losses.setdefault(name, []).append(_trained(make, growth, rate, seed))
    small, lamb, large = (statistics.mean(each) for each in losses.values())
    detail = (
        f"2 layers of width 128, {_SMALL_UPDATES} updates of {encoders.BATCH} sequences or "
        f"{_SMALL_UPDATES // _GROWTH} of {_GROWTH * encoders.BATCH}; losses of other batches: "
        + ", ".join(f"{name} {statistics.mean(each):.3f}" for name, each in losses.items())
    )
    yield at_most(bar, 100 * (lamb / small - 1), 3.0, "%", n=_SEEDS, data=losses, detail=detail)
    yield at_least(scaled, 100 * (large / small - 1), 0.0, "%", n=_SEEDS, detail=detail)


def _trained(make: Any, growth: int, rate: float, seed: int) -> float:
    """Train with batches `growth` times as large; return the loss of other batches."""
    size = {"length": 32, "vocabulary": 2048}
    model = encoders.encoder(2, 128, seed, **size)
    first = encoders.batch_of(0, **size)
    masked_head(model, lambda: model(**first), first["labels"])
    optimizer = make(encoders.groups(model), lr=rate)
    updates = _SMALL_UPDATES // growth
    warmup = updates // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (updates - step) / (updates - warmup))
    )
    for step in range(updates):
        batch = encoders.batch_of(seed * _HELD_OUT + step, growth * encoders.BATCH, **size)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        others = (encoders.batch_of(-1 - number, 256, **size) for number in range(4))
        return statistics.mean(float(model(**batch).loss) for batch in others)


def _data_rows(options: BenchOptions) -> Iterator[Bar]:
    growth, rate = "resident memory, corpus ten times as large", "batches over mini's best rate"
    if not (options.wants(growth, 20) or options.wants(rate, 20)):
        return
    options.progress(growth)
    texts = encoders.sequences()
    with tempfile.TemporaryDirectory() as folder:
        resident = []
        for times in (1, 10):
            corpus = (text for _ in range(times) for text in texts)
            where = Path(folder, str(times))
            write_shards(corpus, where, 8, encoders.VOCABULARY)
            sizes = []
            for rank in range(4):
                with Child("a reader of shards") as child:
                    sizes.append(
                        child.call(f"{_HERE}:resident_bytes", folder=str(where), rank=rank)
                    )
            resident.append(statistics.median(sizes))
        small, large = resident
        yield at_most(
            growth, 100 * (large / small - 1), 5.0, "%", n=4,
            detail=f"{small / 2**20:.0f} to {large / 2**20:.0f} MiB",
        )  # fmt: skip
        batches = _batches(ShardedTokens(Path(folder, "1")))
        loading = float(min(times_s(lambda: batches.batch(batches.numbers(3)), 20)))
        step = float(min(times_s(_built("mini", RUNGS[-1]).step, 3)))
        yield at_least(rate, step / loading, 20.0, "x", detail=f"{1e3 * loading:.2f} ms per batch")


def _batches(corpus: ShardedTokens) -> MaskedBatches:
    return MaskedBatches(corpus, encoders.BATCH, encoders.LENGTH, mask_token=2)


def resident_bytes(folder: str, rank: int) -> int:
    """Return the resident memory of a rank of four after 200 batches; runs in a child."""
    batches = _batches(ShardedTokens(Path(folder), rank, 4))
    for step in range(200):
        batches.batch(batches.numbers(step, rank, 4))
    return read_status_bytes("VmRSS")
