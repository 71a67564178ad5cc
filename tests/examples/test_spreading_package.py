"""A technique of another package that replicates a step is part of the advice for a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli._main import _command
from slipstream.graph import save
from small_steps import graph_of
from technique_package import SPREADING, install


def test_it_is_among_the_ways_to_distribute_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, SPREADING))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SLIPSTREAM_STORE", str(tmp_path / "results.db"))
    save(graph_of("mlp"), tmp_path / "run.slipgraph")

    def advised(*options: str) -> list[str]:
        run = str(tmp_path / "run.slipgraph")
        code = _command(["advise", run, *options, "--json"])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return [prediction["technique"] for prediction in json.loads(shown.out)["predictions"]]

    names = advised("--cluster", "workers=4,link=1gbit")
    theirs = [name for name in names if "local_sgd" in name]
    # Without a hook for our techniques, it is combined with none of them.
    alone = [technique for technique in theirs if "+" not in technique]
    assert sorted(alone) == ["local_sgd:4", "local_sgd:4,every=64"]
    assert "adasum:4" in names
