"""A checker for trees of results, ours or another's: every defect with a message of its own.

It believes nothing but LoadGen's detail log, and that only as far as the files agree with each
other. Written from the rules; the official checker is not consulted.

Source: MLPerf Inference rules and submission rules (mlcommons/inference_policies).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.mlperf.serving import logs, tree
from slipstream.mlperf.serving.rules import (
    INFERRED_FROM,
    OFFICIAL_DURATION_S,
    ROUND_SEEDS,
    SCENARIOS,
    Scenario,
)
from slipstream.mlperf.serving.statistics import fewest_queries, supports
from slipstream.tables import Field, Table

AUDITS = ("TEST01", "TEST04")
_SEEDS = (
    "effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed",
)  # fmt: skip
# Numbers of a conf are written with fewer digits than they are logged with.
_CLOSE = 1e-3


@dataclass(frozen=True)
class Defect:
    """Something that the rules do not accept.

    Attributes:
        kind: a short word for programs: ``seed``, ``duration``, ...
        where: file or folder.
    """

    kind: str
    where: str
    what: str


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        scenarios: folders that were looked at.
    """

    scenarios: tuple[str, ...]
    defects: tuple[Defect, ...]

    def table(self) -> Table:
        """A row a defect."""
        fields: tuple[Field[Defect], ...] = (
            Field.of("defect", lambda one: one.kind),
            Field.of("what is wrong", lambda one: one.what),
            Field.of("where", lambda one: one.where),
        )
        count = len(self.defects)
        title = f"{len(self.scenarios)} scenarios, {count} defect{'s' * (count != 1)}"
        return Table.of(self.defects, fields, title, () if count else ("no defect was found",))

    def to_json(self) -> dict[str, Any]:
        """The findings for programs."""
        return {
            "scenarios": list(self.scenarios),
            "accepted": not self.defects,
            "defects": [vars(one) for one in self.defects],
        }


def check(
    root: Path,
    *,
    min_duration_s: float = OFFICIAL_DURATION_S,
    required: Sequence[str] = (),
    audits: Sequence[str] = AUDITS,
) -> Checked:
    """Every defect of the tree at `root`.

    Args:
        min_duration_s: of a performance run: the rules', unless short runs are to be looked at.
        required: scenarios that every model must have, by title.
        audits: that every scenario must have.

    Raises:
        SlipstreamError: there is no tree at `root`.
    """
    folders = sorted(
        path for path in root.glob("*/*/results/*/*/*") if path.is_dir() and tree.titled(path.name)
    )
    if not folders:
        raise SlipstreamError(
            "no results are here: DIVISION/ORGANISATION/results/SYSTEM/MODEL/SCENARIO",
            where=str(root),
        )
    defects: list[Defect] = []
    for model in sorted({path.parent for path in folders}):
        here = {one.title for path in model.iterdir() if (one := tree.titled(path.name))}
        defects += [
            Defect("scenario", str(model), f"the required scenario {title} is missing")
            for title in required
            if title not in here
        ]
        system = model.parents[2] / "systems" / f"{model.parent.name}.json"
        if tree.read_json(system) is None:
            defects.append(Defect("system", str(system), "the system is not described"))
    for folder in folders:
        scenario = tree.titled(folder.name)
        assert scenario is not None
        defects += _scenario(folder, scenario, min_duration_s, audits)
    return Checked(tuple(str(one.relative_to(root)) for one in folders), tuple(defects))


