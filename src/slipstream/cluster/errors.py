"""What can be wrong with a description of a cluster."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class ClusterError(SlipstreamError):
    """A cluster, route, group or calibration that cannot be used; names the element."""
