"""`slipstream explain | export | import | diff`, as a user runs them."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.cli import _main
from slipstream.graph import (
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Editor,
    Graph,
    Kind,
    Role,
    StepPhase,
    Tasks,
    load,
    replace_tasks,
    save,
)
from slipstream.graph.page_faults import PAGE_FAULTS
from slipstream.provenance import Provenance
from tiny_models import captured


@dataclass
class Ran:
    """The outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


class Cli:
    """Runs commands in a folder through the CLI, without a new process for each."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Ran:
        """Return exit code, stdout and stderr of ``slipstream ARGUMENTS``."""
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("COLUMNS", "200")
            patch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
            # Its signal handlers would outlive it.
            patch.setattr(_main, "_handle_signals", lambda: None)
            with pytest.raises(SystemExit) as left:
                _main.main()
        out, err = self._capsys.readouterr()
        return Ran(int(left.value.code or 0), out, err)

    def json(self, *arguments: str | Path) -> Any:
        """Return the JSON output of a command that succeeds."""
        ran = self(*arguments, "--json")
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


def _graph() -> Graph:
    """Return a graph of a host that launches two kernels: 100 us of host, 300 us of kernels."""
    n = 4
    zero = np.zeros(n, np.int32)
    return Graph(
        tasks=Tasks(
            name=np.array([1, 2, 1, 3], np.int32), scope=zero,
            module=np.array([4, 4, 5, 5], np.int32), source=zero,
            kind=np.array([Kind.LAUNCH, Kind.KERNEL, Kind.LAUNCH, Kind.KERNEL], np.uint8),
            phase=np.full(n, StepPhase.FORWARD, np.uint8),
            lane=np.array([0, 1, 0, 1], np.int32), rank=zero, call=np.full(n, -1, np.int32),
            sequence=np.full(n, -1, np.int64),
            duration_ns=np.array([10e3, 200e3, 10e3, 100e3]),
            gap_ns=np.array([40e3, 0, 40e3, 0]), spread=np.zeros(n),
            provenance=np.full(n, PROVENANCES.index(Provenance.MEASURED), np.uint8),
        ),
        edges=Edges(
            np.array([0, 2], np.int32), np.array([1, 3], np.int32),
            np.full(2, Dependency.LAUNCH, np.uint8), np.array([5e3, 5e3]), np.zeros(2, np.uint8),
        ),
        strings=("", "cudaLaunchKernel", "gemm", "softmax", "attention", "head"),
        calls=(),
        operand_start=np.zeros(n + 1, np.int64),
        operands=np.empty(0, np.int32),
        parameters=np.empty(0, np.int32),
        lanes=("thread 1", "gpu 0 stream 7"),
        samples=8,
        meta={"workload": "model.py:step"},
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.slipgraph"
    save(_graph(), path)
    return path


def test_explain_sums_the_path_by_operator_and_module(cli: Cli, run: Path) -> None:
    found = cli.json("explain", run)
    assert found["step_ns"] == 300e3
    assert [(c["name"], c["busy_ns"]) for c in found["contributions"]] == [
        ("gemm", 200e3), ("softmax", 100e3),
    ]  # fmt: skip
    assert [lane["busy_ns"] for lane in found["lanes"]] == [20e3, 300e3]
    assert found["duration_share"] == {"measured": 1.0}
    modules = cli.json("explain", run, "--by", "module")["contributions"]
    assert {m["name"]: m["share"] for m in modules} == {
        "attention": pytest.approx(2 / 3), "head": pytest.approx(1 / 3),
    }  # fmt: skip


def test_explain_lists_the_path_and_the_cause_of_each_wait(cli: Cli, run: Path) -> None:
    entries = cli.json("explain", run, "--critical-path")["critical_path"]
    assert [(e["name"], e["waits_for"]) for e in entries] == [
        ("gemm", "stream_order"), ("softmax", "stream_order"),
    ]  # fmt: skip


def test_explain_predicts_the_gain_of_a_faster_kernel(cli: Cli, run: Path) -> None:
    curves = cli.json("explain", run, "--causal")["virtual_speedups"]
    gemm = next(curve for curve in curves if curve["name"] == "gemm")
    assert gemm["gain"][gemm["faster"].index(0.5)] == pytest.approx(1 / 3)
    launch = next(curve for curve in curves if curve["name"] == "cudaLaunchKernel")
    assert set(launch["gain"]) == {0.0}


def test_explain_prints_tables_with_provenance(cli: Cli, run: Path) -> None:
    for options in ((), ("--critical-path",), ("--causal",), ("--by", "lane")):
        ran = cli("explain", run, *options)
        assert ran.returncode == 0, ran.stderr
        assert "gpu 0 stream 7" in ran.stdout
    assert "100.0 % measured" in ran.stdout


def test_an_unknown_group_is_an_error_that_lists_the_known_ones(cli: Cli, run: Path) -> None:
    ran = cli("explain", run, "--by", "colour")
    assert ran.returncode != 0
    assert "operator, module, line" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("form", "suffix"), [("perfetto", ".json"), ("chakra", ".et"), ("csv", ".csv")]
)
def test_export_writes_next_to_the_run_by_default(
    cli: Cli, run: Path, form: str, suffix: str
) -> None:
    found = cli.json("export", run, "--to", form)
    written = run.with_suffix(suffix)
    assert found == {
        "file": str(written), "format": form, "tasks": 4, "bytes": written.stat().st_size,
    }  # fmt: skip


def test_csv_has_one_task_per_line(cli: Cli, run: Path) -> None:
    cli.json("export", run, "--to", "csv", "-o", "tasks.csv")
    with open(run.parent / "tasks.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [
        "cudaLaunchKernel",
        "gemm",
        "cudaLaunchKernel",
        "softmax",
    ]
    assert rows[1]["start_ns"] == "15000.0"
    assert (rows[1]["critical"], rows[1]["module"], rows[1]["provenance"]) == (
        "1", "attention", "measured",
    )  # fmt: skip


def test_chakra_export_and_import_are_lossless(cli: Cli, run: Path) -> None:
    cli.json("export", run, "--to", "chakra")
    cli.json("import", "run.et", "-o", "back.slipgraph")
    assert (run.parent / "back.slipgraph").read_bytes() == run.read_bytes()


def test_an_unknown_format_is_a_usage_error(cli: Cli, run: Path) -> None:
    for arguments, message in ((("--to", "pdf"), "'pdf'"), ((), "format")):
        ran = cli("export", run, *arguments)
        assert ran.returncode == 2
        what, _, remedy = ran.stderr.partition("  try: ")
        assert message in what
        assert {"perfetto", "chakra", "csv"} <= set(re.findall(r"\w+", remedy))


def test_import_creates_a_graph_of_a_real_trace(
    cli: Cli, shared_data: Path, tmp_path: Path
) -> None:
    trace = shared_data / "gpu_traces" / "timeline_analysis_sampled_rank-0.json.gz"
    found = cli.json("import", trace, "-o", "run.slipgraph", "--step", "551")
    assert found["kernels"] == found["kernels_linked"] == 602
    assert found["step_ns"] == found["recorded_ns"] == 607_361_000
    assert len(load(tmp_path / "run.slipgraph")) == found["tasks"]
    assert cli.json("explain", "run.slipgraph")["step_ns"] == found["step_ns"]


def test_import_names_file_and_remedy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    ran = cli("import", "cut.json")
    assert ran.returncode == 1
    assert "cut.json" in ran.stderr
    assert "export it again" in ran.stderr
    ran = cli("import", "cut.json", "--step", "last")
    assert ran.returncode == 2


def _slower(run: Path, factor: float) -> Path:
    graph = _graph()
    duration = graph.tasks.duration_ns * np.where(graph.tasks.name == 2, factor, 1.0)
    path = run.with_name("slower.slipgraph")
    save(replace(replace_tasks(graph, duration_ns=duration), meta={}), path)
    return path


def test_diff_attributes_a_change_and_adds_up(cli: Cli, run: Path) -> None:
    found = cli.json("diff", run, _slower(run, 1.3))
    assert (found["before_ns"], found["after_ns"]) == (300e3, 360e3)
    assert found["change"] == pytest.approx(0.2)
    changes = {row["name"]: row["change_ns"] for row in found["rows"]["operator"]}
    assert changes == {"gemm": 60e3, "softmax": 0, "cudaLaunchKernel": 0}
    assert {row["name"]: row["change_ns"] for row in found["rows"]["module"]}["attention"] == 60e3


@pytest.mark.parametrize(("limit", "code"), [("5%", 1), ("26%", 0), ("19.9", 0)])
def test_diff_fails_over_a_threshold(cli: Cli, run: Path, limit: str, code: int) -> None:
    ran = cli("diff", run, _slower(run, 1.3), "--fail-over", limit, "--json")
    assert ran.returncode == code, ran.stderr
    found = json.loads(ran.stdout)
    assert found["failed"] is bool(code)
    assert found["interval"][0] < 0.2 < found["interval"][1]
    assert (found["verdict"], found["different"]) == ("slower", None)
    # Beyond the limit, but within its interval: reported, but not a failure.
    assert bool(re.search(r"\bnot by more\b.*\binterval\b", ran.stderr)) == (limit == "19.9")


def test_diff_reports_what_recordings_cannot_resolve(cli: Cli, run: Path) -> None:
    graph = _graph()
    busy = run.with_name("busy.slipgraph")
    save(replace(graph, meta={"contended": True}), busy)
    ran = cli("diff", run, busy, "--fail-over", "6%")
    assert ran.returncode == 0
    assert "within noise" in ran.stdout
    assert re.search(r"\bcannot\b.*\b6\.0 %.*\bmore\b", ran.stderr)
    # No number of recordings can resolve this limit, so more are not suggested.
    assert re.search(r"\bno\b.*\b1\.0 %", cli("diff", run, run, "--fail-over", "1%").stderr)
    assert "warning" not in cli("diff", run, run, "--fail-over", "6%").stderr
    # A change far beyond the limit still fails.
    assert cli("diff", busy, _slower(run, 3), "--fail-over", "6%").returncode == 1


def test_diff_excludes_page_faults_from_the_limit(cli: Cli, run: Path) -> None:
    def with_faults(name: str, ns: float) -> Path:
        edit = Editor(_graph(), "")
        edit.insert(3, PAGE_FAULTS, ns, Provenance.MEASURED, spread=0.5)
        path = run.with_name(name)
        save(edit.apply(""), path)
        return path

    before, after = with_faults("few.slipgraph", 10e3), with_faults("many.slipgraph", 200e3)
    ran = cli("diff", before, after, "--fail-over", "10%")
    assert ran.returncode == 0, ran.stderr
    # The first line and the rows differ by the page faults, and both report it.
    assert re.search(r"^300 µs → 300 µs\b.*\bpage faults\b", ran.stdout)
    assert re.search(r"\b310 µs\b.*\b500 µs\b", ran.stdout)
    assert "page faults" in ran.stdout.splitlines()[2]
    assert "`allocator`" in ran.stdout
    found = cli.json("diff", before, after)
    assert found["change_ns"] == 190e3
    assert found["change_without_page_faults"] == 0
    for group in ("operator", "module", "line"):
        changes = {row["name"]: row["change_ns"] for row in found["rows"][group]}
        assert changes["page faults"] == 190e3


def test_diff_first_reports_that_the_workloads_differ(cli: Cli, run: Path) -> None:
    other = run.with_name("other.slipgraph")
    for target, path in (("a.py", run), ("b.py", other)):
        recipe = {"target": target, "arguments": {}, "script_arguments": [], "threads": 0}
        save(replace(_graph(), meta={"recipe": recipe}), path)
    ran = cli("diff", run, other)
    assert re.search(r"\A.*\bdifferent\b.*\ba\.py\b.*\bb\.py\b", ran.stdout)
    strings = ("", "conv", "pool", "norm", "attention", "head")
    save(replace(_graph(), strings=strings), other)
    assert cli.json("diff", run, other)["different"].startswith("0 % ")


def test_a_gain_never_fails(cli: Cli, run: Path) -> None:
    ran = cli("diff", _slower(run, 1.3), run, "--fail-over", "0%")
    assert ran.returncode == 0
    assert "-60.0 µs" in ran.stdout


@pytest.mark.parametrize("limit", ["much", "-5%", "nan", "inf"])
def test_a_threshold_must_be_a_percentage(cli: Cli, run: Path, limit: str) -> None:
    ran = cli("diff", run, run, f"--fail-over={limit}")
    assert ran.returncode == 2
    assert "5%" in ran.stderr


def test_explain_shows_the_peak_of_memory(cli: Cli, run: Path) -> None:
    memory = Allocations.of(
        [1000, 500, 200], [-1, -1, -1], [Role.PARAMETER, Role.ACTIVATION, Role.TEMPORARY],
        [-1, 1, 3], [-1, 3, 3],
    )  # fmt: skip
    save(replace(load(run), memory=memory), run)
    found = cli.json("explain", run, "--memory")
    assert found["peak_bytes"] == 1700
    assert found["lasting_bytes"] == 1000
    assert found["task"] == {"index": 3, "name": "softmax", "module": "head", "source": ""}
    assert found["by_role"][0] == {"role": "parameter", "bytes": 1000}
    assert found["by_module"] == [
        {"module": "(parameter)", "bytes": 1000}, {"module": "attention", "bytes": 500},
        {"module": "head", "bytes": 200},
    ]  # fmt: skip
    shown = cli("explain", run, "--memory", "--top", "1").stdout
    assert "1.66 KiB peak" in shown
    assert "softmax in head" in shown
    assert re.search(r"\b2 smaller\b.*\bomitted\b", shown)


def test_explain_reports_that_memory_was_not_recorded(cli: Cli, run: Path) -> None:
    ran = cli("explain", run, "--memory")
    assert ran.returncode == 1
    assert re.search(r"\bmemory\b.*\bnot recorded\b", ran.stderr)
    assert re.search(r"\btry: record\b", ran.stderr)
    # If the reason is known, recording again without a change would not help.
    save(replace(load(run), meta={"memory_reason": "the steps differ"}), run)
    ran = cli("explain", run, "--memory")
    assert re.search(r"\bmemory\b.*\bthe steps differ\b", ran.stderr)
    assert not re.search(r"\btry: record\b", ran.stderr)


def test_explain_movement_adds_up(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "step.slipgraph"
    save(captured("transformer"), path)
    found = cli.json("explain", path, "--movement", "--by", "phase")
    assert sum(group["moved_bytes"] for group in found["groups"]) == found["moved_bytes"]
    assert sum(row["needed_bytes"] for row in found["classes"]) == found["needed_bytes"]
    assert sum(row["time_ns"] for row in found["classes"]) == pytest.approx(found["step_ns"])
    assert 0 < found["needed_bytes"] < found["moved_bytes"]


def test_explain_movement_reports_unknown_operators(cli: Cli, run: Path) -> None:
    ran = cli("explain", run, "--movement")
    assert ran.returncode == 1
    assert "arguments" in ran.stderr
    ran = cli("explain", run, "--movement", "--by", "lane")
    assert ran.returncode == 2
    assert "line" in ran.stderr
