"""One self-contained HTML page about some runs, and its pictures beside it."""

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from splitveil.errors import RunError
from splitveil.report import figures, grid, tables, words
from splitveil.report.breadth import leak_sheet
from splitveil.report.fields import section
from splitveil.report.files import RunFiles
from splitveil.report.rows import Group

TITLE = "SplitVeil report"
PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG with its file name; `run` is set where it belongs to one run."""

    file: str
    png: bytes
    run: str | None = None

    @property
    def uri(self) -> str:
        """The picture as a data: address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All pictures of a report; None where the runs hold nothing to draw."""

    grid: Picture | None
    tradeoff: Picture | None
    attacks: Picture | None
    curves: tuple[Picture, ...]

    def listed(self) -> list[Picture]:
        """Those that exist, in the order of the page."""
        found = (self.grid, self.tradeoff, self.attacks, *self.curves)
        return [picture for picture in found if picture is not None]


def render(runs: Sequence[RunFiles], title: str = TITLE) -> str:
    """The page as HTML text: no script, no network, pictures inside."""
    return _fill(runs, title, _draw(runs))


def write_report(runs: Sequence[RunFiles], target: Path, *, title: str = TITLE) -> list[Path]:
    """Write the page and its PNGs; returns their paths, the page first.

    `target` is a folder (made when absent) or the path of the page itself, ending in .html.
    Every file is complete or not there.
    """
    page = target if target.suffix == ".html" else target / PAGE
    pictures = _draw(runs)
    contents = {page: _fill(runs, title, pictures).encode("utf-8")}
    contents |= {page.parent / picture.file: picture.png for picture in pictures.listed()}
    for path, content in contents.items():
        _write(path, content)
    return list(contents)


def _write(path: Path, content: bytes) -> None:
    """Put a file in place in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as err:
        raise RunError(
            f"cannot write {path}: {err}; choose a folder you may write to, or free some space"
        ) from err


def _draw(runs: Sequence[RunFiles]) -> Pictures:
    """Every picture for which the runs have data."""
    if not runs:
        raise RunError("no runs to report; name at least one run folder")
    rows = tables.summary_rows(runs)
    attacked = [run for run in runs if section(run.record, "attacks")]
    return Pictures(
        grid=Picture(file="reconstructions.png", png=figures.reconstruction_grid(runs))
        if any(run.gallery for run in runs)
        else None,
        tradeoff=Picture(file="tradeoff.png", png=figures.scatter(runs))
        if any(row.accuracy is not None and row.strongest_mse is not None for row in rows)
        else None,
        attacks=Picture(file="attacks.png", png=figures.attack_bars(runs)) if attacked else None,
        curves=tuple(
            Picture(file=f"curves-{slug}.png", png=figures.training_curves(run), run=run.name)
            for run, slug in zip(runs, _slugs(runs), strict=True)
            if run.metrics
        ),
    )


def _slugs(runs: Sequence[RunFiles]) -> list[str]:
    """A different, harmless file name part for each run."""
    found: list[str] = []
    for run in runs:
        slug = re.sub(r"[^\w.-]+", "_", run.name)
        again = sum(re.fullmatch(re.escape(slug) + r"(-again\d+)?", s) is not None for s in found)
        found.append(f"{slug}-again{again}" if again else slug)
    return found


def _fill(runs: Sequence[RunFiles], title: str, pictures: Pictures) -> str:
    """The template with everything in its place; all strings are escaped."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("splitveil.report").joinpath("page.html.j2")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(source.read_text(encoding="utf-8"))
    page: str = template.render(
        title=title,
        statement=words.statement(runs),
        verdict=words.verdict(runs),
        cards=[_card(row) for row in tables.summary_rows(runs)],
        pictures=pictures,
        left_out=grid.left_out(runs),
        without_gallery=[run.name for run in runs if run.gallery is None],
        without_metrics=[run.name for run in runs if not run.metrics],
        columns=tables.columns(),
        rows=[tables.format_row(row) for row in tables.summary_rows(runs)],
        attack_columns=tables.attack_columns(),
        attack_groups=[
            [tables.format_attack_row(row) for row in rows]
            for rows in map(tables.attack_rows, runs)
            if rows
        ],
        leaks=leak_sheet([Group(r.name, ((r.record,),)) for r in runs if r.record]),
        caveats=words.caveats(runs),
        passports=[(run.name, words.passport(run)) for run in runs],
    )
    return page


def _card(row: tables.Row) -> dict[str, str | float | None]:
    """The three key numbers of a run, and the length of its leakage bar in per cent."""
    leak = row.leakage
    return {
        "name": row.name,
        "defence": row.defence or tables.NOTHING,
        "accuracy": tables.percent(row.accuracy, 2),
        "mse": tables.format_mse(row.strongest_mse),
        "by": row.strongest_by,
        "ceiling": tables.format_mse(row.ceiling_mse),
        "leakage": tables.percent(leak, 1),
        "bar": None if leak is None else round(100 * min(max(leak, 0.0), 1.0), 1),
    }
