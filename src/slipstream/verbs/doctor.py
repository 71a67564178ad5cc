"""Checks of `slipstream doctor`: each tries a capability and reports the result."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.child.program import answer_of
from slipstream.errors import SlipstreamError
from slipstream.tables import Field, Table

_TIMEOUT_S = 10.0
# What each optional dependency group provides.
_UNLOCKS = {
    "search": "search strategies that learn from trials",
    "data": "data sets that scikit-learn carries",
    "parquet": "slipstream results export --to parquet",
    "trials": "searches on many machines, with Ray",
    "controller": "training under Monarch's controller",
    "edge": "models for phones and microcontrollers",
    "onnx": "ONNX Runtime as a second runtime",
    "mlperf": "serving and training under MLPerf's rules",
    "live": "the editor server and the live page",
    "vision": "reading images",
    "dev": "running slipstream's tests",
}
_SYSCALL_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_PERF_HARDWARE, _PERF_SOFTWARE = 0, 1
_COUNT_INSTRUCTIONS, _TASK_CLOCK = 1, 1
# The threshold that a measurement's gate waits for, too.
_BUSY_PERCENT = 15
_PAIR = "ip link add name left type veth peer name right"
_DELAY = "tc qdisc add dev left root netem delay 1ms"
_TITLES = {
    "machine": "This machine",
    "software": "Software",
    "extras": "Extras",
    "measuring": "What can be measured here",
    "store": "Results store",
}


class ProbeResult(NamedTuple):
    """Outcome of a probe; see `Check`."""

    ok: bool | None
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A line of the doctor's report.

    Attributes:
        ok: whether it works; None for a plain fact.
        found: the finding, or why it does not work.
        unlocks: what it is used for.
        remedy: how to get it; empty if nothing needs doing.
    """

    group: str
    name: str
    ok: bool | None
    found: str
    unlocks: str = ""
    remedy: str = ""

    @property
    def needed(self) -> bool:
        """Whether slipstream cannot run without it."""
        return self.name in ("Python", "torch", "results")


@dataclass(frozen=True)
class Checks:
    checks: tuple[Check, ...]

    @property
    def core_works(self) -> bool:
        return not any(check.needed and check.ok is False for check in self.checks)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(check) for check in self.checks]

    def tables(self) -> list[Table]:
        """Return a table per group, without empty columns."""
        return [self._table(group) for group in _TITLES]

    def _table(self, group: str) -> Table:
        checks = [check for check in self.checks if check.group == group]
        fields: list[Field[Check]] = [Field.of("what", lambda check: check.name)]
        if any(check.ok is not None for check in checks):
            words = {True: "yes", False: "no", None: ""}
            fields.append(Field.of("works", lambda check: words[check.ok]))
        fields.append(Field.of("found", lambda check: check.found))
        if any(check.unlocks for check in checks):
            fields.append(Field.of("used for", lambda check: check.unlocks, optional=True))
        notes = [
            f"{check.name} ({check.unlocks or 'needed'}): {check.remedy}"
            for check in checks
            if check.remedy
        ]
        return Table.of(checks, fields, _TITLES[group], notes)


def examine(store: Path | None, report: Callable[[str], None] = lambda line: None) -> Checks:
    """Run every check."""
    checks: dict[str, list[Check]] = {}
    # The GPU check uses the torch that "software" imported.
    for group in ("software", "machine", "extras", "measuring"):
        report(group)
        checks[group] = run_checks(group)
    checks["store"] = [check_store(store)]
    return Checks(tuple(check for group in _TITLES for check in checks[group]))


def run_checks(group: str) -> list[Check]:
    """Run the checks of a group other than the store."""
    if group == "extras":
        return _extras()
    checks = _facts() if group == "machine" else []
    for name, unlocks, probe in _PROBES[group]:
        answer = _tried(probe)
        checks.append(Check(group, name, answer.ok, answer.found, unlocks, answer.remedy))
    return checks


