"""Check trees of results, ours or published ones; every kind of defect has its own message.

The checker trusts only LoadGen's detail log, as far as the files agree with each other. It follows
the text of the rules, not the official checker.

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
    Scenario,
)
from slipstream.mlperf.serving.statistics import min_queries, supports
from slipstream.tables import Field, Table

AUDITS = ("TEST01", "TEST04")
_SEEDS = (
    "effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed",
)  # fmt: skip
# A conf file has fewer digits than the log.
_CONF_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Defect:
    """A violation of the rules.

    Attributes:
        kind: ``seed``, ``duration``, ...
        where: file or folder.
    """

    kind: str
    where: str
    what: str


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        scenarios: checked folders.
    """

    scenarios: tuple[str, ...]
    defects: tuple[Defect, ...]

    def table(self) -> Table:
        """Return a table with a row per defect."""
        fields: tuple[Field[Defect], ...] = (
            Field.of("defect", lambda defect: defect.kind),
            Field.of("description", lambda defect: defect.what),
            Field.of("where", lambda defect: defect.where),
        )
        count = len(self.defects)
        title = f"{len(self.scenarios)} scenarios, {count} defect{'s' * (count != 1)}"
        return Table.of(self.defects, fields, title, () if count else ("no defect was found",))

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON."""
        return {
            "scenarios": list(self.scenarios),
            "accepted": not self.defects,
            "defects": [vars(defect) for defect in self.defects],
        }


def check(
    root: Path,
    *,
    min_duration_s: float = OFFICIAL_DURATION_S,
    required: Sequence[str] = (),
    audits: Sequence[str] = AUDITS,
) -> CheckResult:
    """Check the tree at `root`.

    Args:
        min_duration_s: minimum duration of a performance run; lower it to check short runs.
        required: scenarios that every model must have, by title.
        audits: audits that every scenario must have.

    Raises:
        SlipstreamError: there is no tree at `root`.
    """
    folders = sorted(
        path for path in root.glob("*/*/results/*/*/*") if path.is_dir() and tree.titled(path.name)
    )
    if not folders:
        raise SlipstreamError(
            "found no results at DIVISION/ORGANISATION/results/SYSTEM/MODEL/SCENARIO",
            where=str(root),
        )
    defects: list[Defect] = []
    for model in sorted({path.parent for path in folders}):
        present = {found.title for path in model.iterdir() if (found := tree.titled(path.name))}
        defects += [
            Defect("scenario", str(model), f"the required scenario {title} is missing")
            for title in required
            if title not in present
        ]
        system = model.parents[2] / "systems" / f"{model.parent.name}.json"
        if tree.read_json(system) is None:
            defects.append(Defect("system", str(system), "the system is not described"))
    for folder in folders:
        scenario = tree.titled(folder.name)
        assert scenario is not None
        defects += _scenario(folder, scenario, min_duration_s, audits)
    return CheckResult(tuple(str(path.relative_to(root)) for path in folders), tuple(defects))


def _scenario(
    folder: Path, scenario: Scenario, min_duration_s: float, audits: Sequence[str]
) -> Iterator[Defect]:
    measures, settings = tree.read_json(folder / tree.MEASURES), folder
    if measures is None:
        # A published tree has its settings elsewhere, in the submitter's format.
        settings, measures = tree.related(folder, "measurements"), {}
        if not any(settings.glob("*.json")):
            yield Defect("measurements", str(folder), f"{tree.MEASURES} is missing or not JSON")
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
            status = "failed" if verified[0] is False else "undecided"
            yield Defect(f"audit {status}", str(folder), f"{name}: {verified[1]}")


def _measured(scenario: Scenario, runs: Sequence[Path]) -> Scenario:
    """Return the scenario that was run, from which this one's result may be inferred."""
    for run in runs:
        with contextlib.suppress(logs.LogError):
            ran = logs.read_detail(run / logs.DETAIL).get("effective_scenario")
            if ran in INFERRED_FROM.get(scenario.title, ()):
                return tree.titled(ran) or scenario
    return scenario


def _digest(folder: Path) -> Iterator[Defect]:
    recorded = tree.read_json(folder / tree.DIGEST)
    if recorded is None:
        return  # a published tree: edits show only where files disagree
    actual = tree.digests(folder)
    for name in sorted(recorded.keys() | actual.keys()):
        if recorded.get(name) != actual.get(name):
            how = "was edited" if name in actual and name in recorded else "was added or removed"
            yield Defect("edited", str(folder / name), f"the log {how} after the run")


def _log(folder: Path, scenario: Scenario, mode: str) -> Iterator[Defect | logs.DetailLog]:
    """Yield the defects that any log can have, then the log if it is readable."""
    where = str(folder / logs.DETAIL)
    try:
        log = logs.read_detail(folder / logs.DETAIL)
    except logs.LogError as error:
        yield Defect("log", error.where or where, error.what)
        return
    for line in log.errors:
        yield Defect("errors", where, f"LoadGen logged an error: {line}")
    if log.get("effective_scenario") != scenario.title:
        ran = log.get("effective_scenario")
        yield Defect("other scenario", where, f"the scenario is {ran}, not {scenario.title}")
    if log.get("effective_test_mode") != mode:
        yield Defect("mode", where, f"the mode is {log.get('effective_test_mode')}, not {mode}")
    yield log


