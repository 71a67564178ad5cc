"""Placement of new files on a fast tier by price."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.cli._main import _command
from slipstream.engines.storage import AccessTrace, PriceSheet, StorageTier, predict_tiers
from slipstream.engines.storage.traces import OPS
from slipstream.errors import SlipstreamError

DAY_NS = 86_400 * 10**9
GB = 10**9
CREATE, DELETE = OPS.index("create"), OPS.index("delete")
SHEET = PriceSheet(StorageTier(3.0), StorageTier(0.0, gb_read=0.02))


def life(days: int = 40) -> AccessTrace:
    """One shard a day, read 20 times a day for two days; one checkpoint a day, kept for three."""
    rows = []
    for day in range(days):
        rows += [(day, f"/run/shard-{day}", CREATE), (day, f"/run/checkpoint-{day}", CREATE)]
        rows += [(day + 0.05 * n, f"/run/shard-{day}", 1) for n in range(1, 41)]
        rows.append((day + 3, f"/run/checkpoint-{day}", DELETE))
    rows.sort()
    return AccessTrace.of(
        [name for _, name, _ in rows], [GB] * len(rows),
        time_ns=[round(day * DAY_NS) for day, *_ in rows], ops=[op for *_, op in rows],
    )  # fmt: skip


def test_files_stay_as_long_as_their_reads_pay_for_the_space() -> None:
    """A day of space costs 0.1, and its 20 reads 0.4: two days are worth it, checkpoints never."""
    found = predict_tiers(life(), SHEET)
    saved = {row.rule: row.saved for row in found.outcomes}
    months = {row.rule: row.fast_gb_months for row in found.outcomes}
    shards = found.files / 2
    assert saved["learned"] == pytest.approx(0.95 * saved["future known"], rel=0.06)
    assert saved["future known"] == pytest.approx(0.6 * shards, rel=0.2)
    assert months["learned"] == pytest.approx(shards * 2 / 30, rel=0.25)
    assert saved["all fast"] < 0 == saved["hot directories"]
    assert found.slow_cost == pytest.approx(0.8 * shards, rel=0.2)


def test_a_price_that_no_read_pays_for_leaves_all_files_on_the_slow_tier() -> None:
    dear = PriceSheet(StorageTier(3.0, gb_written=5.0), SHEET.slow)
    saved = {row.rule: row.saved for row in predict_tiers(life(), dear).outcomes}
    assert saved["learned"] == saved["future known"] == 0
    same = PriceSheet(SHEET.slow, SHEET.slow)
    assert all(row.saved == 0 for row in predict_tiers(life(), same).outcomes)


def test_a_price_sheet_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[fast]\ngb_month = 3\n[slow]\ngb_month = 0.0\ngb_read = 0.02\n")
    assert PriceSheet.load(path) == SHEET
    for text, what in (
        ("[fast]\ngb_month = 3\n", "slow"),
        ("[fast\n", "not TOML"),
        ("[fast]\ngb_month = -1\n[slow]\ngb_month = 0\n", "gb_month: a price must not"),
        ("[fast]\ngb_month = 1\nreads = 2\n[slow]\ngb_month = 0\n", "reads"),
        ("[fast]\ngb_month = 'x'\n[slow]\ngb_month = 0\n", "fast.gb_month"),
    ):
        path.write_text(text)
        with pytest.raises(SlipstreamError, match=what):
            PriceSheet.load(path)


def test_the_command_shows_each_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.toml").write_text("fast = { gb_month = 3 }\nslow = { gb_month = 0 }\n")
    life(6).save(tmp_path / "run.npz")
    arguments = [str(tmp_path / "run.npz"), "--prices", str(tmp_path / "prices.toml"), "--json"]
    assert _command(["storage", "predict", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["rule"] for row in found["outcomes"]} >= {"learned", "hot directories"}


def test_traces_without_times_or_new_files_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="has no times"):
        predict_tiers(AccessTrace.of(["a", "b"], [1, 1]), SHEET)
    old = AccessTrace.of(["a"] * 4, [1] * 4, time_ns=np.arange(4) * DAY_NS)
    with pytest.raises(SlipstreamError, match="no new files"):
        predict_tiers(old, SHEET)
    with pytest.raises(SlipstreamError, match="has no reads"):
        predict_tiers(AccessTrace.of(["a"], [1], time_ns=[DAY_NS]), SHEET)
