"""Clusters as TOML files, presets and short forms."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.cluster.devices import NUMBERS, Device, device, read_device
from slipstream.cluster.generators import GENERATORS, star
from slipstream.cluster.quantity import Quantity
from slipstream.cluster.topology import Aggregator, LinkKind, Topology
from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.files import read_bytes, replacing
from slipstream.provenance import Provenance
from slipstream.schema import Readers, build, read
from slipstream.units import parse_bandwidth, parse_duration_ns

if TYPE_CHECKING:
    from slipstream.cluster.cluster import Cluster

_KEYS = (
    "name", "about", "alpha_ns", "reduce_ns_per_byte", "overlap_penalty", "regimes", "topology",
    "links", "device", "host", "calibration",
)  # fmt: skip
"""Keys of a file, in the order in which they are written."""
_MAX_BYTES = 16 << 20
_SHORT = ("workers", "link", "latency", "device")


def presets() -> dict[str, str]:
    """Return the names of clusters that ship with the package, with descriptions."""
    about = {}
    for entry in resources.files("slipstream.cluster").joinpath("presets").iterdir():
        if entry.name.endswith(".toml") and entry.name != "devices.toml":
            about[entry.name.removesuffix(".toml")] = str(
                tomllib.loads(entry.read_text()).get("about", "")
            )
    return dict(sorted(about.items()))


def load(cluster: type[Cluster], name: str | Path, sizes: Mapping[str, Any]) -> Cluster:
    """See `Cluster.load`."""
    text = str(name)
    if isinstance(name, str) and "=" in text and not Path(text).exists():
        return _short_form(cluster, text)
    shipped = presets()
    if isinstance(name, str) and text in shipped:
        data = resources.files("slipstream.cluster").joinpath(f"presets/{text}.toml").read_text()
        return _parse(cluster, data, text, sizes)
    path = Path(name)
    if not path.is_file():
        raise UnknownNameError("cluster", text, shipped, where="neither a preset nor a file")
    try:
        return _parse(cluster, read_bytes(path, most=_MAX_BYTES).decode(), text, sizes)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("cluster", f"{text} cannot be read: {error}") from error


def _short_form(cluster: type[Cluster], text: str) -> Cluster:
    """Build workers on one switch: ``workers=4,link=1gbit,latency=50us,device=h100-sxm``."""
    settings: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if key not in _SHORT:
            raise UnknownNameError("cluster setting", key, _SHORT, where=text)
        if not equals or not value.strip() or key in settings:
            raise InvalidArgumentError("cluster", f"'{part}' is not a setting", where=text)
        settings[key] = value.strip()
    example = "workers=4,link=1gbit,latency=50us"
    for key in ("workers", "link"):
        if key not in settings:
            raise InvalidArgumentError("cluster", f"'{text}' lacks {key}", remedy=example)
    if not re.fullmatch("[0-9]+", settings["workers"]):
        raise InvalidArgumentError(
            "workers", f"'{settings['workers']}' is not an integer", remedy=example
        )
    link = LinkKind.of(
        settings["link"],
        parse_bandwidth(settings["link"], "link"),
        # One half of a message's latency is before the switch, the other half behind it.
        parse_duration_ns(settings.get("latency", "0s"), "latency") / 2,
        source=text,
    )
    kind = device(settings["device"]) if "device" in settings else None
    return cluster(text, star(int(settings["workers"]), link), kind,
                   Quantity(0.0, Provenance.USER, text))  # fmt: skip


def _parse(cluster: type[Cluster], text: str, name: str, sizes: Mapping[str, Any]) -> Cluster:
    """Parse a file with `Cluster`'s fields, and with kinds of links by name in ``links``."""
    try:
        try:
            data = {"name": name, **tomllib.loads(text)}
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError("cluster", f"{name} is not TOML: {error}") from error
        links = read(Mapping[str, Any], data.pop("links", {}), "links", NUMBERS)
        kinds = {
            kind: build(LinkKind, table, f"links.{kind}", "link", NUMBERS, name=kind)
            for kind, table in links.items()
        }
        readers: Readers = {
            **NUMBERS,
            Device: read_device,
            LinkKind: lambda value, place: _link(value, place, kinds),
            Topology: lambda value, place: _topology(value, place, readers),
        }
        if sizes and isinstance(data.get("topology"), Mapping):
            data["topology"] |= sizes
        return build(cluster, data, "", "cluster", readers)
    except SlipstreamError as error:
        error.where = f"{name}, {error.where}" if error.where else name
        error.remedy = error.remedy or "see the example in docs/cluster.md"
        raise


