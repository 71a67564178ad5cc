"""``slipstream stability``: measure and fix predictions that differ between devices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import _options as options

if TYPE_CHECKING:
    from slipstream.cli._output import Report
    from slipstream.ship.stability.opening import Devices

app = typer.Typer(
    no_args_is_help=True,
    help="Measure, explain and fix predictions of a model that differ between devices.",
    epilog="Start with: slipstream stability measure model.onnx --data images/",
)

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="model.onnx, model.tflite, a server's URL, or file.py:function."
    ),
]
_Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        help="A folder of images (subfolders are classes), a data set (slipstream data ls), "
        "file.npz with x and y, or file.py:function that returns (x, y). By default the workload's "
        "own batch.",
    ),
]
_Paths = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="default: sixteen phones; or a TOML file with a table [paths], one path per name.",
    ),
]
_Path = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="A path, such as camera:edge,sharpen=0.8+codec:jpeg,quality=60+resize:bilinear, or "
        "reference. Repeatable.",
    ),
]
_Also = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="Another version of the model as one more path: int8=model.tflite. Repeatable.",
    ),
]
_Preprocess = Annotated[
    str,
    typer.Option(
        metavar="STAGES",
        help="Changes to the default preprocessing, which crops the largest square, resizes it "
        "(bicubic) to the model's input and maps it to 0..1: "
        "crop:share=0.875+normalise:mean=0.485/0.456/0.406,std=0.229/0.224/0.225.",
    ),
]
_Scene = Annotated[
    int | None,
    typer.Option(
        metavar="PIXELS", min=8, help="Size of scenes from files; twice the model's input."
    ),
]
_Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Maximum number of scenes.")]


_FIRST = {
    "model": (_Model, inspect.Parameter.empty), "data": (_Data, None), "paths": (_Paths, None),
    "path": (_Path, None), "also": (_Also, None), "technique": (options.Techniques, None),
    "preprocess": (_Preprocess, ""),
}  # fmt: skip
_LAST = {"scene": (_Scene, None), "limit": (_Limit, None), "settings": (options.Set, None)}


@contextlib.contextmanager
def _opened(report: Report, shared: dict[str, Any]) -> Iterator[Devices]:
    from slipstream.ship.stability.opening import opened
    from slipstream.verbs.request import Request

    report("opening")
    with opened(
        shared["model"], data=shared["data"], paths=shared["paths"], path=shared["path"] or (),
        also=shared["also"] or (), techniques=shared["technique"] or (),
        arguments=Request.parse(shared["model"], settings=shared["settings"] or ()).arguments,
        preprocess=shared["preprocess"], scene=shared["scene"], limit=shared["limit"],
    ) as devices:  # fmt: skip
        yield devices


def _on_devices(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of models, scenes and paths; the command takes their values first."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        command({name: arguments.pop(name) for name in (*_FIRST, *_LAST)}, **arguments)

    options.declare(wrapper, command, _FIRST, _LAST)
    return wrapper


@app.command()
@_on_devices
def measure(
    shared: dict[str, Any],
    topk: Annotated[
        int, typer.Option(metavar="K", min=1, help="Top classes to compare: 1, 3, 5.")
    ] = 3,
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the most disputed scenes, per path."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure instability: the fraction of scenes that one device gets right and another wrong.

    Accuracy does not show it: two phones can both be right on three of four images, but not the
    same ones. Without labels, divergence is measured: the fraction with different predictions.

        slipstream stability measure model.onnx --data images/ --sheet disputed.png

        slipstream stability measure train.py:make --data digits -t amp:bf16

        slipstream stability measure model.onnx --data images/ --also int8=model.tflite
    """
    from slipstream.cli._output import emit, need_place, note, progress
    from slipstream.ship import stability

    if sheet is not None:
        need_place(sheet, ".png", option="--sheet")
    drawn: list[int] = []
    with progress("stability measure") as report, _opened(report, shared) as devices:
        scenes, ways = devices.scenes, devices.matrix.paths
        result = stability.measure(
            devices.models, scenes, ways, scenes.labels, topk=topk, report=report
        )
        if sheet is not None:
            report("drawing")
            drawn = stability.contact_sheet(result, scenes, ways, sheet, classes=scenes.classes)
    emit(result.tables(), result.to_json(), as_json=as_json)
    if drawn:
        count = f"{len(drawn)} scene{'s' * (len(drawn) != 1)}"
        data = ["--data", shared["data"]] if shared["data"] else []
        command = ["slipstream", "stability", "explain", shared["model"], *data]
        note(f"wrote {sheet}: {count}; next: {shlex.join(command)}")
    elif sheet is not None:
        note(f"nothing is disputed: {sheet} was not written")


