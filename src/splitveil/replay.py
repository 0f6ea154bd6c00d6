"""Replaying an audit: the same numbers again from the record alone, or what differs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitveil.auditing import examine
from splitveil.errors import AuditError, RunError
from splitveil.runs import Run
from splitveil.types import Json, Progress, Record, silent

TIMES = ("seconds", "command", "commit")  # what may differ between two equal audits


def read_record(path: Path) -> Record:
    """A record from a file; anything else is refused with its reason."""
    try:
        return Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as err:
        raise RunError(
            f"cannot read {path}: {err.strerror}; give the path of a record.json"
        ) from err
    except (ValueError, TypeError) as err:
        raise RunError(f"{path} is not a record: {err}; `splitveil audit` writes records") from err


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Every place where two JSON values differ, times and commands left out.

    >>> list(differences({"a": [1, 2], "seconds": 3}, {"a": [1, 5], "seconds": 4}))
    ['a[1]: 2 was recorded, 5 was measured']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *[k for k in new if k not in old]]:
            if key not in TIMES:
                path = f"{where}.{key}" if where else key
                yield from differences(old.get(key), new.get(key), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif old != new:
        yield f"{where}: {old!r} was recorded, {new!r} was measured"


def replay(run: Run, record: Record, progress: Progress = silent) -> list[str]:
    """Audit again as a record says, without anything stored; returns what differs.

    The bits are promised on the same type of machine with the same torch and number of threads.
    """
    said, seeds = record.audit, record.seeds
    if "profile" not in said or "aux" not in said or "attack" not in seeds:
        raise AuditError("the record does not say how it was made; audit the run again")
    model = said.get("model")
    fresh, _ = examine(
        run, said["profile"], aux=said["aux"], seed=seeds["attack"], progress=progress, store=None
    )
    if model is not None and fresh.audit["model"] != model:
        raise AuditError(
            f"the record is of another model: its hash is {model}, the run's is "
            f"{fresh.audit['model']}; give the record of this run"
        )
    old: Json = json.loads(record.to_json())
    return list(differences(old, json.loads(fresh.to_json())))
