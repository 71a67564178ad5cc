"""Check out revisions of a repository side by side to measure them."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure.arms import CommandArm

_GIT_TIMEOUT_S = 300


class Revisions:
    """Git worktrees of revisions in a temporary directory, removed at the end of ``with``.

    The user's working tree, index and branches are not touched. The command runs in the same
    subdirectory of each worktree.

    Args:
        revisions: Names that git resolves to a commit: a branch, a tag, ``HEAD~1``.
        directory: Directory in the repository; the current one by default.

    Raises:
        InvalidArgumentError: The directory is not in a repository, or a revision is unknown.
    """

    def __init__(self, revisions: Sequence[str], directory: Path | None = None) -> None:
        self._directory = (directory or Path.cwd()).resolve()
        self._root = Path(self._git("rev-parse", "--show-toplevel", argument="directory"))
        self.commits = {name: self._commit(name) for name in revisions}
        self._folder: Path | None = None

    def __enter__(self) -> Revisions:
        self._git("worktree", "prune")
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-revisions-"))
        try:
            for number, commit in enumerate(self.commits.values()):
                self._git("worktree", "add", "--detach", str(self._folder / str(number)), commit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def worktree(self, revision: str) -> Path:
        """Return the subdirectory of the worktree of `revision` that matches `directory`."""
        if self._folder is None:
            raise MeasurementError(
                "revisions are not checked out", remedy="use Revisions in a with statement"
            )
        number = list(self.commits).index(revision)
        return self._folder / str(number) / self._directory.relative_to(self._root)

    def arms(self, command: str | Sequence[str]) -> list[CommandArm]:
        """Return one arm per revision that runs `command` in its worktree.

        Raises:
            InvalidArgumentError: The directory or program does not exist in a revision.
        """
        words = command if isinstance(command, str) else shlex.join(command)
        arms = []
        for name, commit in self.commits.items():
            folder = self.worktree(name)
            if not folder.is_dir():
                raise InvalidArgumentError(
                    "revision", f"'{name}' does not contain the current directory"
                )
            described = f"{words} at {name} ({commit[:10]})"
            arms.append(CommandArm(name, command, directory=folder, description=described))
        return arms

    def _commit(self, revision: str) -> str:
        try:
            # The braces require a commit; --end-of-options protects from names like options.
            return self._git("rev-parse", "--verify", "--quiet", "--end-of-options",
                             f"{revision}^{{commit}}")  # fmt: skip
        except InvalidArgumentError:
            raise InvalidArgumentError(
                "revision",
                f"git does not find a commit '{revision}'",
                remedy="list revisions with git branch --all and git tag",
            ) from None

    def _remove(self) -> None:
        if self._folder is None:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(InvalidArgumentError):
            self._git("worktree", "prune")
        self._folder = None

    def _git(self, *words: str, argument: str = "revision") -> str:
        try:
            process = subprocess.run(
                ["git", *words],
                cwd=self._directory,
                capture_output=True,
                text=True,
                timeout=_GIT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidArgumentError(argument, f"git could not be run: {error}") from None
        if process.returncode != 0:
            reason = process.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise InvalidArgumentError(argument, f"git {words[0]} failed: {reason[0]}")
        return process.stdout.strip()
