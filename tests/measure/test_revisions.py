"""Two revisions side by side, without leftover files."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure.revisions import Revisions


def git(folder, *words):
    settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "repository"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for number in (1, 2):
        (folder / "sub" / "number").write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", str(number))
    (folder / "sub" / "number").write_text("dirty")
    return folder


def leftovers(tmp_path):
    return [path for path in tmp_path.glob("slipstream-revisions-*")]  # noqa: C416


def test_each_revision_is_checked_out_at_the_callers_folder(repository, tmp_path):
    with Revisions(["HEAD~1", "HEAD"], repository / "sub") as revisions:
        found = [(revisions.worktree(r) / "number").read_text() for r in ("HEAD~1", "HEAD")]
        assert found == ["1", "2"]
        arms = revisions.arms(["test", "-e", "number"])
        assert [arm.name for arm in arms] == ["HEAD~1", "HEAD"]
        for arm in arms:
            arm.open(10)
            assert arm.sample(1, 600)["wall"] > 0
            arm.close()
    assert leftovers(tmp_path) == []
    assert (repository / "sub" / "number").read_text() == "dirty"
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_nothing_is_left_after_an_exception(repository, tmp_path):
    with pytest.raises(KeyboardInterrupt), Revisions(["HEAD"], repository):
        raise KeyboardInterrupt
    assert leftovers(tmp_path) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("revision", ["no-such-branch", "--all", ""])
def test_an_unknown_revision_is_named(repository, revision):
    with pytest.raises(InvalidArgumentError, match=f"'{revision}'") as caught:
        Revisions([revision], repository)
    assert caught.value.argument == "revision"
    assert "git branch --all" in (caught.value.remedy or "")


def test_a_folder_without_a_repository_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="git"):
        Revisions(["HEAD"], tmp_path)


def test_a_folder_of_one_revision_only_is_refused(repository):
    (repository / "new").mkdir()
    (repository / "new" / "file").touch()
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "new")
    with (
        Revisions(["HEAD~1", "HEAD"], repository / "new") as revisions,
        pytest.raises(InvalidArgumentError, match=r"^revision: 'HEAD~1'"),
    ):
        revisions.arms("true")


def test_worktrees_exist_only_inside_the_with_block(repository):
    with pytest.raises(MeasurementError, match=r"\bnot checked out\b"):
        Revisions(["HEAD"], repository).worktree("HEAD")


def test_the_caller_may_be_in_any_folder(repository, monkeypatch):
    monkeypatch.chdir(repository)
    with Revisions(["HEAD"]) as revisions:
        assert isinstance(revisions.worktree("HEAD"), Path)
