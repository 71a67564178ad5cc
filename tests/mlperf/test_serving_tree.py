"""The checker accepts trees that we write, and reports each planted defect."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.mlperf.serving import (
    LoadTestConfig,
    Place,
    Session,
    audits,
    benchmark,
    check,
    scenarios,
)

SYSTEMS = Path(__file__).parent / "serving_systems.py"
SECONDS = 0.4
Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scenarios of a real model under the real LoadGen, with audits."""
    root = tmp_path_factory.mktemp("results")
    config = LoadTestConfig(seconds=SECONDS, rate=2000.0, bound_ns=1e9)
    with (
        pytest.MonkeyPatch.context() as patch,
        Session(f"{SYSTEMS}:honest", f"{SYSTEMS}:samples") as session,
    ):
        # An audit must not be inconclusive on a busy machine.
        patch.setattr(audits, "_FAST_TOLERANCE", 9.0)
        found = benchmark(
            session, scenarios("single-stream,server,offline"), config,
            place=Place.of(root, "honest"), audits=("TEST01", "TEST04"), gate=0.99,
        )  # fmt: skip
    assert found.accuracy == 1.0
    assert [row.run.valid for row in found.rows] == [True] * 3, found.table().notes
    # TEST04 sends single queries in every scenario, so it runs once.
    assert [audit.name for audit in found.audits].count("TEST01") == 3
    assert [audit.name for audit in found.audits].count("TEST04") == 1
    return root


@pytest.fixture
def copy(tree: Path, tmp_path: Path) -> Path:
    shutil.copytree(tree, tmp_path / "tree")
    return tmp_path / "tree"


def scenario(root: Path, name: str) -> Path:
    return next(root.glob(f"*/*/results/*/*/{name}"))


def relog(name: str, key: str, value: object, run: str = "performance/run_1") -> Plant:
    """Change a value of a detail log."""

    def plant(root: Path) -> None:
        folder = scenario(root, name)
        path = folder / run / "mlperf_log_detail.txt"
        text = path.read_text()
        text, count = re.subn(
            rf'("key": "{re.escape(key)}", "value": )("[^"]*"|[^,]*)',
            lambda match: match[1] + json.dumps(value), text,
        )  # fmt: skip
        assert count
        path.write_text(text)
        (folder / "digest.json").unlink()

    return plant


def error(root: Path) -> None:
    path = scenario(root, "Offline") / "performance" / "run_1" / "mlperf_log_detail.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1].replace('"is_error": false', '"is_error": true')]))
    (path.parents[2] / "digest.json").unlink()


def answers(change: Callable[[list[object]], list[object]]) -> Plant:
    def plant(root: Path) -> None:
        path = scenario(root, "Offline") / "accuracy" / "mlperf_log_accuracy.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        (path.parents[1] / "digest.json").unlink()

    return plant


def edited(root: Path) -> None:
    path = scenario(root, "SingleStream") / "performance" / "run_1" / "mlperf_log_detail.txt"
    path.write_text(path.read_text().replace("effective_min_query_count", "effective_some_count"))


def summary(root: Path) -> None:
    path = scenario(root, "SingleStream") / "performance" / "run_1" / "mlperf_log_summary.txt"
    path.write_text(re.sub(r"(Mean latency \(ns\)\s*: )\d+", r"\g<1>17", path.read_text()))
    (path.parents[2] / "digest.json").unlink()


def conf(root: Path) -> None:
    path = scenario(root, "Server") / "user.conf"
    path.write_text(path.read_text().replace("target_latency = 1000", "target_latency = 10"))


def unaudited(root: Path) -> None:
    shutil.rmtree(scenario(root, "Server") / "TEST04")


def audited(passed: str) -> Plant:
    def plant(root: Path) -> None:
        path = scenario(root, "Server") / "TEST01" / "verify.json"
        text = path.read_text().replace('"passed": true', f'"passed": {passed}')
        path.write_text(text.replace('"finding": "', f'"finding": "{passed}: '))

    return plant


def inaccurate(root: Path) -> None:
    (scenario(root, "Offline") / "accuracy" / "accuracy.txt").write_text("accuracy=0.5\n")


def gone(root: Path) -> None:
    shutil.rmtree(scenario(root, "Offline"))


def undescribed(root: Path) -> None:
    for path in root.glob("*/*/systems/*.json"):
        path.unlink()


def loose(root: Path) -> None:
    path = scenario(root, "Server") / "measurements.json"
    path.write_text(
        path.read_text().replace('"performance_samples": 32', '"performance_samples": 99')
    )


