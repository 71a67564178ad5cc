"""Hosts and cables inside one machine: network namespaces shaped by token buckets.

Every host is a network namespace held by a sleeping process; a cable is a veth pair to a bridge in
a separate namespace, with a token bucket at both ends. When the process that created a lab exits,
also by a signal, the kernel kills the sleeping processes and removes their namespaces, cables and
bridge. Nothing outside the namespaces is changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.cluster.errors import ClusterError
from slipstream.errors import InvalidArgumentError
from slipstream.ranks.launch import Host

INTERFACE = "eth0"
_NETWORK = "10.77.0"
_MAX_HOSTS = 250
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
# Small, so that short messages are shaped too; the kernel splits larger packets. At least the bytes
# of 1.5 ms, since the kernel's timer is late by a millisecond on busy cores, and a full bucket
# loses its tokens meanwhile.
_BURST_BYTES, _BURST_S = 8192, 0.0015
_READY_S = 5.0
# Available in every kernel and settable per namespace. The machine's default would affect the
# measurement: with BBR, which paces by an estimate, a cable of 15 Mbit/s carries between 70 and
# 96 % of its rate.
_CONGESTION_CONTROL = "reno"
_HOLD = (
    f"{{ echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control; }} 2> /dev/null; "
    "exec sleep infinity"
)


def why_no_netlab() -> str | None:
    """Return None if a lab can be created here, else the reason."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "a network lab needs Linux with network namespaces"
    if os.geteuid() != 0:
        return "a network lab needs root to create network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"a network lab needs {', '.join(missing)}" if missing else None


