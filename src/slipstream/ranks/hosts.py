"""Hosts for the ranks of a cluster on this machine: a network lab or the loopback interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.cluster.cluster import Cluster
from slipstream.ranks.calibration import cores
from slipstream.ranks.launch import Host
from slipstream.ranks.netlab import Netlab, why_no_netlab

# Ethernet, IP and TCP headers with time stamps per 1448 bytes, which interfaces count.
HEADERS = (1448 + 66) / 1448
# Faster token buckets would occupy a core.
_MAX_BYTES_PER_S = 3.2e8
_HOST_RATE = 1e11


@dataclass(frozen=True)
class Hosts:
    """Hosts of ranks and the links between them.

    Attributes:
        ranks: host of each rank.
        notes: sentences about the hosts and their effect on measurements.
        private: whether no other program sends through these interfaces.
        shaped: whether the links have the cluster's rates.
        sharing: number of ranks per interface counter.
        bytes_per_s: rate of a rank's cable in each direction, with headers; 0 without a cable.
    """

    ranks: tuple[Host, ...]
    notes: tuple[str, ...]
    private: bool
    shaped: bool
    sharing: int
    bytes_per_s: float = 0.0
    _lab: Netlab | None = field(default=None, repr=False, compare=False)

    @contextlib.contextmanager
    def unshaped(self) -> Iterator[None]:
        """Remove the shaping of links in the block, for untimed work."""
        if self._lab is None or not self.shaped:
            yield
            return
        with self._lab.unshaped():
            yield


@contextlib.contextmanager
def hosts_of(cluster: Cluster, ranks: int) -> Iterator[Hosts]:
    """Yield hosts for `ranks`, on links like the cluster's if this machine can create them.

    Without root, or for a network other than equal cables to one switch, ranks communicate through
    this machine's memory; `Hosts.notes` has the reason.
    """
    crowded = cores() < ranks
    noise = [
        f"{ranks} ranks share {cores()} cores: measured times are noisy, and longer than on "
        f"{ranks} machines"
    ] * crowded
    reason = why_no_netlab()
    rate = _line_rate(cluster)
    with contextlib.ExitStack() as stack:
        if reason is None and isinstance(rate, float):
            lab = stack.enter_context(Netlab(ranks, rate))
            note = (
                f"{ranks} ranks on hosts of a network lab, cables of {rate * 8 / 1e6:.0f} Mbit/s "
                "with headers, as in the cluster"
            )
            yield Hosts(tuple(lab.ranks()), (note, *noise), True, True, 1, rate, lab)
            return
        cause = rate if isinstance(rate, str) else reason
        note = f"{ranks} ranks communicate through this machine's memory: {cause}"
        if reason is None:
            # A separate host, whose counters exclude other programs.
            lab = stack.enter_context(Netlab(1, _HOST_RATE))
            inside = Host(lab.prefix(0), "lo")
            yield Hosts((inside,) * ranks, (note, *noise), True, False, ranks, _lab=lab)
            return
        shared = "bytes include those of other programs on the loopback interface"
        yield Hosts((Host(),) * ranks, (note, shared, *noise), False, False, ranks)


def _line_rate(cluster: Cluster) -> float | str:
    """Return the bytes/s of a cable with headers, or the reason why it cannot be created here."""
    topology = cluster.topology
    if topology.generator == "loopback":
        return "the cluster is this machine's memory"
    kinds = {kind.bytes_per_s.value for kind in topology.link_kinds}
    if topology.generator != "star" or len(kinds) != 1:
        return f"a network lab has one switch and equal cables, unlike {cluster.name}"
    rate = float(kinds.pop()) * HEADERS
    if rate > _MAX_BYTES_PER_S:
        return f"links of {rate * 8 / 1e9:.0f} Gbit/s are faster than a network lab on this machine"
    return rate
