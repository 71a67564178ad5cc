"""``slipstream bench stability``: disagreement between devices, its causes and its reduction.

Quick takes a few photographs and a part of Fashion-MNIST, with one seed. Rows that need more
photographs need ``--full``: the forecast's ranks, the order of the stages; and so does CIFAR-10.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from slipstream import runtimes
from slipstream.data import MissingDataError
from slipstream.errors import MissingExtraError
from slipstream.measure.instability import Reduction, spread_by_chance, unstable
from slipstream.runtimes.paths import DeviceMatrix
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.ship import stability
from slipstream_bench.harness import one_thread
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.stability.models import (
    Garments,
    Objects,
    efficientnet_lite0,
    exported,
    imagenet,
    int8_by_onnxruntime,
    small_pictures,
)

_PHOTOS_QUICK, _PHOTOS_FULL = 60, 500
_SAMPLE = 64
_CALIBRATED = 32
# Per scene: drawing a twin costs more than a step of these small networks.
_DRAWS = 4
# One stage is planted into a mild phone; the others stay the same.
_MILD = {
    "camera": "camera:warmth=0.05,contrast=0.05,sharpen=0.1", "codec": "codec:webp,quality=95",
    "resize": "resize:area", "colour": "colour:gamma=1.02", "crop": "crop:share=0.98",
    "scale": "scale:low=-0.98",
}  # fmt: skip
_PLANTED = {
    "camera": "camera:warmth=0.05,contrast=0.05,sharpen=3", "codec": "codec:jpeg,quality=8",
    "resize": "resize:nearest,antialias=no", "colour": "colour:gamma=2.2",
    "crop": "crop:share=0.55", "scale": "scale:low=-4",
}  # fmt: skip
_HARDENED: dict[str, dict[str, Any]] = {
    "fashion_mnist": {
        "train": 20_000, "test": 3_000, "base": 5, "alpha": 10.0, "epochs": 15, "bar": 60,
    },
    "cifar10_jpeg": {
        "train": 20_000, "test": 4_000, "base": 10, "alpha": 10.0, "epochs": 20, "bar": 75,
    },
}  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows."""
    yield from _statistics(options)
    yield from _photographs(options)
    yield from hardened_rows(options, "fashion_mnist", seeds=5 if options.full else 1)
    if options.full:
        yield from hardened_rows(options, "cifar10_jpeg", seeds=5)
        yield from _hardened_for_int8(options)


def _statistics(options: BenchOptions) -> Iterator[Bar]:
    bar = "equal models whose difference is declared"
    if not options.wants(bar):
        return
    rng = np.random.default_rng(1)
    declared = 0
    for _ in range(500):
        chance = rng.beta(0.5, 4, 500)
        first, second = (rng.random(500) < chance for _ in range(2))
        declared += Reduction.of(first, second).p_value < 0.05
    yield at_most(bar, declared / 5, 5.0, "%", n=500, detail="McNemar, 500 simulated pairs")


def _photographs(options: BenchOptions) -> Iterator[Bar]:
    names = {
        "share": "instability over the sixteen phones, EfficientNet-Lite0",
        "spread": "spread of their accuracies",
        "largest": "camera and codec among the two largest stages",
        "rank": "forecast from 64 photographs, rank correlation over the phones",
        "total": "forecast of the whole, error",
        "planted": "a planted stage named first",
        "fast": "answers changed by the decoder's fast transform",
        "isa": "answers changed by a cap of the instruction set",
        "growth": "time of 48 paths over 12 times that of 4",
    }
    if not any(options.wants(bar, 60.0) for bar in names.values()):
        return
    photos = _PHOTOS_FULL if options.full else _PHOTOS_QUICK
    try:
        with one_thread(), imagenet(photos) as (runtime, scenes, pipeline):
            work = _Photographs(options, names, runtime, scenes, pipeline)
            rows = itertools.chain(work.headline(), work.planted(), work.decoders(), work.growth())
            yield from (row for row in rows if options.wants(row.bar))
    except (MissingDataError, MissingExtraError) as error:
        for bar in filter(options.wants, names.values()):
            yield not_judged(bar, "", "", error.what)


