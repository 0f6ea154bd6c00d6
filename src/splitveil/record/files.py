"""The files of a run folder: read, checked, and written without losing a stronger record."""

import json
import logging
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.io import Json, as_run_error, parse_json, read_text, write_text
from splitveil.record.schema import (
    Record,
    number,
    read_record,
    read_value,
    text,
    unpack,
    wrong,
)

Pixels = NDArray[np.uint8]  # (n, c, h, w)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Scored images and their reconstructions, uint8 (n, c, h, w), the same images in each.

    `label_names` and `answer_names` are the classes of `labels` and of the server's `answers`;
    `mse` holds the error of each image (n,), by attack.
    """

    indices: tuple[int, ...]
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    answers: tuple[int, ...]
    answer_names: tuple[str, ...]
    original: Pixels
    reconstructions: dict[str, Pixels]
    mse: dict[str, tuple[float, ...]]


def parse_gallery(data: Json, where: str) -> Gallery:
    """The gallery in the JSON of file `where`; raises RunError naming what is wrong."""

    def entries(kind: Any, value: object, key: str, length: int | None = None) -> tuple[Any, ...]:  # noqa: ANN401 - a type hint
        found: tuple[Any, ...] = read_value(kind, value, key)
        if not found or None in found or length not in (None, len(found)):
            raise wrong(key, f"a list of {length or 'at least 1'} entries", value)
        return found

    def pixels(packed: object, key: str) -> Pixels:
        raw = unpack(read_value(str, packed, key), "uint8", key)
        if raw.size != math.prod(size):
            raise wrong(key, f"{math.prod(size)} bytes for {size}", packed)
        return raw.reshape(size)

    def named(places: tuple[int, ...]) -> tuple[str, ...]:  # a number if the list is too short
        return tuple(classes[at] if 0 <= at < len(classes) else str(at) for at in places)

    whole, real = tuple[int, ...], tuple[float, ...]
    try:
        shape = entries(whole, data.get("image_shape"), "image_shape", 3)
        if shape[0] not in (1, 3) or min(shape) < 1:
            raise wrong("image_shape", "[1 or 3, height, width]", shape)
        indices = entries(whole, data.get("indices"), "indices")
        size = (len(indices), *shape)
        labels = entries(whole, data.get("labels"), "labels", len(indices))
        answers = entries(whole, data.get("answers"), "answers", len(indices))
        classes = read_value(tuple[str, ...], data.get("classes"), "classes")
        guesses = read_value(Mapping[str, Any], data.get("reconstructions"), "reconstructions")
        errors = read_value(Mapping[str, Any], data.get("mse"), "mse")
        return Gallery(
            indices=indices,
            labels=labels,
            label_names=named(labels),
            answers=answers,
            answer_names=named(answers),
            original=pixels(data.get("original"), "original"),
            reconstructions={n: pixels(v, f"reconstructions.{n}") for n, v in guesses.items()},
            mse={n: entries(real, v, f"mse.{n}", len(indices)) for n, v in errors.items()},
        )
    except RunError as err:
        raise RunError(f"{where} is not a gallery: {err}") from err


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What one run folder holds.

    `record` is empty if the run was trained but not audited; `metrics` has one entry per epoch;
    `config` holds the settings of `config.toml`.
    """

    name: str
    path: Path
    record: Record
    metrics: tuple[Json, ...] = ()
    gallery: Gallery | None = None
    config: Json = field(default_factory=dict)

    @property
    def settings(self) -> Json:
        """Its settings: of the record, or of `config.toml` where there is no record."""
        return dict(self.record.config or self.config)

    @property
    def audited(self) -> bool:
        """Whether the run has a record."""
        return bool(self.record.raw)


def read_run(path: Path, *, audited: bool = True) -> RunFiles:
    """Read a run folder.

    Args:
        path: `runs/<name>`.
        audited: Whether a record is required. Without, a run may be read for its training curves.

    Returns:
        Its record, epochs and gallery.

    Raises:
        RunError: If the folder is missing or a file is broken, or without a record if `audited`.
    """
    if not os.path.isdir(path):  # Path.is_dir raises without permission
        raise RunError(
            f"no run folder at {path}; train one with `splitveil train --name {path.name}`, "
            "or check the path"
        )
    name = path.resolve().name
    record = _read_object(path / "record.json")
    if record is None and audited:
        if inner := sorted(path.glob("*/config.toml")):
            raise RunError(f"{path} holds runs; name them, such as {inner[0].parent}")
        raise RunError(f"run '{name}' has no record.json; run `splitveil audit {path}` first")
    pictures = _read_object(path / "gallery.json")
    found = RunFiles(
        name=name,
        path=path,
        record=Record.from_dict(record or {}),
        metrics=_read_epochs(path / "metrics.jsonl"),
        gallery=None if pictures is None else parse_gallery(pictures, str(path / "gallery.json")),
        config=_read_settings(path / "config.toml"),
    )
    for key in ("epochs", "lambd", "ramp"):  # which curves and charts show
        number(found.settings, key)
    return found


def folder_names(folders: Sequence[Path]) -> dict[Path, str]:
    """A short name for each folder, with as many parent folders as it takes to be unique.

    >>> list(folder_names([Path("/a/x"), Path("/b/y/x"), Path("/c/y/x"), Path("/z")]).values())
    ['a/x', 'b/y/x', 'c/y/x', 'z']
    """
    names = {folder: folder.name for folder in folders}
    for depth in range(2, 1 + max(len(folder.parts) for folder in folders)):
        taken = list(names.values())
        names = {
            folder: name if taken.count(name) == 1 else "/".join(folder.parts[-depth:]).lstrip("/")
            for folder, name in names.items()
        }
    return names


