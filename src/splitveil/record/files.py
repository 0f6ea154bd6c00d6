"""The files of a run's folder. Writing a record never loses a better one."""

import base64
import binascii
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.io import Json, as_run_error, parse, write_text
from splitveil.record.schema import Record, read_record, text

Pixels = NDArray[np.uint8]  # (n, c, h, w)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Scored images and their reconstructions, uint8 (n, c, h, w), one column per image.

    `labels` and `answers` (the server's) index `classes`; `mse` holds per-image errors (n,).
    """

    indices: tuple[int, ...]
    labels: tuple[int, ...]
    answers: tuple[int, ...]
    classes: tuple[str, ...]
    original: Pixels
    reconstructions: dict[str, Pixels]
    mse: dict[str, tuple[float, ...]]

    def class_name(self, label: int) -> str:
        """The name of a class, or its number when the list of names is too short."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)


def parse_gallery(data: Mapping[str, Any], where: str) -> Gallery:
    """A checked gallery from the JSON of file `where`; raises RunError naming what is wrong."""
    try:
        shape = _shape(data["image_shape"])
        indices = _integers(data["indices"], "indices")
        size = (len(indices), *shape)
        return Gallery(
            indices=indices,
            labels=_integers(data["labels"], "labels", len(indices)),
            answers=_integers(data["answers"], "answers", len(indices)),
            classes=tuple(str(name) for name in data.get("classes") or ()),
            original=_pixels(data["original"], size, "original"),
            reconstructions={
                str(name): _pixels(blob, size, f"reconstructions.{name}")
                for name, blob in dict(data["reconstructions"]).items()
            },
            mse={
                str(name): _errors(values, len(indices), f"mse.{name}")
                for name, values in dict(data.get("mse") or {}).items()
            },
        )
    except (KeyError, TypeError, ValueError) as err:
        reason = f"the key {err} is missing" if isinstance(err, KeyError) else str(err)
        raise RunError(
            f"{where} is not a gallery: {reason}; audit the run again to write a fresh one"
        ) from err


def _shape(value: object) -> tuple[int, int, int]:
    """Channels, height and width; grey or RGB."""
    c, h, w = _integers(value, "image_shape", 3)
    if c not in (1, 3) or h < 1 or w < 1:
        raise ValueError(f"image_shape must be [1 or 3, height, width], got {value}")
    return c, h, w


def _integers(value: object, what: str, length: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers, of a given length where one is named."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{what} must be a list of whole numbers, got {value!r:.60}")
    if not value or length not in (None, len(value)):
        raise ValueError(f"{what} must hold {length or 'at least 1'} entries, got {len(value)}")
    return tuple(value)


def _pixels(blob: object, size: tuple[int, ...], what: str) -> Pixels:
    """Base64 of raw uint8 bytes to an array of the stated size."""
    if not isinstance(blob, str):
        raise ValueError(f"{what} must be base64 text, got {type(blob).__name__}")
    try:
        raw = base64.b64decode(blob, validate=True)
    except binascii.Error as err:
        raise ValueError(f"{what} is not base64 ({err})") from err
    if len(raw) != math.prod(size):
        raise ValueError(f"{what} must be {math.prod(size)} bytes for {size}, got {len(raw)}")
    return np.frombuffer(raw, dtype=np.uint8).reshape(size)


def _errors(value: object, length: int, what: str) -> tuple[float, ...]:
    """Per-image errors, one for each image."""
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{what} must be a list of {length} numbers, got {value!r:.60}")
    return tuple(float(item) for item in value)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What one run folder holds; `record` is empty for a run that was trained but not audited.

    `metrics` has one entry per epoch, in order.
    """

    name: str
    path: Path
    record: Record
    metrics: tuple[Json, ...] = ()
    gallery: Gallery | None = None

    @property
    def audited(self) -> bool:
        """Whether there is a record."""
        return bool(self.record.raw)


def read_run(path: Path, *, audited: bool = True) -> RunFiles:
    """Read `runs/<name>/`; raises RunError when it is absent, corrupt or was not audited.

    With `audited=False` a run without `record.json` is read too, for its training curves.
    """
    if not os.path.isdir(path):  # Path.is_dir raises where it may not look
        raise RunError(
            f"no run folder at {path}; train one with `splitveil train --name {path.name}`, "
            "or check the path"
        )
    name = path.resolve().name
    record = _read_object(path / "record.json")
    if record is None and audited:
        raise RunError(f"run '{name}' has no record.json; run `splitveil audit {path}` first")
    pictures = _read_object(path / "gallery.json")
    return RunFiles(
        name=name,
        path=path,
        record=Record.from_dict(record or {}),
        metrics=_read_epochs(path / "metrics.jsonl"),
        gallery=None if pictures is None else parse_gallery(pictures, str(path / "gallery.json")),
    )


def _read_text(path: Path) -> str | None:
    """The text of a file, or None when there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as err:
        raise RunError(f"cannot read {path}: {err}; check its permissions and encoding") from err


def _read_object(path: Path) -> Json | None:
    """The JSON object in a file, or None when there is no file."""
    content = _read_text(path)
    if content is None:
        return None
    try:
        data = parse(content)
    except ValueError as err:
        raise RunError(f"{path} is not valid JSON ({err}); audit the run again") from err
    if not isinstance(data, dict):
        raise RunError(
            f"{path} must hold a JSON object, got {type(data).__name__}; audit the run again"
        )
    return data


def _read_epochs(path: Path) -> tuple[Json, ...]:
    """The epoch lines of a log, in order of epoch.

    A run that was stopped may end in half a line, which is dropped; one that was resumed may
    have logged an epoch twice, and then the later line counts.
    """
    lines = [line for line in (_read_text(path) or "").split("\n") if line.strip()]
    epochs: dict[float, Json] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = parse(line)
        except ValueError as err:
            if number == len(lines):
                break
            raise RunError(
                f"{path} line {number} is not valid JSON ({err}); remove the line or train again"
            ) from err
        if isinstance(entry, Mapping) and entry.get("kind") == "epoch":
            when = entry.get("epoch")
            epochs[when if isinstance(when, int | float) else len(epochs)] = dict(entry)
    return tuple(epochs[when] for when in sorted(epochs))


def last_epoch(folder: Path) -> dict[str, Any]:
    """The last epoch's line of a run's log; empty before the first."""
    lines = read_run(folder, audited=False).metrics
    return dict(lines[-1]) if lines else {}


def class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    """Names of the classes as the audit wrote them into a run's gallery; empty without one."""
    try:
        found = json.loads((path / "gallery.json").read_text(encoding="utf-8"))["classes"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    right = isinstance(found, list) and len(found) == num_classes
    return tuple(map(str, found)) if right else ()


log = logging.getLogger(__name__)
SAME = ("audit.model", "audit.aux", "splits.scored", "seeds.attack")


def write_record(folder: Path, record: Record, pictures: Json, profiles: Sequence[str]) -> None:
    """Write `record.json` and `gallery.json` into a folder, which is made where it is missing.

    An earlier record there that says something which this one does not is kept beside it, as
    `record.<profile>-<aux>-seed<N>.json`, with its gallery; a line says so.
    `profiles` are the names of the audits' profiles, by rising budget.
    """
    with as_run_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    old = _read(folder / "record.json")
    if old is not None and not is_at_least_as_strong(record, old, profiles):
        name = _free_name(folder, old, profiles)
        for kind in ("gallery", "record"):
            file = folder / f"{kind}.json"
            with as_run_error(file):
                if file.exists():
                    file.replace(folder / f"{kind}.{name}.json")
        log.warning(
            "the earlier record of %s says what this one does not; it is kept as record.%s.json",
            folder,
            name,
        )
    write_text(folder / "gallery.json", json.dumps(pictures))
    write_text(folder / "record.json", record.to_json())


def is_at_least_as_strong(new: Record, old: Record, profiles: Sequence[str]) -> bool:
    """Whether a record can take another one's place.

    It is of the same model, images and attack seed, by attackers who know as much and are at least
    as strong, with as many attributes and other leaks.
    """
    if any(text(new, path) != text(old, path) for path in SAME):
        return False
    if not set(old.audit.attributes or ()) <= set(new.audit.attributes or ()):
        return False
    if not set(old.leaks) - {"refused"} <= set(new.leaks):
        return False
    new_rank, old_rank = _rank(new, profiles), _rank(old, profiles)
    whole = not new.audit.only and not new.audit.left_out
    return (new_rank > old_rank and whole) or (
        new_rank >= old_rank and set(old.attacks) <= set(new.attacks)
    )


def _rank(record: Record, profiles: Sequence[str]) -> int:
    """The place of a record's profile among all, by budget; an unknown one is the first."""
    profile = record.audit.profile
    return profiles.index(profile) if profile in profiles else -1


def _free_name(folder: Path, old: Record, profiles: Sequence[str]) -> str:
    """A name for a record to keep that no other one has which it does not cover."""
    told = f"{old.audit.profile}-{old.audit.aux}-seed{old.seeds.attack}"
    stem = re.sub(r"[^\w.-]+", "-", told)
    names = (stem if at == 1 else f"{stem}-{at}" for at in count(1))
    return next(n for n in names if _may_hold(folder / f"record.{n}.json", old, profiles))


def _may_hold(file: Path, record: Record, profiles: Sequence[str]) -> bool:
    """Whether nothing is lost if a record takes this file's place."""
    there = _read(file)
    return not file.exists() or (
        there is not None and is_at_least_as_strong(record, there, profiles)
    )


def _read(file: Path) -> Record | None:
    """The record in a file; None where there is none that could be judged."""
    try:
        return read_record(file)
    except RunError:
        return None