@dataclass
class Netlab:
    """Hosts connected to a switch by cables. Use as a context manager.

    Args:
        hosts: number of hosts.
        bytes_per_s: rate of a cable in each direction, including Ethernet and TCP headers.
        racks: number of switches, which share the hosts in order; neighbours are joined by a cable.
        between_bytes_per_s: rate of cables between racks; None for `bytes_per_s`.
    """

    hosts: int
    bytes_per_s: float
    racks: int = 1
    between_bytes_per_s: float | None = None
    pids: list[int] = field(default_factory=list)  # of the hosts, then of the switch
    _holders: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= _MAX_HOSTS:
            raise InvalidArgumentError("hosts", f"{self.hosts} is not between 1 and {_MAX_HOSTS}")
        for name in ("bytes_per_s", "between_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not 1e3 <= rate < 1e12:
                raise InvalidArgumentError(name, f"{rate} cannot be shaped")
        if self.racks < 1 or self.hosts % self.racks:
            raise InvalidArgumentError("racks", f"{self.hosts} hosts do not fill {self.racks}")

    def __enter__(self) -> Netlab:
        reason = why_no_netlab()
        if reason is not None:
            raise ClusterError(reason)
        try:
            for _ in range(self.hosts + 1):
                self._hold()
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that hold namespaces; the kernel removes the rest."""
        for holder in self._holders:
            with contextlib.suppress(ProcessLookupError):
                holder.send_signal(signal.SIGKILL)
            holder.wait()
        self._holders.clear()
        self.pids.clear()

    def address(self, host: int) -> str:
        """Return the host's address, valid inside the lab only."""
        return f"{_NETWORK}.{host + 1}"

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return the words before a command that run it on a host."""
        return ("nsenter", "--target", str(self.pids[host]), "--net")

    @contextlib.contextmanager
    def unshaped(self) -> Iterator[None]:
        """Remove the shaping of cables in the block, for untimed work."""
        remove = "qdisc del dev {device} root"
        self._each_end(remove, remove)
        try:
            yield
        finally:
            self._put_shapes()

    def switch_host(self, mtu: int = 9000) -> tuple[str, Host]:
        """Raise the MTU of all cables, and give the first switch an address.

        Returns:
            The address, and a host for processes that run at the switch, before shaped cables.
        """
        address = f"{_NETWORK}.{_MAX_HOSTS + 1}"
        racks, hosts = range(self.racks), range(self.hosts)
        joined = [f"{end}{rack}" for rack in racks[1:] for end in ("up", "down")]
        lines = [f"link set {name} mtu {mtu}" for name in (*(f"h{h}" for h in hosts), *joined)]
        lines += [f"link set br{rack} mtu {mtu}" for rack in racks]
        for host in hosts:
            _batch(self.pids[host], "ip", [f"link set {INTERFACE} mtu {mtu}"])
        lines += ["link set lo up", f"addr add {address}/24 dev br0"]
        _batch(self.pids[-1], "ip", lines)
        return address, Host(self.prefix(-1), "br0")

    def unplug(self, host: int) -> None:
        """Disconnect a host's cable, without notice to the other hosts."""
        _batch(self.pids[-1], "ip", [f"link set h{host} down"])

    def ranks(self) -> list[Host]:
        return [Host(self.prefix(host), INTERFACE) for host in range(self.hosts)]

    def counters(self) -> list[tuple[int, int]]:
        """Return the bytes that each host received and sent, including headers."""
        traffic = []
        for host in range(self.hosts):
            # Unlike sysfs, this file shows the namespace of the process.
            text = Path(f"/proc/{self.pids[host]}/net/dev").read_text()
            line = next(line for line in text.splitlines() if line.strip().startswith(INTERFACE))
            numbers = line.split(":")[1].split()
            traffic.append((int(numbers[0]), int(numbers[8])))
        return traffic

    def run(self, command: Sequence[str]) -> list[int]:
        """Run the command on all hosts simultaneously; return the exit codes.

        Sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME.
        """
        running: list[subprocess.Popen[bytes]] = []
        try:
            for host in range(self.hosts):
                environment = {
                    **os.environ, "RANK": str(host), "WORLD_SIZE": str(self.hosts),
                    "MASTER_ADDR": self.address(0), "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                }  # fmt: skip
                running.append(
                    subprocess.Popen(
                        [*self.prefix(host), "setpriv", "--pdeathsig", "KILL", *command],
                        env=environment, start_new_session=True,
                    )
                )  # fmt: skip
            return [process.wait() for process in running]
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _hold(self) -> None:
        namespace = os.readlink("/proc/self/ns/net")
        holder = subprocess.Popen(
            ["unshare", "--net", "setpriv", "--pdeathsig", "KILL", "sh", "-c", _HOLD],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._holders.append(holder)
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                named = Path(f"/proc/{holder.pid}/comm").read_text().strip()
                if named == "sleep" and os.readlink(f"/proc/{holder.pid}/ns/net") != namespace:
                    self.pids.append(holder.pid)
                    return
            if holder.poll() is not None:
                break
            time.sleep(0.005)
        raise ClusterError(
            "a network namespace could not be created",
            remedy="run as root, outside of containers that forbid it",
        )  # fmt: skip

    def _wire(self) -> None:
        switch = self.pids[-1]
        links = []
        for rack in range(self.racks):
            links += [f"link add br{rack} type bridge", f"link set br{rack} up"]
        for host in range(self.hosts):
            links += [
                f"link add h{host} type veth peer name {INTERFACE} netns {self.pids[host]}",
                f"link set h{host} master br{host * self.racks // self.hosts} up",
            ]
        for rack in range(1, self.racks):
            links += [
                f"link add up{rack} type veth peer name down{rack}",
                f"link set up{rack} master br{rack} up",
                f"link set down{rack} master br{rack - 1} up",
            ]
        _batch(switch, "ip", links)
        for host in range(self.hosts):
            _batch(
                self.pids[host], "ip",
                ["link set lo up", f"addr add {self.address(host)}/24 dev {INTERFACE}",
                 f"link set {INTERFACE} up"],
            )  # fmt: skip
        self._put_shapes()

    def _put_shapes(self) -> None:
        cable = _shape(self.bytes_per_s)
        between = _shape(self.between_bytes_per_s or self.bytes_per_s)
        self._each_end("qdisc add dev {device} " + cable, "qdisc add dev {device} " + between)

    def _each_end(self, line: str, between: str) -> None:
        hosts, joined = range(self.hosts), range(1, self.racks)
        ends = [line.format(device=f"h{host}") for host in hosts]
        ends += [between.format(device=f"{end}{n}") for n in joined for end in ("up", "down")]
        _batch(self.pids[-1], "tc", ends)
        for host in hosts:
            _batch(self.pids[host], "tc", [line.format(device=INTERFACE)])


def _shape(bytes_per_s: float) -> str:
    burst = max(_BURST_BYTES, int(bytes_per_s * _BURST_S))
    return f"root tbf rate {bytes_per_s * 8:.0f}bit burst {burst} latency 100ms"


def _batch(pid: int, tool: str, lines: Sequence[str]) -> None:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        messages = done.stderr.strip().splitlines()
        raise ClusterError(f"the network lab cannot be wired: {tool} failed",
                           where=messages[0] if messages else None)  # fmt: skip
