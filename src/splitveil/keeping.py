"""Writing a record without losing a better one: what it does not cover is kept under a name."""

import json
import logging
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from splitveil.errors import RunError
from splitveil.io import explain_os_error, write_text
from splitveil.record.schema import parse, section, text
from splitveil.threat import Json, Record

log = logging.getLogger(__name__)


SAME = (("audit", "model"), ("audit", "aux"), ("splits", "scored"), ("seeds", "attack"))


def put_record(folder: Path, record: Record, pictures: Json, profiles: Sequence[str]) -> None:
    """Write `record.json` and `gallery.json` into a folder, which is made where it is missing.

    An earlier record there that says something which this one does not is kept beside it, as
    `record.<profile>-<aux>-seed<N>.json`, with its gallery; a line says so.
    `profiles` are the names of the audits' profiles, by rising budget.
    """
    with explain_os_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    old = _read(folder / "record.json")
    if old is not None and not covers(record.to_dict(), old, profiles):
        name = _free_name(folder, old, profiles)
        for kind in ("gallery", "record"):
            file = folder / f"{kind}.json"
            with explain_os_error(file):
                if file.exists():
                    file.replace(folder / f"{kind}.{name}.json")
        log.warning(
            "the earlier record of %s says what this one does not; it is kept as record.%s.json",
            folder,
            name,
        )
    write_text(folder / "gallery.json", json.dumps(pictures))
    write_text(folder / "record.json", record.to_json())


def covers(new: Json, old: Json, profiles: Sequence[str]) -> bool:
    """Whether a record can take another one's place.

    It is of the same model, images and attack seed, by attackers who know as much and are at least
    as strong, with as many attributes and other leaks.
    """
    if any(text(new, *keys) != text(old, *keys) for keys in SAME):
        return False
    if not set(_attributes(old)) <= set(_attributes(new)):
        return False
    if not set(section(old, "leaks")) - {"refused"} <= set(section(new, "leaks")):
        return False
    new_rank, old_rank = _rank(new, profiles), _rank(old, profiles)
    stronger = new_rank > old_rank and _whole(new)
    return stronger or (
        new_rank >= old_rank and set(section(old, "attacks")) <= set(section(new, "attacks"))
    )


def _attributes(record: Json) -> list[str]:
    found = section(record, "audit").get("attributes") or []
    return [str(name) for name in found]


def _rank(record: Json, profiles: Sequence[str]) -> int:
    """The place of a record's profile among all, by budget; an unknown one is the first."""
    profile = text(record, "audit", "profile") or ""
    return profiles.index(profile) if profile in profiles else -1


def _whole(record: Json) -> bool:
    """Whether every attack of its profile was run."""
    told = section(record, "audit")
    return not told.get("only") and not told.get("left_out")


def _free_name(folder: Path, old: Json, profiles: Sequence[str]) -> str:
    """A name for a record to keep that no other one has which it does not cover."""
    profile, aux = text(old, "audit", "profile"), text(old, "audit", "aux")
    seed = text(old, "seeds", "attack")
    stem = re.sub(r"[^\w.-]+", "-", f"{profile}-{aux}-seed{seed}")
    names = (stem if at == 1 else f"{stem}-{at}" for at in count(1))
    return next(n for n in names if _may_hold(folder / f"record.{n}.json", old, profiles))


def _may_hold(file: Path, record: Json, profiles: Sequence[str]) -> bool:
    """Whether nothing is lost if a record takes this file's place."""
    there = _read(file)
    return not file.exists() or (there is not None and covers(record, there, profiles))


def _read(file: Path) -> Json | None:
    """The record in a file; None where there is none that could be judged."""
    try:
        record = parse(file.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) and covers(record, record, ()) else None
    except (OSError, ValueError, TypeError, RunError):
        return None
