"""``make test-mutants``: do the tests detect small faults in the package?

Every fault (`mutant_faults`) is tried against tests, the nearest first, until one fails, or until
its CPU seconds are spent. The test that last caught it (`mutants.caught`) runs first. After
``--record``, the others are the tests that run the fault's place, quick ones before slow ones;
without it, all that can reach its file by imports. A test counts only if it passes without the
fault. Surviving faults are listed; `mutants.toml` excuses those that cannot be observed, with
reasons, and plants faults that were once missed.

    python tests/mutants.py --record            record which tests run which place, once
    python tests/mutants.py                     try all faults
    python tests/mutants.py --sample 40         as continuous integration does
    python tests/mutants.py --only 3f2a9c0e11   one fault, by its digest
    python tests/mutants.py --keep              store which test caught which fault
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
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import changed
from mutant_faults import ROOT, Fault, drawn, planted

# Number of faults drawn from each package, and its files. "verdicts" are the files that judge
# quality or report a verdict. The data and hyper-parameters of MLPerf tasks are left out.
PACKAGES = {
    "graph": (40, ("src/slipstream/graph/**/*.py",)),
    "native": (24, ("src/slipstream/native/*.py",)),
    "measure": (34, ("src/slipstream/measure/*.py",)),
    "durations": (20, ("src/slipstream/durations/*.py",)),
    "capture": (26, ("src/slipstream/capture/*.py",)),
    "techniques": (46, ("src/slipstream/techniques/**/*.py",)),
    "verdicts": (18, ("src/slipstream/measure/claims.py", "src/slipstream/measure/checks.py",
                      "src/slipstream/measure/quality.py", "src/slipstream/measure/sequential.py",
                      "src/slipstream/verbs/proving/*.py")),
    "search": (25, ("src/slipstream/search/*.py",)),
    "runtimes": (23, ("src/slipstream/runtimes/**/*.py",)),
    "ship": (28, ("src/slipstream/ship/**/*.py",)),
    "mlperf": (23, ("src/slipstream/mlperf/*/*.py",)),
    "newer techniques": (30, tuple(
        f"src/slipstream/techniques/{name}/**/*.py"
        for name in (
            "lowrank", "quadratic", "ensembles", "scan", "fusion", "side_by_side", "dropout",
        )
    )),
}  # fmt: skip
# Only format output for people, or need a GPU or Triton, which the development install lacks.
LEFT_OUT = (
    "measure/page.py", "measure/render.py", "_triton.py", "triton_prelude.py", "cuda_graphs.py",
    "graph/views/notebook.py", "ship/firmware/drawing.py", "ship/stability/sheet.py",
    "fusion/emit_triton.py", "side_by_side/triton/_child.py",
)  # fmt: skip
TARGET = 0.85
SEED = "one"
CPU_S = 60.0
# CPU seconds that one test may take: a fault may make it loop forever.
_TEST_CPU_S = 20.0
_STALLED_S = 240
_CHUNKS = (2, 4, 8, 16, 32, 64, 128)
_SLOW_S = 2.0
REPORT = ROOT / "build/mutants.jsonl"
REACHED = ROOT / "build/mutants.reached"
CAUGHT = ROOT / "tests/mutants.caught"
SITE = str(ROOT / "tests/fault_site")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault.

    Attributes:
        caught: whether the test `by` failed.
        tried: number of test files that ran to their end, of `reached` that can reach the fault.
            A file with slow tests counts twice.
        excused: why the fault cannot be observed; empty if it can.
    """

    digest: str
    fault: str
    package: str
    caught: bool
    by: str
    tried: int
    reached: int
    cpu_s: float
    excused: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sample", type=int, default=0, help="number of faults, the same for a seed"
    )
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-s", type=float, default=CPU_S, help="CPU seconds per fault")
    parser.add_argument("--package", default="", help="only faults of this package, or `planted`")
    parser.add_argument("--only", nargs="*", default=(), help="only these, by their digests")
    parser.add_argument("--resume", action="store_true", help="keep what the report has")
    parser.add_argument("--report", action="store_true", help="report, and accept any share caught")
    parser.add_argument("--list", action="store_true", help="list faults without trying them")
    parser.add_argument(
        "--keep", action="store_true", help=f"try none; add what the report has to {CAUGHT.name}"
    )
    parser.add_argument(
        "--record", nargs="*", metavar="TESTS", help="record which tests run which fault"
    )
    options = parser.parse_args()
    if options.record is not None:
        return _record(
            [fault for _, fault in every_fault(options.seed)], options.record or ["tests"]
        )

    if options.keep:
        return _keep({fault.digest for _, fault in every_fault(options.seed)})

    chosen = [
        (package, fault)
        for package, fault in every_fault(options.seed)
        if options.package in ("", package) and (not options.only or fault.digest in options.only)
    ]
    # Shuffled, so that an interrupted run has tried some faults of every package.
    chosen.sort(key=lambda pair: _lot(options.seed, pair[1]))
    if options.sample:
        chosen = chosen[: options.sample]
    if options.list:
        for package, fault in chosen:
            print(f"{package}: {fault}")
        return 0
    recorded = _recorded() if options.resume else {}
    outcomes = [recorded[fault.digest] for _, fault in chosen if fault.digest in recorded]
    waiting = [(package, fault) for package, fault in chosen if fault.digest not in recorded]
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
    """Yield faults with their package: those written by hand, then those drawn."""
    for entry in _written()["planted"]:
        yield "planted", planted(entry["file"], entry["before"], entry["after"])
    taken: set[str] = set()
    for package, (count, patterns) in PACKAGES.items():
        paths = sorted(
            {str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern)}
        )
        paths = [path for path in paths if not path.endswith(LEFT_OUT)]
        fresh = [
            fault for fault in drawn(paths, count + len(taken), seed) if fault.digest not in taken
        ]
        taken |= {fault.digest for fault in fresh[:count]}
        yield from ((package, fault) for fault in fresh[:count])


