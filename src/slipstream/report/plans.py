"""Plans that a technique chose from, as an SVG: time against device time."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import UsageError
from slipstream.graph import Graph
from slipstream.report.scatter import scatter_svg
from slipstream.units import format_duration


def plans_svg(graphs: Sequence[Graph]) -> str:
    """Draw the plans of the first predicted step that has some, with the chosen one highlighted.

    Args:
        graphs: predicted steps, whose `meta` has ``plans``.

    Raises:
        UsageError: no technique that applies compared plans.
    """
    found = next((graph.meta["plans"] for graph in graphs if "plans" in graph.meta), None)
    if found is None:
        raise UsageError(
            "--svg: no technique that applies here compared plans",
            remedy="pass one that does, for example --technique burst:4",
        )
    dots = [
        (time_ns, device_ns, f"{spec}: {format_duration(time_ns)}, {format_duration(device_ns)}")
        for spec, time_ns, device_ns in found["plans"]
    ]
    _, times_ns, spent_ns = zip(*found["plans"], strict=True)
    # A limit far above all plans would squeeze them into a corner.
    across, up = (
        limit if limit is not None and limit <= 2 * max(values) else None
        for limit, values in ((found["deadline_ns"], times_ns), (found["device_ns"], spent_ns))
    )
    chosen = [(x, y) for spec, x, y in found["plans"] if spec == found["chosen"]]
    return scatter_svg(
        f"plans that no other one beats; chosen: {found['chosen']}",
        ("time of layers and moves", "device time"), dots, chosen,
        limits=(across, up), as_text=format_duration,
    )  # fmt: skip
