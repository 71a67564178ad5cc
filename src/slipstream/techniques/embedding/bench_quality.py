"""Bars on what compressed tables learn: clicks with known truth, Gowalla, MovieLens.

Every row tells all ways at the same bytes, with eight- and four-bit codes of the dense tables and a
smaller dimension among them. Nothing is tuned for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.bars import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream.data import get, why_absent
from slipstream.data.generators.clicks import click_log
from slipstream.data.generators.feedback import implicit_feedback
from slipstream.durations import usable_cores
from slipstream.techniques.embedding.criteo import KAGGLE_ROWS, scaled_rows
from slipstream.techniques.embedding.planning import MIXED
from slipstream.techniques.embedding.quality import CONVERTED, DENSE, Scored, compare, ranked
from slipstream.techniques.embedding.quality_tasks import (
    ClickTask,
    Feedback,
    Task,
    first_users,
    split,
)

_SEEDS = 3
# Of the ids in the fields of Criteo's log.
_CRITEO_SHARE = 30
_CLICKS = "planted clicks"
_CLICK_WAYS = ("robe", "hash", "hot_hash", MIXED)
# One column of 16 and the matrix that widens it are a little more than a sixteenth.
_ONE_COLUMN = 15.9
_FACTOR_WAYS = ("lowdim", "tt", "robe", "hash", "hot_hash", MIXED)


@dataclass(frozen=True)
class _Study:
    """A task, and at which sizes it is asked.

    Attributes:
        data: name of the set that it needs; empty for a generated one.
        convert: whether the trained dense tables are compressed as well.
    """

    name: str
    make: Callable[[], Task]
    ratios: tuple[float, ...]
    methods: tuple[str, ...]
    data: str = ""
    convert: bool = True


def _clicks() -> Task:
    rows = scaled_rows(KAGGLE_ROWS, sum(KAGGLE_ROWS) / _CRITEO_SHARE)
    log = click_log(
        200_000, test_rows=60_000, cardinalities=rows, dense=13, exponent=1.15, signal=0.35
    )
    return ClickTask(log.data, _CLICKS)


def _planted() -> Task:
    log = implicit_feedback(2000, 3000, per_user=60, taste=1.5)
    return Feedback(log.data, "planted tastes", epochs=8)


def _gowalla() -> Task:
    return Feedback(first_users(get("gowalla"), 6000), "Gowalla")


def _movielens() -> Task:
    data = get("movielens_latest_small")
    users, items = len(data.user_ids), len(data.item_ids)
    return Feedback(
        split(data.users, data.items, users, items, data.name),
        "MovieLens", epochs=8,
    )  # fmt: skip


_STUDIES = (
    _Study(_CLICKS, _clicks, (_ONE_COLUMN, 64), _FACTOR_WAYS, convert=False),
    _Study(_CLICKS, _clicks, (100, 1000), _CLICK_WAYS, convert=False),
    _Study("planted tastes", _planted, (16,), _FACTOR_WAYS),
    _Study("MovieLens", _movielens, (16,), _FACTOR_WAYS, "movielens_latest_small"),
    _Study("Gowalla", _gowalla, (16, 64), _FACTOR_WAYS, "gowalla"),
)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of all studies. Quick runs the clicks at 1000x with one seed."""
    for study in _STUDIES:
        ratios = [ratio for ratio in study.ratios if options.full or ratio == 1000]
        wanted = [ratio for ratio in ratios if any(map(options.wants, _names(study.name, ratio)))]
        if not wanted:
            continue
        absent = why_absent(study.data) if study.data else None
        if absent is not None:
            for ratio in wanted:
                for name in _names(study.name, ratio):
                    yield not_judged(name, "", "", absent.what)
            continue
        yield from _study(study, wanted, options)


def _study(study: _Study, ratios: Sequence[float], options: BenchOptions) -> Iterator[Bar]:
    task = study.make()
    seeds = _SEEDS if options.full else 1
    methods = study.methods if options.full else study.methods[:2]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scored = list(
            compare(
                task, ratios, methods, seeds=seeds, convert=study.convert,
                workers=min(seeds, usable_cores()), progress=options.progress,
            )
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    for ratio in ratios:
        yield from _rows(task, ratio, scored, seeds)


def _names(task: str, ratio: float) -> tuple[str, ...]:
    prefix = f"quality, {task} at {ratio:g}x"
    names = [f"{prefix}: ROBE over hashed rows"]
    if task == _CLICKS:
        names.append(f"{prefix}: ROBE below dense")
    else:
        names.append(f"{prefix}: the plan over a smaller dimension")
    if task == "planted tastes" or (task == _CLICKS and ratio < 100):
        names.append(f"{prefix}: TT over hashed rows and ROBE")
    return tuple(names)


def _rows(task: Task, ratio: float, scored: Sequence[Scored], seeds: int) -> Iterator[Bar]:
    found = {one.method: one for one in scored if one.asked in (1.0, ratio)}
    detail = _ranking(task, ratio, scored)
    unit = task.metric
    over, second, *more = _names(task.name, ratio)
    gain = found["robe"].mean - found["hash"].mean
    yield at_least(over, gain, 0.0, unit, n=seeds, detail=detail)
    if task.name == _CLICKS:
        below = found[DENSE].mean - found["robe"].mean
        allowed = 0.002 if ratio <= 100 else 0.005
        yield at_most(second, below, allowed, unit, n=seeds, detail=detail)
        yield from _train_rows(found, more, unit, seeds, detail)
        return
    plain = found["lowdim"].mean if "lowdim" in found else 0.0
    best = max(found[name].mean for name in (CONVERTED, MIXED) if name in found)
    yield at_least(second, best - plain, 0.0, unit, n=seeds, detail=detail)
    yield from _train_rows(found, more, unit, seeds, detail)


def _train_rows(
    found: Mapping[str, Scored], names: Sequence[str], unit: str, seeds: int, detail: str
) -> Iterator[Bar]:
    """Tensor trains on tables that are planted with low rank."""
    for name in names:
        others = max(found["hash"].mean, found["robe"].mean)
        yield at_least(name, found["tt"].mean - others, 0.0, unit, n=seeds, detail=detail)


def _ranking(task: Task, ratio: float, scored: Sequence[Scored]) -> str:
    dense = next(one for one in scored if one.method == DENSE)
    order = ranked(scored, ratio)
    codes = [one for one in scored if one.method in ("int8", "int4") and one not in order]
    said = [f"{one.method} {one.mean:.4f}" + _size(one, ratio) for one in [*order, *codes]]
    spread = max(one.spread for one in scored)
    return (
        f"{task.metric}: dense {dense.mean:.4f}; {', '.join(said)}; largest deviation between "
        f"seeds {spread:.4f}; {dense.epochs} epochs, untuned"
    )


def _size(one: Scored, ratio: float) -> str:
    return f" ({one.ratio:.1f}x)" if one.asked != ratio else ""
