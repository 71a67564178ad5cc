"""Bars on training with compressed tables: clicks with known truth, Gowalla, MovieLens.

Every row lists all methods at the same bytes, the best first, including eight- and four-bit codes
of the dense tables and a smaller dimension. The rate of each is chosen on held-out training data;
nothing else is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.data import Ratings, get
from slipstream.durations import usable_cores
from slipstream.techniques.embedding.planning import MIXED
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream_bench.datasets import gowalla, movielens_100k, why_absent
from slipstream_bench.generators.clicks import click_log
from slipstream_bench.generators.feedback import implicit_feedback
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.embedding.criteo import KAGGLE_ROWS, scaled_rows
from slipstream_bench.systems.embedding.quality import (
    CODES,
    CONVERTED,
    DENSE,
    RATES,
    Scored,
    compare,
    epochs_to,
    ranked,
)
from slipstream_bench.systems.embedding.quality_tasks import (
    ClickTask,
    Feedback,
    Task,
    first_users,
    split,
)
from slipstream_bench.systems.embedding.quality_texts import newsgroups, sentiments

_SEEDS = 3
# Ids in the fields of Criteo's log.
_CRITEO_SHARE = 30
_CLICK_DIM = 16
# One column of 16 and the matrix that widens it take slightly more than a sixteenth.
_ONE_COLUMN = 15.9
_HASHED_WAYS = ("robe", "hash", "hot_hash", MIXED)
_PLANS = ("lowdim", MIXED)
_WAYS = ("lowdim", "tt", "hot_tt", *_HASHED_WAYS)
_MAX_EPOCHS = 3

_OVER_HASH = "ROBE over hashed rows"
_BELOW_DENSE = "ROBE below dense"
_EPOCHS = "epochs until ROBE is that near to dense"
_TRAIN = "TT over hashed rows and ROBE"
_PLAN = "the plan over a smaller dimension"
_NOT_BELOW = "the plan below a smaller dimension, beyond the seeds' noise"


@dataclass(frozen=True)
class _Study:
    """A task, and the ratios at which it is compared.

    Attributes:
        rows: names of its judged rows.
        data: name of the data set that it needs; empty for a generated one.
        convert: whether to also compress the trained dense tables.
    """

    name: str
    make: Callable[[], Task]
    ratios: tuple[float, ...]
    methods: tuple[str, ...]
    rows: tuple[str, ...]
    data: str = ""
    convert: bool = True

    def names(self, ratio: float) -> dict[str, str]:
        """Return the full names of the rows."""
        return {row: f"quality, {self.name} at {ratio:g}x: {row}" for row in self.rows}


def _clicks() -> Task:
    return _click_task("planted clicks", None)


def _catalogue() -> Task:
    return _click_task("planted catalogue", lambda rows: TTShape.of(rows, _CLICK_DIM, 1).rows)


def _click_task(name: str, digits: Callable[[int], Sequence[int]] | None) -> Task:
    rows = scaled_rows(KAGGLE_ROWS, sum(KAGGLE_ROWS) / _CRITEO_SHARE)
    log = click_log(
        200_000, test_rows=60_000, cardinalities=rows, dense=13, exponent=1.15, signal=0.35,
        digits=digits,
    )  # fmt: skip
    return ClickTask(log.data, name, dim=_CLICK_DIM, best=log.bayes_auc)


def _planted() -> Task:
    log = implicit_feedback(2000, 3000, per_user=60, taste=1.5)
    return Feedback(log.data, "planted tastes", epochs=8)


def _gowalla() -> Task:
    return Feedback(first_users(gowalla(), 6000), "Gowalla")


def _movielens() -> Task:
    return _ratings(get("movielens_latest_small"), "MovieLens")


def _movielens_100k() -> Task:
    return _ratings(movielens_100k(), "MovieLens-100k")


def _ratings(data: Ratings, name: str) -> Task:
    users, items = len(data.user_ids), len(data.item_ids)
    return Feedback(split(data.users, data.items, users, items, data.name), name, epochs=8)


def _frappe() -> Task:
    return ClickTask(get("frappe"), "Frappe", dim=_CLICK_DIM, epochs=3, batch=256)


_STUDIES = (
    _Study("planted clicks", _clicks, (_ONE_COLUMN, 64), _WAYS,
           (_OVER_HASH, _BELOW_DENSE, _TRAIN), convert=False),
    _Study("planted clicks", _clicks, (100, 1000), _HASHED_WAYS,
           (_OVER_HASH, _BELOW_DENSE, _EPOCHS), convert=False),
    _Study("planted catalogue", _catalogue, (_ONE_COLUMN, 64), _WAYS,
           (_OVER_HASH, _TRAIN), convert=False),
    _Study("planted tastes", _planted, (16,), _WAYS, (_OVER_HASH, _PLAN, _TRAIN)),
    _Study("MovieLens", _movielens, (16,), _WAYS, (_OVER_HASH, _PLAN, _NOT_BELOW),
           "movielens_latest_small"),
    _Study("Gowalla", _gowalla, (16, 64), _WAYS, (_OVER_HASH, _PLAN, _NOT_BELOW), "gowalla"),
    _Study("MovieLens-100k", _movielens_100k, (8,), _PLANS, (_NOT_BELOW,), "movielens_100k"),
    _Study("Frappe", _frappe, (8,), _PLANS, (_NOT_BELOW,), "frappe"),
    _Study("Stanford sentiments", sentiments, (16,), _PLANS, (_NOT_BELOW,), "sst"),
    _Study("20 Newsgroups", newsgroups, (16,), _PLANS, (_NOT_BELOW,), "newsgroups"),
)  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows of all studies. Quick runs the clicks at 1000x with one seed and one rate."""
    for study in _STUDIES:
        ratios = [ratio for ratio in study.ratios if options.full or ratio == 1000]
        selected = [
            ratio for ratio in ratios if any(map(options.wants, study.names(ratio).values()))
        ]
        if not selected:
            continue
        absent = why_absent(study.data) if study.data else None
        if absent is not None:
            for ratio in selected:
                for name in study.names(ratio).values():
                    yield not_judged(name, "", "", absent.what)
            continue
        yield from _study(study, selected, options)


