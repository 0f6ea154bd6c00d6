import hashlib
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset, stratified
from splitveil.data.splits import AuxView, Splits, aux_view, index_hash, make_splits
from splitveil.errors import ConfigError, DataError

NONE = torch.zeros(0, dtype=torch.int64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def dataset(labels: Tensor, test: int, *, ordered: bool = False) -> Dataset:
    """A dataset whose last `test` images are the test part."""
    n = len(labels)
    return Dataset(
        name="toy",
        images=torch.zeros(n, 1, 2, 2, dtype=torch.uint8),
        labels=labels,
        classes=tuple(str(c) for c in range(int(labels.max()) + 1)),
        pool=torch.arange(n - test),
        test=torch.arange(n - test, n),
        ordered_test90=ordered,
    )


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


class_counts = st.lists(st.integers(0, 30), min_size=1, max_size=6)


@settings(deadline=None)
@given(class_counts, st.floats(0, 0.99), st.integers(0, 99))
def test_stratified_shares_are_exact_to_one(counts: list[int], fraction: float, seed: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=Generator().manual_seed(seed))]
    taken, rest = stratified(labels, fraction, Generator().manual_seed(seed))
    assert torch.cat([taken, rest]).sort().values.tolist() == list(range(len(labels)))
    assert taken.tolist() == sorted(taken.tolist())
    assert rest.tolist() == sorted(rest.tolist())
    got = labels[taken].bincount(minlength=len(counts)).tolist()
    bound = 0
    for have, count in zip(got, counts, strict=True):
        assert abs(have - fraction * count) <= 1 + 1e-9
        assert have < count or count == 0
        bound += have == max(count - 1, 0)
    assert len(taken) == round(fraction * len(labels)) or bound


def test_stratified_golden_counts() -> None:
    labels = torch.tensor([0] * 7 + [1] * 5 + [2] * 3)
    taken, _ = stratified(labels, 0.4, Generator().manual_seed(0))
    assert labels[taken].bincount().tolist() == [3, 2, 1]  # shares 2.8, 2.0, 1.2 of 6


def test_a_class_of_one_stays() -> None:
    taken, rest = stratified(ints(0, 1, 1, 1), 0.5, Generator().manual_seed(0))
    assert 0 in rest.tolist()
    assert taken.tolist() != []


def test_every_image_is_drawn_equally_often() -> None:
    labels = ints(0, 1).repeat(5)
    hits = torch.zeros(10)
    for seed in range(2000):
        hits[stratified(labels, 0.2, Generator().manual_seed(seed))[0]] += 1
    assert (hits / 2000 - 0.2).abs().max() < 0.04  # 4.5 standard deviations


def test_digits_sizes_are_known(digits: Dataset) -> None:
    splits = make_splits(digits, held_out=0.1)
    assert splits.sizes() == {"train": 1165, "val": 129, "test": 359, "held_out": 144}
    assert make_splits(digits).sizes() == {"train": 1294, "val": 144, "test": 359, "held_out": 0}


def test_hashes_are_golden_and_ignore_the_global_generator(digits: Dataset) -> None:
    torch.manual_seed(1)
    first = make_splits(digits, held_out=0.1)
    state = torch.get_rng_state()
    again = make_splits(digits, held_out=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.hashes() == again.hashes()
    assert first.hashes() == {
        "train": "a765338337077621",
        "val": "2901815c6be7c6e5",
        "test": "9b1d09da39cb1d41",
        "held_out": "c95a2a9575adf029",
    }


def test_another_split_seed_moves_val_but_never_test(digits: Dataset) -> None:
    one, other = make_splits(digits).hashes(), make_splits(digits, split_seed=1).hashes()
    assert one["test"] == other["test"]
    assert one["val"] != other["val"]


def test_the_path_of_a_dataset_does_not_matter(digits: Dataset) -> None:
    moved = replace(digits, name="folder:/elsewhere")
    assert make_splits(moved).hashes() == make_splits(digits).hashes()


def test_hash_is_sha256_of_little_endian_int64() -> None:
    raw = struct.pack("<3q", 4, 1, 7)
    assert index_hash(ints(4, 1, 7)) == hashlib.sha256(raw).hexdigest()[:16]


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 12), min_size=2, max_size=5),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
    st.booleans(),
)
def test_sets_are_disjoint_and_complete(
    counts: list[int], val_fraction: float, held_out: float, final: bool
) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    data = dataset(torch.cat([labels, labels]), test=len(labels))
    splits = make_splits(data, val_fraction=val_fraction, held_out=held_out, final=final)
    together = torch.cat(list(splits.sets().values()))
    assert together.sort().values.tolist() == list(range(len(data)))
    assert splits.test.tolist() == data.test.tolist()
    assert data.labels[splits.train].unique().tolist() == list(range(len(counts)))  # type: ignore[no-untyped-call]


