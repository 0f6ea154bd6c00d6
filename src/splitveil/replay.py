"""Replaying an audit: the same numbers again from the record alone, or what differs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitveil.audits.trained_run import examine
from splitveil.config import RunConfig
from splitveil.errors import AuditError, RunError
from splitveil.passport import model_hash
from splitveil.runs import Run
from splitveil.types import Json, Progress, Record, silent

RECENT = ("label_smoothing", "teacher_share", "teacher_temperature")  # older records lack them
TIMES = ("seconds", "command", "commit")  # what may differ between two equal audits


def read_record(path: Path) -> Record:
    """A record from a file; anything else is refused with its reason."""
    try:
        record = Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if not (isinstance(record.audit, dict) and isinstance(record.seeds, dict)):
            raise TypeError("audit and seeds must be tables")
        return record
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
    profile, aux, seed = (
        record.audit.get("profile"), record.audit.get("aux"), record.seeds.get("attack"),
    )  # fmt: skip
    if not (isinstance(profile, str) and isinstance(aux, str) and isinstance(seed, int)):
        raise AuditError("the record does not say how it was made; audit the run again")
    recorded, own = record.audit.get("model"), model_hash(run.model)
    if recorded is not None and recorded != own:
        raise AuditError(
            f"the record is of another model: its hash is {recorded}, the run's is {own}; "
            "give the record of this run"
        )
    only, fused = record.audit.get("only") or (), bool(record.audit.get("compiled"))
    fresh, _ = examine(
        run, profile, aux=aux, seed=seed, progress=progress, store=None, only=only, compile=fused
    )
    old: Json = json.loads(json.dumps(record.to_dict()))  # NaN in a record differs, as it should
    old["config"] = {k: getattr(RunConfig, k) for k in RECENT} | old["config"]
    return list(differences(old, json.loads(fresh.to_json())))
