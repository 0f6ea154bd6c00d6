"""Reading a record from a file."""

import json
from pathlib import Path

from splitveil.errors import RunError
from splitveil.threat import Record


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
