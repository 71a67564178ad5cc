"""A cluster: devices, the network between them, and its calibration."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.cluster import files
from slipstream.cluster.collective import Collective
from slipstream.cluster.cost import Cost, Estimate, Interval, check_group, estimate
from slipstream.cluster.devices import Device
from slipstream.cluster.groups import Group, Mesh
from slipstream.cluster.patterns import candidates
from slipstream.cluster.quantity import NOT_GIVEN, Calibration, Quantity
from slipstream.cluster.regimes import Regime, check_regimes
from slipstream.cluster.topology import Float64s, Topology
from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance, weakest


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices connected by a network. Immutable: methods that change something return a copy.

    Attributes:
        name: name for display.
        topology: nodes, links, routes.
        device: the kind of all its devices; None if only the network matters.
        alpha_ns: software latency of one message, in addition to the links' latencies.
        reduce_ns_per_byte: time to sum one received byte.
        regimes: costs of messages by size, if these differ; the first one's `alpha_ns` is then the
            cluster's.
        host: properties of a host by name: ``input_bytes_per_s``, ``loader_threads``.
        overlap_penalty: relative slowdown of compute while its device communicates (0: none).
        calibration: the fit that produced these numbers; None for data sheets.
    """

    name: str
    topology: Topology
    device: Device | None = None
    alpha_ns: Quantity = NOT_GIVEN
    reduce_ns_per_byte: Quantity = NOT_GIVEN
    host: Mapping[str, Quantity] = field(default_factory=dict)
    overlap_penalty: Quantity = NOT_GIVEN
    calibration: Calibration | None = None
    about: str = ""
    regimes: tuple[Regime, ...] = ()

    def __post_init__(self) -> None:
        check_regimes(self.regimes)

    @property
    def devices(self) -> int:
        return self.topology.devices

    @functools.cached_property
    def provenance(self) -> Provenance:
        """Provenance of its network: the weakest among the numbers that a transfer depends on."""
        kinds = self.topology.link_kinds
        provenances = [k.bytes_per_s.provenance for k in kinds] + [self.alpha_ns.provenance]
        # A missing latency is zero, and included in that of the software.
        provenances += [k.latency_ns.provenance for k in kinds if k.latency_ns.value > 0.0]
        return weakest(provenances)

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for all its devices; None if the price is unknown."""
        if self.device is None or self.device.price_per_hour is None:
            return None
        return self.devices * self.device.price_per_hour.value

    # ---- which devices -----------------------------------------------------------------------

    def all(self) -> Group:
        """Return every device, in the dimensions of a torus, otherwise by hosts."""
        return self._all

    @functools.cached_property
    def _all(self) -> Group:
        dims = tuple(self.topology.settings.get("dims", ()))
        in_host = np.bincount(self.topology.host_of_device)
        if not dims and in_host.size > 1 and in_host.min() == in_host.max() > 1:
            dims = (in_host.size, int(in_host[0]))
        fits = math.prod(dims) == self.devices
        return Group.of(np.arange(self.devices), dims if fits else ())

    def mesh(
        self,
        shape: Sequence[int],
        axes: Sequence[str],
        devices: npt.ArrayLike | None = None,
    ) -> Mesh:
        """Return devices (by default the first ones) in a grid with named axes, the last fastest.

        Raises:
            InvalidArgumentError: the grid is larger than the cluster.
        """
        count = math.prod(int(size) for size in shape)
        if any(int(size) < 1 for size in shape):
            raise InvalidArgumentError("shape", f"{tuple(shape)} has a side less than 1")
        if count > self.devices:
            raise InvalidArgumentError(
                "shape", f"{tuple(shape)} is {count} devices, the cluster has {self.devices}"
            )
        chosen = np.arange(count) if devices is None else np.asarray(devices, np.int64)
        if chosen.size != count:
            raise InvalidArgumentError("devices", f"{chosen.size} do not make {tuple(shape)}")
        check_group(self.topology, Group.of(chosen.reshape(-1)))
        return Mesh(chosen.reshape(tuple(shape)), tuple(axes))

    def group_of(self, collective: Collective) -> Group:
        """Return the devices that take part in a collective.

        Raises:
            InvalidArgumentError: the group has devices that the cluster lacks.
        """
        group = self.all() if collective.group is None else collective.group
        check_group(self.topology, group)
        for server in collective.servers:
            if not 0 <= server < self.devices:
                raise InvalidArgumentError(
                    "servers", f"contains device {server}, but the cluster has {self.devices}"
                )
        return group

    # ---- closed form -------------------------------------------------------------------------

    def cost(self, collective: Collective) -> Cost:
        """Return the cost of a collective without other traffic.

        The first call for a group and algorithm computes its routes (milliseconds for thousands of
        devices); later ones, of any size, take microseconds.

        Raises:
            InvalidArgumentError: the group does not fit the cluster or the algorithm.
            ClusterError: two of its devices are not connected, or only by a link without capacity.
        """
        group = self.group_of(collective)
        size = collective.nbytes
        algo, estimated = min(
            ((name, self._estimate(collective, group, name))
             for name in self.algorithms(collective, group)),
            key=lambda named: _line(named[1].at(size), size),
        )  # fmt: skip
        line = estimated.at(size)
        duration = _line(line, size)
        interval = None
        if self.calibration is not None:
            spread = self.calibration.residual_p90
            interval = Interval(duration * max(0.0, 1.0 - spread), duration * (1.0 + spread))
        name = "" if estimated.bottleneck < 0 else self.topology.link_name(estimated.bottleneck)
        return Cost(
            duration, line[0], algo, name, estimated.sent_per_byte * size, estimated.load, size,
            interval, self.provenance,
        )  # fmt: skip

    def cost_many_ns(
        self,
        kind: str,
        nbytes: npt.ArrayLike,
        ranks: npt.ArrayLike,
        algo: str | Sequence[str] = "auto",
        which: npt.ArrayLike | None = None,
    ) -> Float64s:
        """Return `cost` for many rows, for groups of the first devices.

        Args:
            nbytes: float [rows].
            ranks: int [rows]; row i is the devices 0 to ``ranks[i]`` - 1.
            algo: one for all rows, or several.
            which: int [rows]; index of each row's algorithm if there are several.

        Returns:
            float64 [rows], nanoseconds; bitwise equal to those of `cost`.

        Raises:
            InvalidArgumentError: a row is malformed, or larger than the cluster.
        """
        size, count = np.asarray(nbytes, np.float64), np.asarray(ranks, np.int64)
        names = (algo,) if isinstance(algo, str) else tuple(algo)
        which = np.zeros(1, np.int64) if which is None else np.asarray(which, np.int64)
        size, count, which = np.broadcast_arrays(size, count, which)
        if size.size == 0:
            return np.zeros(size.shape)
        if not (float(size.min()) >= 0.0 and float(size.max()) < np.inf):
            raise InvalidArgumentError(
                "nbytes", "contains a size that is not finite and at least 0"
            )
        low, high = int(count.min()), int(count.max())
        if low < 1 or high > self.devices:
            raise InvalidArgumentError(
                "ranks", f"from {low} to {high}; the cluster has {self.devices} devices"
            )
        if int(which.min()) < 0 or int(which.max()) >= len(names):
            raise InvalidArgumentError(
                "algo", f"a row's index is outside the {len(names)} algorithms"
            )
        best = np.full(size.shape, np.inf)
        rows = which * (high + 1) + count
        seen = np.flatnonzero(np.bincount(rows.reshape(-1), minlength=len(names) * (high + 1)))
        options: list[list[Estimate]] = []
        for row in seen.tolist():
            collective = Collective(kind, 0.0, _first(row % (high + 1)), names[row // (high + 1)])
            group = self.group_of(collective)
            options.append(
                [self._estimate(collective, group, a) for a in self.algorithms(collective, group)]
            )
        # One look-up per column: the n-th option of every kind of row that has it.
        for column in range(max(len(estimates) for estimates in options)):
            column_estimates = {
                row: estimates[column]
                for row, estimates in zip(seen.tolist(), options, strict=True)
                if column < len(estimates)
            }  # fmt: skip
            time = np.full(size.shape, np.inf)
            for part in range(
                max(len(candidate.from_bytes) for candidate in column_estimates.values())
            ):
                start, fixed, slope = np.full((3, len(names) * (high + 1)), np.inf)
                for row, candidate in column_estimates.items():
                    if part < len(candidate.from_bytes):
                        start[row] = candidate.from_bytes[part]
                        fixed[row], slope[row] = (
                            candidate.latency_ns[part],
                            candidate.ns_per_byte[part],
                        )
                if part == 0:
                    slope[np.isinf(slope)] = 0.0
                    time = fixed[rows] + size * slope[rows]
                else:
                    later = size >= start[rows]
                    time[later] = (fixed[rows] + size * slope[rows])[later]
            np.minimum(best, time, out=best)
        return best

    def algorithms(self, collective: Collective, group: Group) -> list[str]:
        """Return the named algorithm, or those that ``auto`` and ``2d`` choose from."""
        if collective.algo not in ("auto", "2d"):
            return [collective.algo]
        names = candidates(
            collective.kind, group.shape, direct=self.topology.direct, algo=collective.algo
        )
        if collective.algo == "auto" and collective.kind == "all_reduce" and (
            self.topology.aggregator is not None
        ):  # fmt: skip
            names.append("in_network")
        if not names:
            raise InvalidArgumentError(
                "algo", f"{collective.kind} of a group of shape {group.shape} has no dimensions "
                "to use", remedy="pass a group of several axes, or algo='auto'",
            )  # fmt: skip
        return names

    @property
    def message_regimes(self) -> tuple[Regime, ...]:
        """Regimes, at least one: without any, all messages have the latency `alpha_ns`."""
        return self.regimes or (Regime(0.0, self.alpha_ns.value),)

    @functools.cached_property
    def _estimates(self) -> dict[tuple[object, ...], Estimate]:
        return {}

    def _estimate(self, collective: Collective, group: Group, algo: str) -> Estimate:
        key = (
            collective.kind, algo, group.key, group.shape, collective.chunks, collective.servers,
        )  # fmt: skip
        cached = self._estimates.get(key)
        if cached is None:
            cached = self._estimates[key] = estimate(
                self.topology, collective, group, algo, self.message_regimes,
                self.reduce_ns_per_byte.value,
            )  # fmt: skip
        return cached

    def __getstate__(self) -> dict[str, Any]:
        # Cached values are computed again when needed.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    # ---- files -------------------------------------------------------------------------------

    @classmethod
    def load(cls, name: str | Path, **sizes: Any) -> Cluster:
        """Load a preset by name, a TOML file by path, or a short form ``"workers=4,link=1gbit"``.

        Args:
            sizes: other arguments for the generator of a preset's topology: ``hosts=64``.

        Raises:
            UnknownNameError: there is no such preset or file.
            InvalidArgumentError: the file or the short form is malformed; the error names the
                setting.
        """
        return files.load(cls, name, sizes)

    def save(self, path: str | Path) -> None:
        """Write a TOML file, with every number's source."""
        files.save(self, Path(path))

    def with_network(self, topology: Topology) -> Cluster:
        """Return a copy with another topology."""
        return replace(self, topology=topology)


@functools.lru_cache(1024)
def _first(ranks: int) -> Group:
    """Return the first devices of any cluster."""
    return Group.of(np.arange(ranks))


def _line(line: tuple[float, float], nbytes: float) -> float:
    return line[0] + nbytes * line[1]
