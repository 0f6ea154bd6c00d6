"""Attribute tables: a CSV file with facts about the images, such as sex or age group.

A row names its image by a column `index` (its place in the dataset) or `file` (its path below the
folder of a `folder:` dataset). Without either column the rows are in the order of the images. Every
other column is an attribute; its values are categories.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from splitveil.data.dataset import Attributes
from splitveil.errors import DataError
from splitveil.io import read_bytes

MAX_VALUES = 256  # of one attribute
INDEX, FILE = "index", "file"
SHOWN = 3  # names that a message lists
Row = Mapping[str, str]


def read_table(path: Path, n: int, files: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Read the attributes of all images of a dataset.

    Args:
        path: The CSV file.
        n: How many images the dataset has.
        files: File names of the images, if they have any.

    Returns:
        Codes (n,) by attribute: 0, 1, … for its values in sorted order, sorted as numbers if all
        are integers.

    Raises:
        DataError: Unless every image has exactly one row and every row has all values.
    """
    rows = _rows(path)
    if not rows:
        raise DataError(f"{path} has no rows; it needs one for each of the {n} images")
    names = list(rows[0])
    keys = [name for name in names if name in (INDEX, FILE)]
    columns = [name for name in names if name not in (INDEX, FILE)]
    if len(keys) > 1 or not columns:
        raise DataError(
            f"{path} must have at least one attribute, and at most one of the columns '{INDEX}' "
            f"and '{FILE}'; its columns are {', '.join(names)}"
        )
    ordered = _by_image(path, rows, keys[0] if keys else None, n, files)
    return {name: codes([row[name] for row in ordered]) for name in columns}


def attributes_of(
    path: Path, table: Mapping[str, Tensor], aux: Tensor, scored: Tensor
) -> Attributes:
    """The attributes of aux and scored images; raises DataError for one that cannot be attacked."""
    both = ({name: column[rows.cpu()] for name, column in table.items()} for rows in (aux, scored))
    made = Attributes(*both)
    for name, values in made.aux.items():
        known, every = len(set(values.tolist())), int(table[name].max()) + 1
        if known == 1:
            raise DataError(
                f"attribute '{name}' in {path} has only one value on the attacker's {len(values)} "
                "images, so there is nothing to guess; remove its column"
            )
        if every > MAX_VALUES:
            raise DataError(
                f"attribute '{name}' in {path} has {every} values; at most {MAX_VALUES} are "
                "allowed, so divide a measured quantity into classes first"
            )
    return made


def codes(values: Sequence[str]) -> Tensor:
    """The rank of each value among the distinct values in sorted order.

    >>> codes(["10", "-1", "9", "9"]).tolist(), codes(["yes", "no"]).tolist()
    ([2, 0, 1, 1], [1, 0])
    """
    try:
        keys: Sequence[str | int] = [int(value) for value in values]
    except ValueError:
        keys = values
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return torch.tensor([ranks[key] for key in keys])


def _rows(path: Path) -> list[Row]:
    """The lines below the header, as mappings from columns to cells."""
    if path.suffix.lower() == ".json":
        raise DataError(
            f"{path}: attributes are read from CSV only; write a header with the names of the "
            "columns, then one line for each image"
        )
    try:
        # utf-8-sig drops the byte order mark that spreadsheets write.
        content = read_bytes(path).decode("utf-8-sig")
        header, *lines = list(csv.reader(StringIO(content, newline=""))) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise DataError(f"cannot read the attributes in {path}: {err}") from err
    names = [name.strip() for name in header]
    if not names or not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{path} must start with a header of distinct column names, got: "
            f"{', '.join(names) or 'nothing'}"
        )
    numbered = ((number, cells) for number, cells in enumerate(lines, start=2) if cells)
    return [_row(f"{path}, line {number}", names, cells) for number, cells in numbered]


def _row(where: str, names: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) != len(names):
        raise DataError(f"{where}: {len(cells)} values for {len(names)} columns")
    row = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    if missing := [name for name, cell in row.items() if cell.lower() in ("", "nan")]:
        raise DataError(f"{where}: no value for {', '.join(missing)}; every column needs one")
    return row


def _by_image(
    path: Path, rows: Sequence[Row], key: str | None, n: int, files: Sequence[str] | None
) -> list[Row]:
    """The rows in the order of the images; every image must have exactly one."""
    if key is None and len(rows) > n:
        raise DataError(f"{path} has {len(rows)} rows for {n} images; keep one for each")
    known, named = [str(place) for place in range(n)], [str(place) for place in range(len(rows))]
    hint = f"allowed are whole numbers from 0 to {n - 1}"
    if key == INDEX:
        named = [row[INDEX].lstrip("0") or "0" for row in rows]  # "007" is image 7
    elif key == FILE:
        if files is None:
            raise DataError(
                f"{path} has a column '{FILE}', but only the images of a `folder:` dataset have "
                f"file names; use a column '{INDEX}', or sort the rows in the order of the dataset"
            )
        known, named = list(files), [row[FILE].replace("\\", "/") for row in rows]
        hint = f"names are relative to the dataset's folder, such as '{files[0]}'"
    found = dict(zip(named, rows, strict=True))
    images = set(known)
    if wrong := [name for name in named if name not in images]:
        raise DataError(f"{path}: unknown {key} {_some(wrong)}; {hint}")
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        raise DataError(f"{path} has two rows for image {_some(twice)}; keep one")
    if absent := [name for name in known if name not in found]:
        raise DataError(
            f"{path} has no row for {len(absent)} of {n} images: {_some(absent)}; add one for "
            "every image of the dataset"
        )
    return [found[name] for name in known]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name:.80}'" for name in names[:SHOWN])
    return shown + (", …" if len(names) > SHOWN else "")
