"""No operator of ours crashes or gives wrong numbers, whatever it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "operator_attacks.py"


def test_operators_refuse_or_are_right() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)], capture_output=True, text=True
    )
    assert run.returncode == 0, f"died in {run.stderr.strip().splitlines()[-1]}"
    report = json.loads(run.stdout)
    assert report["wrong"] == []
    assert report["without sample"] == [], "give the operator a sample in operator_attacks.py"
    # Enough of them ran through for equality to mean something.
    assert report["calls"] >= 2000
    assert report["equal"] >= 500