class _Photographs:
    """Rows on EfficientNet-Lite0, which share the model and its photographs."""

    def __init__(
        self, options: BenchOptions, names: dict[str, str], runtime: Any, scenes: Any,
        pipeline: Pipeline,
    ) -> None:  # fmt: skip
        self.options, self.names = options, names
        self.runtime, self.scenes, self.labels = runtime, scenes, scenes.labels
        self.pipeline = pipeline
        self.matrix = DeviceMatrix.default(pipeline)

    def headline(self) -> Iterator[Bar]:
        selected = [self.names[k] for k in ("share", "spread", "rank", "total", "largest")]
        if not any(self.options.wants(bar, 60.0) for bar in selected):
            return
        share_, spread_, rank_, total_, largest_ = selected
        paths = self.matrix.paths
        found = stability.measure(
            self.runtime, self.scenes, (self.matrix.reference, *paths), self.labels,
            report=self.options.progress,
        )  # fmt: skip
        phones = stability.Stability(found.names[1:], found.classes[1:], found.labels)
        n, disagreement = len(self.scenes), phones.instability()
        # Quick: Wilson's interval would reach 18 % with twenty photographs of which none changes,
        # so more are taken. One of twenty is 5 points of accuracy.
        low, high, most = (10, 20, 3.0) if self.options.full else (5, 40, 15.0)
        data = {"accuracy": phones.accuracy.tolist(), "growth": phones.growth().tolist()}
        top3, reference = phones.instability(3).estimate, found.accuracy[0]
        detail = (
            f"top 3 {100 * top3:.1f} %, divergence {100 * phones.divergence.estimate:.1f} %; "
            f"two phones {100 * data['growth'][0]:.1f} %; reference {100 * reference:.1f} % right"
        )
        yield Bar(
            share_, 100 * disagreement.estimate, "%", f"{low} to {high}",
            low <= 100 * disagreement.estimate <= high, n, detail, float(low),
            100 * disagreement.low, 100 * disagreement.high, data=data,
        )  # fmt: skip
        spread = 100 * float(np.ptp(phones.accuracy))
        by_chance, _ = spread_by_chance(phones.right())
        yield at_most(
            spread_, spread, most, "points", n=n,
            detail=f"{phones.accuracy.min():.3f} to {phones.accuracy.max():.3f}; with as many "
            f"photographs equally good phones would lie within {100 * by_chance:.1f}",
        )  # fmt: skip
        if not self.options.full:
            for bar, unit in ((rank_, ""), (total_, "%"), (largest_, "of 2")):
                if self.options.wants(bar):
                    yield not_judged(bar, unit, "", "a few photographs are too few: needs --full")
            return
        measured = found.matrix()[0, 1:]
        forecast = stability.predict(
            self.runtime, self.scenes, self.matrix, self.labels,
            sample=_SAMPLE, report=self.options.progress,
        )  # fmt: skip
        rank = float(spearmanr(forecast.pairs, measured).statistic)
        yield at_least(
            rank_, rank, 0.8, "", n=len(paths), detail=f"{forecast.sample} of {n} photographs run",
            data={"told": forecast.pairs.tolist(), "measured": measured.tolist()},
        )  # fmt: skip
        whole = found.instability().estimate
        yield at_most(
            total_, 100 * abs(forecast.total / whole - 1), 30.0, "%", n=n,
            detail=f"predicted {100 * forecast.total:.1f} %, measured {100 * whole:.1f} %",
        )  # fmt: skip
        if not self.options.wants(largest_, 90.0):
            return
        causes = stability.explain(
            self.runtime, self.scenes, self.matrix, self.labels, report=self.options.progress
        )
        order = [cause.stage for cause in causes.causes]
        shown = ", ".join(f"{c.stage} {100 * c.effect.estimate:.1f} %" for c in causes.causes)
        yield at_least(
            largest_, len({"camera", "codec"} & set(order[:2])), 2, "of 2", n=n, detail=shown,
            data={"causes": [[c.stage, c.alone, c.without] for c in causes.causes]},
        )  # fmt: skip

    def planted(self) -> Iterator[Bar]:
        bar = self.names["planted"]
        if not self.options.wants(bar, 90.0):
            return
        trials, photos = (20, 40) if self.options.full else (6, 12)
        kinds, named = list(_PLANTED), []
        pipeline = self.pipeline.completed()
        for trial in range(trials):
            self.options.progress(f"{bar}: {trial} of {trials}")
            planted = kinds[trial % len(kinds)]
            text = "+".join({**_MILD, planted: _PLANTED[planted]}.values())
            matrix = DeviceMatrix.of(pipeline, {"phone": text})
            rng = np.random.default_rng(trial)
            chosen = rng.permutation(len(self.scenes))[:photos]
            found = stability.explain(
                self.runtime, [self.scenes[n] for n in chosen], matrix, self.labels[chosen]
            )
            named.append(found.causes[0].stage == planted)
        missed = [kinds[n % len(kinds)] for n, good in enumerate(named) if not good]
        yield at_least(
            bar, sum(named), trials, f"of {trials}", n=trials,
            detail=f"among six stages, {photos} photographs; missed: {', '.join(missed) or 'none'}",
        )  # fmt: skip

    def decoders(self) -> Iterator[Bar]:
        bar = self.names["fast"]
        if self.options.wants(bar, 10.0):
            matrix = DeviceMatrix.of(
                self.pipeline,
                {"accurate": "codec:jpeg,quality=85", "fast": "codec:jpeg,quality=85,decoder=fast"},
            )
            found = stability.measure(self.runtime, self.scenes, matrix.paths, self.labels)
            value = 100 * found.divergence.estimate
            detail = "same bytes" if found.same else "other bytes; the only decode difference"
            yield at_most(bar, value, 2.0, "%", n=len(self.scenes), detail=detail)
        bar = self.names["isa"]
        if self.options.wants(bar, 30.0):
            answers = [_answers_under(cap) for cap in ("", "AVX2")]
            changed = sum(a != b for a, b in zip(*answers, strict=True))
            yield at_most(
                bar, changed, 0, "of 8", n=8, detail="ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY"
            )

    def growth(self) -> Iterator[Bar]:
        bar = self.names["growth"]
        if not self.options.wants(bar, 40.0):
            return
        texts = {
            f"{kind} {quality}": f"codec:{kind},quality={quality}"
            for kind in ("jpeg", "webp")
            for quality in range(20, 92, 3)
        }
        matrix = DeviceMatrix.of(self.pipeline, texts)
        few = [self.scenes[n] for n in range(8)]
        cpu_s = []
        for count in (4, 48):
            half = count // 2
            chosen = [*matrix.paths[:half], *matrix.paths[-half:]]
            began = time.process_time()
            stability.measure(self.runtime, few, chosen, self.labels[:8])
            cpu_s.append(time.process_time() - began)
        ratio = cpu_s[1] / (12 * cpu_s[0])
        yield at_most(bar, ratio, 1.25, "x", n=8, detail="CPU time; 1 is linear")


