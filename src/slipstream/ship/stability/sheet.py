"""Draw the scenes that paths disagree about, as each path sees them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.runtimes.paths import DevicePath
from slipstream.ship.stability.measuring import Scenes, Stability

_CELL, _FRAME, _GAP, _LINE = 112, 4, 6, 14
_RIGHT, _WRONG, _INK = (46, 125, 50), (198, 40, 40), (30, 30, 30)
_MAX_CHARACTERS = _CELL // 7


def contact_sheet(
    found: Stability,
    scenes: Scenes,
    paths: Sequence[DevicePath],
    file: str | Path,
    *,
    count: int = 12,
    classes: Sequence[str] = (),
) -> list[int]:
    """Draw the most disputed scenes: a row per scene, a column per path.

    Correctly classified images have a green frame; without labels, those with the first path's
    answer.

    Args:
        file: path of the ``.png`` to write.
        count: maximum number of rows.
        classes: names of classes; numbers if empty.

    Returns:
        The scenes drawn; if all paths agree, it is empty and no file is written.

    Raises:
        MissingExtraError: Pillow is not installed.
        InvalidArgumentError: `file` does not end in ``.png``.
    """
    try:
        image, draw_on = (importlib.import_module(f"PIL.{m}") for m in ("Image", "ImageDraw"))
    except ImportError as error:
        raise MissingExtraError("the contact sheet", "Pillow", "vision") from error
    if Path(file).suffix.lower() != ".png":
        raise InvalidArgumentError("sheet", f"'{file}' does not end in .png", remedy="sheet.png")
    items = found.worst_items(count)
    if not items:
        return []
    wide, high = _CELL + 2 * _FRAME + _GAP, _CELL + 2 * _FRAME + _GAP + _LINE
    head = 2 * _LINE + _GAP
    sheet = image.new("RGB", (wide * (1 + len(paths)) + _GAP, head + high * len(items)), "white")
    pen = draw_on.Draw(sheet)

    def write(x: int, y: int, text: str) -> None:
        pen.text((x, y), text[:_MAX_CHARACTERS], fill=_INK)

    def place(x: int, y: int, pixels: Any, colour: tuple[int, int, int] | None) -> None:
        side = _CELL + 2 * _FRAME
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=colour or (255, 255, 255))
        sheet.paste(image.fromarray(pixels).resize((_CELL, _CELL)), (x + _FRAME, y + _FRAME))

    def class_name(number: int) -> str:
        return str(classes[number]) if number < len(classes) else f"class {number}"

    write(_GAP, _GAP, "scene")
    for column, path in enumerate(paths, 1):
        for line, part in enumerate(_halves(path.name)):
            write(_GAP + column * wide, _GAP + line * _LINE, part)
    for row, item in enumerate(items):
        y, scene = head + row * high, scenes[item]
        truth = None if found.labels is None else int(found.labels[item])
        place(_GAP, y, _square(scene), None)
        below = y + _CELL + 2 * _FRAME
        write(_GAP, below, f"#{item} " + ("" if truth is None else class_name(truth)))
        good = int(found.answers[0, item]) if truth is None else truth
        for column, path in enumerate(paths, 1):
            answer = int(found.answers[column - 1, item])
            x = _GAP + column * wide
            place(x, y, _seen(path, scene), _RIGHT if answer == good else _WRONG)
            write(x, below, class_name(answer))
    sheet.save(file, "PNG", optimize=True)
    return items


def _halves(name: str) -> tuple[str, str]:
    first, _, second = name.partition(", ")
    return (first, second) if second else (name[:_MAX_CHARACTERS], name[_MAX_CHARACTERS:])


def _square(image: Any) -> Any:
    side = min(image.shape[:2])
    top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    return np.ascontiguousarray(image[top : top + side, left : left + side, :3])


def _seen(path: DevicePath, scene: Any) -> Any:
    """Return the output of the path's last image stage, uint8 [H, W, 3]."""
    seen = scene
    for value in path.pipeline.trace(scene).values():
        if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in (1, 3):
            seen = value
    return _square(np.repeat(seen, 3, 2) if seen.shape[2] == 1 else seen)