def _performance(
    folder: Path,
    scenario: Scenario,
    conf: dict[str, str],
    measures: dict[str, Any],
    min_duration_s: float,
) -> Iterator[Defect]:
    where, log = str(folder / logs.DETAIL), None
    for item in _log(folder, scenario, "PerformanceOnly"):
        if isinstance(item, Defect):
            yield item
        else:
            log = item
    if log is None:
        return
    if log.get("result_validity") != "VALID":
        yield Defect("verdict", where, f"LoadGen's verdict is {log.get('result_validity')}")
    # Compare with the round that shares most seeds with the log.
    seeds = [log.get(key) for key in _SEEDS]
    rules = max(ROUND_SEEDS.values(), key=lambda official: sum(map(operator.eq, official, seeds)))
    for key, seed, official in zip(_SEEDS, seeds, rules, strict=True):
        if seed != official:
            yield Defect("seed", where, f"{key} is {seed}; the rules require {official}")
    duration_s = float(log.get("effective_min_duration_ms") or 0) / 1e3
    if duration_s < min_duration_s:
        text = f"the minimum duration is {duration_s:g} s, not {min_duration_s:g} s"
        yield Defect("duration", where, text)
    yield from _counts(log, scenario, where)
    in_memory = log.get("effective_performance_sample_count") or 0
    needed = measures.get("performance_samples")
    if needed is not None and in_memory < needed:
        yield Defect("samples", where, f"{in_memory} samples were in memory, not {needed}")
    for name, key, scale in _CONF_KEYS.get(scenario.name, ()):
        if name in conf and not _agree(conf[name], log.get(key), scale):
            yield Defect(
                "conf differs", where, f"{key} is {log.get(key)}; {tree.CONF} has {conf[name]}"
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
    """Check that the queries suffice for the percentile."""
    queries = int(log.get("result_query_count") or 0)
    share = float(log.get("effective_target_latency_percentile") or 0)
    if scenario.percentile is None:
        return
    if share < scenario.percentile:
        required = 100 * scenario.percentile
        text = f"the log reports p{100 * share:g}, not p{required:g}"
        yield Defect("percentile", where, text)
        return
    needed = min_queries(share)
    if queries < needed:
        yield Defect("queries", where, f"{queries} queries; p{100 * share:g} needs {needed}")
    elif scenario.name == "server":
        over = int(log.get("result_overlatency_query_count") or 0)
        if not supports(queries, over, share):
            yield Defect("bound", where, f"{over} of {queries} queries exceeded the bound")


def _summary(folder: Path, log: logs.DetailLog) -> Iterator[Defect]:
    """Check that the summary agrees with the detail log."""
    path = folder / logs.SUMMARY
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        yield Defect("summary", str(path), "the summary is missing")
        return
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.count(":") == 1)
    reported = {key.strip().removeprefix("* "): value.strip() for key, value in lines.items()}
    if reported.get("Result is") != log.get("result_validity"):
        text = f"the summary's verdict is {reported.get('Result is')}"
        yield Defect("summary differs", str(path), text)
    mean = reported.get("Mean latency (ns)")
    if mean is not None and not _agree(mean, log.get("result_mean_latency_ns"), 1):
        yield Defect("summary differs", str(path), f"the summary's mean latency is {mean} ns")


def _accuracy(folder: Path, scenario: Scenario, measures: dict[str, Any]) -> Iterator[Defect]:
    for item in _log(folder, scenario, "AccuracyOnly"):
        if isinstance(item, Defect):
            yield item
    samples = measures.get("samples")
    try:
        answered = Counter(index for index, _ in logs.read_answers(folder / logs.ACCURACY))
    except logs.LogError as error:
        # Published logs of answers are truncated; their hash is in the accuracy file.
        if "hash=" not in _text(folder / tree.ACCURACY_TEXT):
            yield Defect("answers", error.where or str(folder), error.what)
        return
    where = str(folder / logs.ACCURACY)
    if samples is not None:
        missing = set(range(int(samples))) - answered.keys()
        if missing:
            text = f"{len(missing)} samples have no answer; the first is {min(missing)}"
            yield Defect("missing answers", where, text)
    twice = [index for index, count in answered.items() if count > 1]
    if twice:
        text = f"{len(twice)} samples have several answers; the first is {min(twice)}"
        yield Defect("answered twice", where, text)
    gate, reached = measures.get("gate"), _reached(folder / tree.ACCURACY_TEXT)
    if gate is not None and (reached is None or reached < gate):
        shown = "unknown" if reached is None else f"{reached:.4f}"
        yield Defect("accuracy", where, f"the accuracy is {shown}, not at least {gate:g}")


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
        return math.isclose(float(written) * scale, float(logged), rel_tol=_CONF_TOLERANCE)
    except (TypeError, ValueError):
        return False
