"""Disjoint, hashed index sets: who may see which image.

The defender sees `train`, chooses by `val`, and is scored on `test`; `held_out` is reserved for an
attacker and never shown to the defender. A split depends on the dataset and a split seed, never on
a run's seed, so that runs pair across seeds. Index tensors are sorted and live on the CPU.
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
    """Four disjoint sets of indices into `Dataset.images`."""

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
            refuse_overlap(one, sets[one], other, sets[other])
        for name in ("train", "test"):
            if len(sets[name]) == 0:
                raise DataError(f"the {name} set is empty; lower the fractions or add images")

    def sets(self) -> dict[str, Tensor]:
        """The index sets by name."""
        return {n: getattr(self, n) for n in ("train", "val", "test", "held_out")}

    def hashes(self) -> dict[str, str]:
        """One `index_hash` per set."""
        return hash_all(self.sets())

    def judged(self, knowledge: "Knowledge") -> Int64[Tensor, " c"]:
        """The images that a run is judged by: test, or val while something is still chosen."""
        return self.val if knowledge == "val" else self.test

    def sizes(self) -> dict[str, int]:
        """How many images each set has."""
        return {name: len(indices) for name, indices in self.sets().items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class AuxView:
    """What an attacker fits on (`aux`) and is scored on (`scored`) under a knowledge level.

    `val` is only here to be kept apart: it chose the defence, so no attacker may fit on it.
    """

    aux: Int64[Tensor, " a"]
    scored: Int64[Tensor, " s"]
    val: Int64[Tensor, " v"]
    knowledge: Knowledge

    def __post_init__(self) -> None:
        refuse_overlap("aux", self.aux, "scored", self.scored)
        refuse_overlap("aux", self.aux, "val", self.val)
        if len(self.aux) == 0 or len(self.scored) == 0:
            raise DataError(
                f"aux={self.knowledge} gives {len(self.aux)} images to fit on and "
                f"{len(self.scored)} to score; both must be at least 1"
            )

    def hashes(self) -> dict[str, str]:
        """One `index_hash` for `aux` and one for `scored`."""
        return hash_all({"aux": self.aux, "scored": self.scored})


def make_splits(
    dataset: Dataset,
    *,
    split_seed: int = 0,
    val_fraction: float = 0.1,
    held_out: float = 0.0,
    final: bool = False,
) -> Splits:
    """Stratified sets: first `held_out` of the pool, then `val_fraction` of the rest.

    With `final`, val is empty and train keeps its images: the run that is trained once after
    selection. Every class keeps at least one image in train.
    """
    for name, value in (("val_fraction", val_fraction), ("held_out", held_out)):
        Range(0, 1, below=True).check(name, value)
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
    """The images an attacker of this knowledge level fits on, and those it is scored on.

    train: all of train, scored on test. held-out: the reserved images, scored on test. test90:
    90 % of test, scored on the other 10 %. val: all of train, scored on val; test stays unseen.
    """
    if knowledge not in KNOWLEDGE:
        raise ConfigError(unknown("knowledge level", knowledge, KNOWLEDGE))
    if knowledge == "held-out" and len(splits.held_out) == 0:
        raise DataError(
            "aux=held-out needs images the defender never saw, and this run reserved none; "
            "train again with held_out=0.1, or choose aux=train"
        )
    if knowledge == "val" and len(splits.val) == 0:
        raise DataError(
            "aux=val scores validation images, and this run has none: it was trained on them "
            "too (--final), or there are too few images to set some aside; nothing must be "
            "chosen by the test images, so train without --final or add images"
        )
    aux, scored = splits.train, splits.judged(knowledge)
    if knowledge == "held-out":
        aux = splits.held_out
    elif knowledge == "test90":
        aux, scored = _ninety(dataset, splits.test, split_seed)
    return AuxView(aux=aux, scored=scored, val=splits.val, knowledge=knowledge)


def _ninety(dataset: Dataset, test: Tensor, split_seed: int) -> tuple[Tensor, Tensor]:
    """90 % of test and the other 10 %: by file order, or stratified."""
    if dataset.ordered_test90:
        cut = round(TEST90 * len(test))
        return test[:cut], test[cut:]
    taken, rest = stratified(dataset.labels.cpu()[test], TEST90, stream(split_seed, "split/test90"))
    return test[taken], test[rest]


def index_hash(indices: Int64[Tensor, " n"]) -> str:
    """First 16 hex digits of the SHA-256 of the indices as little-endian int64.

    >>> index_hash(torch.arange(3))
    'ab25350e3e65efeb'
    """
    raw = indices.cpu().numpy().astype("<i8").tobytes()
    return hashlib.sha256(raw).hexdigest()[:HASH_DIGITS]


def hash_all(sets: Mapping[str, Tensor]) -> dict[str, str]:
    """`index_hash` of every set, under its name."""
    return {name: index_hash(indices) for name, indices in sets.items()}


def refuse_overlap(one: str, a: Tensor, other: str, b: Tensor) -> None:
    """Refuse two sets that share an image, for then a number measured on them would be false."""
    if shared := int(torch.isin(a, b).sum()):
        raise DataError(f"{one} and {other} share {shared} images; they must be disjoint")
