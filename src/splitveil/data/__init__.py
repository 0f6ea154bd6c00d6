"""Datasets: a catalogue, readers of the canonical formats, disjoint splits, augmentation.

`load("digits")` or `load("folder:photos")` gives a `Dataset`; `make_splits` divides it.
"""

from splitveil.data.augment import augment
from splitveil.data.catalogue import DATASETS, load
from splitveil.data.dataset import Dataset, Request, Source, make_dataset
from splitveil.data.splits import AuxView, Splits, aux_view, make_splits

__all__ = [
    "DATASETS",
    "AuxView",
    "Dataset",
    "Request",
    "Source",
    "Splits",
    "augment",
    "aux_view",
    "load",
    "make_dataset",
    "make_splits",
]