_ISA = """
import sys, torch
from slipstream_bench.systems.stability.models import efficientnet_lite0
torch.set_num_threads(1)
x = torch.rand(8, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
with torch.inference_mode():
    print(*efficientnet_lite0()(x).argmax(1).tolist())
"""


def _answers_under(cap: str) -> list[str]:
    caps = {"ONEDNN_MAX_CPU_ISA": cap, "ATEN_CPU_CAPABILITY": cap.lower()} if cap else {}
    done = subprocess.run(
        [sys.executable, "-c", _ISA], env={**os.environ, **caps}, capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.split()


def hardened_rows(options: BenchOptions, name: str, seeds: int) -> Iterator[Bar]:
    """Compare with the control and with augmentation alone, on held-out paths, by seed."""
    less = f"{name}: instability less than the plain fine-tune's"
    worse = f"{name}: accuracy beside the plain fine-tune's"
    over_augmented = f"{name}: instability beside augmentation alone"
    if not any(options.wants(bar, 60.0) for bar in (less, worse, over_augmented)):
        return
    plan = _HARDENED[name]
    part = 1 if options.full else 5
    try:
        trained, judged, pipeline = small_pictures(
            name, plan["train"] // part, plan["test"] // part
        )
    except (MissingDataError, MissingExtraError) as error:
        yield not_judged(less, "%", f">= {plan['bar']}", error.what)
        return
    held_out = DeviceMatrix.held_out(pipeline)
    rows = []
    with one_thread():
        for seed in range(seeds):
            options.progress(f"{name}, seed {seed}")
            rows.append(_one_seed(options, plan, trained, judged, pipeline, held_out, seed))
    reductions = [1 - row["hardened"] / row["control"] for row in rows]
    means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    shown = ", ".join(f"{100 * r:.0f}" for r in reductions)
    low = 100 * min(row["low"] for row in rows)
    high = 100 * max(row["high"] for row in rows)
    detail = (
        f"seeds: {shown} %; given {100 * means['given']:.1f} %, control "
        f"{100 * means['control']:.1f} %, hardened {100 * means['hardened']:.1f} %"
    )
    target = plan["bar"] if options.full else plan["bar"] - 20
    data = {"seeds": rows}
    yield Bar(
        less, 100 * float(np.mean(reductions)), "%", f">= {target}",
        bool(100 * np.mean(reductions) >= target), seeds, detail, target, low, high, data=data,
    )  # fmt: skip
    change = 100 * (means["hardened accuracy"] - means["control accuracy"])
    yield at_least(
        worse, change, -0.3, "points", n=seeds,
        detail=f"undistorted: {100 * means['hardened plain']:.1f} and "
        f"{100 * means['control plain']:.1f} %",
    )  # fmt: skip
    ratio = means["hardened"] / means["augmented"]
    yield at_most(
        over_augmented,
        ratio,
        0.75,
        "x",
        n=seeds,
        detail=f"augmented {100 * means['augmented']:.1f} %",
    )


def _one_seed(
    options: BenchOptions, plan: dict[str, Any], trained: Any, judged: Any, pipeline: Pipeline,
    held_out: DeviceMatrix, seed: int,
) -> dict[str, float]:  # fmt: skip
    import torch

    torch.manual_seed(seed)
    scenes, labels = trained
    base = stability.fine_tune(
        Garments() if plan["bar"] == 60 else Objects(), scenes, labels, pipeline, None,
        stability.Recipe(epochs=plan["base"], learning_rate=2e-3, seed=seed), options.progress,
    )  # fmt: skip
    recipe = stability.Recipe(alpha=plan["alpha"], epochs=plan["epochs"], seed=seed, draws=_DRAWS)
    found = stability.harden(
        base, scenes, labels, pipeline, held_out=held_out, judged=judged, recipe=recipe,
        twins=stability.Distortion(quality=(15, 90)),
        augmented=True, report=options.progress,
    )  # fmt: skip
    augmented = found.augmented
    assert augmented is not None
    control, hard = found.control_stability, found.after
    between = found.reduction.reduction
    return {
        "given": float(unstable(found.before.right()).mean()),
        "control": float(unstable(control.right()).mean()),
        "hardened": float(unstable(hard.right()).mean()),
        "augmented": float(unstable(augmented.right()).mean()),
        "low": between.low,
        "high": between.high,
        "control accuracy": float(control.accuracy.mean()),
        "hardened accuracy": float(hard.accuracy.mean()),
        "control plain": float(control.accuracy[0]),
        "hardened plain": float(hard.accuracy[0]),
    }


class _Prepared:
    """A pipeline for prepared inputs, whose scenes are samples."""

    def batch(self, scenes: Any) -> Any:
        return np.stack(scenes)


def _hardened_for_int8(options: BenchOptions) -> Iterator[Bar]:
    """Compare labels that int8 changes, after hardening for it and after the plain fine-tune.

    Half of the photographs are for training; the others are judged, on the files of ONNX Runtime's
    quantiser for both: another int8 than that of the fine-tune.
    """
    bar = "answers changed by int8, less than the plain fine-tune's, EfficientNet-Lite0"
    if not options.wants(bar, 300.0):
        return
    try:
        model = efficientnet_lite0()
        with imagenet(_PHOTOS_FULL) as (_, scenes, pipeline):
            options.progress(bar)
            samples = pipeline.batch([scenes[n] for n in range(len(scenes))])
            labels = scenes.labels
    except (MissingDataError, MissingExtraError) as error:
        yield not_judged(bar, "%", ">= 40", error.what)
        return
    assert labels is not None
    order = np.random.default_rng(0).permutation(len(samples))
    half = len(order) // 2
    trained, judged = samples[order[:half]], samples[order[half:]]
    changed, right = {}, {}
    for name, twins in (("control", None), ("hardened", stability.IdenticalTwins())):
        recipe = stability.Recipe(
            epochs=2, batch=16, learning_rate=1e-4, int8=twins is not None, seed=0
        )
        tuned = stability.fine_tune(
            model, trained, labels[order[:half]], _Prepared(), twins, recipe,  # type: ignore[arg-type]
            options.progress,
        )  # fmt: skip
        answers = _float_and_int8(tuned, trained[:_CALIBRATED], judged)
        changed[name] = float((answers[0] != answers[1]).mean())
        right[name] = [
            float((predictions == labels[order[half:]]).mean()) for predictions in answers
        ]
    less = 100 * (1 - changed["hardened"] / max(changed["control"], 1 / len(judged)))
    shown = "; ".join(
        f"{name} changes {changed[name]:.1%}, float right {of[0]:.1%}, int8 {of[1]:.1%}"
        for name, of in right.items()
    )
    yield at_least(bar, less, 40, "%", n=len(judged), detail=shown)


def _float_and_int8(model: Any, calibration: Any, samples: Any) -> list[Any]:
    """Return the predicted classes [N] of both files."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = exported(model, Path(folder) / "tuned.onnx")
        answers = []
        for file in (path, int8_by_onnxruntime(path, calibration)):
            with contextlib.closing(runtimes.load(str(file))) as runtime:
                parts = [runtime.run([sample[None]])[0].argmax(1) for sample in samples]
            answers.append(np.concatenate(parts))
    return answers
