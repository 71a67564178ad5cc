"""Models that come as files."""

from __future__ import annotations

from slipstream.data._files import read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.kinds import ModelFiles


def model_files(entry: Entry) -> ModelFiles:
    """The TensorFlow Lite files of a folder, by stem; `classes` where a list lies beside them.

    Nothing is opened here: the runtimes that do validate what they read.

    Raises:
        MissingDataError: not in the data folder.
    """
    folder = find(entry)
    classes: tuple[str, ...] = ()
    for path in folder.glob("*label*.txt"):
        classes = tuple(line for line in read_lines(entry, path) if line)
    return ModelFiles(
        entry.name, {path.stem: path for path in sorted(folder.glob("*.tflite"))}, classes
    )
