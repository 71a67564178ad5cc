"""The official package reads our logs, and says of them what we say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rules import PLANTED, logs_of

from slipstream.mlperf.training import Judged, check_run, olympic
from slipstream.mlperf.training.log import TOKEN, Event
from slipstream.mlperf.training.rules import official_rules, seconds_of


def write(events: list[Event], path: Path) -> None:
    rows = [
        {
            "namespace": "", "time_ms": one.time_ms, "event_type": one.kind, "key": one.key,
            "value": one.value, "metadata": one.metadata,
        }
        for one in events
    ]  # fmt: skip
    path.write_text("".join(TOKEN + json.dumps(row) + "\n" for row in rows))


def accepted(log: Path, rules: Path) -> bool:
    compliance: Any = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", "6.0.0", True, True)
    return bool(checker.check_file(str(log), str(rules)))


# What the official checker's YAML cannot be told: it reads no two clocks, and one log at a time.
BEYOND = {
    "seed repeated", "best of several", "runs missing", "clock set", "mixed settings", "init",
    "not converged",
}  # fmt: skip


def test_our_logs_are_accepted_and_planted_violations_are_not(
    judged: Judged, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(official_rules(judged.task, "adam"))
    for run in (run for arm in judged.arms for run in arm.runs):
        assert accepted(Path(run.log), rules)
    for rule in set(PLANTED) - BEYOND:
        path = tmp_path / "planted.txt"
        write(PLANTED[rule](logs_of(judged))[0], path)
        assert not accepted(path, rules), rule


def test_verdicts_and_scores_of_random_results_are_the_same(judged: Judged, tmp_path: Path) -> None:
    """Of 100 results, each a run with up to two violations planted in it, or none."""
    summary: Any = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")
    rules = tmp_path / "rules.yaml"
    rules.write_text(official_rules(judged.task, "adam"))
    drawn = np.random.default_rng(0)
    names = sorted(set(PLANTED) - BEYOND)
    verdicts = []
    for number in range(100):
        logs = logs_of(judged)
        for name in drawn.choice(names, drawn.integers(0, 3), replace=False):
            logs = PLANTED[str(name)](logs)
        path = tmp_path / f"{number}.txt"
        write(logs[0], path)
        verdicts.append((not check_run(logs[0], judged.task, "adam"), accepted(path, rules)))
    assert [ours for ours, _ in verdicts] == [theirs for _, theirs in verdicts]
    assert 10 < sum(ours for ours, _ in verdicts) < 90
    for _ in range(100):
        times = drawn.uniform(1, 9, drawn.integers(3, 12)).tolist()
        failed = int(drawn.integers(0, 2))
        theirs = summary._compute_olympic_average(
            [*sorted(times)[: len(times) - failed]], failed, 1
        )
        ours = olympic([*sorted(times)[: len(times) - failed], *[math.inf] * failed])
        assert ours == pytest.approx(theirs)


def test_the_score_of_a_result_is_the_summarizers(judged: Judged) -> None:
    summary: Any = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")
    parser: Any = pytest.importorskip("mlperf_logging.compliance_checker.mlp_parser")
    minutes = []
    for run in judged.arms[0].runs:
        lines, errors = parser.parse_file(run.log, ruleset="6.0.0")
        assert not errors
        begin, end = summary._query_run_start_stop(lines)
        minutes.append((end - begin) / 60 / 1000)
    ours = olympic([seconds_of(one) for one in logs_of(judged)])
    assert ours / 60 == pytest.approx(summary._compute_olympic_average(minutes, 0, 1))
