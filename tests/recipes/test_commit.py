import functools
import subprocess
from pathlib import Path

import pytest

from pamm.recipes import commit


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in a repository of somebody, who does not track it."""
    monkeypatch.delenv("PAMM_COMMIT", raising=False)
    path = tmp_path / "site-packages/commit.py"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(commit, "__file__", str(path))
    monkeypatch.setattr(commit, "commit", functools.cache(commit.commit.__wrapped__))
    git(tmp_path, "init", "--quiet")
    record(tmp_path)
    return path


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    run = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


def record(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "state")


def test_it_is_that_of_the_checkout_the_file_belongs_to(source: Path) -> None:
    assert commit.commit() is None, "installed inside of another project's checkout"
    git(source.parent, "add", source.name)
    record(source.parent)
    commit.commit.cache_clear()
    now = git(source.parent, "rev-parse", "--short", "HEAD")
    assert commit.commit() == now
    (source.parent / "more").touch()
    git(source.parent, "add", "more")
    record(source.parent)
    assert commit.commit() == now, "what this process runs"


def test_a_copy_without_a_checkout_may_name_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAMM_COMMIT", "abc1234")
    assert commit.commit() == "abc1234"