def check_store(path: Path | None) -> Check:
    answer = _tried(partial(_store, path))
    return Check("store", "results", answer.ok, answer.found, remedy=answer.remedy)


def _tried(probe: Callable[[], ProbeResult]) -> ProbeResult:
    try:
        return probe()
    except ImportError as error:
        return ProbeResult(False, f"cannot be checked: {error}")
    except SlipstreamError as error:
        return ProbeResult(False, error.what, error.remedy or "")


def _facts() -> list[Check]:
    from slipstream.measure import facts_machine

    facts = facts_machine.facts()
    quota = facts["machine.cpu_quota"]
    affinity = facts["machine.affinity"]
    cores = f"{facts['cpu.physical']} cores, {facts['cpu.logical']} logical"
    if isinstance(affinity, list) and len(affinity) != facts["cpu.logical"]:
        cores += f", {len(affinity)} of them usable by this process"
    if quota is not None:
        cores += f", limited to {quota:g} by the control group"
    virtual = f"hypervisor: {facts['machine.hypervisor']}; container: {facts['machine.container']}"
    descriptions = {
        "processor": str(facts["cpu.model"]),
        "cores": cores,
        "memory": f"{facts['memory.total_mib']} MiB, "
        f"{facts['now.memory_available_mib']} MiB available",
        "system": f"{platform.system()} {platform.release()}; {virtual}",
    }
    return [Check("machine", name, None, value) for name, value in descriptions.items()]


def _extras() -> list[Check]:
    try:
        declared = metadata.metadata("slipstream").get_all("Provides-Extra") or []
        required = metadata.requires("slipstream") or []
    except metadata.PackageNotFoundError:
        reason = "slipstream is importable but not installed"
        return [Check("extras", "slipstream", False, reason, remedy="pip install slipstream")]
    return [check_extra(extra, required) for extra in declared]


def check_extra(extra: str, required: Sequence[str]) -> Check:
    """Check that the requirements of the dependency group `extra` are installed."""
    installed, missing = [], []
    for requirement in required:
        condition = requirement.partition(";")[2]
        name = re.match(r"[\w.-]+", requirement)
        if name is None or not re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", condition):
            continue
        try:
            installed.append(f"{name[0]} {metadata.version(name[0])}")
        except metadata.PackageNotFoundError:
            missing.append(name[0])
    lists = [", ".join(installed), f"missing: {', '.join(missing)}" if missing else ""]
    text = "; ".join(filter(None, lists)) or "needs nothing"
    remedy = f"pip install 'slipstream[{extra}]'" if missing else ""
    return Check("extras", extra, not missing, text, _UNLOCKS.get(extra, ""), remedy)


def _store(path: Path | None) -> ProbeResult:
    from slipstream.measure.store import Store, default_path

    place = default_path() if path is None else path
    if not place.exists():
        folder = next((p for p in place.absolute().parents if p.exists()), Path("/"))
        if os.access(folder, os.W_OK):
            return ProbeResult(True, f"{place} (created at the first measurement)")
        return ProbeResult(False, f"{place} cannot be created", "set SLIPSTREAM_STORE")
    try:
        with Store(place, read_only=True) as opened:
            count = len(opened.list())
    except SlipstreamError as error:
        return ProbeResult(False, f"{place}: {error.what}", error.remedy or "")
    if not os.access(place, os.W_OK):
        return ProbeResult(
            False, f"{place}: {count} experiments, read-only", "set SLIPSTREAM_STORE"
        )
    size_kib = place.stat().st_size // 1024
    return ProbeResult(True, f"{place}: {count} experiments, {size_kib} KiB")


def _instruction_sets() -> ProbeResult:
    from slipstream.native import InstructionSet, cpu_features

    features = cpu_features()
    levels = ", ".join(level.value for level in InstructionSet if features.runs(level))
    return ProbeResult(None, f"{levels} (by {features.source}); kernels use {features.best.value}")