def _lot(seed: str, fault: Fault) -> str:
    return hashlib.sha256(f"sample {seed} {fault.digest}".encode()).hexdigest()


def tests_of(path: str, place: str) -> list[str]:
    """Return test files that a change of `path` can affect, nearest first.

    Nearest: those that name what the change is in, then other public names of the module; those
    called as the module; of its package; by how many imports lie between.
    """
    begin = ROOT / path
    importers: dict[Path, set[Path]] = {}
    for importer, imported in changed.imports().items():
        for other in imported:
            importers.setdefault(other, set()).add(importer)
    distance = {begin: 0}
    queue = [begin]
    for current in queue:
        for other in importers.get(current, ()):
            if other not in distance:
                distance[other] = distance[current] + 1
                queue.append(other)
    module, parts = begin.stem.strip("_"), begin.relative_to(ROOT / "src/slipstream").parts[:-1]

    public = {node.name for node in ast.parse(begin.read_text("utf-8")).body if _is_public(node)}
    own = place.partition(".")[0]

    def rank(test: Path) -> tuple[int, int, str]:
        folders = test.relative_to(ROOT / "tests").parts[:-1]
        shared = sum(a == b for a, b in zip(parts, folders, strict=False))
        words = _words(test)
        near = 2 * (own in words) + min(len(public & words), 3) + 3 * (module in test.stem)
        return -(near + 2 * shared), distance[test], str(test)

    found = [p for p in distance if p.name.startswith("test_") and p.is_relative_to(ROOT / "tests")]
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=rank)]