def test_final_gives_val_to_train_and_leaves_held_out(digits: Dataset) -> None:
    draft = make_splits(digits, held_out=0.2)
    final = make_splits(digits, held_out=0.2, final=True)
    assert len(final.val) == 0
    assert final.train.tolist() == torch.cat([draft.train, draft.val]).sort().values.tolist()
    assert final.held_out.tolist() == draft.held_out.tolist()


def test_val_is_a_tenth_of_every_class(digits: Dataset) -> None:
    splits = make_splits(digits)
    counts = digits.labels[digits.pool].bincount()
    assert (digits.labels[splits.val].bincount() - counts * 0.1).abs().max() <= 1


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_outside_the_range_are_refused(digits: Dataset, fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"val_fraction must be in \[0, 1\)"):
        make_splits(digits, val_fraction=fraction)
    with pytest.raises(ConfigError, match=r"held_out must be in \[0, 1\)"):
        make_splits(digits, held_out=fraction)


def test_overlap_names_the_sets_and_the_count() -> None:
    with pytest.raises(DataError, match="val and test share 2 images"):
        Splits(train=ints(0), val=ints(1, 2, 3), test=ints(2, 3, 4), held_out=NONE)
    with pytest.raises(DataError, match="train and held_out share 1 images"):
        Splits(train=ints(0, 9), val=NONE, test=ints(3), held_out=ints(9))


def test_empty_or_unsorted_sets_are_refused() -> None:
    with pytest.raises(DataError, match="train set is empty"):
        Splits(train=NONE, val=NONE, test=ints(1), held_out=NONE)
    with pytest.raises(DataError, match="val set must be sorted and without repeats"):
        Splits(train=ints(0), val=ints(2, 2), test=ints(1), held_out=NONE)


def test_knowledge_of_train(digits: Dataset) -> None:
    splits = make_splits(digits)
    view = aux_view(digits, splits, "train")
    assert view.hashes() == {"aux": splits.hashes()["train"], "scored": splits.hashes()["test"]}


def test_knowledge_of_held_out(digits: Dataset) -> None:
    splits = make_splits(digits, held_out=0.1)
    view = aux_view(digits, splits, "held-out")
    assert view.aux.tolist() == splits.held_out.tolist()
    assert view.scored.tolist() == splits.test.tolist()
    with pytest.raises(DataError, match="reserved none; train again with held_out"):
        aux_view(digits, make_splits(digits), "held-out")


def test_knowledge_of_test90_is_stratified(digits: Dataset) -> None:
    splits = make_splits(digits)
    view = aux_view(digits, splits, "test90")
    assert torch.cat([view.aux, view.scored]).sort().values.tolist() == splits.test.tolist()
    assert (len(view.aux), len(view.scored)) == (323, 36)
    counts = digits.labels[splits.test].bincount()
    assert (digits.labels[view.aux].bincount() - counts * 0.9).abs().max() <= 1
    assert view.hashes() != aux_view(digits, splits, "test90", split_seed=1).hashes()


def test_knowledge_of_test90_in_file_order() -> None:
    data = dataset(torch.arange(40) % 2, test=20, ordered=True)
    view = aux_view(data, make_splits(data), "test90")
    assert view.aux.tolist() == list(range(20, 38))
    assert view.scored.tolist() == [38, 39]


def test_knowledge_of_val_leaves_test_unseen(digits: Dataset) -> None:
    splits = make_splits(digits)
    view = aux_view(digits, splits, "val")
    assert view.hashes() == {"aux": splits.hashes()["train"], "scored": splits.hashes()["val"]}
    assert not set(splits.test.tolist()) & {*view.aux.tolist(), *view.scored.tolist()}
    assert splits.judged("val") is splits.val
    assert splits.judged("test90") is splits.judged("train") is splits.test
    with pytest.raises(DataError, match=r"this run has none.*train without --final, or add images"):
        aux_view(digits, make_splits(digits, final=True), "val")


def test_unknown_knowledge_is_refused(digits: Dataset) -> None:
    with pytest.raises(ConfigError, match="did you mean 'test90'"):
        aux_view(digits, make_splits(digits), "test80")


def test_aux_may_touch_neither_scored_nor_val() -> None:
    with pytest.raises(DataError, match="aux and scored share 1 images"):
        AuxView(aux=ints(1, 2), scored=ints(2, 3), val=NONE, knowledge="train")
    with pytest.raises(DataError, match="aux and val share 2 images"):
        AuxView(aux=ints(1, 2), scored=ints(3), val=ints(1, 2), knowledge="train")
    with pytest.raises(DataError, match="gives 1 images to fit on and 0 to score"):
        AuxView(aux=ints(1), scored=NONE, val=NONE, knowledge="test90")
