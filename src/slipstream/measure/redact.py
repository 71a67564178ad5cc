"""Remove user names, host names and absolute paths from text."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import sys
from pathlib import Path

# An absolute path: a slash that does not continue a word or a relative path, up to a separator.
# Matches neither a URL's "//" nor the "/s" of "MB/s", whose slash follows a letter.
_PATH = re.compile(r"(?<![\w.~/…<>-])/(?!/)[^\s:;,'\"()\[\]=]+")
_DRIVE_PATH = re.compile(r"\b[A-Za-z]:\\[^\s;,'\"]+")


class Redactor:
    """Callable that returns a text without the names and paths of this machine.

    The current directory becomes ``.``, the home directory ``~``, any other absolute path its
    last part after ``…/``; the user's and the host's name become ``<user>`` and ``<host>``.
    """

    def __init__(self) -> None:
        places = [(os.getcwd(), "."), (str(Path.home()), "~"), (sys.prefix, "<python>")]
        # Longest first, so that a directory inside the home is replaced as a whole.
        places.sort(key=lambda place: -len(place[0]))
        self._places = [(_place(path), short) for path, short in places if path.strip("/")]
        self._names = [(_word(name), short) for name, short in _names()]

    def __call__(self, text: str) -> str:
        for place, short in self._places:
            text = place.sub(short, text)
        text = _PATH.sub(lambda match: "…/" + match[0].rstrip("/").rpartition("/")[2], text)
        text = _DRIVE_PATH.sub(lambda match: "…/" + match[0].rpartition("\\")[2], text)
        for name, short in self._names:
            text = name.sub(short, text)
        return text


def _names() -> list[tuple[str, str]]:
    host = socket.gethostname()
    names = [(host, "<host>"), (host.partition(".")[0], "<host>")]
    # A user id may have no name, for example in containers.
    with contextlib.suppress(OSError, KeyError):
        names.append((getpass.getuser(), "<user>"))
    names.append((Path.home().name, "<user>"))
    return [(name, short) for name, short in names if name]


def _place(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path.rstrip("/")) + r"(?=[/\s:;,'\"]|$)")


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])")