@cache
def _words(test: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", test.read_text("utf-8")))


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


def _caught_by() -> dict[str, str]:
    """Return the test that last caught each fault, by digest."""
    lines = CAUGHT.read_text("utf-8").splitlines() if CAUGHT.exists() else []
    return {digest: test for digest, _, test in (line.partition("\t") for line in lines)}


def _keep(digests: set[str]) -> int:
    """Add the report's results to `CAUGHT`, and remove faults that no longer exist."""
    caught_by = _caught_by() | {
        outcome.digest: outcome.by for outcome in _recorded().values() if outcome.caught
    }
    lines = [f"{digest}\t{caught_by[digest]}" for digest in sorted(caught_by.keys() & digests)]
    CAUGHT.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{CAUGHT.relative_to(ROOT)}: {len(lines)} of {len(digests)} faults")
    return 0


def _tried(waiting: list[tuple[str, Fault]], jobs: int, cpu_s: float) -> Iterator[Outcome]:
    """Yield outcomes as they end, `jobs` faults at a time, each in a fork of this process."""
    _warm()
    excuses = {entry["fault"]: entry["because"] for entry in _written().get("unseen", ())}
    running: dict[int, Path] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number, (package, fault) in enumerate(waiting):
            while len(running) >= max(jobs, 1):
                yield from _ended(running)
            report = Path(folder) / f"{number}.json"
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    outcome = _trial(package, fault, cpu_s, excuses.get(fault.digest, ""), report)
                    report.write_text(json.dumps(asdict(outcome)), "utf-8")
                finally:
                    os._exit(0)
            running[pid] = report
        while running:
            yield from _ended(running)


def _ended(running: dict[int, Path]) -> Iterator[Outcome]:
    pid, _ = os.wait()
    report = running.pop(pid, None)
    if report is not None:
        yield Outcome(**json.loads(report.read_text("utf-8")))


def _warm() -> None:
    """Import, once for all faults, what every test needs except the package; collect the tests."""
    for path in changed.imports():
        if path.name.startswith("test_"):
            _words(path)
    for name in ("hypothesis", "pytest", "scipy.special", "scipy.stats", "torch"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _trial(package: str, fault: Fault, cpu_s: float, excused: str, report: Path) -> Outcome:
    waiting, done, spent = _choice(fault), 0, 0.0
    reached = len(waiting)
    texts = report.with_suffix(".fault")
    texts.write_text(json.dumps({_module(fault.path): fault.source()}), "utf-8")
    doubted: list[str] = []
    for size in (1, *_CHUNKS):
        chunk, waiting = waiting[:size], waiting[size:]
        while chunk and spent < cpu_s:
            failed, used = _run(chunk, doubted, str(texts), cpu_s - spent)
            spent += used
            if not failed:
                done += len(chunk) * (spent < cpu_s)
                break
            # A test that fails anyway proves nothing.
            again, _ = _run([Choice(failed)], [], "", cpu_s)
            if not again:
                return Outcome(
                    fault.digest, str(fault), package, True, failed, done, reached, spent
                )
            doubted.append(failed)
    return Outcome(fault.digest, str(fault), package, False, "", done, reached, spent, excused)


def _module(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Choice:
    """Tests to run: a file or one test of it, and which of its tests in which order, if not all."""

    path: str
    tests: tuple[str, ...] = ()


def _choice(fault: Fault) -> list[Choice]:
    """The tests to run against a fault: the one that last caught it, then those that can."""
    last = _caught_by().get(fault.digest, "")
    path, _, test = last.partition("::")
    first = [Choice(path, (last,) if test else ())] if path and (ROOT / path).exists() else []
    return [*first, *_in_order(fault)]


def _in_order(fault: Fault) -> list[Choice]:
    """Return tests that run the fault's place, or all that can reach its file.

    Test files without a record, or changed since, come between the quick and the slow tests.
    """
    nearest = tests_of(fault.path, fault.place)
    if not REACHED.exists():
        return [Choice(path) for path in nearest]
    recorded_ns = REACHED.stat().st_mtime_ns
    durations, by = _reached(recorded_ns)
    came = sorted(
        (test for test in by.get(fault.digest, ()) if test in durations), key=durations.__getitem__
    )
    quick: dict[str, list[str]] = defaultdict(list)
    slow: dict[str, list[str]] = defaultdict(list)
    for test in came:
        (slow if durations[test] > _SLOW_S else quick)[test.partition("::")[0]].append(test)
    if not came:
        return [Choice(path) for path in nearest]
    reached_paths = {
        path
        for path in {test.partition("::")[0] for test in durations}
        if (ROOT / path).stat().st_mtime_ns <= recorded_ns
    }

    def chosen(some: dict[str, list[str]]) -> list[Choice]:
        candidates = [path for path in [*nearest, *sorted({*some} - {*nearest})] if path in some]
        return [Choice(path, tuple(some[path])) for path in candidates if path in reached_paths]

    others = [Choice(path) for path in nearest if path not in reached_paths]
    return [*chosen(quick), *others, *chosen(slow)]


@cache
def _reached(_changed_ns: int) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Return CPU seconds of every recorded test that passed, and tests by digest of a fault."""
    durations: dict[str, float] = {}
    by: dict[str, set[str]] = defaultdict(set)
    for line in REACHED.read_text("utf-8").splitlines():
        what, _, test = line.partition("\t")
        if what.startswith("="):
            durations[test] = float(what[1:])
        else:
            by[what].add(test)
    return durations, by


def _record(faults: Iterable[Fault], tests: list[str]) -> int:
    """Run tests, and add to `REACHED` which faults' places they run, and their CPU time."""
    places: dict[str, dict[int, list[str]]] = {}
    for fault in faults:
        for line in _lines(fault):
            found = places.setdefault(_module(fault.path), {}).setdefault(line, [])
            found.append(fault.digest)
    REACHED.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".probes") as file:
        json.dump({"log": str(REACHED), "places": places}, file)
        file.flush()
        words = ["-q", "-m", "not full", "-p", "no:cacheprovider", "-p", "mutants"]
        environment = os.environ | {
            "SLIPSTREAM_PROBES": file.name,
            "PYTHONPATH": os.pathsep.join([SITE, str(ROOT / "tests")]),
        }
        command = [sys.executable, "-m", "pytest", *words, f"--timeout={_STALLED_S}", *tests]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _lines(fault: Fault) -> list[int]:
    """Return lines that run where the fault shows: its own, or those that read what it sets."""
    source = (ROOT / fault.path).read_text("utf-8")
    whole = ast.parse(source)
    functions = [node for node in ast.walk(whole) if isinstance(node, ast.FunctionDef)]
    around = [
        function
        for function in functions
        if function.lineno <= fault.line <= (function.end_lineno or 0)
    ]
    if around:
        inner = max(around, key=lambda function: function.lineno)
        first = inner.body[0].lineno
        return [fault.line if fault.line >= first else _first_line(inner)]
    bound = set(re.findall(r"^\s*(\w+)\s*(?::[^=]*)?=", fault.text)) or {
        name.id
        for node in whole.body
        if node.lineno <= fault.line <= (node.end_lineno or 0)
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    words = [
        set(re.findall(r"\w+", ast.get_source_segment(source, function) or ""))
        for function in functions
    ]
    readers = [function for function, used in zip(functions, words, strict=True) if used & bound]
    return sorted({_first_line(function) for function in readers or functions})


def _first_line(function: ast.FunctionDef) -> int:
    """Return the first line of a function's body after its docstring."""
    body = function.body
    return body[1 if len(body) > 1 and ast.get_docstring(function) else 0].lineno


class Times:
    """Records each test's CPU time, if it passed, with the places that it ran."""

    def __init__(self) -> None:
        self.begin_s, self.passed = 0.0, True

    def pytest_runtest_logstart(self) -> None:
        self.begin_s, self.passed = _spent_s(), True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed = self.passed and report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.passed:
            with open(REACHED, "a", encoding="utf-8") as file:
                file.write(f"={_spent_s() - self.begin_s:.3f}\t{nodeid}\n")


def pytest_configure(config: Any) -> None:
    """Plug in for the tests that `_record` runs."""
    config.pluginmanager.register(Times())


def _spent_s() -> float:
    """Return CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def _run(tests: list[Choice], without: list[str], texts: str, cpu_s: float) -> tuple[str, float]:
    """Return the first test that fails, or an empty string, and the CPU seconds it took."""
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
            stuck = time.monotonic() - begin > 2 * _STALLED_S + 4 * cpu_s
            if failed or stuck or _cpu_s(pid) > cpu_s:
                _kill(pid)
                _, _, usage = os.wait4(pid, 0)
                break
            time.sleep(0.05)
    _kill(pid)
    return failed, usage.ru_utime + usage.ru_stime


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _Teller:
    """Report the first failure, then wait to be killed, so that no time is spent on teardown."""

    def __init__(self, write: int) -> None:
        self.write = write
        signal.signal(signal.SIGPROF, self._loops)

    def _loops(self, *_: object) -> None:
        import pytest

        pytest.fail(f"took more than {_TEST_CPU_S:.0f} s of CPU time")

    def pytest_runtest_logstart(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, _TEST_CPU_S)

    def _tell(self, nodeid: str) -> None:
        os.write(self.write, nodeid.encode() + b"\n")
        time.sleep(60)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid)


class _Chooser:
    """Keep only the requested tests, in the requested order."""

    def __init__(self, tests: list[Choice]) -> None:
        self.at = {
            test: at for at, test in enumerate(t for c in tests for t in c.tests or [c.path])
        }

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def place(item: Any) -> int | None:
            return self.at.get(item.nodeid, self.at.get(item.nodeid.partition("::")[0]))

        places = [(place(item), item) for item in items]
        chosen = [(at, item) for at, item in places if at is not None]
        items[:] = [item for _, item in sorted(chosen, key=lambda entry: entry[0])]


def _pytest(tests: list[Choice], without: list[str], texts: str, write: int) -> None:
    import pytest

    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.pop("SLIPSTREAM_FAULT", None)
    if texts:
        os.environ["SLIPSTREAM_FAULT"] = texts
        sys.path.insert(0, SITE)
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    options = ["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"--timeout={_STALLED_S}"]  # fmt: skip
    options += [f"--deselect={test}" for test in without]
    paths = [test.path for test in tests]
    code = pytest.main([*options, *paths], plugins=[_Teller(write), _Chooser(tests)])
    os._exit(int(code))


def _summary(outcomes: Iterable[Outcome]) -> int:
    counted = [outcome for outcome in outcomes if not outcome.excused]
    by_package: dict[str, list[Outcome]] = defaultdict(list)
    for trial in counted:
        by_package[trial.package].append(trial)
    print()
    for package, found in by_package.items():
        print(
            f"{package:12} {sum(outcome.caught for outcome in found):4d} of {len(found):4d} caught"
        )
    caught, n = sum(outcome.caught for outcome in counted), len(counted)
    share = f"{100 * caught / max(n, 1):.0f} % (bar {100 * TARGET:.0f} %)"
    print(f"{'all':12} {caught:4d} of {n:4d} caught: {share}")
    for path, number in Counter(
        re.split(r"[ :]", outcome.fault)[1] for outcome in counted if not outcome.caught
    ).most_common():
        print(f"  {number} survived in {path}")
    return int(_below(caught, n))


def _below(caught: int, n: int) -> bool:
    """Whether a rate of `TARGET` is refuted, one-sided at 95 %."""
    from scipy.stats import binom

    return n > 0 and float(binom.cdf(caught, n, TARGET)) < 0.05


if __name__ == "__main__":
    sys.exit(main())