def _lowbit_kernels() -> ProbeResult:
    from slipstream.techniques.lowbit.dispatch import table

    return ProbeResult(
        None, "many rows: " + "; ".join(f"{pair}: {kernel}" for pair, kernel in table())
    )


def _timer() -> ProbeResult:
    steps = []
    for _ in range(200):
        before = time.perf_counter_ns()
        while (after := time.perf_counter_ns()) == before:
            pass
        steps.append(after - before)
    return ProbeResult(None, f"resolution {min(steps)} ns, over 200 readings")


def _torch() -> ProbeResult:
    try:
        import torch
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return ProbeResult(False, first, "pip install torch")
    level = torch.backends.cpu.get_cpu_capability()
    return ProbeResult(True, f"{torch.__version__}, {torch.get_num_threads()} threads, {level}")


def _native() -> ProbeResult:
    from slipstream.native.loader import why_no_library

    why = why_no_library()
    return (
        ProbeResult(True, "loaded")
        if why is None
        else ProbeResult(False, why, "reinstall with a compiler")
    )


def _counters(kind: int, config: int) -> ProbeResult:
    number = _SYSCALL_PERF_EVENT_OPEN.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return ProbeResult(False, "no perf_event_open on this system")
    import ctypes
    import struct

    # struct perf_event_attr: type, size, config, then 48 bytes up to the flags, of which
    # disabled (1), exclude_kernel (1 << 5) and exclude_hv (1 << 6) are set.
    size = 128
    attributes = struct.pack("=IIQQQQQ", kind, size, config, 0, 0, 0, 1 | 1 << 5 | 1 << 6)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, attributes.ljust(size, b"\0"), 0, -1, -1, 0)
    if fd >= 0:
        os.close(fd)
        return ProbeResult(True, "perf_event_open answers")
    code = ctypes.get_errno()
    reason = f"perf_event_open: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
    denied = code in (errno.EACCES, errno.EPERM)
    return ProbeResult(False, reason, "sysctl kernel.perf_event_paranoid=1" if denied else "")


def _energy() -> ProbeResult:
    meters = sorted(Path("/sys/class/powercap").glob("*/energy_uj"))
    if not meters:
        return ProbeResult(False, "no powercap meter; reported as none")
    try:
        meters[0].read_text()
    except OSError as error:
        return ProbeResult(False, f"{len(meters)} meters, {error.strerror}", "run as root")
    return ProbeResult(True, f"{len(meters)} powercap meters")


def _frequency() -> ProbeResult:
    path = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
    try:
        return ProbeResult(True, Path(path).read_text().strip().splitlines()[0])
    except (OSError, IndexError):
        return ProbeResult(False, f"{path} cannot be read")


def pressure(path: Path = Path("/proc/pressure/cpu")) -> ProbeResult:
    """Report how long tasks recently waited for a CPU, by the kernel's pressure metric."""
    try:
        # "some avg10=98.54 avg60=...": percent of the last ten seconds.
        waited = float(path.read_text().split()[1].removeprefix("avg10="))
    except (OSError, IndexError, ValueError):
        return ProbeResult(False, f"{path} cannot be read")
    busy = "; busy: measurements will have wide intervals" if waited > _BUSY_PERCENT else ""
    return ProbeResult(True, f"tasks waited for a CPU {waited:.0f} % of the last 10 s{busy}")


def _peak_memory() -> ProbeResult:
    try:
        # Resets only this process's high-water mark, which nothing else reads.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return ProbeResult(False, f"the peak cannot be reset: {error.strerror}")
    return ProbeResult(True, "the high-water mark can be reset")


def _namespace() -> ProbeResult:
    return _in_namespace(_PAIR, "a pair of interfaces can be made")


def _slow_links() -> ProbeResult:
    answer = _in_namespace(f"{_PAIR} && {_DELAY}", "netem delays packets")
    if not answer.ok and _namespace().ok:
        return answer._replace(remedy="a kernel with the module sch_netem")
    return answer


