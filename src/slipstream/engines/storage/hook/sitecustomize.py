"""Record the files that a Python program opens; imported at its start (see `recording`).

Each process writes lines to shared memory maps of files of its own, without a system call per line,
and a killed process loses nothing. Uses the standard library only.
"""

import importlib
import mmap
import os
import sys
import threading
import time

_OUTPUT = os.environ.get("SLIPSTREAM_STORAGE_RECORD", "")
_CODE = (".py", ".pyc", ".so", ".pth")
_EVENTS = frozenset({"open", "os.remove", "mmap.__new__"})
_CHUNK = 1 << 20
_WRITES = os.O_WRONLY | os.O_RDWR


class _Log:
    """Lines of one process, in files of `_CHUNK` bytes that are filled from the start."""

    chunks = 0

    def start(self) -> None:
        """Begin the files of a new process; another thread may hold the lock of its parent."""
        self.lock = threading.RLock()
        self.name = f"{_OUTPUT}.{os.getpid()}-{time.time_ns()}"
        self.extend()
        self.write(f"P\t{_escaped(' '.join(sys.orig_argv[:8]))}\n")

    def extend(self) -> None:
        number, self.chunks = self.chunks, self.chunks + 1
        file = os.open(f"{self.name}.{number:06d}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, _CHUNK)
        self.file = file
        self.map, self.at = mmap.mmap(file, _CHUNK), 0
        self.file = -1
        os.close(file)

    def write(self, line: str) -> None:
        data = line.encode("utf-8", "surrogateescape")
        size = len(data)
        with self.lock:
            if self.at + size > _CHUNK:
                self.extend()
            # Reserved without a call: a signal handler or finalizer may write during any.
            begin, self.at, target = self.at, self.at + size, self.map
            target[begin : begin + size] = data


def _start() -> None:
    log = _Log()
    log.start()
    skipped = (sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/", _OUTPUT)
    now, folder = time.time_ns, os.getcwd() + "/"

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event not in _EVENTS:
            return
        path = args[0]
        if isinstance(path, int):
            if event == "mmap.__new__" and path not in (-1, log.file):
                log.write("M\n")
            return
        try:
            text = path if isinstance(path, str) else os.fsdecode(path)  # type: ignore[arg-type]
            if text[:1] != "/":
                text = folder + text
            if text.startswith(skipped) or text.endswith(_CODE):
                return
            if "\n" in text or "\t" in text or "\\" in text:
                text = _escaped(text)
            op = "D" if event != "open" else "C" if args[2] & _WRITES else "R"  # type: ignore[operator]
            log.write(f"{op}\t{now()}\t{text}\n")
        except Exception:
            log.write("L\n")

    os.register_at_fork(after_in_child=log.start)
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
