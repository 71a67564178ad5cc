"""What `slipstream doctor` looks at: each check tries the thing itself and says what happened."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.child.program import answer_of

_TIMEOUT_S = 10.0
# What each optional dependency group of ours is good for.
_UNLOCKS = {
    "search": "search strategies that learn from trials",
    "data": "data sets that scikit-learn carries",
    "parquet": "slipstream results export --to parquet",
    "trials": "searches on many machines, with Ray",
    "controller": "training under Monarch's controller",
    "edge": "models for phones and microcontrollers",
    "onnx": "ONNX Runtime beside PyTorch",
    "mlperf": "serving and training under MLPerf's rules",
    "live": "the editor server and the live page",
    "vision": "reading pictures",
    "dev": "running our own tests",
}
_SYSCALL_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_PERF_HARDWARE, _PERF_SOFTWARE = 0, 1
_COUNT_INSTRUCTIONS, _TASK_CLOCK = 1, 1


# What the gate of a measurement waits for to pass, too.
_BUSY_PERCENT = 15


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        ok: there and working; None where it is neither good nor bad.
        found: what was found, or why it does not work.
        unlocks: what it is good for.
        remedy: how to get it; empty where there is nothing to do.
    """

    group: str
    name: str
    ok: bool | None
    found: str
    unlocks: str = ""
    remedy: str = ""


def machine() -> list[Check]:
    """The machine and what runs on it."""
    from slipstream.measure import facts_machine

    facts = facts_machine.facts()
    quota = facts["machine.cpu_quota"]
    affinity = facts["machine.affinity"]
    cores = f"{facts['cpu.physical']} cores, {facts['cpu.logical']} logical"
    if isinstance(affinity, list) and len(affinity) != facts["cpu.logical"]:
        cores += f", {len(affinity)} of them ours"
    if quota is not None:
        cores += f", limited to {quota:g} by the control group"
    virtual = f"hypervisor: {facts['machine.hypervisor']}; container: {facts['machine.container']}"
    memory = f"{facts['memory.total_mib']} MiB, {facts['now.memory_available_mib']} MiB available"
    return [
        Check("machine", "processor", None, str(facts["cpu.model"])),
        Check("machine", "cores", None, cores),
        Check("machine", "memory", None, memory),
        Check("machine", "system", None, f"{platform.system()} {platform.release()}; {virtual}"),
        *_instruction_sets(),
        *_lowbit_kernels(),
        _timer(),
    ]


def software() -> list[Check]:
    """Python, torch, our compiled library."""
    return [
        Check("software", "Python", sys.version_info >= (3, 11), platform.python_version()),
        _torch(),
        _native(),
    ]


def extras() -> list[Check]:
    """Our optional dependencies, as the installed package's metadata names them."""
    from importlib import metadata

    try:
        declared = metadata.metadata("slipstream").get_all("Provides-Extra") or []
        required = metadata.requires("slipstream") or []
    except metadata.PackageNotFoundError:
        found = "slipstream itself is not installed, only on the path"
        return [Check("extras", "slipstream", False, found, remedy="pip install slipstream")]
    return [_extra(extra, required) for extra in declared]


def measuring() -> list[Check]:
    """What can be measured here, and why something cannot."""
    return [
        _counters("hardware counters", _PERF_HARDWARE, _COUNT_INSTRUCTIONS, "instruction counts"),
        _counters("software counters", _PERF_SOFTWARE, _TASK_CLOCK, "page faults, switches"),
        _callgrind(),
        _energy(),
        _frequency(),
        _pressure(Path("/proc/pressure/cpu")),
        _peak_memory(),
        *_network(),
        _gpu(),
        _program("compiler", ("c++", "g++", "clang++"), "native kernels", "a C++17 compiler"),
        _program("git", ("git",), "comparing revisions", "git"),
        _program("qemu", ("qemu-system-arm",), "running firmware", "qemu-system-arm"),
        _program(
            "chromium",
            ("chromium", "chromium-browser", "google-chrome"),
            "testing the pages",
            "chromium",
        ),
    ]


