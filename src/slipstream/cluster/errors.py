"""Errors in descriptions of clusters."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class ClusterError(SlipstreamError):
    """A cluster, route, group or calibration that cannot be used; the error names the element."""
