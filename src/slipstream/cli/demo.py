"""``slipstream demo``: the whole loop on a real language model, in a few minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli._workload import StorePath
from slipstream.errors import SlipstreamError

_TECHNIQUE = "amp:bf16"
# `prove` records the step once more; fewer steps than the first time keep the demo short.
_AGAIN = 9


def command(
    budget: Annotated[str, typer.Option("--budget", help="Time for the measurement.")] = "45s",
    store: StorePath = None,
) -> None:
    """Profile, predict, apply and prove one technique on a transformer, on real text.

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
            f"the demo keeps its results in '{graph.parent}' here, which cannot be made: "
            f"{error.strerror}",
            remedy='run it in a folder you can write: cd "$(mktemp -d)" && slipstream demo',
        ) from error
    note("1/4 profile: one training step of a language model, recorded as a graph")
    profile.command(target, output=graph, threads=1)
    note(f"\n2/4 predict: what would {_TECHNIQUE} gain, before anybody implements it?")
    predict.command(str(graph), technique=[_TECHNIQUE], store=store)
    note(f"\n3/4 apply: the real {_TECHNIQUE}, beside the original, from the same seed")
    apply.command(target, technique=[_TECHNIQUE], threads=1)
    note("\n4/4 prove: does it still learn as well? Both train a little from the same seeds;")
    note(f"    then both are measured in turns for at most {budget}, the prediction beside it")
    prove.command(
        target, technique=[_TECHNIQUE], budget=budget, threads=1, steps=_AGAIN, store=store
    )
    note("\nnext: slipstream advise YOUR_SCRIPT.py    (slipstream --help for the rest)")
