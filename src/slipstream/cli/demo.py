"""``slipstream demo``: the whole loop on a real language model, in a few minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import StorePath
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.measure.render import ComparisonRow

_FUSED, _AMP = "fused_optimizer:fused", "amp:bf16"
_TECHNIQUES = [_FUSED, _AMP]
# Small enough to fit enough blocks into the budget on a busy machine, where a block of three sides
# and their guard takes several times as long as on a quiet one.
_SETTINGS = ["batch_size=2", "context=64"]


def command(
    budget: Annotated[str, typer.Option(help="Time limit of the measurement.")] = "60s",
    store: StorePath = None,
) -> None:
    """Profile, predict, apply and prove two techniques on a transformer, on real text.

    The model trains on the English text of Python's own reference topics, on one thread.
    """
    from pathlib import Path

    from slipstream.cli import _demo, apply, predict, profile, prove
    from slipstream.cli._output import note

    target = f"{Path(_demo.__file__).parent / 'language_model.py'}:make_workload"
    graph = Path(".slipstream") / "demo.slipgraph"
    try:
        graph.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise SlipstreamError(
            f"the demo cannot create '{graph.parent}' in the current folder for its results: "
            f"{error.strerror}",
            remedy='run it in a folder you can write: cd "$(mktemp -d)" && slipstream demo',
        ) from error
    note("1/4 profile: one training step of a language model, recorded as a graph")
    profile.command(target, settings=_SETTINGS, output=graph, threads=1)
    note("\n2/4 predict: the gain of two techniques, before implementing them")
    predict.command(str(graph), technique=_TECHNIQUES, store=store)
    note(f"\n3/4 apply: the real {_FUSED}, next to the original, from the same seed")
    apply.command(target, settings=_SETTINGS, technique=[_FUSED], threads=1)
    note("\n4/4 prove: do they still learn as well? All train briefly from the same seeds; then")
    note(f"    they are measured alternately for about {budget} and compared with the predictions")
    prove.command(
        target, settings=_SETTINGS, technique=_TECHNIQUES, budget=budget, threads=1, store=store,
    )  # fmt: skip
    note("")
    for line in _ending(store):
        note(line)
    note("\nnext: slipstream advise YOUR_SCRIPT.py    (slipstream --help lists all commands)")


def _ending(store: Path | None) -> list[str]:
    """Return the results of the latest experiment in `store`, as lines per technique."""
    from slipstream.measure.environment import computes_in_bf16
    from slipstream.measure.render import comparison_rows, is_guard
    from slipstream.measure.store import Store

    with Store(store, read_only=True) as opened:
        rows = comparison_rows(opened.load("last"), opened.claims("last"))
    carrying = [row for row in rows if row.carries and not is_guard(row)]
    return [line for row in carrying for line in outcome(row, computes_in_bf16())]


def outcome(row: ComparisonRow, bf16: bool | None) -> list[str]:
    """Return a sentence or two about a measurement of the demo.

    Args:
        bf16: whether this processor computes in bfloat16; None if unknown.
    """
    from slipstream.measure.records import Verdict
    from slipstream.measure.render import describe_inside, format_change

    name, measured = row.arm, f"measured {format_change(row, 2)}"
    if row.predicted is not None:
        inside = describe_inside(row.inside)
        measured = f"predicted {format_change(row.predicted, 2)}, {measured}: {inside}"
    if row.verdict in (Verdict.INCONCLUSIVE, Verdict.UNTRUSTWORTHY):
        return [
            f"{name}: inconclusive: {row.blocks} blocks do not decide it on this machine now; run "
            "longer: slipstream demo --budget 3min"
        ]
    if row.verdict == Verdict.EQUIVALENT:
        return [f"{name}: {measured}; no difference on this machine"]
    lines = [f"{name}: {measured}; {row.verdict}"]
    if name == _AMP and row.verdict == Verdict.SLOWER and bf16 is False:
        lines.append(
            "    this processor has no bfloat16 instructions (no avx512_bf16, amx_bf16 or bf16 "
            "among its flags) and emulates bfloat16; a processor with them may gain"
        )
    return lines
