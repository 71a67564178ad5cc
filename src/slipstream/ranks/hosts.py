"""Hosts for the ranks of a cluster on this machine: of a network lab, or its loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.cluster.cluster import Cluster
from slipstream.ranks.calibration import cores
from slipstream.ranks.launch import Host
from slipstream.ranks.netlab import Netlab, why_no_netlab

# Ethernet, IP and TCP with time stamps, on 1448 bytes of a full packet; the interface counts them.
HEADERS = (1448 + 66) / 1448
# A token bucket of this machine's kernel carries no more without needing a core of its own.
_FASTEST_BYTES_PER_S = 3.2e8
_HOST_RATE = 1e11


@dataclass(frozen=True)
class Hosts:
    """Where ranks run, and what lies between them.

    Attributes:
        ranks: the host of each.
        notes: where they are and what that means for numbers, a sentence each.
        private: whether nothing else sends through these interfaces.
        shaped: whether the links are those of the cluster.
        sharing: how many ranks one interface's counter counts together.
        bytes_per_s: what a rank's cable carries each way, headers included; 0: it has none.
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
        """Links as fast as this machine, for what is not timed."""
        if self._lab is None or not self.shaped:
            yield
            return
        with self._lab.unshaped():
            yield


@contextlib.contextmanager
def hosts_of(cluster: Cluster, ranks: int) -> Iterator[Hosts]:
    """Hosts for `ranks` on links like the cluster's where this machine can make them.

    Without root, or where the cluster's network is none of equal cables into one switch, they
    communicate through this machine's memory, and `Hosts.notes` says why. Nothing is left behind.
    """
    crowded = cores() < ranks
    noise = [
        f"{ranks} ranks on {cores()} cores wait for each other: measured times are noisy, and "
        "longer than on as many machines"
    ] * crowded
    reason = why_no_netlab()
    rate = _line_rate(cluster)
    with contextlib.ExitStack() as stack:
        if reason is None and isinstance(rate, float):
            lab = stack.enter_context(Netlab(ranks, rate))
            note = (
                f"{ranks} ranks on hosts of a network lab, cables of {rate * 8 / 1e6:.0f} Mbit/s "
                "with headers, as the cluster says"
            )
            yield Hosts(tuple(lab.ranks()), (note, *noise), True, True, 1, rate, lab)
            return
        why = rate if isinstance(rate, str) else reason
        note = f"{ranks} ranks communicate through this machine's memory: {why}"
        if reason is None:
            # A host of its own, so that its counters count nothing else.
            lab = stack.enter_context(Netlab(1, _HOST_RATE))
            inside = Host(lab.prefix(0), "lo")
            yield Hosts((inside,) * ranks, (note, *noise), True, False, ranks, _lab=lab)
            return
        shared = "bytes are all that passed the loopback interface meanwhile, other programs' too"
        yield Hosts((Host(),) * ranks, (note, shared, *noise), False, False, ranks)


def _line_rate(cluster: Cluster) -> float | str:
    """Bytes a second of a cable, headers included; or why its links cannot be made here."""
    topology = cluster.topology
    if topology.generator == "loopback":
        return "so does the cluster"
    kinds = {kind.bytes_per_s.value for kind in topology.link_kinds}
    if topology.generator != "star" or len(kinds) != 1:
        return f"a network lab has one switch and equal cables, {cluster.name} is another network"
    rate = float(kinds.pop()) * HEADERS
    if rate > _FASTEST_BYTES_PER_S:
        return f"links of {rate * 8 / 1e9:.0f} Gbit/s are faster than a network lab here"
    return rate
