"""The official package accepts our logs and agrees with our verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rules import PLANTED, logs_of

from slipstream.mlperf.training import TrainingResult, check_run, olympic_mean
from slipstream.mlperf.training.log import TOKEN, Event
from slipstream.mlperf.training.rules import seconds_of
from slipstream.mlperf.training.tasks import Task


def write(events: list[Event], path: Path) -> None:
    rows = [
        {
            "namespace": "", "time_ms": event.time_ms, "event_type": event.kind, "key": event.key,
            "value": event.value, "metadata": event.metadata,
        }
        for event in events
    ]  # fmt: skip
    path.write_text("".join(TOKEN + json.dumps(row) + "\n" for row in rows))


def accepted(log: Path, rules: Path) -> bool:
    compliance: Any = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", "6.0.0", True, True)
    return bool(checker.check_file(str(log), str(rules)))


def official_rules(task: Task, optimizer: str = "") -> str:
    """Return the rules as far as the official compliance checker can express them, as its YAML."""
    better = ">=" if task.higher else "<="

    def record(name: str, required: str, checks: Iterable[str] = (), after: str = "") -> str:
        lines = ["- KEY:", f"    NAME: {name}", f"    REQ: {required}"]
        if checks := list(checks):
            lines += ["    CHECK:", *(f'        - "{check}"' for check in checks)]
        return "\n".join([*lines, *([f'    POST: "{after}"'] if after else [])])

    started, gap = "s['run']", "v['metadata']['samples_count'] - s['last']"
    rules = [
        "- BEGIN:\n    CODE: \"s.update({'run': False, 'init': False, 'stopped': False, 'cleared': "
        "False, 'last': 0, 'quality': None, 'batch': 0, 'reached': False})\"",
        record("cache_clear", "AT_LEAST_ONE", [f"not {started}"], "s['cleared'] = True"),
        record("init_start", "EXACTLY_ONE", [f"not {started}"], "s['init'] = True"),
        record("init_stop", "EXACTLY_ONE", ["s['init']", f"not {started}"]),
        record("run_start", "EXACTLY_ONE", [], "s['run'] = True"),
        record("data_touched", "OPTIONAL", [started]),
        record("epoch_start", "AT_LEAST_ONE", [started]),
        record("eval_start", "AT_LEAST_ONE", [started]),
        *(record(key, "EXACTLY_ONE") for key in ("submission_org", "submission_platform")),
        record("submission_benchmark", "EXACTLY_ONE"),
        record("submission_division", "EXACTLY_ONE", ["v['value'] in ['closed', 'open']"]),
        record("seed", "EXACTLY_ONE", [f"not {started}"]),
        record("global_batch_size", "EXACTLY_ONE", [], "s['batch'] = v['value']"),
        record("target_quality", "EXACTLY_ONE", [f"v['value'] {better} {task.target}"]),
        record("train_samples", "EXACTLY_ONE", [f"v['value'] == {task.train_samples}"]),
        record("eval_samples", "EXACTLY_ONE", [f"v['value'] >= {task.eval_samples}"]),
        record(
            "eval_accuracy", "AT_LEAST_ONE",
            [f"{gap} <= {task.evaluate_every} + s['batch']", "not s['reached']"],
            "s['last'] = v['metadata']['samples_count']; s['quality'] = v['value']; "
            f"s['reached'] = v['value'] {better} {task.target}",
        ),
        record(
            "run_stop", "EXACTLY_ONE",
            [started, "v['metadata']['status'] == 'success'", "s['reached']"],
        ),
    ]  # fmt: skip
    if optimizer:
        rules.append(record("opt_name", "EXACTLY_ONE", [f"v['value'] == '{optimizer}'"]))
    return "\n\n".join(rules) + "\n"


# Rules that the official YAML cannot express: it compares no clocks and reads one log at a time.
INEXPRESSIBLE = {
    "seed repeated", "best of several", "runs missing", "clock set", "mixed settings", "init",
    "not converged",
}  # fmt: skip


def test_official_checker_rejects_planted_violations_only(
    judged: TrainingResult, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(official_rules(judged.task, "adam"))
    for run in (run for arm in judged.arms for run in arm.runs):
        assert accepted(Path(run.log), rules)
    for rule in set(PLANTED) - INEXPRESSIBLE:
        path = tmp_path / "planted.txt"
        write(PLANTED[rule](logs_of(judged))[0], path)
        assert not accepted(path, rules), rule


def test_official_verdicts_and_scores_of_random_results_agree(
    judged: TrainingResult, tmp_path: Path
) -> None:
    """100 runs with zero to two planted violations each."""
    summary: Any = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")
    rules = tmp_path / "rules.yaml"
    rules.write_text(official_rules(judged.task, "adam"))
    generator = np.random.default_rng(0)
    names = sorted(set(PLANTED) - INEXPRESSIBLE)
    verdicts = []
    for number in range(100):
        logs = logs_of(judged)
        for name in generator.choice(names, generator.integers(0, 3), replace=False):
            logs = PLANTED[str(name)](logs)
        path = tmp_path / f"{number}.txt"
        write(logs[0], path)
        verdicts.append((not check_run(logs[0], judged.task, "adam"), accepted(path, rules)))
    assert [ours for ours, _ in verdicts] == [theirs for _, theirs in verdicts]
    assert 10 < sum(ours for ours, _ in verdicts) < 90
    for _ in range(100):
        times = generator.uniform(1, 9, generator.integers(3, 12)).tolist()
        failed = int(generator.integers(0, 2))
        theirs = summary._compute_olympic_average(
            [*sorted(times)[: len(times) - failed]], failed, 1
        )
        ours = olympic_mean([*sorted(times)[: len(times) - failed], *[math.inf] * failed])
        assert ours == pytest.approx(theirs)


def test_score_equals_the_official_summarizers(judged: TrainingResult) -> None:
    summary: Any = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")
    parser: Any = pytest.importorskip("mlperf_logging.compliance_checker.mlp_parser")
    minutes = []
    for run in judged.arms[0].runs:
        lines, errors = parser.parse_file(run.log, ruleset="6.0.0")
        assert not errors
        begin, end = summary._query_run_start_stop(lines)
        minutes.append((end - begin) / 60 / 1000)
    ours = olympic_mean([seconds_of(events) for events in logs_of(judged)])
    assert ours / 60 == pytest.approx(summary._compute_olympic_average(minutes, 0, 1))
