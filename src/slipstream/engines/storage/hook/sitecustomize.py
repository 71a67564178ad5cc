"""Record the files that a Python program opens; imported at its start (see `recording`).

It appends one line per event, with one write each, so that several processes can share the file and
a killed one loses nothing. Uses the standard library only.
"""

import importlib
import os
import stat
import sys
import time

_OUTPUT = os.environ.get("SLIPSTREAM_STORAGE_RECORD", "")
_CODE = (".py", ".pyc", ".so", ".pth")


def _start() -> None:
    file = os.open(_OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    skipped = (sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/", _OUTPUT)
    write, now, status, folder = os.write, time.time_ns, os.stat, os.getcwd()

    def describe() -> None:
        words = " ".join(sys.orig_argv[:8])
        write(file, f"P\t{os.getpid()}\t{_escaped(words)}\n".encode("utf-8", "surrogateescape"))

    def note(op: str, path: str, size: int) -> None:
        line = f"{op}\t{os.getpid()}\t{now()}\t{size}\t{_escaped(path)}\n"
        write(file, line.encode("utf-8", "surrogateescape"))

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event not in ("open", "os.remove"):
            return
        try:
            path = args[0]
            if isinstance(path, int):
                return
            text = os.fsdecode(path)  # type: ignore[arg-type]
            if not text.startswith("/"):
                text = os.path.join(folder, text)
            if text.startswith(skipped) or text.endswith(_CODE):
                return
            if event == "os.remove":
                note("delete", text, 0)
                return
            flags = args[2]
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                note("create", text, 0)
                return
            found = status(text)
            if stat.S_ISREG(found.st_mode):
                note("read", text, found.st_size)
        except FileNotFoundError:
            return
        except Exception:
            write(file, b"L\n")

    describe()
    os.register_at_fork(after_in_child=describe)
    sys.addaudithook(hook)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _run_next() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if hidden is not None:
            sys.modules["sitecustomize"] = hidden


if _OUTPUT:
    _start()
    _run_next()
