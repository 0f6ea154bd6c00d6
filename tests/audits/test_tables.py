"""Attributes from a table: whichever way its rows name the images, or the fault named."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists

from splitveil.data.attributes import attributes_of, codes, read_table
from splitveil.errors import DataError

FILES = ["cat/a.png", "cat/b.png", "dog/a.png"]
CSV = {
    "by order": "hat,age\nyes,10\nno,-1\nno,9\n",
    "by index": "age,index,hat\n9,2,no\n\n10,0,yes\n-1,1,no\n",
    "by file": "file,hat,age\ndog/a.png,no,9\ncat\\b.png,no,-1\ncat/a.png,yes,10\n",
    "with a mark": "\ufeffhat, age\nyes, 10\nno ,-1\nno,9\n",
}


def written(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", CSV)
def test_rows_may_name_their_images_in_three_ways(kind: str, tmp_path: Path) -> None:
    found = read_table(written(tmp_path, CSV[kind]), 3, FILES)
    assert {name: column.tolist() for name, column in found.items()} == {
        "hat": [1, 0, 0],  # no, yes
        "age": [2, 0, 1],  # as numbers: −1, 9, 10
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must start with a header of distinct column names, got: nothing"),
        ("hat,hat\n1,2\n", "distinct column names, got: hat, hat"),
        ("hat,\n1,2\n", "distinct column names"),
        ("hat\n", "has no rows; it needs one for each of the 3 images"),
        ("index\n0\n1\n2\n", "at least one attribute"),
        ("index,file,hat\n0,a,1\n", "at most one of the columns 'index' and 'file'"),
        ("hat\n1\n2\n", "has no row for 1 of 3 images: '2'; add one for every image"),
        ("hat\n1\n2\n1\n2\n", "has 4 rows for 3 images; keep one for each"),
        ("index,hat\n0,1\n1,1\n3,1\n", "unknown index '3'; allowed are whole numbers from 0 to 2"),
        ("index,hat\n-1,1\n", "unknown index '-1'"),
        (f"index,hat\n{'9' * 5000},1\n", f"unknown index '{'9' * 80}'"),
        ("index,hat\n0,1\n0,2\n1,1\n2,1\n", "two rows for image '0'; keep one"),
        ("file,hat\ncat/c.png,1\n", "unknown file 'cat/c.png'; names are .* as 'cat/a.png'"),
        ("file,hat\ncat/a.png,1\n", "no row for 2 of 3 images: 'cat/b.png', 'dog/a.png'"),
        ("hat\n1\n \n2\n", "line 3: no value for hat"),
        ("hat\n1\nNaN\n2\n", "line 3: no value for hat"),
        ("hat,age\n1,2\n1\n", "line 3: 1 values for 2 columns"),
    ],
)
def test_a_table_with_a_fault_is_refused_and_the_fault_named(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        read_table(written(tmp_path, text), 3, FILES)


def test_a_table_in_json_is_answered_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="read from CSV only; write a header"):
        read_table(written(tmp_path, '[{"hat": 1}, {"hat": 2}]', "table.JSON"), 2)


def test_file_names_need_files_and_a_table_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="but only the images of a `folder:` dataset have"):
        read_table(written(tmp_path, CSV["by file"]), 3)
    with pytest.raises(DataError, match="cannot read the attributes"):
        read_table(tmp_path / "none.csv", 3)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read the attributes"):
        read_table(tmp_path / "bytes.csv", 3)


def test_what_cannot_be_guessed_is_refused_before_any_attack() -> None:
    path, aux, scored = Path("t.csv"), torch.tensor([2, 0]), torch.tensor([1])
    made = attributes_of(path, {"hat": torch.tensor([5, 6, 7])}, aux, scored)
    assert (made.aux["hat"].tolist(), made.scored["hat"].tolist()) == ([7, 5], [6])
    with pytest.raises(DataError, match=r"'hat' in t\.csv has only one value on the attacker's 2"):
        attributes_of(path, {"hat": torch.tensor([0, 1, 0])}, aux, scored)
    many = torch.arange(300)
    with pytest.raises(DataError, match=r"'age' in t\.csv has 300 values; at most 256 are allowed"):
        attributes_of(path, {"age": many}, many[:200], many[200:])


@given(lists(integers(-20, 20), min_size=1))
def test_codes_count_the_smaller_values(values: list[int]) -> None:
    found = codes([str(v) for v in values]).tolist()
    assert found == [len({w for w in values if w < v}) for v in values]


def test_a_table_is_split_by_the_indices_of_both_sets() -> None:
    table = {"hat": torch.tensor([5, 6, 7])}
    made = attributes_of(Path("table.csv"), table, torch.tensor([2, 0]), torch.tensor([1]))
    assert made.aux["hat"].tolist() == [7, 5]
    assert made.scored["hat"].tolist() == [6]
