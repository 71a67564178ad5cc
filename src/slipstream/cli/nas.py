"""Search for a smaller architecture inside your own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.nas import ArchitectureSpace

app = typer.Typer(
    no_args_is_help=True,
    help="Search for a smaller architecture inside your own model.",
    epilog="Start with: slipstream nas space model.py:make_workload",
)


@app.command()
def space(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function that returns (model, inputs, ...); inputs are a tensor or a "
            "tuple, whose first tensor is used if there is a loss.",
        ),
    ],
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="GLOB", help="Layers that stay unchanged; repeatable."),
    ] = None,
    multiple: Annotated[
        int, typer.Option("--multiple", min=1, help="Widths are multiples of this.")
    ] = 8,
    as_json: Json = False,
) -> None:
    """List the widths, depths and kernels of a model that can shrink, and why others cannot.

    slipstream nas space model.py:make_workload
    """
    from slipstream.cli._output import emit, progress
    from slipstream.nas import Supernet, derive_space, estimate

    model, inputs = _model_and_inputs(target)
    with progress("trace") as report:
        report(target)
        found = derive_space(model, inputs, channel_multiple=multiple, keep=keep or ())
    net = Supernet(found)
    sizes = {"whole": estimate(net, found.full), "smallest": estimate(net, found.smallest)}
    first, second = found.summary()
    ranges = (f"{m} {sizes['smallest'][m]:,} to {sizes['whole'][m]:,}" for m in sizes["whole"])
    first = replace(first, notes=[*first.notes, "; ".join(ranges)])
    emit((first, second), _space_json(found, sizes), as_json=as_json)


@app.command()
def search(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function that returns (model, (inputs, classes), (inputs, classes)): "
            "training and validation data.",
        ),
    ],
    board: Annotated[
        str, typer.Option("--board", metavar="NAME", help="Board, such as stm32f446re.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the firmware.")
    ],
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Maximum latency, such as 100ms.")
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME|N", help="Duration, or number of trainings.")
    ] = "15min",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the longest trainings.")] = 24,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="FILE.db", help="File of the study.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search a classifier's narrower versions for the most accurate one that fits a board.

    Nothing that does not fit is trained: flash, RAM and instructions of a candidate are predicted
    before it is built. The result is trained, converted to int8 and written as firmware.

    slipstream nas search kws.py:task --board stm32f446re --latency 100ms -o kws/
    """
    from slipstream.cli._output import emit, note, progress
    from slipstream.errors import UsageError
    from slipstream.nas import search_for_board
    from slipstream.ship.firmware import export_firmware
    from slipstream.ship.firmware.firmware import need_folder
    from slipstream.units import parse_duration_ns

    need_folder(output)
    limit_ms = None if latency is None else parse_duration_ns(latency, "--latency") / 1e6
    made = _returned(target)
    if not isinstance(made, tuple) or len(made) < 3:
        raise UsageError(
            f"'{target}' does not return (model, (inputs, classes), (inputs, classes))",
            remedy="return the model, the training data and the validation data",
        )
    with progress("search") as report:
        report("predicting which networks fit")
        found = search_for_board(
            *made[:3], board=board, latency_ms=limit_ms, budget=budget, epochs=epochs, seed=seed,
            store=store, progress=lambda study: report(f"{len(study.trials)} trials"),
        )  # fmt: skip
        firmware = export_firmware(
            found.model, name="network", device=found.fit.forecast.firmware.target.name
        )
        written = firmware.write(output)
    emit(found.tables(), found.to_json(), as_json=as_json)
    note(f"wrote {len(written)} files; next: slipstream ship verify {output}")


@app.command()
def export(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:function that returns an ss.nas.Supernet."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.py", help="Source; weights in FILE.pt.")
    ],
    study: Annotated[
        Path | None,
        typer.Option("--study", metavar="FILE.db", help="Export the best trial of this study."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="JSON", help="Configuration; others keep the full size."),
    ] = None,
) -> None:
    """Write a sub-network as plain PyTorch source with its weights.

    slipstream nas export nas.py:net --study nas.db -o small.py
    """
    from slipstream.cli._output import need_place, note
    from slipstream.errors import UsageError
    from slipstream.nas import estimate
    from slipstream.nas.supernet import need_supernet
    from slipstream.nas.writing import write_module

    need_place(output, ".py")
    if (study is None) == (config is None):
        raise UsageError("pass either --study or --config", remedy="for example --study nas.db")
    chosen = _best(study) if study is not None else _parsed(str(config))
    net = need_supernet(_returned(target), where=target)
    module = net.export(chosen)
    write_module(module, output)
    sizes = ", ".join(f"{value:,} {metric}" for metric, value in estimate(net, chosen).items())
    note(f"wrote {output} and {output.with_suffix('.pt').name}: {sizes}")


