"""What paper/headline.py refuses before any training."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
from paper_tables.made import COMMAND, ENVIRONMENT, Planned


def test_a_row_of_another_table_is_refused(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        planned("--rows", "ResSFL")
    assert "no row ResSFL in headline; choose from none, noise, cem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "file"), "cannot write file: Not a directory"),
        (("--out", "file/below"), "cannot write file/below: Not a directory"),
        (("--out", ""), "--out must be a folder, or one that can be made, got ''"),
        (("--runs-dir", "file"), "there. Choose another folder with --runs-dir"),
        (("--profile", "standart"), "unknown profile 'standart'; did you mean 'standard'?"),
        (
            ("--table", "seed-003", "--profile", "quick"),
            "unknown attack of profile 'quick' 'decoder-large'",
        ),
        (("--stop-after", "nan"), "--stop-after: must be from 0 to 2000000, got nan; leave it out"),
        (("--stop-after", "-5"), "--stop-after: must be from 0 to 2000000, got -5"),
        (("--begin-until", "1e300"), "--begin-until: must be from 0 to 2000000, got 1e300"),
        (("--jobs", "-1"), "--jobs: must be at least 1, got -1"),
        (("--seeds", "0", "1", "0"), "--seeds names 0 more than once"),
        (("--rows", "cem", "cem"), "--rows names cem more than once"),
    ],
)
def test_what_could_not_work_is_refused_before_any_training(
    words: tuple[str, ...],
    said: str,
    planned: Planned,
    in_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (in_folder / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        planned("--out", "o", *words)
    assert said in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_is_refused(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(dir: Path, **_: object) -> None:  # the superuser may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("splitveil.io.TemporaryDirectory", refused)
    with pytest.raises(SystemExit, match="2"):
        planned("--out", "o")
    assert "cannot write o: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"audit": {"profile": "quick"}}', "is of the profile quick, not standard; give --out"),
        ("{}", "is no record: KeyError('audit'); remove it, or give --out"),
    ],
)
def test_a_record_of_another_profile_is_no_record_of_this_one(
    content: str, why: str, tmp_path: Path
) -> None:
    place = tmp_path / "none" / "seed0" / "record.json"
    place.parent.mkdir(parents=True)
    place.write_text(content)
    done = subprocess.run(
        [*COMMAND, "--rows", "none", "--out", str(tmp_path), "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_a_rehearsal_with_nothing_to_do_says_so() -> None:
    done = subprocess.run(
        [*COMMAND, "--table", "controls", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("nothing to do: the records exist")