def _scenario(
    folder: Path, scenario: Scenario, min_duration_s: float, audits: Sequence[str]
) -> Iterator[Defect]:
    measures, settings = tree.read_json(folder / tree.MEASURES), folder
    if measures is None:
        # As published: what else the settings' folder holds is said in the submitter's way.
        settings, measures = tree.beside(folder, "measurements"), {}
        if not any(settings.glob("*.json")):
            yield Defect("measurements", str(folder), f"{tree.MEASURES} is missing or no JSON")
    try:
        conf = tree.read_conf(settings / tree.CONF)
    except OSError:
        yield Defect("conf", str(folder), f"{tree.CONF} is missing")
        conf = {}
    yield from _digest(folder)
    runs = sorted((folder / "performance").glob("run_*"))
    if not runs:
        yield Defect("performance", str(folder), "there is no performance run")
    scenario = _measured(scenario, runs)
    for run in runs:
        yield from _performance(run, scenario, conf, measures, min_duration_s)
    yield from _accuracy(folder / "accuracy", scenario, measures)
    for name in audits:
        verified = tree.verified(folder, name)
        if verified is None:
            yield Defect("audit missing", str(folder), f"the audit {name} is missing")
        elif not verified[0]:
            ended = "failed" if verified[0] is False else "undecided"
            yield Defect(f"audit {ended}", str(folder), f"{name}: {verified[1]}")


def _measured(scenario: Scenario, runs: Sequence[Path]) -> Scenario:
    """The scenario that was run: another one, where this one's result is inferred from that."""
    for run in runs:
        with contextlib.suppress(logs.LogError):
            ran = logs.read_detail(run / logs.DETAIL).get("effective_scenario")
            if ran in INFERRED_FROM.get(scenario.title, ()):
                return tree.titled(ran) or scenario
    return scenario


def _digest(folder: Path) -> Iterator[Defect]:
    noted = tree.read_json(folder / tree.DIGEST)
    if noted is None:
        return  # another's tree: what was edited shows only where files disagree
    now = tree.digests(folder)
    for name in sorted(noted.keys() | now.keys()):
        if noted.get(name) != now.get(name):
            how = "was edited" if name in now and name in noted else "was added or taken away"
            yield Defect("edited", str(folder / name), f"the log {how} after the run")


def _log(folder: Path, scenario: Scenario, mode: str) -> Iterator[Defect | logs.DetailLog]:
    """The detail log, after what is wrong with any log."""
    where = str(folder / logs.DETAIL)
    try:
        log = logs.read_detail(folder / logs.DETAIL)
    except logs.LogError as error:
        yield Defect("log", error.where or where, error.what)
        return
    for one in log.errors:
        yield Defect("errors", where, f"LoadGen logged an error: {one}")
    if log.get("effective_scenario") != scenario.title:
        yield Defect("other scenario", where, f"it is of {log.get('effective_scenario')}")
    if log.get("effective_test_mode") != mode:
        yield Defect("mode", where, f"it is of {log.get('effective_test_mode')}, not {mode}")
    yield log


def _performance(
    folder: Path,
    scenario: Scenario,
    conf: dict[str, str],
    measures: dict[str, Any],
    min_duration_s: float,
) -> Iterator[Defect]:
    where, log = str(folder / logs.DETAIL), None
    for one in _log(folder, scenario, "PerformanceOnly"):
        if isinstance(one, Defect):
            yield one
        else:
            log = one
    if log is None:
        return
    if log.get("result_validity") != "VALID":
        yield Defect("verdict", where, f"LoadGen calls it {log.get('result_validity')}")
    # The round whose seeds most of the log's are: the others are what is wrong.
    seeds = [log.get(key) for key in _SEEDS]
    rules = max(ROUND_SEEDS.values(), key=lambda known: sum(map(operator.eq, known, seeds)))
    for key, seed, wanted in zip(_SEEDS, seeds, rules, strict=True):
        if seed != wanted:
            yield Defect("seed", where, f"{key} is {seed}, and the rules' is {wanted}")
    lasted = float(log.get("effective_min_duration_ms") or 0) / 1e3
    if lasted < min_duration_s:
        yield Defect("duration", where, f"{lasted:g} s were asked for, not {min_duration_s:g} s")
    yield from _counts(log, scenario, where)
    in_memory, needed = (
        log.get("effective_performance_sample_count") or 0,
        measures.get("performance_samples"),
    )
    if needed is not None and in_memory < needed:
        yield Defect("samples", where, f"{in_memory} samples were in memory, not {needed}")
    for name, key, scale in _CONF_KEYS.get(scenario.name, ()):
        if name in conf and not _agree(conf[name], log.get(key), scale):
            yield Defect(
                "conf differs", where, f"{key} is {log.get(key)}, {tree.CONF} has {conf[name]}"
            )
    yield from _summary(folder, log)