def _study(study: _Study, ratios: Sequence[float], options: BenchOptions) -> Iterator[Bar]:
    task = study.make()
    seeds = _SEEDS if options.full else 1
    methods = study.methods if options.full else study.methods[:2]
    workers = min(seeds, usable_cores())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scored = list(
            compare(
                task, ratios, methods, seeds=seeds, rates=RATES if options.full else (1.0,),
                convert=study.convert, workers=workers, progress=options.progress,
            )
        )  # fmt: skip
        for ratio in ratios:
            yield from _rows(study, task, ratio, scored, workers)
    finally:
        torch.set_num_threads(threads)


def _rows(
    study: _Study, task: Task, ratio: float, scored: Sequence[Scored], workers: int
) -> Iterator[Bar]:
    found = {score.method: score for score in scored if score.requested in (1.0, ratio)}
    mean = {name: score.mean for name, score in found.items()}
    detail, unit = _ranking(task, ratio, scored), task.metric
    n = len(found[DENSE].scores)
    allowed = 0.002 if ratio <= 100 else 0.005
    for row, name in study.names(ratio).items():
        if row == _OVER_HASH:
            yield at_least(name, mean["robe"] - mean["hash"], 0.0, unit, n=n, detail=detail)
        elif row == _BELOW_DENSE:
            below = mean[DENSE] - mean["robe"]
            yield at_most(name, below, allowed, unit, n=n, detail=detail)
        elif row == _EPOCHS:
            yield _epochs(task, name, found["robe"], mean[DENSE] - allowed, workers)
        elif row == _TRAIN:
            best = max(mean["tt"], mean["hot_tt"])
            over = best - max(mean["hash"], mean["robe"])
            yield at_least(name, over, 0.0, unit, n=n, detail=detail)
        elif row == _NOT_BELOW:
            # Both plans: of untrained and of trained tables.
            plans = [found[name] for name in (CONVERTED, MIXED) if name in found]
            worst, plain = min(plans, key=lambda plan: plan.mean), found["lowdim"]
            noise = max(worst.spread, plain.spread)
            note = f"{worst.method} is the worse plan; noise {noise:.4f}; {detail}"
            if n < _SEEDS:
                yield not_judged(name, unit, "", f"one seed does not determine noise; {note}")
                continue
            yield at_most(name, plain.mean - worst.mean, noise, unit, n=n, detail=note)
        else:
            best = max(mean[name] for name in (CONVERTED, MIXED) if name in mean)
            yield at_least(name, best - mean.get("lowdim", 0.0), 0.0, unit, n=n, detail=detail)


def _epochs(task: Task, name: str, robe: Scored, target: float, workers: int) -> Bar:
    """Return a row of the seed with the most epochs; one more than allowed if never."""
    epochs = epochs_to(task, robe, target, _MAX_EPOCHS, workers=workers)
    by_seed = ", ".join("never" if count is None else str(count) for count in epochs)
    return at_most(
        name, max(_MAX_EPOCHS + 1 if count is None else count for count in epochs), _MAX_EPOCHS,
        "epochs", n=len(epochs),
        detail=f"to {target:.4f} by seed: {by_seed}; {task.epochs} of the dense model's own",
    )  # fmt: skip


def _ranking(task: Task, ratio: float, scored: Sequence[Scored]) -> str:
    """Describe all scores, the best first, and name the winner."""
    dense = next(score for score in scored if score.method == DENSE)
    order = ranked(scored, ratio)
    codes = [score for score in scored if score.method in CODES and score not in order]
    entries = [
        f"{score.method} {score.mean:.4f}{_size(score, ratio)}{_rate(score, task)}"
        for score in [*order, *codes]
    ]
    spread = max(score.spread for score in [dense, *order])
    return "; ".join(
        [
            f"{task.metric}: dense {dense.mean:.4f}{_rate(dense, task)}",
            f"best at this size: {order[0].method}",
            ", ".join(entries),
            *([task.yardstick()] if task.yardstick() else []),
            f"largest deviation between seeds {spread:.4f}",
            f"{task.epochs} epochs, rates in times {task.rate:g} as chosen on held-out data",
        ]
    )


def _size(score: Scored, ratio: float) -> str:
    return f" ({score.ratio:.1f}x)" if score.requested != ratio else ""


def _rate(score: Scored, task: Task) -> str:
    trained = score.method not in (*CODES, CONVERTED)
    return f" [{score.rate / task.rate:.2g}]" if trained else ""