def _link(value: Any, place: str, kinds: Mapping[str, LinkKind]) -> LinkKind:
    if isinstance(value, LinkKind):
        return value
    if not isinstance(value, str) or value not in kinds:
        raise UnknownNameError("link kind", str(value), kinds, where=place)
    return kinds[value]


def _topology(value: Any, place: str, readers: Readers) -> Topology:
    table = dict(read(Mapping[str, Any], value, place, readers))
    name = read(str, table.pop("generator", ""), f"{place}.generator", readers)
    if name not in GENERATORS:
        raise UnknownNameError("topology generator", name, GENERATORS, where=place)
    changes = {key: table.pop(key) for key in _CHANGES if key in table}
    try:
        topology = build(GENERATORS[name], table, place, name, readers)
        return build(_changed, changes, place, name, readers, topology=topology)
    except (MemoryError, OverflowError) as error:
        raise InvalidArgumentError(
            place, f"{name} is too large for this machine's memory", remedy="use fewer devices"
        ) from error


def _changed(
    topology: Topology,
    routes: Sequence[Sequence[int]] = (),
    capacities: Sequence[tuple[int, float]] = (),
    aggregator: Mapping[str, Any] | None = None,
) -> Topology:
    """Return a network with a file's changes; each route is two devices, then links."""
    if any(len(route) < 2 for route in routes):
        raise InvalidArgumentError(
            "topology.routes",
            "contains a route with fewer than two devices",
            remedy="write [0, 1, link, ...]",
        )
    if routes:
        topology = topology.with_routes({(route[0], route[1]): route[2:] for route in routes})
    if aggregator is not None:
        table, place = dict(aggregator), "topology.aggregator"
        switches = table.pop("switches", None)
        if switches is not None:
            switches = read(Sequence[int], switches, f"{place}.switches", {})
        topology = topology.with_aggregators(
            build(Aggregator, table, place, "aggregator", {}), switches
        )
    for link, rate in capacities:
        topology = topology.with_capacity(link, rate)
    return topology


_CHANGES = ("routes", "capacities", "aggregator")


# ---- writing --------------------------------------------------------------------------------


def save(cluster: Cluster, path: Path) -> None:
    """See `Cluster.save`."""
    kinds: dict[str, LinkKind] = {}
    data = {**vars(cluster), "topology": _describe(cluster.topology, kinds), "links": kinds}
    lines = _lines(_plain({key: data[key] for key in _KEYS}), ())
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


def _plain(value: Any) -> Any:
    """Return a value as tables, arrays and numbers, without unknown and empty entries."""
    if isinstance(value, LinkKind):
        return {"bytes_per_s": _plain(value.bytes_per_s), "latency_ns": _plain(value.latency_ns)}
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None and not _is_empty(v)}
    return [_plain(element) for element in value] if isinstance(value, tuple) else value


def _is_empty(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple)) and not value


def _describe(topology: Topology, kinds: dict[str, LinkKind]) -> dict[str, Any]:
    def name_of(kind: LinkKind) -> str:
        name = kind.name
        while kinds.get(name, kind) != kind:
            name += "'"
        kinds[name] = kind
        return name

    table: dict[str, Any] = {"generator": topology.generator}
    for key, value in topology.settings.items():
        if isinstance(value, LinkKind):
            table[key] = name_of(value)
        elif key == "edges":
            table[key] = [[a, b, name_of(kind)] for a, b, kind in value]
        elif key == "parts":
            table[key] = [_describe(part, kinds) for part in value]
        else:
            table[key] = value
    return table


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return a TOML table: first values that fit a line, then nested tables."""
    below = {key: v for key, v in table.items() if isinstance(v, Mapping) and not _inline(v)}
    lines = [f"[{'.'.join(map(_key, path))}]"] if path else []
    lines += [f"{_key(key)} = {_value(v)}" for key, v in table.items() if key not in below]
    for key, value in below.items():
        lines += ["", *_lines(value, (*path, key))]
    return lines


def _inline(table: Mapping[str, Any]) -> bool:
    return "value" in table and "provenance" in table


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence) or (hasattr(value, "tolist") and np.ndim(value)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return "inf" if number > 0 else "nan"
    return repr(number)