def store(path: Path | None) -> Check:
    """Where results go, and whether they can."""
    from slipstream.errors import SlipstreamError
    from slipstream.measure.store import Store, default_path

    place = default_path() if path is None else path
    if not place.exists():
        folder = next((p for p in place.absolute().parents if p.exists()), Path("/"))
        if os.access(folder, os.W_OK):
            return Check("store", "results", True, f"{place} (made at the first measurement)")
        return Check(
            "store", "results", False, f"{place} cannot be made", remedy="set SLIPSTREAM_STORE"
        )
    try:
        with Store(place, read_only=True) as opened:
            count = len(opened.list())
    except SlipstreamError as error:
        return Check("store", "results", False, f"{place}: {error.what}", remedy=error.remedy or "")
    if not os.access(place, os.W_OK):
        found = f"{place}: {count} experiments, read-only"
        return Check("store", "results", False, found, remedy="set SLIPSTREAM_STORE")
    size_kib = place.stat().st_size // 1024
    return Check("store", "results", True, f"{place}: {count} experiments, {size_kib} KiB")


def _instruction_sets() -> list[Check]:
    from slipstream.errors import SlipstreamError

    try:
        from slipstream.native import InstructionSet, cpu_features

        features = cpu_features()
        levels = ", ".join(level.value for level in InstructionSet if features.runs(level))
        found = f"{levels} (by {features.source}); kernels use {features.best.value}"
    except ImportError as error:
        return [Check("machine", "instruction sets", False, f"cannot be asked: {error}")]
    except SlipstreamError as error:
        return [Check("machine", "instruction sets", False, error.what, remedy=error.remedy or "")]
    return [Check("machine", "instruction sets", None, found)]


def _lowbit_kernels() -> list[Check]:
    from slipstream.errors import SlipstreamError

    try:
        from slipstream.techniques.lowbit.dispatch import table

        rows = table()
    except ImportError as error:
        return [Check("machine", "low-bit products", False, f"cannot be asked: {error}")]
    except SlipstreamError as error:
        return [Check("machine", "low-bit products", False, error.what, remedy=error.remedy or "")]
    found = "; ".join(f"{pairs}: {kernel}" for pairs, kernel in rows)
    return [Check("machine", "low-bit products", None, f"many rows: {found}")]


def _timer() -> Check:
    steps = []
    for _ in range(200):
        before = time.perf_counter_ns()
        while (after := time.perf_counter_ns()) == before:
            pass
        steps.append(after - before)
    return Check("machine", "timer", None, f"steps of {min(steps)} ns, seen in 200 readings")


