"""Cluster files are read by type: errors name the problem, the place and the remedy."""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster import Aggregator, Cluster, LinkKind, islands, star, torus
from slipstream.cluster.files import _lines
from slipstream.errors import InvalidArgumentError, SlipstreamError

TEXT = """
name = "all there is"
device = { kind = "ours", memory_bytes = 8e9, flops = { float32 = 1e12 } }
alpha_ns = 4000
host = { loader_threads = 4 }
regimes = [{ from_bytes = 0, alpha_ns = 4000 }, { from_bytes = 65536, alpha_ns = 9000 }]

[topology]
generator = "leaf_spine"
devices = 8
per_leaf = 4
spines = 2
link = "nic"
oversubscription = 2
uplink_latency_ns = 500
routes = [[0, 1, 0, 9]]
capacities = [[3, 1e9]]
aggregator = { slots = 64, slot_bytes = 1024, bytes_per_s = 5e9, switches = [8] }

[links.nic]
bytes_per_s = { value = 1e9, provenance = "datasheet", source = "a data sheet" }
latency_ns = 1000

[calibration]
date = "2026-01-01"
fingerprint = "this machine"
libraries = "torch, gloo"
residual = 0.01
residual_p90 = 0.02
oversubscription = 1
"""
JUNK = (
    True,
    math.nan,
    -math.inf,
    -1,
    0.5,
    99999999999,
    10**400,
    "",
    "x",
    [],
    [[]],
    [7],
    {},
    {"": 1},
)


def loaded(tmp_path: Path, data: dict[str, Any]) -> Cluster:
    path = tmp_path / "c.toml"
    path.write_text("\n".join(_lines(data, ())))
    return Cluster.load(path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a file, including tables and entries of arrays."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in entries:
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))


@pytest.mark.parametrize(
    "path", list(places(tomllib.loads(TEXT))), ids=lambda p: ".".join(map(str, p))
)
def test_no_value_in_a_file_causes_an_internal_error(path: tuple[Any, ...], tmp_path: Path) -> None:
    errors = [error for junk in JUNK if (error := refusal(path, junk, tmp_path)) is not None]
    for error in errors:
        assert error.what
        assert "c.toml" in (error.where or "")
        assert error.remedy
    assert len(errors) > 1


def refusal(path: tuple[Any, ...], junk: Any, folder: Path) -> SlipstreamError | None:
    """Return the error with `junk` at one place of the file; None if it is allowed there."""
    data = copy.deepcopy(tomllib.loads(TEXT))
    table: Any = data
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = junk
    try:
        loaded(folder, data)
    except SlipstreamError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("was", "becomes", "what", "where", "remedy"),
    [
        ('device = "h100-sxm"', "device = true", "device: True", "", "name"),
        ('nic = "nic"', "nic = nan", "'nan'", ", topology.nic", "known: nic,"),
        ('"gpu_hosts"', "[]", "topology.generator: []", "", "quotes"),
        ("gpus = 8", "gpus = 99999999999", "134,217,728", "", "hosts"),
        ("gpus = 8", "gpus = '8'", "topology.gpus: '8'", "", " 8"),
        ("gpus = 8", "", "topology.gpus: ", "", " gpus ="),
    ],
)
def test_errors_name_the_place(
    was: str, becomes: str, what: str, where: str, remedy: str, tmp_path: Path
) -> None:
    preset = resources.files("slipstream.cluster") / "presets/h100x8-100gbe.toml"
    path = tmp_path / "c.toml"
    path.write_text(preset.read_text().replace(was, becomes))
    with pytest.raises(SlipstreamError) as caught:
        Cluster.load(path)
    assert what in caught.value.what
    assert caught.value.where == f"{path}{where}"
    assert remedy in (caught.value.remedy or "")


def test_saved_clusters_are_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    # An unquoted date is accepted, too.
    path.write_text(TEXT.replace('"2026-01-01"', "2026-01-01"))
    cluster = Cluster.load(path)
    cluster.save(tmp_path / "1.toml")
    again = Cluster.load(tmp_path / "1.toml")
    again.save(tmp_path / "2.toml")
    assert (tmp_path / "1.toml").read_text() == (tmp_path / "2.toml").read_text()
    for name in ("name", "device", "alpha_ns", "host", "regimes", "calibration"):
        assert getattr(again, name) == getattr(cluster, name)
    assert again.topology.aggregator == Aggregator(64, 1024.0, 5e9)
    assert again.topology.capacity.tolist() == cluster.topology.capacity.tolist()
    assert again.topology.route(0, 1) == [0, 9]


def test_networks_of_networks_are_read_by_type_as_well(tmp_path: Path) -> None:
    link = LinkKind.of("nic", 1e9, 500.0)
    parts = [torus((2, 2), link, per_host=2), star(3, link)]
    Cluster("two", islands(parts, link, link)).save(tmp_path / "c.toml")
    data = tomllib.loads((tmp_path / "c.toml").read_text())
    assert loaded(tmp_path, data).devices == 7
    data["topology"]["parts"][0]["dims"] = [2, "2"]
    with pytest.raises(InvalidArgumentError, match=r"topology\.parts\[0\]\.dims\[1\]: '2' is not"):
        loaded(tmp_path, data)
