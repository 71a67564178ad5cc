"""Conversion of exceptions to JSON, with the user's line, and back."""

from __future__ import annotations

import json
import linecache
import os
import re
import traceback
from pathlib import Path
from typing import Any

from slipstream.child.pipe import Message
from slipstream.errors import SlipstreamError, WorkloadError

# Escape sequences with which a message sets bold text or colours.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGE = str(Path(__file__).parents[1])
# Recording keeps several kilobytes for each operator of a step.
LESS_MEMORY = (
    "use a smaller batch or model, a step with fewer operators, or a machine with more memory"
)
# Messages of torch, with and without CUDA, for a device that is not available.
_NO_DEVICE = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA driver version is insufficient",
    "Attempting to deserialize object on a CUDA device",
    "Cannot access accelerator device when none is available",
    "no CUDA-capable device is detected",
    "requires CUDA support",
    "has no attribute '_cuda_",
)


def describe_error(error: BaseException) -> Message:
    """Describe an exception as JSON: ours by its parts, others with the user's file and line."""
    if isinstance(error, SlipstreamError):
        return {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "remedy": error.remedy,
            "attributes": {k: v for k, v in vars(error).items() if _is_json(v)},
            "traceback": "".join(traceback.format_exception(error)),
        }
    where, source = _user_line(error)
    text = _STYLE.sub("", str(error))
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if source:
        what += f"\n    {source}"
    return {
        "kind": "WorkloadError",
        "what": what,
        "where": where,
        "remedy": _remedy(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _remedy(error: BaseException) -> str | None:
    text = str(error)
    if any(message in text for message in _NO_DEVICE):
        return (
            "the workload asks for a GPU, and torch sees none here: put model and batch on the "
            "CPU, or profile it where torch.cuda.is_available() is True"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return f"out of memory: {LESS_MEMORY}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package, _, part = error.name.rpartition(".")
        if package:
            return (
                f"'{package}' has no '{part}' here: install another version of it, or run from the "
                "folder that holds yours"
            )
        return f"install '{error.name}' in this environment, or run from the folder that holds it"
    if isinstance(error, SystemExit):
        return "the code exits the process; let it return, or guard it with __main__"
    if isinstance(error, SyntaxError):
        return "fix the file; Python cannot parse it"
    return "check whether the code raises it without slipstream too"


def _user_line(error: BaseException) -> tuple[str | None, str]:
    """Return ``file:line`` and source of the innermost frame of user code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}", (error.text or "").strip()
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename}:{frame.lineno}", line
    return None, ""


def is_user_file(path: str) -> bool:
    foreign = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen")
    return not path.startswith((_PACKAGE, "<")) and not any(part in path for part in foreign)


def revive(error: Message) -> SlipstreamError:
    """Restore an exception that a child described, with its class."""
    kinds = {kind.__name__: kind for kind in _subclasses(SlipstreamError)}
    kind = kinds.get(error["kind"], WorkloadError)
    revived = kind.revive(
        error["what"], error["where"], error["remedy"], error.get("attributes", {})
    )
    revived.add_note(error["traceback"])
    return revived


def _subclasses(kind: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in _subclasses(sub))]


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
