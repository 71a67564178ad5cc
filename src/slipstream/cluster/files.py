"""Clusters as TOML files, presets and short forms."""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.cluster.calibration import Calibration
from slipstream.cluster.devices import Device, device
from slipstream.cluster.generators import GENERATORS, star
from slipstream.cluster.quantity import NOT_GIVEN, Quantity
from slipstream.cluster.regimes import read_regimes
from slipstream.cluster.topology import Aggregator, LinkKind, Topology
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.files import replacing
from slipstream.provenance import Provenance
from slipstream.units import parse_bandwidth, parse_duration_ns

if TYPE_CHECKING:
    from slipstream.cluster.cluster import Cluster

_KEYS = {
    "name", "about", "topology", "links", "device", "alpha_ns", "reduce_ns_per_byte", "host",
    "overlap_penalty", "calibration", "regimes",
}  # fmt: skip
_SHORT = ("workers", "link", "latency", "device")


def presets() -> dict[str, str]:
    """Names of the clusters that ship with the package, and what they are."""
    found = {}
    for entry in resources.files("slipstream.cluster").joinpath("presets").iterdir():
        if entry.name.endswith(".toml") and entry.name != "devices.toml":
            found[entry.name.removesuffix(".toml")] = str(
                tomllib.loads(entry.read_text()).get("about", "")
            )
    return dict(sorted(found.items()))


def load(cluster: type[Cluster], name: str | Path, sizes: Mapping[str, Any]) -> Cluster:
    """See `Cluster.load`."""
    text = str(name)
    if isinstance(name, str) and "=" in text and not Path(text).exists():
        return _short_form(cluster, text)
    known = presets()
    if isinstance(name, str) and text in known:
        data = resources.files("slipstream.cluster").joinpath(f"presets/{text}.toml").read_text()
        return _parse(cluster, data, text, sizes)
    path = Path(name)
    if not path.is_file():
        raise UnknownNameError("cluster", text, known, where="neither a preset nor a file")
    try:
        return _parse(cluster, path.read_text(), text, sizes)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("cluster", f"{text} cannot be read: {error}") from error


