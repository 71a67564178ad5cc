"""The skip rule: a promised feature fails instead of skipping."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Require = Callable[[str, bool, str], None]


@pytest.mark.parametrize("promised", ["", "data,sklearn", " netlab "])
def test_a_present_feature_passes(
    require: Require, monkeypatch: pytest.MonkeyPatch, promised: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REQUIRE", promised)
    require("data", True, "unused")


def test_an_absent_feature_skips_with_its_reason(
    require: Require, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REQUIRE", "netlab,database")
    with pytest.raises(pytest.skip.Exception, match="no folder"):
        require("data", False, "no folder")
    monkeypatch.delenv("SLIPSTREAM_REQUIRE")
    with pytest.raises(pytest.skip.Exception, match="no folder"):
        require("data", False, "no folder")


@pytest.mark.parametrize("promised", ["data", "netlab, data", "data,netlab"])
def test_a_promised_but_absent_feature_fails(
    require: Require, monkeypatch: pytest.MonkeyPatch, promised: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REQUIRE", promised)
    with pytest.raises(pytest.fail.Exception, match="promises 'data'"):
        require("data", False, "no folder")
