"""Reading the documents: where they are, their blocks, their tables, their headings."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def read(name: str) -> str:
    """The text of a page, by its name below `docs`."""
    return (DOCS / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def python_blocks(text: str) -> list[str]:
    """The fenced Python blocks, in order."""
    return [m[2] for m in FENCE.finditer(text) if m[1] == "python"]


def sections(text: str) -> dict[str, str]:
    """Level-2 headings, without backticks, and the text below each."""
    fenced = [m.span() for m in FENCE.finditer(text)]
    starts = [
        m
        for m in re.finditer(r"^## +(.+?) *$", text, re.M)
        if not any(a < m.start() < b for a, b in fenced)
    ]
    ends = [m.start() for m in starts[1:]] + [len(text)]
    return {
        start[1].strip("`"): text[start.end() : end]
        for start, end in zip(starts, ends, strict=True)
    }


def table(text: str, heading: str) -> list[list[str]]:
    """Rows of the table whose first heading is this, without backticks."""
    after = text.split(f"| {heading} |", 1)[1].split("\n")[2:]
    rows = []
    for line in after:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows
