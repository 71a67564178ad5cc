"""The mutation gate: faults planted by hand, excused faults, and the choice of tests."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import os
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mutants
from mutant_faults import ROOT, Fault, faults_of, planted

_WRITTEN = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", _WRITTEN["planted"], ids=lambda fault: fault["after"][:40])
def test_a_planted_fault_finds_its_code(entry: dict[str, str]) -> None:
    assert entry["before"] != entry["after"]
    planted(entry["file"], entry["before"], entry["after"])


@pytest.mark.parametrize("entry", _WRITTEN["unseen"], ids=lambda fault: fault["fault"])
def test_an_excused_fault_still_exists(entry: dict[str, str]) -> None:
    assert entry["fault"] in {fault.digest for fault in faults_of(entry["file"])}
    assert entry["because"]


PROBED = '''\
def sign(x):
    """Doc."""
    if x < 0:
        return -1
    elif x > 0:
        return 1
    try:
        return 1 // x
    except ZeroDivisionError:
        found = 0
    return found
'''


def test_a_place_is_reached_if_its_innermost_statement_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location(
        "site_of_faults", f"{mutants.SITE}/sitecustomize.py"
    )
    assert spec is not None
    assert spec.loader is not None
    site: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    path = tmp_path / "probed.py"
    path.write_text(PROBED)
    came: list[str] = []
    monkeypatch.setattr(builtins, "_come_by", came.extend, raising=False)
    lines = {3: ["if"], 4: ["negative"], 5: ["elif"], 8: ["try"], 10: ["except"]}
    names: dict[str, Any] = {}
    exec(compile(site.with_probes(str(path), lines), str(path), "exec"), names)
    for x, places in (
        (-2, ["if", "negative"]),
        (3, ["if", "elif"]),
        (0, ["if", "elif", "try", "except"]),
    ):
        came.clear()
        assert names["sign"](x) == (x > 0) - (x < 0)
        assert came == places
    assert names["sign"].__doc__ == "Doc."


def of_a_constant() -> Fault:
    return next(
        planted(entry["file"], entry["before"], entry["after"])
        for entry in _WRITTEN["planted"]
        if entry["before"].startswith("STOPPED_BLINDLY")
    )


def test_a_constant_is_reached_where_it_is_read() -> None:
    fault = of_a_constant()
    lines = mutants._lines(fault)
    tree = ast.parse((ROOT / fault.path).read_text("utf-8"))
    readers = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "STOPPED_BLINDLY" in ast.dump(node)
    ]  # fmt: skip
    assert len(lines) == len(readers) > 0
    for node in readers:
        assert any(node.lineno < line <= node.body[-1].lineno for line in lines)


def test_recorded_tests_are_chosen_quick_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = of_a_constant()
    near, far = "tests/measure/test_claims.py", "tests/cli/test_results.py"
    reached = tmp_path / "reached"
    reached.write_text(
        f"{fault.digest}\t{far}::test_a\n=0.100\t{far}::test_a\n"
        f"{fault.digest}\t{near}::test_b\n=0.200\t{near}::test_b\n"
        f"{fault.digest}\t{near}::test_c\n=9.000\t{near}::test_c\n"
        f"{fault.digest}\t{near}::test_failed\n=0.100\t{near}::test_elsewhere\n"
    )
    monkeypatch.setattr(mutants, "REACHED", reached)
    found = mutants._in_order(fault)
    assert found[:2] == [
        mutants.Choice(near, (f"{near}::test_b",)), mutants.Choice(far, (f"{far}::test_a",)),
    ]  # fmt: skip
    assert found[-1] == mutants.Choice(near, (f"{near}::test_c",))
    # Tests without a record, or changed since, are unknown.
    others = {choice.path for choice in found[2:-1] if not choice.tests}
    assert others == {*mutants.tests_of(fault.path, fault.place)} - {near, far}
    os.utime(reached, ns=(0, 0))
    assert mutants.Choice(near) in mutants._in_order(fault)


def test_the_test_that_caught_a_fault_is_stored_and_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, near = of_a_constant(), "tests/measure/test_claims.py"
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "CAUGHT", tmp_path / "caught")
    monkeypatch.setattr(mutants, "REPORT", tmp_path / "report")
    monkeypatch.setattr(mutants, "_in_order", lambda _: [mutants.Choice("others")])
    tried = [("other", True, f"{near}::test_a"), (fault.digest, True, f"{near}::test_b"),
             ("survivor", False, "")]  # fmt: skip
    rows = [mutants.Outcome(fault, "", "", caught, by, 1, 1, 1.0) for fault, caught, by in tried]
    mutants.REPORT.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    # Faults that no longer exist are dropped.
    mutants._keep({fault.digest, "survivor", "new"})
    assert mutants.CAUGHT.read_text() == f"{fault.digest}\t{near}::test_b\n"
    assert mutants._choice(fault) == [mutants.Choice("others")], "the file is gone"
    (tmp_path / near).parent.mkdir(parents=True)
    (tmp_path / near).touch()
    assert mutants._choice(fault)[0] == mutants.Choice(near, (f"{near}::test_b",))


def test_chosen_tests_run_in_the_order_of_the_choice() -> None:
    quick, whole = mutants.Choice("a.py", ("a.py::test_2", "a.py::test_1")), mutants.Choice("b.py")
    names = ["a.py::test_1", "a.py::test_2", "a.py::test_3", "b.py::test_4", "b.py::test_5"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    mutants._Chooser([quick, whole]).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [
        "a.py::test_2", "a.py::test_1", "b.py::test_4", "b.py::test_5",
    ]  # fmt: skip
