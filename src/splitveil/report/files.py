"""A run folder read into plain records: `record.json`, `metrics.jsonl`, `gallery.json`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitveil.errors import RunError
from splitveil.record.files import Gallery, parse_gallery
from splitveil.record.schema import Json, parse


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What one run folder holds; `record` is None for a run that was trained but not audited.

    `metrics` has one entry per epoch, in order.
    """

    name: str
    path: Path
    record: Json | None
    metrics: tuple[Json, ...] = ()
    gallery: Gallery | None = None


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
        record=record,
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