_CONF_KEYS = {
    "single-stream": (("target_latency_percentile", "effective_target_latency_percentile", 1e-2),),
    "multi-stream": (
        ("target_latency_percentile", "effective_target_latency_percentile", 1e-2),
        ("samples_per_query", "effective_samples_per_query", 1),
    ),
    "server": (
        ("target_latency_percentile", "effective_target_latency_percentile", 1e-2),
        ("target_latency", "effective_target_latency_ns", 1e6),
    ),
}


def _counts(log: logs.DetailLog, scenario: Scenario, where: str) -> Iterator[Defect]:
    """Queries enough for the percentile, by the rules and by our own statistics."""
    queries = int(log.get("result_query_count") or 0)
    share = float(log.get("effective_target_latency_percentile") or 0)
    if scenario.percentile is None:
        return
    if share < scenario.percentile:
        wanted = 100 * scenario.percentile
        yield Defect("percentile", where, f"p{100 * share:g} was told, not p{wanted:g}")
        return
    if queries < fewest_queries(share):
        needed = fewest_queries(share)
        yield Defect("queries", where, f"{queries} queries, where p{100 * share:g} takes {needed}")
    elif scenario.name == "server":
        over = int(log.get("result_overlatency_query_count") or 0)
        if not supports(queries, over, share):
            yield Defect("bound", where, f"{over} of {queries} queries took longer than the bound")


def _summary(folder: Path, log: logs.DetailLog) -> Iterator[Defect]:
    """The summary, which people read, says what the detail log says."""
    path = folder / logs.SUMMARY
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        yield Defect("summary", str(path), "the summary is missing")
        return
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.count(":") == 1)
    told = {key.strip().removeprefix("* "): value.strip() for key, value in lines.items()}
    if told.get("Result is") != log.get("result_validity"):
        yield Defect("summary differs", str(path), f"it says {told.get('Result is')}")
    mean = told.get("Mean latency (ns)")
    if mean is not None and not _agree(mean, log.get("result_mean_latency_ns"), 1):
        yield Defect("summary differs", str(path), f"it says a mean latency of {mean} ns")


def _accuracy(folder: Path, scenario: Scenario, measures: dict[str, Any]) -> Iterator[Defect]:
    for one in _log(folder, scenario, "AccuracyOnly"):
        if isinstance(one, Defect):
            yield one
    samples = measures.get("samples")
    try:
        answered = Counter(index for index, _ in logs.read_answers(folder / logs.ACCURACY))
    except logs.LogError as error:
        # Published logs of answers are cut short, and their hash stands beside the accuracy.
        if "hash=" not in _text(folder / tree.ACCURACY_TEXT):
            yield Defect("answers", error.where or str(folder), error.what)
        return
    where = str(folder / logs.ACCURACY)
    if samples is not None:
        missing = set(range(int(samples))) - answered.keys()
        if missing:
            yield Defect(
                "missing answers",
                where,
                f"{len(missing)} samples have no answer, {min(missing)} first",
            )
    twice = [index for index, count in answered.items() if count > 1]
    if twice:
        yield Defect(
            "answered twice",
            where,
            f"{len(twice)} samples have several answers, {min(twice)} first",
        )
    gate, reached = measures.get("gate"), _reached(folder / tree.ACCURACY_TEXT)
    if gate is not None and (reached is None or reached < gate):
        shown = "unknown" if reached is None else f"{reached:.4f}"
        yield Defect("accuracy", where, f"it is {shown}, and {gate:g} is asked for")


def _reached(path: Path) -> float | None:
    word = _text(path).partition("accuracy=")[2].partition(",")[0].strip()
    try:
        return float(word[:-1]) / 100 if word.endswith("%") else float(word)
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _agree(written: str, logged: Any, scale: float) -> bool:
    try:
        return math.isclose(float(written) * scale, float(logged), rel_tol=_CLOSE)
    except (TypeError, ValueError):
        return False


ALL = tuple(one.title for one in SCENARIOS.values())
