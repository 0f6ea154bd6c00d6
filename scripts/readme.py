"""Rebuild the README's tables and picture from record files.

python scripts/readme.py                  the tables, from results/<dataset>/<row>/seed*/record.json
python scripts/readme.py picture RUN...   docs/images/digits.png, from audited runs
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitveil.report import read_run
from splitveil.report.compare import spread
from splitveil.report.figures import reconstruction_grid

ROOT = Path(__file__).parents[1]
ORDER = (
    "none",
    "noise",
    "noise-thin-resnet",
    "cem",
    "gated-att",
    "slot-cross",
    "veil",
    "veil-ramp",
)
HEADINGS = ("row", "net", "accuracy %", "strongest attack MSE ↑", "by", "SSIM ↓",
            "worst-case MSE ↑", "ceiling", "leakage %", "rate, nats")  # fmt: skip


def row(name: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of one row: a preset, over its seeds."""
    return [
        f"`{name}`",
        records[0]["config"]["net"],
        spread([r["accuracy"] for r in records], 100.0, 2),
        spread([r["strongest"]["mse"] for r in records], 1.0, 4),
        ", ".join(sorted({r["strongest"]["mse_by"] for r in records})),
        spread([r["strongest"]["ssim"] for r in records], 1.0, 3),
        spread([r["worst_case"]["mse"] for r in records], 1.0, 4),
        spread([r["ceiling"]["mse"] for r in records[:1]], 1.0, 4),
        spread([r["leakage"] for r in records], 100.0, 1),
        spread([r["true_rate_nats"] for r in records], 1.0, 1),
    ]


def table(dataset: str) -> str:
    """Markdown table of every row in `results/<dataset>`."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for name in ORDER:
        paths = sorted((ROOT / "results" / dataset / name).glob("seed*/record.json"))
        if paths:
            cells = row(name, [json.loads(p.read_text(encoding="utf-8")) for p in paths])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The README's text with every marked table rebuilt."""
    for dataset in ("digits", "cifar10"):
        start, end = f"<!-- table {dataset} -->\n", "\n<!-- end -->"
        head, rest = text.split(start)
        text = head + start + table(dataset) + end + rest.split(end.lstrip("\n"), 1)[1]
    return text


def picture(paths: Sequence[str]) -> bytes:
    """PNG of the originals and of each run's strongest attack."""
    runs = []
    for path in paths:
        run = read_run(Path(path))
        assert run.record is not None  # noqa: S101 - read_run refuses a run without one
        best = run.record["strongest"]["mse_by"]
        if run.gallery is None:
            sys.exit(f"{path} has no gallery.json; audit it again")
        shown = {best: run.gallery.reconstructions[best]}
        runs.append(replace(run, gallery=replace(run.gallery, reconstructions=shown)))
    return reconstruction_grid(runs)


def main() -> None:
    """Write what was asked for."""
    if sys.argv[1:2] == ["picture"]:
        (ROOT / "docs" / "images" / "digits.png").write_bytes(picture(sys.argv[2:]))
    else:
        path = ROOT / "README.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
