"""CIFAR-100 with its coarse classes as the task and its fine ones as a secret."""

import re
from pathlib import Path

import pytest
import torch
from data.made import coarse_archive, coarse_blobs, pack_tar

from splitveil.audits.trained_run import check_replayable
from splitveil.data.catalogue import DATASETS, load
from splitveil.data.cifar import CIFAR100, FINE
from splitveil.errors import AuditError, DataError
from splitveil.record.schema import Record


def test_the_task_is_coarse_and_the_fine_class_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = coarse_archive(tmp_path, monkeypatch)
    fine, coarse = load("cifar100", folder), load("cifar100-coarse", folder)
    assert coarse.classes == ("sea", "land")
    assert torch.equal(fine.images, coarse.images)
    assert coarse.attributes.keys() == {FINE} == set(DATASETS["cifar100-coarse"].attributes)
    assert torch.equal(coarse.attributes[FINE], fine.labels)
    assert torch.equal(coarse.labels, fine.labels // 2)
    assert (coarse.crop_pad, coarse.flip, coarse.ordered_test90) == (4, True, True)
    assert fine.attributes == {}


def test_an_audit_gets_the_secret_of_its_own_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load("cifar100-coarse", coarse_archive(tmp_path, monkeypatch))
    given = data.own_attributes(torch.tensor([3, 0]), torch.tensor([41]))
    assert given is not None
    assert given.aux[FINE].tolist() == data.attributes[FINE][[3, 0]].tolist()
    assert given.scored[FINE].tolist() == data.attributes[FINE][[41]].tolist()
    assert load("digits").own_attributes(torch.tensor([0]), torch.tensor([1])) is None


def test_a_record_about_own_attributes_can_be_replayed_and_one_of_a_table_cannot() -> None:
    facts = {"config": {"dataset": "cifar100-coarse"}, "audit": {"attributes": [FINE]}}
    check_replayable(Record.from_dict(facts))
    for dataset, names in (("cifar100-coarse", ["sex"]), ("digits", [FINE])):
        other = {"config": {"dataset": dataset}, "audit": {"attributes": names}}
        with pytest.raises(AuditError, match="a table of attributes"):
            check_replayable(Record.from_dict(other))


def test_without_names_of_coarse_classes_only_the_fine_task_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse_archive(tmp_path, monkeypatch)
    blobs = coarse_blobs()
    del blobs["coarse_label_names.txt"]
    pack_tar(blobs, tmp_path / CIFAR100.name, CIFAR100.folder)
    assert len(load("cifar100", tmp_path)) == 80
    with pytest.raises(DataError, match=r"lacks coarse_label_names\.txt; fetch the archive again"):
        load("cifar100-coarse", tmp_path)


def test_a_fine_class_in_two_coarse_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse_archive(tmp_path, monkeypatch)
    blobs = coarse_blobs()
    raw = bytearray(blobs["train.bin"])
    places = [p for p in range(0, len(raw), 3074) if raw[p + 1] in (0, 2)]
    zero, two = (next(p for p in places if raw[p + 1] == k) for k in (0, 2))
    raw[zero], raw[two] = raw[two], raw[zero]  # the counts stay right
    blobs["train.bin"] = bytes(raw)
    pack_tar(blobs, tmp_path / CIFAR100.name, CIFAR100.folder)
    said = "each of 4 fine classes has one coarse class, but"
    with pytest.raises(DataError, match=re.escape(said)):
        load("cifar100-coarse", tmp_path)


def test_wrong_counts_of_coarse_classes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse_archive(tmp_path, monkeypatch)
    blobs = coarse_blobs()
    raw = bytearray(blobs["test.bin"])
    raw[0] = 1 - raw[0]
    blobs["test.bin"] = bytes(raw)
    pack_tar(blobs, tmp_path / CIFAR100.name, CIFAR100.folder)
    with pytest.raises(DataError, match=r"cifar100-coarse has 20 test images of every class"):
        load("cifar100-coarse", tmp_path)
