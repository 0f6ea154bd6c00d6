"""Reading the documents: where they are, their blocks, their tables."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def table(text: str, heading: str) -> list[list[str]]:
    """Rows of the table whose first heading is this, without backticks."""
    after = text.split(f"| {heading} |", 1)[1].split("\n")[2:]
    rows = []
    for line in after:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows
