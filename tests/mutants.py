"""``make test-mutants``: is a small fault in our code noticed by a test?

Every fault (`mutant_faults`) is tried against the tests that can reach its file, those nearest by
imports first, until one fails, or until its processor seconds are spent. A test counts only if it
passes without the fault. What survives is listed; `mutants.toml` says of some why nobody could see
them, and plants faults that were once missed.

    python tests/mutants.py                     all of them
    python tests/mutants.py --sample 40         as continuous integration does
    python tests/mutants.py --only 3f2a9c0e11   one, by its digest
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import changed
from mutant_faults import ROOT, Fault, drawn, planted

# Faults of each room. Beyond the rooms at the bottom: what judges quality, and what a verdict says.
ROOMS = {
    "graph": (40, ("src/slipstream/graph/**/*.py",)),
    "native": (24, ("src/slipstream/native/*.py",)),
    "measure": (34, ("src/slipstream/measure/*.py",)),
    "durations": (20, ("src/slipstream/durations/*.py",)),
    "capture": (26, ("src/slipstream/capture/*.py",)),
    "techniques": (46, ("src/slipstream/techniques/**/*.py",)),
    "verdicts": (18, ("src/slipstream/measure/claims.py", "src/slipstream/measure/checks.py",
                      "src/slipstream/measure/quality.py", "src/slipstream/measure/sequential.py",
                      "src/slipstream/verbs/proving/*.py")),
}  # fmt: skip
# Drawn and printed for people, or run only on a device that is not here.
LEFT_OUT = (
    "measure/page.py", "measure/render.py", "_triton.py", "cuda_graphs.py",
    "graph/views/notebook.py",
)  # fmt: skip
TARGET = 0.85
SEED = "one"
CPU_S = 60.0
_TEST_S = 60
_STALLED_S = 240.0
_CHUNKS = (2, 4, 8, 16, 32, 64, 128)
REPORT = ROOT / "build/mutants.jsonl"


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        caught: by the test `by`; False where it survived.
        tried: files of tests that were run to their end; of `reached` that can reach it.
        excused: why nobody could see it; empty where somebody could.
    """

    digest: str
    fault: str
    room: str
    caught: bool
    by: str
    tried: int
    reached: int
    cpu_s: float
    excused: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sample", type=int, default=0, help="so many of them, the same for a seed"
    )
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-s", type=float, default=CPU_S, help="processor seconds a fault")
    parser.add_argument("--room", default="", help="only of this room, or `planted`")
    parser.add_argument("--only", nargs="*", default=(), help="only these, by their digests")
    parser.add_argument("--resume", action="store_true", help="keep what the report has")
    parser.add_argument("--report", action="store_true", help="report, whatever the share caught")
    parser.add_argument("--list", action="store_true", help="list them and try none")
    options = parser.parse_args()

    chosen = [
        (room, fault)
        for room, fault in every_fault(options.seed)
        if options.room in ("", room) and (not options.only or fault.digest in options.only)
    ]
    # By lot, so that a run that is cut off has seen some of every room.
    chosen.sort(key=lambda one: _lot(options.seed, one[1]))
    if options.sample:
        chosen = chosen[: options.sample]
    if options.list:
        for room, fault in chosen:
            print(f"{room}: {fault}")
        return 0
    known = _recorded() if options.resume else {}
    outcomes = [known[fault.digest] for _, fault in chosen if fault.digest in known]
    waiting = [(room, fault) for room, fault in chosen if fault.digest not in known]
    REPORT.parent.mkdir(exist_ok=True)
    with open(REPORT, "a" if options.resume else "w", encoding="utf-8") as report:
        for outcome in _tried(waiting, options.jobs, options.cpu_s):
            outcomes.append(outcome)
            report.write(json.dumps(asdict(outcome)) + "\n")
            report.flush()
            word = "caught  " if outcome.caught else "excused " if outcome.excused else "SURVIVED"
            print(f"[{len(outcomes)}/{len(chosen)}] {word} {outcome.fault}", flush=True)
            print(f"    {outcome.cpu_s:.0f} s, {outcome.by or outcome.excused}", flush=True)
    below = _summary(outcomes)
    return 0 if options.report else below


def every_fault(seed: str = SEED) -> Iterator[tuple[str, Fault]]:
    """Each fault with its room: those planted by hand, then those drawn."""
    for one in _written()["planted"]:
        yield "planted", planted(one["file"], one["before"], one["after"])
    taken: set[str] = set()
    for room, (count, patterns) in ROOMS.items():
        paths = sorted({str(p.relative_to(ROOT)) for one in patterns for p in ROOT.glob(one)})
        paths = [path for path in paths if not path.endswith(LEFT_OUT)]
        fresh = [one for one in drawn(paths, count + len(taken), seed) if one.digest not in taken]
        taken |= {one.digest for one in fresh[:count]}
        yield from ((room, one) for one in fresh[:count])


def _lot(seed: str, fault: Fault) -> str:
    return hashlib.sha256(f"sample {seed} {fault.digest}".encode()).hexdigest()


def tests_of(path: str, place: str) -> list[str]:
    """Files of tests that a change of `path` can reach, the nearest first.

    Nearest: those that name what the change is in, then other public names of the module; those
    called as the module; of its room; by how many imports lie between.
    """
    begin = ROOT / path
    importers: dict[Path, set[Path]] = {}
    for one, imported in changed.imports().items():
        for other in imported:
            importers.setdefault(other, set()).add(one)
    distance = {begin: 0}
    queue = [begin]
    for one in queue:
        for other in importers.get(one, ()):
            if other not in distance:
                distance[other] = distance[one] + 1
                queue.append(other)
    module, parts = begin.stem.strip("_"), begin.relative_to(ROOT / "src/slipstream").parts[:-1]

    public = {one.name for one in ast.parse(begin.read_text("utf-8")).body if _is_public(one)}
    own = place.partition(".")[0]

    def rank(test: Path) -> tuple[int, int, str]:
        folders = test.relative_to(ROOT / "tests").parts[:-1]
        shared = sum(a == b for a, b in zip(parts, folders, strict=False))
        words = set(re.findall(r"\w+", test.read_text("utf-8")))
        near = 2 * (own in words) + min(len(public & words), 3) + 3 * (module in test.stem)
        return -(near + 2 * shared), distance[test], str(test)

    found = [p for p in distance if p.name.startswith("test_") and p.is_relative_to(ROOT / "tests")]
    return [str(one.relative_to(ROOT)) for one in sorted(found, key=rank)]


def _is_public(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def _written() -> dict[str, Any]:
    with open(ROOT / "tests/mutants.toml", "rb") as file:
        return tomllib.load(file)


def _recorded() -> dict[str, Outcome]:
    if not REPORT.exists():
        return {}
    rows = [Outcome(**json.loads(line)) for line in REPORT.read_text("utf-8").splitlines()]
    return {row.digest: row for row in rows}


def _tried(waiting: list[tuple[str, Fault]], jobs: int, cpu_s: float) -> Iterator[Outcome]:
    """Outcomes as they come, `jobs` faults at a time, each in a fork of this process."""
    _warm()
    excuses = {one["fault"]: one["because"] for one in _written().get("unseen", ())}
    running: dict[int, Path] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number, (room, fault) in enumerate(waiting):
            while len(running) >= max(jobs, 1):
                yield from _ended(running)
            told = Path(folder) / f"{number}.json"
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    outcome = _trial(room, fault, cpu_s, excuses.get(fault.digest, ""), told)
                    told.write_text(json.dumps(asdict(outcome)), "utf-8")
                finally:
                    os._exit(0)
            running[pid] = told
        while running:
            yield from _ended(running)


def _ended(running: dict[int, Path]) -> Iterator[Outcome]:
    pid, _ = os.wait()
    told = running.pop(pid, None)
    if told is not None:
        yield Outcome(**json.loads(told.read_text("utf-8")))


def _warm() -> None:
    """Import once what every test needs, and nothing of ours."""
    for name in ("hypothesis", "pytest", "scipy.special", "scipy.stats", "torch"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _trial(room: str, fault: Fault, cpu_s: float, excused: str, told: Path) -> Outcome:
    files, done, spent = tests_of(fault.path, fault.place), 0, 0.0
    texts = told.with_suffix(".fault")
    module = fault.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    texts.write_text(json.dumps({module.removesuffix(".__init__"): fault.source()}), "utf-8")
    doubted: list[str] = []
    waiting = [*files]
    for size in _CHUNKS:
        chunk, waiting = waiting[:size], waiting[size:]
        while chunk and spent < cpu_s:
            failed, used = _run(chunk, doubted, str(texts), cpu_s - spent)
            spent += used
            if not failed:
                done += len(chunk)
                break
            # A test that fails anyhow says nothing.
            again, _ = _run([failed], [], "", cpu_s)
            if not again:
                return Outcome(
                    fault.digest, str(fault), room, True, failed, done, len(files), spent
                )
            doubted.append(failed)
    return Outcome(fault.digest, str(fault), room, False, "", done, len(files), spent, excused)


def _run(tests: list[str], without: list[str], texts: str, cpu_s: float) -> tuple[str, float]:
    """The first test that fails (empty: none does), and the processor seconds it took."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read)
        try:
            _pytest(tests, without, texts, write)
        finally:
            os._exit(3)
    os.close(write)
    failed, begin = "", time.monotonic()
    with os.fdopen(read, "rb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), False)
        while True:
            ended, _, usage = os.wait4(pid, os.WNOHANG)
            line = pipe.read()
            if line:
                failed = line.decode().splitlines()[0]
            if ended:
                break
            stuck = time.monotonic() - begin > _STALLED_S + 4 * cpu_s
            if failed or stuck or _cpu_s(pid) > cpu_s:
                _kill(pid)
                _, _, usage = os.wait4(pid, 0)
                break
            time.sleep(0.05)
    _kill(pid)
    return failed, usage.ru_utime + usage.ru_stime


def _cpu_s(pid: int) -> float:
    """Of a process and of its children that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(one) for one in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _Teller:
    """Tells of the first failure, and then waits to be killed: nothing is to be tidied."""

    def __init__(self, write: int) -> None:
        self.write = write

    def _tell(self, nodeid: str) -> None:
        os.write(self.write, nodeid.encode() + b"\n")
        time.sleep(60)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid)


def _pytest(tests: list[str], without: list[str], texts: str, write: int) -> None:
    import pytest

    os.chdir(ROOT)
    site = str(ROOT / "tests/fault_site")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.pop("SLIPSTREAM_FAULT", None)
    if texts:
        os.environ["SLIPSTREAM_FAULT"] = texts
        sys.path.insert(0, site)
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    options = ["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"--timeout={_TEST_S}"]  # fmt: skip
    options += [f"--deselect={one}" for one in without]
    code = pytest.main([*options, *tests], plugins=[_Teller(write)])
    os._exit(int(code))


def _summary(outcomes: Iterable[Outcome]) -> int:
    counted = [one for one in outcomes if not one.excused]
    by_room: dict[str, list[Outcome]] = defaultdict(list)
    for one in counted:
        by_room[one.room].append(one)
    print()
    for room, found in by_room.items():
        print(f"{room:12} {sum(one.caught for one in found):4d} of {len(found):4d} caught")
    caught, n = sum(one.caught for one in counted), len(counted)
    share = f"{100 * caught / max(n, 1):.0f} % (bar {100 * TARGET:.0f} %)"
    print(f"{'all':12} {caught:4d} of {n:4d} caught: {share}")
    for path, number in Counter(
        re.split(r"[ :]", one.fault)[1] for one in counted if not one.caught
    ).most_common():
        print(f"  {number} survived in {path}")
    return int(_below(caught, n))


def _below(caught: int, n: int) -> bool:
    """Whether so few are caught that a share of `TARGET` is refuted, one-sided 95 %."""
    from scipy.stats import binom

    return n > 0 and float(binom.cdf(caught, n, TARGET)) < 0.05


if __name__ == "__main__":
    sys.exit(main())
