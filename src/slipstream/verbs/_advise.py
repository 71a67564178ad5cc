"""advise: every technique that might help, ranked, with what does not apply and why."""

from __future__ import annotations

from collections.abc import Callable

from slipstream import technique
from slipstream.durations import Durations
from slipstream.graph import Graph
from slipstream.verbs._predict import Prediction, predict


def advise(
    graph: Graph,
    *,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """Predict every installed technique with its default settings; the fastest per sample first.

    Techniques that do not apply come last, with the reason.

    Raises:
        SlipstreamError: an installed technique cannot be loaded.
    """
    candidates = [kind() for kind in technique.registry().values()]
    found = predict(graph, candidates, durations=durations, widen=widen, say=say)
    return sorted(found, key=lambda p: (p.why_not is not None, p.ratio))
