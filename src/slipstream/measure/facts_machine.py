"""Facts about the machine and its kernel, read from /proc and /sys; "unreadable" if unavailable.

Sources: proc(5), the kernel's Documentation/ABI (sysfs cpu, cpufreq, thermal, powercap) and
cgroups(7). Outside Linux, `psutil` and `platform` provide some of the facts.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

UNREADABLE = "unreadable"
_CPUS = Path("/sys/devices/system/cpu")
_ZONES = Path("/sys/class/thermal")
_CGROUPS = Path("/sys/fs/cgroup")
# Vendor and product names in the firmware tables identify virtual machines; no serial numbers.
_FIRMWARE = Path("/sys/class/dmi/id")
# Cgroup v1 writes the largest multiple of the page size below 2^63 for "no limit".
_UNLIMITED = 1 << 62


def facts() -> dict[str, Any]:
    """Return the groups ``cpu``, ``memory``, ``machine``, ``kernel`` and their ``now`` readings."""
    return _processor() | _caches() | _clock() | _limits() | _memory() | _kernel() | _load()


def read(path: Path | str) -> str | None:
    """Return the stripped text of a small file, or None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _or_unreadable(value: Any) -> Any:
    return UNREADABLE if value is None or value == "" else value


def _first_processor() -> dict[str, str]:
    first: dict[str, str] = {}
    for line in (read("/proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            break  # an empty line ends the first processor
        first[key.strip()] = value.strip()
    return first


def cpu_flags() -> list[str]:
    """Return the processor's instruction sets, by Linux's names; empty on other systems."""
    first = _first_processor()
    return sorted((first.get("flags") or first.get("Features") or "").split())


def _processor() -> dict[str, Any]:
    import psutil

    first = _first_processor()
    smt = read(_CPUS / "smt/active")
    model = first.get("model name") or first.get("CPU part") or platform.processor()
    return {
        "cpu.architecture": platform.machine(),
        "cpu.vendor": _or_unreadable(first.get("vendor_id") or first.get("CPU implementer")),
        "cpu.model": _or_unreadable(model),
        "cpu.family": _or_unreadable(first.get("cpu family")),
        "cpu.model_number": _or_unreadable(first.get("model") or first.get("CPU variant")),
        "cpu.stepping": _or_unreadable(first.get("stepping") or first.get("CPU revision")),
        "cpu.microcode": _or_unreadable(first.get("microcode")),
        "cpu.flags": cpu_flags() or UNREADABLE,
        "cpu.logical": os.cpu_count(),
        "cpu.physical": _or_unreadable(psutil.cpu_count(logical=False)),
        "cpu.smt": UNREADABLE if smt is None else smt == "1",
        "cpu.numa_nodes": _or_unreadable(read("/sys/devices/system/node/online")),
        "now.cpu_mhz": _or_unreadable(first.get("cpu MHz")),
    }


def _caches() -> dict[str, Any]:
    caches: dict[str, Any] = {}
    for index in sorted((_CPUS / "cpu0/cache").glob("index*")):
        level, kind = read(index / "level"), read(index / "type")
        suffix = {"Data": "d", "Instruction": "i"}.get(kind or "", "")
        caches[f"cpu.cache.l{level}{suffix}"] = {
            "size": _or_unreadable(read(index / "size")),
            "shared_by": _or_unreadable(read(index / "shared_cpu_list")),
        }
    return caches or {"cpu.cache": UNREADABLE}


def _clock() -> dict[str, Any]:
    policy = _CPUS / "cpu0/cpufreq"
    turbo = read(_CPUS / "intel_pstate/no_turbo")
    boost = read(_CPUS / "cpufreq/boost")
    has_turbo = turbo == "0" if turbo is not None else boost == "1"
    temperatures = {
        read(zone / "type") or zone.name: read(zone / "temp")
        for zone in sorted(_ZONES.glob("thermal_zone*"))
    }
    return {
        "cpu.governor": _or_unreadable(read(policy / "scaling_governor")),
        "cpu.max_khz": _or_unreadable(read(policy / "cpuinfo_max_freq")),
        "cpu.scaling_max_khz": _or_unreadable(read(policy / "scaling_max_freq")),
        "cpu.turbo": UNREADABLE if turbo is None and boost is None else has_turbo,
        "now.cpu_khz": _or_unreadable(read(policy / "scaling_cur_freq")),
        "now.temperature_millidegrees": temperatures or UNREADABLE,
    }


def _limits() -> dict[str, Any]:
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else UNREADABLE
    return {
        "machine.affinity": affinity,
        "machine.cpu_quota": _cpu_quota(),
        "machine.memory_limit_bytes": memory_limit(),
        "now.nice": os.nice(0) if hasattr(os, "nice") else UNREADABLE,
    }


def _cgroup_files(controller: str, name: str, name_v1: str) -> list[str]:
    """Return the file's text in this process's cgroup and all its ancestors, nearest first."""
    groups: dict[str, str] = {}
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path.strip("/"))
    texts = []
    for root, group, file in (
        (_CGROUPS, groups.get(""), name),
        (_CGROUPS / controller, groups.get(controller), name_v1),
    ):
        if group is None:
            continue
        # In a container the path may be the host's; then only the root is readable.
        folders = [root / group, *(root / group).parents]
        texts += [t for f in folders if f.is_relative_to(root) and (t := read(f / file))]
    return texts


def _cpu_quota() -> Any:
    """Return the CPU quota of the tightest cgroup, in cores; None if unlimited."""
    quotas = []
    for text in _cgroup_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota not in ("max", "-1"):
            # Cgroup v1 stores the period in a separate file; 100 ms is the default.
            quotas.append(int(quota) / int(period or 100_000))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Return the memory limit of the tightest cgroup, in bytes; None if unlimited."""
    limits = _cgroup_files("memory", "memory.max", "memory.limit_in_bytes")
    return min((int(t) for t in limits if t != "max" and int(t) < _UNLIMITED), default=None)


def _memory() -> dict[str, Any]:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    huge = read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        # In MiB, since the kernel's share varies by a few pages between boots.
        "memory.total_mib": memory.total >> 20,
        "memory.swap_mib": swap.total >> 20,
        "memory.transparent_hugepages": _or_unreadable(huge),
        "now.memory_available_mib": memory.available >> 20,
    }


def _kernel() -> dict[str, Any]:
    weaknesses = {path.name: read(path) for path in sorted((_CPUS / "vulnerabilities").glob("*"))}
    return {
        "kernel.system": platform.system(),
        "kernel.release": platform.release(),
        "kernel.libc": " ".join(platform.libc_ver()).strip() or UNREADABLE,
        "kernel.mitigations": weaknesses or UNREADABLE,
        "machine.hypervisor": _hypervisor(),
        "machine.container": _container(),
    }


def _hypervisor() -> str:
    named = [read(_FIRMWARE / name) for name in ("sys_vendor", "product_name")]
    vendor = " ".join(name for name in named if name) or read("/sys/hypervisor/type")
    if " hypervisor" in (read("/proc/cpuinfo") or ""):
        return vendor or "yes, unnamed"
    return f"none seen ({vendor})" if vendor else "none seen"


def _container() -> str:
    for sign, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if Path(sign).exists():
            return kind
    # systemd's variable, in lower case.
    named = os.environ.get("container") or read("/run/systemd/container")  # noqa: SIM112
    if named:
        return named
    groups = read("/proc/1/cgroup") or ""
    for kind in ("kubepods", "docker", "lxc", "containerd"):
        if kind in groups:
            return kind
    return "none seen"


def _load() -> dict[str, Any]:
    load = [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {
        "now.load_average": _or_unreadable(load),
        "now.cpu_pressure": _or_unreadable(read("/proc/pressure/cpu")),
    }
