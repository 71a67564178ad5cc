"""Nothing of the user's is lost: files a script opens for writing are put back afterwards."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_LARGEST_COPY_BYTES = 1 << 30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC


_MANIFEST = "kept.jsonl"


class FileGuard:
    """Within it, every existing file under `folder` or the current one that is opened for writing
    (or removed or renamed) by Python code is first copied to `keep_in`.

    The parent process puts the copies back with `restore_files` once the child is gone, however
    it went. Python tells of each open through an audit event; what C++ opens (``torch.save`` to a
    path) it does not, so that ``torch.save`` is asked separately. New files stay where they are.
    """

    def __init__(self, folder: Path, keep_in: Path) -> None:
        self._folders = {str(folder.resolve()), os.getcwd()}
        self._keep_in = keep_in
        self._kept: set[str] = set()
        self._active = False

    def __enter__(self) -> FileGuard:
        import torch

        self._active = True
        sys.addaudithook(self._audit)
        save = torch.serialization.save

        def guarded_save(obj: Any, f: Any, *rest: Any, **options: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                self._keep(os.fspath(f))
            save(obj, f, *rest, **options)

        torch.save = torch.serialization.save = guarded_save
        return self

    def __exit__(self, *error: object) -> None:
        self._active = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and isinstance(path, (str, bytes)):
                self._keep(os.fsdecode(path))
        elif event in ("os.remove", "os.rename", "os.truncate"):
            for path in arguments[: 2 if event == "os.rename" else 1]:
                if isinstance(path, (str, bytes)):
                    self._keep(os.fsdecode(path))

    def _keep(self, path: str) -> None:
        full = os.path.abspath(path)
        inside = any(full.startswith(folder + os.sep) for folder in self._folders)
        if not inside or full in self._kept or not os.path.isfile(full):
            return
        if os.path.getsize(full) > _LARGEST_COPY_BYTES:
            raise PermissionError(
                f"slipstream does not let a profiled script overwrite the large file {path}"
            )
        self._active = False
        try:
            copy = self._keep_in / str(len(self._kept))
            shutil.copy2(full, copy)
            # After the copy is whole: a line in the manifest is a promise that it can go back.
            with open(self._keep_in / _MANIFEST, "a", encoding="utf-8") as manifest:
                manifest.write(json.dumps([full, copy.name]) + "\n")
            self._kept.add(full)
        finally:
            self._active = True


def restore_files(keep_in: Path) -> list[Path]:
    """Put back every file kept in `keep_in`; returns them."""
    manifest = keep_in / _MANIFEST
    if not manifest.exists():
        return []
    restored = []
    for line in manifest.read_text(encoding="utf-8").splitlines():
        path, copy = json.loads(line)
        shutil.copy2(keep_in / copy, path)
        restored.append(Path(path))
    return restored
