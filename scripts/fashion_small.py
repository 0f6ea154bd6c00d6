"""Make `fashion-small.xz`, the part of Fashion-MNIST that ships with the package.

It holds the first 500 images of each class of the training file and the first 200 of each class of
the test file, in file order: 7,000 labels, one byte each, then the images, 28·28 bytes each. The
same files and the same liblzma give the same bytes.

Example: `python scripts/fashion_small.py`
"""

import argparse
import lzma
from pathlib import Path

import torch

from splitveil.data import Dataset, load
from splitveil.data.mnist import SMALL, SMALL_TEST, SMALL_TRAIN

HERE = Path(__file__).parents[1] / "src/splitveil/data" / SMALL
# Bytes without alignment; the literal-context bits were chosen by size.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def first_of_each(labels: torch.Tensor, rows: torch.Tensor, each: int) -> torch.Tensor:
    """The first `each` of these rows of every class, in their order."""
    kept = [rows[labels[rows] == k][:each] for k in range(int(labels.max()) + 1)]
    return torch.cat(kept).sort().values


def packed(whole: Dataset) -> bytes:
    """The file's bytes from all of Fashion-MNIST."""
    parts = ((whole.pool, SMALL_TRAIN), (whole.test, SMALL_TEST))
    chosen = [first_of_each(whole.labels, p, n // whole.num_classes) for p, n in parts]
    rows = torch.cat(chosen)
    labels = whole.labels[rows].to(torch.uint8).numpy().tobytes()
    raw = labels + whole.images[rows].numpy().tobytes()
    return lzma.compress(raw, format=lzma.FORMAT_XZ, filters=FILTERS)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    target = parser.parse_args().out
    target.write_bytes(packed(load("fashion-mnist")))
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