def _torch() -> Check:
    try:
        import torch
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Check("software", "torch", False, first, remedy="pip install torch")
    found = (
        f"{torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    return Check("software", "torch", True, found)


def _native() -> Check:
    unlocks = "fast simulation (Python gives the same results, slower)"
    try:
        from slipstream.native.loader import why_no_library
    except ImportError as error:
        return Check("software", "compiled library", False, str(error), unlocks)
    why = why_no_library()
    if why is None:
        return Check("software", "compiled library", True, "loaded", unlocks)
    return Check("software", "compiled library", False, why, unlocks, "reinstall with a compiler")


def _extra(extra: str, required: Sequence[str]) -> Check:
    from importlib import metadata

    found, missing = [], []
    for requirement in required:
        condition = requirement.partition(";")[2]
        name = re.match(r"[\w.-]+", requirement)
        if name is None or not re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", condition):
            continue
        try:
            found.append(f"{name[0]} {metadata.version(name[0])}")
        except metadata.PackageNotFoundError:
            missing.append(name[0])
    text = ", ".join(found)
    if missing:
        text += ("; " if text else "") + "missing: " + ", ".join(missing)
    remedy = f"pip install 'slipstream[{extra}]'" if missing else ""
    return Check(
        "extras", extra, not missing, text or "needs nothing", _UNLOCKS.get(extra, ""), remedy
    )


def _counters(name: str, kind: int, config: int, unlocks: str) -> Check:
    number = _SYSCALL_PERF_EVENT_OPEN.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return Check("measuring", name, False, "no perf_event_open on this system", unlocks)
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
        return Check("measuring", name, True, "perf_event_open answers", unlocks)
    code = ctypes.get_errno()
    found = f"perf_event_open: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
    denied = code in (errno.EACCES, errno.EPERM)
    remedy = "sysctl kernel.perf_event_paranoid=1" if denied else ""
    return Check("measuring", name, False, found, unlocks, remedy)


def _callgrind() -> Check:
    return _program("valgrind", ("valgrind",), "instruction counts by simulation", "valgrind")


def _energy() -> Check:
    meters = sorted(Path("/sys/class/powercap").glob("*/energy_uj"))
    unlocks = "energy per step"
    if not meters:
        return Check("measuring", "energy", False, "no powercap meter; reported as none", unlocks)
    try:
        meters[0].read_text()
    except OSError as error:
        found = f"{len(meters)} meters, {error.strerror}"
        return Check("measuring", "energy", False, found, unlocks, "run as root")
    return Check("measuring", "energy", True, f"{len(meters)} powercap meters", unlocks)


def _frequency() -> Check:
    return _readable(
        "clock frequency",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",
        "seeing that the processor slows down",
    )


def _readable(name: str, path: str, unlocks: str) -> Check:
    try:
        text = Path(path).read_text().strip().splitlines()[0]
    except (OSError, IndexError):
        return Check("measuring", name, False, f"{path} cannot be read", unlocks)
    return Check("measuring", name, True, text, unlocks)


def _pressure(path: Path) -> Check:
    unlocks = "seeing that the machine is busy"
    try:
        # "some avg10=98.54 avg60=...": percent of the last ten seconds.
        waited = float(path.read_text().split()[1].removeprefix("avg10="))
    except (OSError, IndexError, ValueError):
        return Check("measuring", "pressure", False, f"{path} cannot be read", unlocks)
    found = f"processors {waited:.0f} % under pressure in the last 10 s"
    if waited > _BUSY_PERCENT:
        found += "; busy: measurements will be wide"
    return Check("measuring", "pressure", True, found, unlocks)


def _peak_memory() -> Check:
    unlocks = "peak memory of a phase"
    try:
        # Resets this process's own high-water mark, which nobody else looks at.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        found = f"the peak cannot be reset: {error.strerror}"
        return Check("measuring", "peak memory", False, found, unlocks)
    return Check("measuring", "peak memory", True, "the high-water mark can be reset", unlocks)


def _network() -> list[Check]:
    """A throw-away network namespace: a pair of interfaces that count bytes, and a slow link."""
    wire = "bytes on the wire between ranks"
    slow = "emulated slow links between ranks"
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        found = "missing: " + ", ".join(missing)
        remedy = "install iproute2 and util-linux"
        return [
            Check("measuring", name, False, found, unlocks, remedy)
            for name, unlocks in (("network namespace", wire), ("slow links", slow))
        ]
    # All of it is gone when the command ends.
    enter = ("unshare", "--net", "--map-root-user", "sh", "-c")
    pair = "ip link add name left type veth peer name right"
    delay = "tc qdisc add dev left root netem delay 1ms"
    remedy = "" if os.geteuid() == 0 else "run as root"
    namespace, why = _succeeds(*enter, pair)
    found = "a pair of interfaces can be made" if namespace else why
    first = Check(
        "measuring", "network namespace", namespace, found, wire, remedy * (not namespace)
    )
    shaped, why = _succeeds(*enter, f"{pair} && {delay}")
    found = "netem delays packets" if shaped else why
    if namespace and not shaped:
        remedy = "a kernel with the module sch_netem"
    return [first, Check("measuring", "slow links", shaped, found, slow, remedy * (not shaped))]


def _succeeds(*command: str) -> tuple[bool, str]:
    """Whether it does, and what it complained about."""
    done = answer_of(*command, timeout_s=_TIMEOUT_S)
    if done is None:
        return False, "no answer"
    complaints = done.stderr.decode(errors="replace").strip().splitlines()
    return done.returncode == 0, (complaints or ["failed without a word"])[0]


def _gpu() -> Check:
    unlocks = "GPU time and memory"
    names = None
    if (program := shutil.which("nvidia-smi")) is not None:
        query = (program, "--query-gpu=name", "--format=csv,noheader")
        done = answer_of(*query, timeout_s=_TIMEOUT_S)
        if done is not None and done.returncode == 0:
            names = done.stdout.decode(errors="replace").splitlines()
    torch = sys.modules.get("torch")
    usable = torch is not None and torch.cuda.is_available()
    if not names:
        return Check("measuring", "GPU", False, "none seen (nvidia-smi lists none)", unlocks)
    found = ", ".join(names) + ("" if usable else "; this torch cannot use it")
    remedy = "" if usable else "install a torch built for CUDA"
    return Check("measuring", "GPU", usable, found, unlocks, remedy)


def _program(name: str, programs: Sequence[str], unlocks: str, package: str) -> Check:
    for program in programs:
        if (path := shutil.which(program)) is None:
            continue
        done = answer_of(path, "--version", timeout_s=_TIMEOUT_S)
        if done is not None and done.returncode == 0:
            version = (done.stdout.decode(errors="replace").strip().splitlines() or ["answers"])[0]
            return Check("measuring", name, True, version, unlocks)
        found = f"{program} is there but does not run"
        return Check("measuring", name, False, found, unlocks, f"reinstall {package}")
    return Check("measuring", name, False, "not on the path", unlocks, f"install {package}")
