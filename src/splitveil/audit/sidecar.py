"""Attributes of images from a table beside the dataset."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitveil.errors import DataError


@dataclass(frozen=True)
class Attributes:
    """Integer attributes by name: (n,) of the aux images and (m,) of the scored ones."""

    aux: Mapping[str, Tensor]
    scored: Mapping[str, Tensor]

    @staticmethod
    def of(table: Mapping[str, Tensor], aux: Tensor, scored: Tensor) -> "Attributes":
        """From a table over the whole dataset and the indices of both sets."""
        return Attributes(
            {name: column[aux] for name, column in table.items()},
            {name: column[scored] for name, column in table.items()},
        )


def read_attributes(path: Path, n: int) -> dict[str, Tensor]:
    """Attributes (n,) by name from a CSV file with a column `index` and one for each attribute.

    Every image 0 … n−1 has one row, in any order. The values of a column become 0, 1, … in sorted
    order, as numbers where all are integers.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise DataError(f"cannot read the attributes in {path}: {err}") from err
    names = [name.strip() for name in header]
    columns = [name for name in names if name != "index"]
    if "index" not in names or not all(names) or len(set(names)) < len(names) or not columns:
        raise DataError(
            f"{path} must start with a header of different names, 'index' and at least one "
            f"attribute, got: {', '.join(names) or 'nothing'}"
        )
    cells: dict[int, list[str]] = {}
    for line, row in enumerate(rows, start=2):
        if row:
            at, values = _row(f"{path}, line {line}", names, row, n)
            if at in cells:
                raise DataError(f"{path}, line {line}: index {at} is there twice; keep one row")
            cells[at] = values
    if absent := [i for i in range(n) if i not in cells]:
        raise DataError(
            f"{path} has no row for {len(absent)} of {n} images, the first is index {absent[0]}; "
            "every image of the dataset needs one"
        )
    return {name: _codes([cells[i][place] for i in range(n)]) for place, name in enumerate(columns)}


def _row(where: str, names: Sequence[str], row: Sequence[str], n: int) -> tuple[int, list[str]]:
    """Index and values of one line."""
    cells = {name: cell.strip() for name, cell in zip(names, row, strict=False)}
    missing = [name for name in names if cells.get(name, "").lower() in ("", "nan")]
    if missing or len(row) > len(names):
        fault = f"no value for {', '.join(missing)}" if missing else f"{len(row)} values"
        raise DataError(f"{where}: {fault}; each of the {len(names)} columns needs one")
    text = cells.pop("index")
    if not (text.isascii() and text.isdigit() and int(text) < n):
        raise DataError(f"{where}: unknown index '{text}'; allowed are 0 to {n - 1}")
    return int(text), list(cells.values())


def _codes(values: Sequence[str]) -> Tensor:
    """Position of each value among the sorted different ones.

    >>> _codes(["10", "-1", "9", "9"]).tolist()
    [2, 0, 1, 1]
    """
    try:
        keys = np.array([int(v) for v in values])
    except ValueError:
        keys = np.array(values)
    return torch.from_numpy(np.unique(keys, return_inverse=True)[1])
