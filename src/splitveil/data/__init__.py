"""Datasets: a catalogue, readers of the official files, disjoint splits.

`load("digits")` or `load("folder:photos")` gives a `Dataset`; `make_splits` divides it.
"""

from splitveil.data.catalogue import DATASETS, load
from splitveil.data.dataset import Dataset, ReadRequest, Source, make_dataset
from splitveil.data.splits import AuxView, Splits, aux_view, make_splits

__all__ = [
    "DATASETS",
    "AuxView",
    "Dataset",
    "ReadRequest",
    "Source",
    "Splits",
    "aux_view",
    "load",
    "make_dataset",
    "make_splits",
]
