"""What paper/headline.py refuses before any training."""

import errno
import os
from pathlib import Path

import pytest
from paper_tables.made import Called, Planned


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
        (("--out", ""), "--out must be a folder, got ''; leave it out for the default"),
        (("--runs-dir", "file"), "there. Choose another folder with --runs-dir"),
        (("--profile", "standart"), "unknown profile 'standart'; did you mean 'standard'?"),
        (
            ("--table", "documents", "--profile", "quick"),
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
def test_wrong_options_are_refused_before_training(
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
        (
            '{"audit": {"profile": "quick"}}',
            "has the profile quick, not standard; choose another --out",
        ),
        ("{}", "is not a record: KeyError('audit'); remove it, or choose another --out"),
    ],
)
def test_a_record_of_another_profile_is_refused(
    content: str, why: str, tmp_path: Path, called: Called
) -> None:
    place = tmp_path / "none" / "seed0" / "record.json"
    place.parent.mkdir(parents=True)
    place.write_text(content)
    code, out, err = called("--rows", "none", "--out", str(tmp_path), "--dry-run")
    assert (code, out) == (2, "")
    assert why in err


def test_a_dry_run_with_nothing_to_do_says_so(called: Called) -> None:
    code, out, err = called("--table", "controls", "--dry-run")
    assert (code, out) == (0, "")
    assert err.startswith("nothing to do: all records exist")
