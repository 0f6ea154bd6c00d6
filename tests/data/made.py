"""Small archives in the layouts of the official ones."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splitveil.data import cifar, tiny_imagenet
from splitveil.data.cifar import CIFAR100
from splitveil.data.dataset import Counts
from splitveil.data.tiny_imagenet import TINY

Blobs = dict[str, bytes]

FEW = Counts(classes=3, train=10, test=10)
WNIDS = ("n02124075", "n01443537", "n04067472")


def pack_tar(blobs: Mapping[str, bytes], target: Path, prefix: str) -> Path:
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        for name, raw in blobs.items():
            info = tarfile.TarInfo(f"{prefix}/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return target


def pack_zip(
    blobs: Mapping[str, bytes], target: Path, prefix: str = TINY.folder, packing: int = 0
) -> Path:
    with zipfile.ZipFile(target, "w", packing) as zipped:
        for name, raw in blobs.items():
            zipped.writestr(f"{prefix}/{name}", raw)
    return target


def unpack(blobs: Mapping[str, bytes], folder: Path) -> Path:
    for name, raw in blobs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def cifar100_blobs(counts: Counts = FEW) -> Blobs:
    """Random records with coarse labels 200, 201, … that must not be taken for the fine ones."""
    rng = np.random.default_rng(0)
    made: Blobs = {}
    for name, each in (("train.bin", counts.train), ("test.bin", counts.test)):
        n = each * counts.classes
        table = rng.integers(0, 256, (n, 3074), dtype=np.uint8)
        table[:, 1] = np.arange(n) % counts.classes
        table[:, 0] = 200 + table[:, 1]
        made[name] = table.tobytes()
    made["fine_label_names.txt"] = "".join(f"fine_{i}\n" for i in range(counts.classes)).encode()
    made["coarse_label_names.txt"] = b"coarse\n"
    return made


def jpeg(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=60)
    return stream.getvalue()


def tiny_blobs(counts: Counts = FEW) -> Blobs:
    """Noise in 64×64; the first image of the first class is grey."""
    rng = np.random.default_rng(0)
    made: Blobs = {
        "wnids.txt": "".join(f"{w}\n" for w in WNIDS).encode(),
        "words.txt": b"n00001740\tentity\nn01443537\tgoldfish, Carassius auratus\n"
        b"n02124075\tEgyptian cat\nn04067472\treel\n",
        "test/images/test_0.JPEG": b"never read",
    }
    for wnid in WNIDS:
        made[f"train/{wnid}/{wnid}_boxes.txt"] = b"never read"
        for i in range(counts.train):
            shape = (64, 64) if wnid == WNIDS[0] and i == 0 else (64, 64, 3)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            made[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(pixels)
    lines = []
    for i in range(counts.test * len(WNIDS)):
        made[f"val/images/val_{i}.JPEG"] = jpeg(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        lines.append(f"val_{i}.JPEG\t{WNIDS[i % 3]}\t0\t32\t44\t62\n")
    made["val/val_annotations.txt"] = "".join(lines).encode()
    return made


def cifar100_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small archive, and the counts that make it a good one."""
    monkeypatch.setattr(cifar, "COUNTS100", FEW)
    pack_tar(cifar100_blobs(), folder / CIFAR100.name, CIFAR100.folder)
    return folder


def tiny_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small archive, and the counts that make it a good one."""
    monkeypatch.setattr(tiny_imagenet, "COUNTS", FEW)
    pack_zip(tiny_blobs(), folder / TINY.name)
    return folder


COARSE = Counts(classes=2, train=20, test=20)  # of two fine classes each
FOUR = Counts(classes=4, train=10, test=10)


def coarse_blobs() -> Blobs:
    """As `cifar100_blobs`, with four fine classes in two coarse ones."""
    made = cifar100_blobs(FOUR)
    for name in ("train.bin", "test.bin"):
        table = np.frombuffer(made[name], np.uint8).reshape(-1, 3074).copy()
        table[:, 0] = table[:, 1] // 2
        made[name] = table.tobytes()
    return made | {"coarse_label_names.txt": b"sea\nland\n"}


def coarse_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small archive with coarse classes, and the counts that make it a good one."""
    monkeypatch.setattr(cifar, "COUNTS100", FOUR)
    monkeypatch.setattr(cifar, "COUNTS20", COARSE)
    pack_tar(coarse_blobs(), folder / CIFAR100.name, CIFAR100.folder)
    return folder
