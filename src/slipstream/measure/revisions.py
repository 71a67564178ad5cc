"""Two revisions of a repository, checked out side by side for as long as they are measured."""

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
    """Git worktrees of revisions in a temporary folder; removed on leaving the ``with`` block.

    The user's own working tree, index and branches are not touched. Both commands run where the
    caller stands in the repository, with the same words.

    Args:
        revisions: anything git resolves to a commit: a branch, a tag, ``HEAD~1``.
        directory: where in the repository; ours by default.

    Raises:
        InvalidArgumentError: not a repository, or a revision that git does not know.
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
        """Where `revision` is checked out, at the same depth as the caller stands."""
        if self._folder is None:
            raise MeasurementError("revisions are checked out inside a with block only")
        number = list(self.commits).index(revision)
        return self._folder / str(number) / self._directory.relative_to(self._root)

    def arms(self, command: str | Sequence[str]) -> list[CommandArm]:
        """One arm a revision: `command` run in its worktree.

        Raises:
            InvalidArgumentError: the folder or program does not exist in a revision.
        """
        words = command if isinstance(command, str) else shlex.join(command)
        arms = []
        for name, commit in self.commits.items():
            folder = self.worktree(name)
            if not folder.is_dir():
                raise InvalidArgumentError(
                    "revision", f"'{name}' has no folder like the one you are in"
                )
            described = f"{words} at {name} ({commit[:10]})"
            arms.append(CommandArm(name, command, directory=folder, description=described))
        return arms

    def _commit(self, revision: str) -> str:
        try:
            # The braces ask for a commit; "--" keeps a revision from being read as an option.
            return self._git("rev-parse", "--verify", "--quiet", "--end-of-options",
                             f"{revision}^{{commit}}")  # fmt: skip
        except InvalidArgumentError:
            raise InvalidArgumentError(
                "revision",
                f"git knows no commit '{revision}'",
                remedy="git branch --all and git tag list what there is",
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
            done = subprocess.run(
                ["git", *words],
                cwd=self._directory,
                capture_output=True,
                text=True,
                timeout=_GIT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidArgumentError(argument, f"git could not be run: {error}") from None
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise InvalidArgumentError(argument, f"git {words[0]} failed: {reason[0]}")
        return done.stdout.strip()
