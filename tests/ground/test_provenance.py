"""Where a number comes from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from splitveil import provenance


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module in a tree of its own, as `src/splitveil/passport.py`."""
    place = tmp_path / "src" / "splitveil" / "passport.py"
    place.parent.mkdir(parents=True)
    shutil.copy(provenance.__file__, place)
    monkeypatch.setattr(provenance, "__file__", str(place))
    return tmp_path


def test_outside_a_checkout_the_environment_gives_the_commit(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPLITVEIL_COMMIT", raising=False)
    assert provenance.commit() is None
    monkeypatch.setenv("SPLITVEIL_COMMIT", "abc")
    assert provenance.commit() == "abc"
    (source / ".git").mkdir()  # a folder of that name, but no repository
    assert provenance.commit() == "abc"


def test_a_checkout_gives_its_commit_and_says_when_it_is_dirty(source: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", str(source), *who, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert provenance.commit() == head
    (source / "src" / "splitveil" / "passport.py").write_text("changed")
    assert provenance.commit() == f"{head}+"


def test_python_m_splitveil_is_written_as_splitveil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/splitveil/__main__.py", "audit", "runs/a"])
    assert provenance.command() == "splitveil audit runs/a"