def _read_text(path: Path) -> str | None:
    """The text of a file, or None if there is no file."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as err:
        raise RunError(f"cannot read {path}: {err}; check its permissions and encoding") from err


def _read_settings(path: Path) -> Json:
    """The settings in a `config.toml`; empty if there is no such file, or a broken one."""
    try:
        return tomllib.loads(_read_text(path) or "")
    except tomllib.TOMLDecodeError:
        return {}


def _read_object(path: Path) -> Json | None:
    """The JSON object in a file, or None if there is no file."""
    content = _read_text(path)
    if content is None:
        return None
    try:
        data = parse_json(content, lenient=True)
    except ValueError as err:
        raise RunError(f"{path} is not valid JSON ({err}); audit the run again") from err
    if not isinstance(data, dict):
        raise RunError(
            f"{path} must hold a JSON object, got {type(data).__name__}; audit the run again"
        )
    return data


def _read_epochs(path: Path) -> tuple[Json, ...]:
    """The lines of a log that describe epochs, in order.

    A killed run may end in half a line, which is dropped. A resumed run may have logged an epoch
    twice; the later line counts.
    """
    lines = [line for line in (_read_text(path) or "").split("\n") if line.strip()]
    epochs: dict[float, Json] = {}
    for at, line in enumerate(lines, start=1):
        try:
            entry = parse_json(line, lenient=True)
        except ValueError as err:
            if at == len(lines):  # cut off by a kill
                break
            raise RunError(
                f"{path} line {at} is not valid JSON ({err}); remove the line or train again"
            ) from err
        if not isinstance(entry, Mapping) or entry.get("kind") != "epoch":
            continue
        for key, value in entry.items():
            left_out = value is None and key != "epoch"
            if key != "kind" and not left_out and type(value) not in (int, float):
                raise RunError(
                    f"{path} line {at}: `{key}` must be a number, got {value!r:.60}; remove the "
                    "line or train again"
                )
        epochs[entry.get("epoch", len(epochs))] = dict(entry)
    return tuple(epochs[when] for when in sorted(epochs))


def last_epoch(folder: Path) -> dict[str, Any]:
    """The last epoch in the log of a run; empty before the first."""
    lines = _read_epochs(folder / "metrics.jsonl")
    return dict(lines[-1]) if lines else {}


def saved_class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    """Names of the classes in the gallery of a run; empty if there is none or it is broken."""
    try:
        found = list(parse_json(read_text(path / "gallery.json"), lenient=True)["classes"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(map(str, found)) if len(found) == num_classes else ()


log = logging.getLogger(__name__)
SAME = ("audit.model", "audit.aux", "splits.scored", "seeds.attack")


def write_record(folder: Path, record: Record, pictures: Json, profiles: Sequence[str]) -> None:
    """Write `record.json` and `gallery.json` into a folder, which is created if it is missing.

    An earlier record with something that the new one lacks is kept as
    `record.<profile>-<aux>-seed<N>.json`, with its gallery, and a warning says so.

    Args:
        folder: Usually the run folder.
        record: What to write.
        pictures: The gallery as JSON.
        profiles: Names of all audit profiles, by rising budget.
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
            "the earlier record in %s has results that the new one lacks; it is kept as "
            "record.%s.json",
            folder,
            name,
        )
    # The record comes last, so that a killed first audit leaves no record without a gallery.
    write_text(folder / "gallery.json", json.dumps(pictures))
    write_text(folder / "record.json", record.to_json())


def is_at_least_as_strong(new: Record, old: Record, profiles: Sequence[str]) -> bool:
    """Whether a record may replace another one.

    It must be of the same model, images and attack seed, by attackers with the same knowledge and
    at least the same strength, and have all attributes and other leaks of the old one.
    """
    if any(text(new, path) != text(old, path) for path in SAME):
        return False
    if not set(old.audit.attributes or ()) <= set(new.audit.attributes or ()):
        return False
    if not set(old.leaks) - {"refused"} <= set(new.leaks):
        return False
    # A larger profile replaces everything only if no attack was left out.
    new_rank, old_rank = _rank(new, profiles), _rank(old, profiles)
    whole = not new.audit.only and not new.audit.left_out
    return (new_rank > old_rank and whole) or (
        new_rank >= old_rank and set(old.attacks) <= set(new.attacks)
    )


def _rank(record: Record, profiles: Sequence[str]) -> int:
    """The rank of a record's profile by budget; an unknown one ranks below all."""
    profile = record.audit.profile
    return profiles.index(profile) if profile in profiles else -1


def _free_name(folder: Path, old: Record, profiles: Sequence[str]) -> str:
    """A name for the record to keep, under which no other record would be lost."""
    facts = f"{old.audit.profile}-{old.audit.aux}-seed{old.seeds.attack}"
    stem = re.sub(r"[^\w.-]+", "-", facts)
    names = (stem if at == 1 else f"{stem}-{at}" for at in count(1))
    return next(n for n in names if _may_hold(folder / f"record.{n}.json", old, profiles))


def _may_hold(file: Path, record: Record, profiles: Sequence[str]) -> bool:
    """Whether nothing is lost if the record is written to this file."""
    if not file.exists():
        return True
    there = _read(file)
    return there is not None and is_at_least_as_strong(record, there, profiles)


def _read(file: Path) -> Record | None:
    """The record in a file; None if there is none or it is broken."""
    try:
        return read_record(file)
    except RunError:
        return None