@app.command()
@_on_devices
def explain(
    shared: dict[str, Any],
    each: Annotated[
        bool, typer.Option("--settings", help="Vary every setting, such as camera.sharpen.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find which stage causes instability: camera, codec, resizing or model.

    Each stage is varied alone, with all others as in the reference, and then held fixed, with all
    others as on the devices.

        slipstream stability explain model.onnx --data images/ --settings

        slipstream stability explain model.onnx --data images/ --path camera:edge,sharpen=3
    """
    from slipstream.cli._output import emit, progress
    from slipstream.ship import stability

    with progress("stability explain") as report, _opened(report, shared) as devices:
        result = stability.explain(
            devices.models, devices.scenes, devices.matrix, devices.scenes.labels,
            settings=each, report=report,
        )  # fmt: skip
    emit(result.tables(), result.to_json(), as_json=as_json)


@app.command()
@_on_devices
def predict(
    shared: dict[str, Any],
    sample: Annotated[
        int, typer.Option(metavar="N", min=2, help="Number of scenes to run on the paths.")
    ] = 64,
    as_json: options.Json = False,
) -> None:
    """Predict instability from all scenes on the reference and only a few on the paths.

    slipstream stability predict model.onnx --data images/ --sample 64
    """
    from slipstream.cli._output import emit, progress
    from slipstream.ship import stability

    with progress("stability predict") as report, _opened(report, shared) as devices:
        forecast = stability.predict(
            devices.models, devices.scenes, devices.matrix, devices.scenes.labels,
            sample=sample, report=report,
        )  # fmt: skip
    emit(forecast.tables(), forecast.to_json(), as_json=as_json)


@app.command()
def harden(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="file.py:function that returns (model, batch).")
    ],
    data: _Data = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Scenes to judge on; by default a fifth of --data."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.pt", help="For the hardened state dict."),
    ] = None,
    twins: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How twins are generated: distortion, gaussian, or same (with --int8).",
        ),
    ] = "distortion",
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="Twins also pass through the layers of an int8 copy, which is judged as well.",
        ),
    ] = False,
    loss: Annotated[
        str, typer.Option(metavar="NAME", help="kl, embedding, or augment (no stability term).")
    ] = "kl",
    alpha: Annotated[float, typer.Option(metavar="X", help="Weight of the stability term.")] = 5.0,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Epochs of both fine-tunes.")] = 3,
    draws: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Twins per scene to reuse, which is faster; 0: new twins in every epoch.",
        ),
    ] = 0,
    rate: Annotated[float, typer.Option(metavar="X", help="Learning rate of both.")] = 1e-3,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of order and twins.")] = 0,
    augmented: Annotated[
        bool, typer.Option("--augmented", help="Also train a third on twins as samples.")
    ] = False,
    paths: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Held-out paths to judge on; by default seven."),
    ] = None,
    preprocess: _Preprocess = "",
    scene: _Scene = None,
    limit: _Limit = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Fine-tune a model to predict the same for a scene and its twin, next to a plain fine-tune.

    A plain fine-tune can increase instability, so it always runs as the control. Both are judged on
    held-out paths, which generate no twins.

        slipstream stability harden train.py:make --data fashion_mnist -o hardened.pt

        slipstream stability harden train.py:make --data photos.npz --twins same --int8
    """
    from slipstream.cli._output import emit, need_place, note, progress
    from slipstream.ship import stability
    from slipstream.ship.stability.opening import hardening
    from slipstream.verbs.request import Request

    if output is not None:
        need_place(output, ".pt", ".pth")
    recipe = stability.Recipe(
        loss, alpha, epochs, learning_rate=rate, seed=seed, draws=draws, int8=int8,  # type: ignore[arg-type]
    )  # fmt: skip
    with progress("stability harden") as report:
        report("opening")
        work = hardening(
            model, data, judge, paths=paths, twins=twins, int8=int8, preprocess=preprocess,
            scene=scene, limit=limit,
            arguments=Request.parse(model, settings=settings or ()).arguments,
        )  # fmt: skip
        hardened = stability.harden(
            work.module, work.scenes, work.labels, work.matrix.reference.pipeline,
            held_out=work.matrix, judged=work.judged, twins=twins, recipe=recipe,
            augmented=augmented, report=report,
        )  # fmt: skip
        if output is not None:
            import torch

            torch.save(hardened.model.state_dict(), output)
    emit(hardened.tables(), hardened.to_json(), as_json=as_json)
    if output is not None:
        note(f"wrote {output}; load it with model.load_state_dict(torch.load('{output}'))")
