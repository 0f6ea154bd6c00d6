"""Disjoint, hashed index sets: who may see which image.

The defender trains on `train`, chooses by `val`, and is scored on `test`. `held_out` is reserved
for an attacker; the defender never sees it. A split depends on the dataset and on a split seed,
never on the seed of a run, so that runs of different seeds can be compared image by image. Index
tensors are sorted and on the CPU.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from splitveil.data.dataset import Dataset, stratified
from splitveil.errors import ConfigError, DataError, Range, unknown
from splitveil.rng import stream

Knowledge = Literal["train", "held-out", "test90", "val"]
KNOWLEDGE: tuple[Knowledge, ...] = get_args(Knowledge)
TEST90 = 0.9
HASH_DIGITS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Splits:
    """Four disjoint, sorted sets of indices into `Dataset.images`; train and test are not empty.

    Args:
        train: Images that a run is trained on (a,).
        val: Images that settings are chosen by (b,).
        test: Images that a result is measured on (c,).
        held_out: Images that only the attacker has (d,).

    >>> none = torch.arange(0)
    >>> sets = Splits(train=torch.arange(3), val=none, test=torch.arange(3, 5), held_out=none)
    >>> sets.sizes()
    {'train': 3, 'val': 0, 'test': 2, 'held_out': 0}
    """

    train: Int64[Tensor, " a"]
    val: Int64[Tensor, " b"]
    test: Int64[Tensor, " c"]
    held_out: Int64[Tensor, " d"]

    def __post_init__(self) -> None:
        sets = self.sets()
        for name, indices in sets.items():
            if not bool((indices.diff() > 0).all()):
                raise DataError(f"the {name} set must be sorted and without repeats")
        for one, other in combinations(sets, 2):
            check_disjoint(one, sets[one], other, sets[other])
        for name in ("train", "test"):
            if len(sets[name]) == 0:
                raise DataError(f"the {name} set is empty; lower the fractions or add images")

    def sets(self) -> dict[str, Tensor]:
        """The index sets by name."""
        return {n: getattr(self, n) for n in ("train", "val", "test", "held_out")}

    def hashes(self) -> dict[str, str]:
        """The `index_hash` of each set, by name."""
        return hash_all(self.sets())

    def judged(self, knowledge: "Knowledge") -> Int64[Tensor, " c"]:
        """The images that a run is scored on: test, or val while settings are still chosen."""
        return self.val if knowledge == "val" else self.test

    def sizes(self) -> dict[str, int]:
        """The number of images in each set."""
        return {name: len(indices) for name, indices in self.sets().items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class AuxView:
    """What an attacker of some knowledge level fits on and is scored on.

    Args:
        aux: Images it fits on (a,).
        scored: Images it is scored on (s,).
        val: For a check only (v,): these images chose the defence, so no attacker may fit on them.
        knowledge: The level: train, held-out, test90 or val.

    Example:
        `aux_view(dataset, splits, "train").aux`
    """

    aux: Int64[Tensor, " a"]
    scored: Int64[Tensor, " s"]
    val: Int64[Tensor, " v"]
    knowledge: Knowledge

    def __post_init__(self) -> None:
        check_disjoint("aux", self.aux, "scored", self.scored)
        check_disjoint("aux", self.aux, "val", self.val)
        if len(self.aux) == 0 or len(self.scored) == 0:
            raise DataError(
                f"aux={self.knowledge} gives {len(self.aux)} images to fit on and "
                f"{len(self.scored)} to score; both must be at least 1"
            )

    def hashes(self) -> dict[str, str]:
        """The `index_hash` of `aux` and of `scored`."""
        return hash_all({"aux": self.aux, "scored": self.scored})


def make_splits(
    dataset: Dataset,
    *,
    split_seed: int = 0,
    val_fraction: float = 0.1,
    held_out: float = 0.0,
    final: bool = False,
) -> Splits:
    """Divide a dataset into stratified sets: first held-out images, then val.

    Args:
        dataset: Its `pool` is divided; its test part stays as it is.
        split_seed: Decides which images go where.
        val_fraction: Share of val in what `held_out` leaves, in [0, 1).
        held_out: Share of the pool reserved for the attacker, in [0, 1).
        final: Whether train keeps the images of val, for the one run that is trained after all
            settings are chosen.

    Returns:
        The sets. Every class keeps at least one image in train.

    >>> from splitveil.data import load
    >>> make_splits(load("digits")).sizes()
    {'train': 1294, 'val': 144, 'test': 359, 'held_out': 0}
    """
    for name, value in (("val_fraction", val_fraction), ("held_out", held_out)):
        Range(0, 1, below=True).check(name, value)
    # held-out is drawn before val, so that changing val_fraction never moves a held-out image.
    labels, pool = dataset.labels.cpu(), dataset.pool.sort().values
    taken, rest = stratified(labels[pool], held_out, stream(split_seed, "split/held-out"))
    reserved, left = pool[taken], pool[rest]
    chosen, kept = stratified(labels[left], val_fraction, stream(split_seed, "split/val"))
    return Splits(
        train=left if final else left[kept],
        val=left[:0] if final else left[chosen],
        test=dataset.test.sort().values,
        held_out=reserved,
    )


def aux_view(dataset: Dataset, splits: Splits, knowledge: str, split_seed: int = 0) -> AuxView:
    """The images that an attacker fits on, and those it is scored on.

    Args:
        dataset: The dataset of `splits`.
        splits: The sets of a run.
        knowledge: "train": fits on all of train, scored on test. "held-out": fits on the reserved
            images, scored on test. "test90": fits on 90 % of test, scored on the rest. "val": fits
            on all of train, scored on val, so that test stays unseen.
        split_seed: Decides which 90 %.

    Returns:
        Disjoint index sets.

    >>> from splitveil.data import load
    >>> digits = load("digits")
    >>> view = aux_view(digits, make_splits(digits), "test90")
    >>> len(view.aux), len(view.scored)
    (323, 36)
    """
    if knowledge not in KNOWLEDGE:
        raise ConfigError(unknown("knowledge level", knowledge, KNOWLEDGE))
    if knowledge == "held-out" and len(splits.held_out) == 0:
        raise DataError(
            "aux=held-out needs images that the defender never saw, but this run reserved none; "
            "train again with held_out=0.1, or choose aux=train"
        )
    if knowledge == "val" and len(splits.val) == 0:
        raise DataError(
            "aux=val scores validation images, but this run has none: it was trained on them "
            "(--final), or the dataset is too small; train without --final, or add images. The "
            "test images are no substitute: nothing may be chosen by them"
        )
    aux, scored = splits.train, splits.judged(knowledge)
    if knowledge == "held-out":
        aux = splits.held_out
    elif knowledge == "test90":
        aux, scored = _ninety(dataset, splits.test, split_seed)
    return AuxView(aux=aux, scored=scored, val=splits.val, knowledge=knowledge)


def _ninety(dataset: Dataset, test: Tensor, split_seed: int) -> tuple[Tensor, Tensor]:
    """90 % of test and the rest, in file order or stratified."""
    if dataset.ordered_test90:
        cut = round(TEST90 * len(test))
        return test[:cut], test[cut:]
    taken, rest = stratified(dataset.labels.cpu()[test], TEST90, stream(split_seed, "split/test90"))
    return test[taken], test[rest]


def index_hash(indices: Int64[Tensor, " n"]) -> str:
    """The first 16 hex digits of the SHA-256 of the indices as little-endian int64.

    >>> index_hash(torch.arange(3))
    'ab25350e3e65efeb'
    """
    # A fixed byte order, so that the hash is the same on every machine.
    raw = indices.cpu().numpy().astype("<i8").tobytes()
    return hashlib.sha256(raw).hexdigest()[:HASH_DIGITS]


def hash_all(sets: Mapping[str, Tensor]) -> dict[str, str]:
    """The `index_hash` of every set, by name."""
    return {name: index_hash(indices) for name, indices in sets.items()}


def check_disjoint(one: str, a: Tensor, other: str, b: Tensor) -> None:
    """Raise DataError if two sets share an image: numbers measured on them would be wrong."""
    if shared := int(torch.isin(a, b).sum()):
        raise DataError(f"{one} and {other} share {shared} images; they must be disjoint")