DEFECTS: dict[str, Plant] = {
    "seed": relog("Server", "effective_sample_index_rng_seed", 7),
    "duration": relog("Offline", "effective_min_duration_ms", 50),
    "missing answers": answers(lambda all: all[1:]),
    "answered twice": answers(lambda all: [*all, all[0]]),
    "edited": edited,
    "summary differs": summary,
    "errors": error,
    "queries": relog("SingleStream", "result_query_count", 50),
    "bound": relog("Server", "result_overlatency_query_count", 60),
    "percentile": relog("SingleStream", "effective_target_latency_percentile", 0.5),
    "conf differs": conf,
    "verdict": relog("Server", "result_validity", "INVALID"),
    "mode": relog("Offline", "effective_test_mode", "AccuracyOnly"),
    "other scenario": relog("Server", "effective_scenario", "Offline"),
    "samples": loose,
    "accuracy": inaccurate,
    "audit missing": unaudited,
    "audit failed": audited("false"),
    "audit undecided": audited("null"),
    "scenario": gone,
    "system": undescribed,
}


def kinds(root: Path) -> dict[str, str]:
    found = check(root, min_duration_s=0.1, required=("SingleStream", "Server", "Offline"))
    return {defect.kind: defect.what for defect in found.defects}


def test_accepts_our_tree_except_for_its_duration(tree: Path) -> None:
    assert kinds(tree) == {}
    assert {defect.kind for defect in check(tree).defects} == {"duration"}


@pytest.mark.parametrize("defect", DEFECTS)
def test_reports_a_planted_defect(copy: Path, defect: str) -> None:
    DEFECTS[defect](copy)
    assert defect in kinds(copy)


def test_messages_differ_between_defects(tree: Path, tmp_path: Path) -> None:
    messages = []
    for number, (defect, plant) in enumerate(DEFECTS.items()):
        root = tmp_path / str(number)
        shutil.copytree(tree, root)
        plant(root)
        messages += [what for kind, what in kinds(root).items() if kind == defect]
    assert len(messages) == len(set(messages))


def as_published(root: Path) -> None:
    """Convert a tree to the published layout: separate settings and audits, truncated answers."""
    for folder in list(root.glob("*/*/results/*/*/*")):
        system, model, name = folder.parts[-3:]
        place = {kind: folder.parents[3] / kind / system / model / name.lower()
                 for kind in ("measurements", "compliance")}  # fmt: skip
        for path in place.values():
            path.mkdir(parents=True)
        (folder / "user.conf").rename(place["measurements"] / "user.conf")
        (folder / "measurements.json").unlink()
        (place["measurements"] / f"{system}.json").write_text("{}")
        for audit in ("TEST01", "TEST04"):
            shutil.rmtree(folder / audit)
            (place["compliance"] / audit).mkdir()
            (place["compliance"] / audit / "verify_performance.txt").write_text("TEST PASS\n")
        answers = folder / "accuracy" / "mlperf_log_accuracy.json"
        answers.write_text(answers.read_text()[:400])
        (folder / "accuracy" / "accuracy.txt").write_text("accuracy=76.4%, good=3\nhash=12ab\n")
        (folder / "digest.json").unlink()
        folder.rename(folder.with_name(name.lower()))
    # Edge results may be inferred from single-stream.
    single = next(root.glob("*/*/results/*/*/singlestream"))
    for kind in ("results", "measurements", "compliance"):
        path = single.parents[3] / kind / single.parts[-3] / single.parts[-2]
        shutil.copytree(path / "singlestream", path / "multistream")


def test_reads_a_published_tree(copy: Path) -> None:
    as_published(copy)
    required = ("SingleStream", "MultiStream", "Server", "Offline")
    found = check(copy, min_duration_s=0.1, required=required)
    assert (len(found.scenarios), found.defects) == (4, ())
    path = next(copy.glob("*/*/compliance/*/*/server/TEST04/verify_performance.txt"))
    path.write_text("TEST FAIL\n")
    assert [defect.kind for defect in check(copy, min_duration_s=0.1).defects] == ["audit failed"]


def test_command_checks_a_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream.cli._main import _command

    arguments = ["mlperf", "check-results", str(tree), "--time", "0.1s"]
    assert _command(arguments) == 0
    assert re.search(r"\bno defect\b", capsys.readouterr().out)
    assert _command([*arguments[:3], "--time", "10min"]) == 1
    assert "duration" in capsys.readouterr().out


def test_folder_without_results_names_the_expected_layout(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="DIVISION/ORGANISATION/results/SYSTEM/"):
        check(tmp_path)
