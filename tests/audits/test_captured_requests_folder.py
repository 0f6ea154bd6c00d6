"""What a capture may hold beside z, and folders that were made for nothing."""

from pathlib import Path

import pytest

from splitveil.audits.captured_requests import kept_if_used, strange_paths, unexpected_fields


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('{"inputs": "an image", "inputs": [{"name": "z"}]}', ["inputs given twice"]),
        ('{"inputs": [{"data": [7], "data": [1]}]}', ["data given twice"]),
        ('{"inputs": [{}], "outputs": [{"name": "logits", "exif": 1}]}', ["exif in its output"]),
        ('{"id": "", "inputs": [{}], "outputs": [{"name": "logits"}]}', []),
        ('{"id": "anna/photo-3.png", "inputs": [{}]}', ["id in a request"]),
        ('{"inputs": [{}], "outputs": []}', []),
    ],
)
def test_nothing_hides_behind_a_name_or_in_an_output(body: str, found: list[str]) -> None:
    assert unexpected_fields(body.encode(), None) == found


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/v2/models/m/infer"], []),
        (["/v2/models/m/versions/1/infer"], []),
        (["/upload/anna-photo-3.png"], ["a path that is not the protocol's"]),
        (["/v2/models/m/infer?who=anna"], ["a query in the path"]),
        (["/v2/models/a/infer", "/v2/models/b/infer"], ["paths that differ between calls"]),
    ],
)
def test_a_path_may_carry_nothing(paths: list[str], found: list[str]) -> None:
    assert strange_paths(paths) == found


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    mine, used = tmp_path / "mine", tmp_path / "used"
    mine.mkdir()

    def fail(folder: Path, *, after_writing: bool) -> None:
        with kept_if_used(folder):
            if after_writing:
                (folder / "capture").touch()
            raise KeyError

    for folder in (mine, used, tmp_path / "new" / "one"):
        with pytest.raises(KeyError):
            fail(folder, after_writing=folder == used)
    assert mine.is_dir()
    assert (used / "capture").is_file()
    assert not (tmp_path / "new" / "one").exists()
