"""Write and read trees of results in the layout of a submission.

    DIVISION/ORGANISATION/
        systems/SYSTEM.json
        results/SYSTEM/MODEL/SCENARIO/
            user.conf  measurements.json  README.md
            performance/run_1/mlperf_log_*.txt
            accuracy/mlperf_log_*  accuracy.txt
            TEST01/  TEST04/  COLD/  each with verify.json
            digest.json

``digest.json`` is ours: the SHA-256 of every log, which reveals later edits. Published trees have
settings below measurements/ and audits below compliance/, by system, model and scenario. Their logs
of answers are truncated, with a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.mlperf.serving.audits import Audit
from slipstream.mlperf.serving.rules import NOT_A_RESULT, SCENARIOS, Scenario
from slipstream.mlperf.serving.session import LoadTestRun

DIVISION = "open"
CONF, MEASURES, DIGEST, VERIFIED, ACCURACY_TEXT = (
    "user.conf", "measurements.json", "digest.json", "verify.json", "accuracy.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Location of a model's results on a system.

    Attributes:
        root: root of the tree.
        organisation, system, model: names that are valid for folders.
    """

    root: Path
    organisation: str
    system: str
    model: str

    @classmethod
    def of(cls, root: Path, model: str, organisation: str = "local") -> Place:
        """Build the location for a model on this machine."""
        import platform

        system = platform.node() or "system"
        return cls(root, _folder_name(organisation), _folder_name(system), _folder_name(model))

    @property
    def top(self) -> Path:
        """The organisation's folder."""
        return self.root / DIVISION / self.organisation

    def scenario(self, scenario: Scenario) -> Path:
        """Return the folder of a scenario."""
        return self.top / "results" / self.system / self.model / scenario.title

    def performance(self, scenario: Scenario) -> Path:
        """Return the folder of the performance run's logs."""
        return self.scenario(scenario) / "performance" / "run_1"

    def accuracy(self, scenario: Scenario) -> Path:
        """Return the folder of the accuracy run's logs."""
        return self.scenario(scenario) / "accuracy"


def write_system(place: Place) -> None:
    """Write the description of this machine."""
    from slipstream.measure.environment import capture

    facts = capture().facts
    path = place.top / "systems" / f"{place.system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {"system_name": place.system, "division": DIVISION, "submitter": place.organisation}
    path.write_text(json.dumps({**named, "facts": dict(facts)}, indent=2, default=str) + "\n")


def write_scenario(
    place: Place,
    scenario: Scenario,
    run: LoadTestRun,
    accuracy: float | None,
    *,
    samples: int,
    performance_samples: int,
    gate: float | None,
    audits: list[Audit],
) -> None:
    """Write a scenario's settings, measurements, audits and the digest of its logs.

    Args:
        accuracy: measured accuracy; None without labels.
        samples, performance_samples: samples of the library, and of its part in memory.
        gate: required accuracy; None for no requirement.
    """
    folder, test = place.scenario(scenario), run.test
    prefix = f"{place.model}.{scenario.title}"
    lines = {
        "min_duration": round(1e3 * test.min_duration_s),
        "min_query_count": test.min_queries,
        "target_latency_percentile": f"{100 * test.percentile:g}",
        "target_latency": f"{test.bound_ns / 1e6:g}",
        "samples_per_query": test.samples_per_query,
        "target_qps": f"{test.rate:g}",
    }
    (folder / CONF).write_text("".join(f"{prefix}.{k} = {v}\n" for k, v in lines.items()))
    measures = {
        "scenario": scenario.title, "samples": samples, "performance_samples": performance_samples,
        "accuracy": accuracy, "gate": gate, "label": run.label,
    }  # fmt: skip
    (folder / MEASURES).write_text(json.dumps(measures, indent=2) + "\n")
    (folder / "README.md").write_text(
        f"# {place.model}, {scenario.title}\n\n{run.label}. Measured by `slipstream mlperf serve` "
        f"with LoadGen {run.values.get('loadgen_version', '')}.\n"
    )
    shown = "-" if accuracy is None else f"{accuracy:.6f}"
    (place.accuracy(scenario) / ACCURACY_TEXT).write_text(f"accuracy={shown}\n")
    for audit in audits:
        (folder / audit.name).mkdir(exist_ok=True)
        verified = dataclasses.asdict(audit)
        (folder / audit.name / VERIFIED).write_text(json.dumps(verified, indent=2) + "\n")
    (folder / DIGEST).write_text(json.dumps(digests(folder), indent=2) + "\n")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every LoadGen log below `folder`, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("mlperf_log_*"))
    }


def read_conf(path: Path) -> dict[str, str]:
    """Read the settings of a ``user.conf``, without the prefix of model and scenario.

    Raises:
        OSError: the file cannot be read.
    """
    settings = {}
    for line in path.read_text("utf-8", errors="replace").splitlines():
        key, equals, value = line.partition("#")[0].partition("=")
        if equals:
            settings[key.strip().rpartition(".")[2]] = value.strip()
    return settings


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no valid one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def titled(title: str) -> Scenario | None:
    """Return the scenario of a folder's name, case-insensitively; None if it is not a scenario."""
    by_title = {scenario.title.lower(): scenario for scenario in SCENARIOS.values()}
    return by_title.get(title.lower())


def related(folder: Path, name: str) -> Path:
    """Return the folder of another kind (``measurements``) for a scenario's results."""
    system, model, scenario = folder.parts[-3:]
    return folder.parents[3] / name / system / model / scenario


def verified(folder: Path, audit: str) -> tuple[bool | None, str] | None:
    """Return whether an audit passed (None if inconclusive) and its finding; None without audit."""
    ours = read_json(folder / audit / VERIFIED)
    if ours is not None:
        passed = ours.get("passed", False)
        return passed if passed is None else bool(passed), str(ours.get("finding"))
    for place in (folder / audit, related(folder, "compliance") / audit):
        texts = {path.name: path.read_text("utf-8") for path in place.glob("verify_*.txt")}
        failed = sorted(name for name, text in texts.items() if "PASS" not in text)
        if texts:
            return not failed, f"{', '.join(failed)}: not passed"
    return None


def _folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or NOT_A_RESULT.split()[-1]