def _in_namespace(commands: str, works: str) -> ProbeResult:
    """Run `commands` in a temporary namespace; report `works` or their first complaint."""
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        return ProbeResult(
            False, f"missing: {', '.join(missing)}", "install iproute2 and util-linux"
        )
    enter = ("unshare", "--net", "--map-root-user", "sh", "-c")
    done = answer_of(*enter, commands, timeout_s=_TIMEOUT_S)
    if done is not None and done.returncode == 0:
        return ProbeResult(True, works)
    remedy = "" if os.geteuid() == 0 else "run as root"
    if done is None:
        return ProbeResult(False, "no answer", remedy)
    complaints = done.stderr.decode(errors="replace").strip().splitlines()
    return ProbeResult(False, (complaints or ["failed without a message"])[0], remedy)


def _gpu() -> ProbeResult:
    names = None
    if (program := shutil.which("nvidia-smi")) is not None:
        query = (program, "--query-gpu=name", "--format=csv,noheader")
        done = answer_of(*query, timeout_s=_TIMEOUT_S)
        if done is not None and done.returncode == 0:
            names = done.stdout.decode(errors="replace").splitlines()
    torch = sys.modules.get("torch")
    usable = torch is not None and torch.cuda.is_available()
    if not names:
        return ProbeResult(False, "none found (nvidia-smi lists none)")
    if usable:
        return ProbeResult(True, ", ".join(names))
    reason = ", ".join(names) + "; this torch cannot use it"
    return ProbeResult(False, reason, "install a torch built for CUDA")


def _program(package: str, *programs: str) -> ProbeResult:
    """Report the version of the first of `programs` on the path (default: named as the package)."""
    for program in programs or (package,):
        if (path := shutil.which(program)) is None:
            continue
        done = answer_of(path, "--version", timeout_s=_TIMEOUT_S)
        if done is not None and done.returncode == 0:
            version = (done.stdout.decode(errors="replace").strip().splitlines() or ["answers"])[0]
            return ProbeResult(True, version)
        return ProbeResult(
            False, f"{program} is installed but does not run", f"reinstall {package}"
        )
    return ProbeResult(False, "not on the path", f"install {package}")


# By group: name, use, probe.
_PROBES: dict[str, list[tuple[str, str, Callable[[], ProbeResult]]]] = {
    "machine": [
        ("instruction sets", "", _instruction_sets),
        ("low-bit matmuls", "", _lowbit_kernels),
        ("timer", "", _timer),
    ],
    "software": [
        (
            "Python", "",
            lambda: ProbeResult(sys.version_info >= (3, 11), platform.python_version()),
        ),
        ("torch", "", _torch),
        (
            "compiled library", "fast simulation (Python gives the same results, slower)", _native
        ),
    ],
    "measuring": [
        (
            "hardware counters", "instruction counts",
            partial(_counters, _PERF_HARDWARE, _COUNT_INSTRUCTIONS),
        ),
        (
            "software counters", "page faults, switches",
            partial(_counters, _PERF_SOFTWARE, _TASK_CLOCK),
        ),
        ("valgrind", "instruction counts by simulation", partial(_program, "valgrind")),
        ("energy", "energy per step", _energy),
        ("clock frequency", "detecting CPU throttling", _frequency),
        ("pressure", "detecting a busy machine", pressure),
        ("peak memory", "peak memory of a phase", _peak_memory),
        ("network namespace", "bytes on the wire between ranks", _namespace),
        ("slow links", "emulated slow links between ranks", _slow_links),
        ("GPU", "GPU time and memory", _gpu),
        (
            "compiler", "native kernels",
            partial(_program, "a C++17 compiler", "c++", "g++", "clang++"),
        ),
        ("git", "comparing revisions", partial(_program, "git")),
        ("qemu", "running firmware", partial(_program, "qemu-system-arm")),
        (
            "chromium", "testing the pages",
            partial(_program, "chromium", "chromium", "chromium-browser", "google-chrome"),
        ),
    ],
}  # fmt: skip
