"""Attributes from a file beside the dataset: read in order, refused with the fault named."""

from pathlib import Path

import pytest
import torch

from splitveil.audit.sidecar import Attributes, read_attributes
from splitveil.errors import DataError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "attributes.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_in_the_order_of_its_indices(tmp_path: Path) -> None:
    path = written(tmp_path, "hat,index,age\nno,2,9\nyes,0,10\n\nno,1,-1\n")
    found = read_attributes(path, 3)
    assert {name: column.tolist() for name, column in found.items()} == {
        "hat": [1, 0, 0],
        "age": [2, 0, 1],  # as numbers: −1, 9, 10
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must start with a header .* got: nothing"),
        ("hat,age\n1,2\n", "must start with a header"),
        ("index\n0\n", "at least one attribute"),
        ("index,hat,hat\n0,1,1\n", "different names"),
        ("index,hat\n0,1\n", "no row for 1 of 2 images, the first is index 1"),
        ("index,hat\n0,1\n2,1\n", "line 3: unknown index '2'; allowed are 0 to 1"),
        ("index,hat\n-1,1\n", "unknown index '-1'"),
        ("index,hat\nzero,1\n", "unknown index 'zero'"),
        ("index,hat\n0,1\n0,1\n", "line 3: index 0 is there twice"),
        ("index,hat\n0,\n", "line 2: no value for hat"),
        ("index,hat\n0,NaN\n", "no value for hat"),
        ("index,hat\n0\n", "no value for hat"),
        ("index,hat\n0,1,2\n", "line 2: 3 values; each of the 2 columns needs one"),
    ],
)
def test_a_file_with_a_fault_is_refused_and_the_fault_named(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read_attributes(written(tmp_path, text), 2)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the attributes"):
        read_attributes(tmp_path / "none.csv", 2)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read the attributes"):
        read_attributes(tmp_path / "bytes.csv", 2)


def test_a_table_is_split_by_the_indices_of_both_sets() -> None:
    made = Attributes.of({"hat": torch.tensor([5, 6, 7])}, torch.tensor([2, 0]), torch.tensor([1]))
    assert made.aux["hat"].tolist() == [7, 5]
    assert made.scored["hat"].tolist() == [6]