def _short_form(cluster: type[Cluster], text: str) -> Cluster:
    """``workers=4,link=1gbit,latency=50us,device=h100-sxm``: workers on one switch."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if key not in _SHORT:
            raise UnknownNameError("cluster setting", key, _SHORT, where=text)
        if not equals or not value.strip() or key in given:
            raise InvalidArgumentError("cluster", f"'{part}' is not a setting", where=text)
        given[key] = value.strip()
    example = "workers=4,link=1gbit,latency=50us"
    for key in ("workers", "link"):
        if key not in given:
            raise InvalidArgumentError("cluster", f"'{text}' lacks {key}", remedy=example)
    if not re.fullmatch("[0-9]+", given["workers"]):
        raise InvalidArgumentError(
            "workers", f"'{given['workers']}' is not a whole number", remedy=example
        )
    link = LinkKind.of(
        given["link"],
        parse_bandwidth(given["link"], "link"),
        # Half of a message's latency on the way to the switch, half behind it.
        parse_duration_ns(given.get("latency", "0s"), "latency") / 2,
        source=text,
    )
    kind = device(given["device"]) if "device" in given else None
    return cluster(text, star(int(given["workers"]), link), kind,
                   Quantity(0.0, Provenance.USER, text))  # fmt: skip


def _parse(cluster: type[Cluster], text: str, name: str, sizes: Mapping[str, Any]) -> Cluster:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError("cluster", f"{name} is not TOML: {error}") from error
    for key in data:
        if key not in _KEYS:
            raise UnknownNameError("cluster setting", key, _KEYS, where=name)
    if not isinstance(data.get("topology"), Mapping):
        raise InvalidArgumentError("topology", "is missing", where=name)
    kinds = {kind: _link_kind(kind, table) for kind, table in _table(data, "links").items()}
    given = data.get("device")
    if given is None:
        made = None
    elif isinstance(given, str):
        made = device(given)
    else:
        table = dict(given)
        made = Device.read(str(table.pop("kind", "device")), table)
    return cluster(
        str(data.get("name", name)),
        _topology({**data["topology"], **sizes}, kinds),
        made,
        Quantity.read("alpha_ns", data.get("alpha_ns", NOT_GIVEN)),
        Quantity.read("reduce_ns_per_byte", data.get("reduce_ns_per_byte", NOT_GIVEN)),
        {key: Quantity.read(f"host.{key}", v) for key, v in _table(data, "host").items()},
        Quantity.read("overlap_penalty", data.get("overlap_penalty", NOT_GIVEN)),
        _calibration(data["calibration"]) if "calibration" in data else None,
        str(data.get("about", "")),
        read_regimes(data.get("regimes", ())),
    )


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, Mapping):
        raise InvalidArgumentError(key, "is not a table")
    return table


def _link_kind(name: str, table: Any) -> LinkKind:
    if not isinstance(table, Mapping) or "bytes_per_s" not in table:
        raise InvalidArgumentError(f"links.{name}", "lacks bytes_per_s")
    for key in table:
        if key not in ("bytes_per_s", "latency_ns"):
            raise UnknownNameError("link setting", key, ("bytes_per_s", "latency_ns"))
    return LinkKind(
        name,
        Quantity.read(f"links.{name}.bytes_per_s", table["bytes_per_s"]),
        Quantity.read(
            f"links.{name}.latency_ns",
            table.get("latency_ns", NOT_GIVEN),
        ),
    )


def _calibration(table: Any) -> Calibration:
    try:
        return Calibration(
            str(table["date"]), str(table["fingerprint"]), str(table["libraries"]),
            float(table["residual"]), float(table["residual_p90"]),
            float(table["oversubscription"]), dict(table.get("detail", {})),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError("calibration", f"is malformed: {error}") from error


def _topology(table: Mapping[str, Any], kinds: Mapping[str, LinkKind]) -> Topology:
    settings = dict(table)
    name = settings.pop("generator", None)
    if name not in GENERATORS:
        raise UnknownNameError("topology generator", str(name), GENERATORS)
    routes, capacities = settings.pop("routes", []), settings.pop("capacities", [])
    aggregator = settings.pop("aggregator", None)
    make = GENERATORS[name]
    known = inspect.signature(make).parameters
    for key, value in settings.items():
        if key not in known:
            raise UnknownNameError(f"{name} setting", key, known)
        settings[key] = _setting(name, key, value, kinds)
    missing = [key for key, p in known.items() if p.default is p.empty and key not in settings]
    if missing:
        raise InvalidArgumentError("topology", f"{name} needs {', '.join(missing)}")
    try:
        made = make(**settings)
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError("topology", f"{name}: {error}") from error
    if routes:
        made = made.with_routes({(r[0], r[1]): r[2:] for r in routes})
    if aggregator is not None:
        made = made.with_aggregators(Aggregator.read(aggregator), aggregator.get("switches"))
    for link, rate in capacities:
        made = made.with_capacity(int(link), float(rate))
    return made


def _setting(generator: str, key: str, value: Any, kinds: Mapping[str, LinkKind]) -> Any:
    def kind_of(name: object) -> LinkKind:
        if name not in kinds:
            raise UnknownNameError("link kind", str(name), kinds, where=f"{generator}.{key}")
        return kinds[str(name)]

    if isinstance(value, str):
        return kind_of(value)
    if key == "edges":
        return [(str(a), str(b), kind_of(kind)) for a, b, kind in value]
    if key == "parts":
        return [_topology(part, kinds) for part in value]
    return value


# ---- writing --------------------------------------------------------------------------------


def save(cluster: Cluster, path: Path) -> None:
    """See `Cluster.save`."""
    kinds: dict[str, LinkKind] = {}
    topology = _describe(cluster.topology, kinds)
    data: dict[str, Any] = {"name": cluster.name, "about": cluster.about}
    data["alpha_ns"] = cluster.alpha_ns.to_toml()
    data["reduce_ns_per_byte"] = cluster.reduce_ns_per_byte.to_toml()
    data["overlap_penalty"] = cluster.overlap_penalty.to_toml()
    if cluster.regimes:
        data["regimes"] = [vars(one) for one in cluster.regimes]
    data["topology"] = topology
    data["links"] = {
        name: {"bytes_per_s": k.bytes_per_s.to_toml(), "latency_ns": k.latency_ns.to_toml()}
        for name, k in kinds.items()
    }
    if cluster.device is not None:
        data["device"] = {"kind": cluster.device.kind, **cluster.device.to_toml()}
    if cluster.host:
        data["host"] = {key: number.to_toml() for key, number in cluster.host.items()}
    if cluster.calibration is not None:
        data["calibration"] = vars(cluster.calibration)
    with replacing(path) as beside:
        beside.write_text("\n".join(_lines(data, ())) + "\n")


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
    """A table of TOML: what fits a line first, then the tables below it."""
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
