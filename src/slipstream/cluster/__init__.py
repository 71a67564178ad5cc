"""Clusters: devices, links and topologies; the cost of a collective, and simulation of many.

from slipstream.cluster import Cluster, Collective

cluster = Cluster.load("h100x8-100gbe", hosts=16)
cluster.cost(Collective("all_reduce", nbytes=668e6)).seconds
"""

from slipstream.cluster.closed_form import closed_form_ns
from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import KINDS, Collective
from slipstream.cluster.cost import Cost, Interval
from slipstream.cluster.devices import Device, device, device_kinds
from slipstream.cluster.errors import ClusterError
from slipstream.cluster.files import presets
from slipstream.cluster.generators import (
    dragonfly,
    fat_tree,
    from_edges,
    gpu_hosts,
    islands,
    leaf_spine,
    loopback,
    mesh,
    nvswitch,
    rail,
    ring,
    star,
    torus,
)
from slipstream.cluster.groups import Group, Mesh
from slipstream.cluster.lower import Queues
from slipstream.cluster.quantity import Calibration, Quantity
from slipstream.cluster.regimes import Regime
from slipstream.cluster.tasks import Job, Task, Tasks
from slipstream.cluster.timeline import Bottleneck, JobTimeline, Timeline, simulate
from slipstream.cluster.topology import Aggregator, Link, LinkKind, Node, NodeKind, Topology

__all__ = [
    "KINDS",
    "Aggregator",
    "Bottleneck",
    "Calibration",
    "Cluster",
    "ClusterError",
    "Collective",
    "Cost",
    "Device",
    "Group",
    "Interval",
    "Job",
    "JobTimeline",
    "Link",
    "LinkKind",
    "Mesh",
    "Node",
    "NodeKind",
    "Quantity",
    "Queues",
    "Regime",
    "Task",
    "Tasks",
    "Timeline",
    "Topology",
    "closed_form_ns",
    "device",
    "device_kinds",
    "dragonfly",
    "fat_tree",
    "from_edges",
    "gpu_hosts",
    "islands",
    "leaf_spine",
    "loopback",
    "mesh",
    "nvswitch",
    "presets",
    "rail",
    "ring",
    "simulate",
    "star",
    "torus",
]