@app.command()
def codesign(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function that returns (net, score) or (net, score, calibration): an "
            "ss.nas.Supernet, a function of an exported sub-network, and batches.",
        ),
    ],
    hw: Annotated[
        str,
        typer.Option(
            "--hw",
            metavar="SPACE.toml",
            help="An accelerator with a table [space]; a shipped chip, such as edge, with 50,000 "
            "variants; or processor, for settings of this one.",
        ),
    ] = "edge",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="METRIC<=VALUE",
            help="Such as 'time<=2ms', or 'area<=1x' of the whole network's; repeatable.",
        ),
    ] = None,
    minimize: Annotated[
        list[str] | None,
        typer.Option("--minimize", metavar="METRIC", help="Next to the score; repeatable."),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Networks to evaluate.")] = 100,
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="nested or joint.")
    ] = "nested",
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="FILE.db", help="Store, to continue later.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.py", help="Export the best network."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search a network together with the chip, or the settings of this processor, that runs it.

    slipstream nas codesign codesign.py:task --hw edge --limit 'time<=1x'
    """
    from slipstream.cli._output import emit, need_place, note, progress
    from slipstream.errors import WorkloadError
    from slipstream.nas.codesign import ChipSpace, ProcessorSpace, search
    from slipstream.nas.searching import first_failure
    from slipstream.nas.writing import write_module

    if output is not None:
        need_place(output, ".py")
    limits = dict(map(_limit, limit or ()))
    hardware = ProcessorSpace() if hw == "processor" else ChipSpace.load(hw)
    chosen = minimize or (["time"] if hw == "processor" else ["energy"])
    with progress("codesign") as report:
        report(target)
        net, score, *rest = _task(target)
        found = search(
            net, score, hardware, constraints=limits, minimize=chosen, algorithm=algorithm,
            calibration=rest[0] if rest else (), seed=seed, store=store,
        )  # fmt: skip
        found.study.callbacks += (lambda study, trial: report(f"trial {trial.number}"),)
        found.run(trials)
        pairs, best = found.pareto(), found.best()
    if best is None:
        raise WorkloadError(
            f"no network was scored: {first_failure(found.study)}", where=target,
            remedy="check the score function, or pass more --trials",
        )  # fmt: skip
    base = hardware.baseline(net, net.space.full)
    payload = {
        "baseline": base,
        "networks_scored": found.trainings,
        "pareto": [pair.to_json() for pair in pairs],
        "best": best.to_json(),
    }
    emit([found.table(pairs), *found.explain(best)], payload, as_json=as_json)
    if output is not None:
        write_module(found.export(best), output)
        note(f"wrote {output} and {output.with_suffix('.pt').name}")


def _limit(text: str) -> tuple[str, str]:
    from slipstream.errors import UsageError

    metric = text.partition("<")[0].strip()
    if "<" not in text or not metric:
        raise UsageError(f"--limit: '{text}' is not a limit", remedy="for example 'time<=2ms'")
    return metric, text.removeprefix(metric).strip()


def _task(target: str) -> Any:
    from slipstream.errors import UsageError
    from slipstream.nas import Supernet

    task = _returned(target)
    if (
        not isinstance(task, tuple)
        or len(task) not in (2, 3)
        or not isinstance(task[0], Supernet)
        or not callable(task[1])
    ):
        raise UsageError(
            f"'{target}' does not return (net, score)",
            remedy="return an ss.nas.Supernet, a function of an exported sub-network, and "
            "optionally batches to recompute batch norms on",
        )
    return task


def _best(study: Path) -> dict[str, Any]:
    from slipstream.errors import UsageError
    from slipstream.search.metrics import best, full_trials
    from slipstream.search.store import StoredStudy

    stored = StoredStudy(study)
    trials = best(full_trials(stored.trials), stored.objectives, 1)
    if not trials or trials[0].violation:
        raise UsageError(
            "the study has no trial that satisfies its constraints", where=str(study),
            remedy="continue it with slipstream search resume",
        )  # fmt: skip
    return dict(trials[0].candidate.values)


def _parsed(text: str) -> dict[str, Any]:
    import json

    from slipstream.errors import UsageError

    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UsageError(
            "--config is not a JSON object",
            where=text,
            remedy="""for example '{"depth_layers": 1}'""",
        )
    return parsed


def _returned(target: str) -> Any:
    """Return what the function ``file.py:name`` returns."""
    from slipstream.child.report import describe_error
    from slipstream.errors import SlipstreamError, UsageError, WorkloadError
    from slipstream.search.estimators import load_target
    from slipstream.units import with_article

    if not target.rpartition(":")[0]:
        raise UsageError(f"'{target}' does not name a function", remedy="pass file.py:function")
    function = load_target(target)
    if not callable(function):
        kind = with_article(type(function).__name__)
        raise UsageError(f"'{target}' is {kind}, not a function", remedy="wrap it in a function")
    try:
        return function()
    except SlipstreamError:
        raise
    except (Exception, SystemExit) as error:
        described = describe_error(error)
        raise WorkloadError(described["what"], where=described["where"] or target) from error


def _model_and_inputs(target: str) -> tuple[Any, Any]:
    import torch

    from slipstream.errors import UsageError

    made = _returned(target)
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], torch.nn.Module):
        raise UsageError(
            f"'{target}' does not return (model, inputs)",
            remedy="return (model, inputs), or (model, (inputs, targets), loss, optimizer)",
        )
    model, inputs, *rest = made
    if rest and rest[0] is not None and isinstance(inputs, (tuple, list)):
        inputs = inputs[0]
    return model, inputs


def _space_json(found: ArchitectureSpace, sizes: dict[str, dict[str, int]]) -> dict[str, Any]:
    return {
        "choices": [
            {"name": name, "kind": type(choice).__name__.lower(), "choices": list(choice.choices)}
            for name, choice in found.choices.items()
        ],
        "coverage": found.coverage,
        "fixed": [
            {"parameter": name, "axis": axis, "reason": why}
            for (name, axis), why in found.reasons.items()
        ],
        "sizes": sizes,
    }
