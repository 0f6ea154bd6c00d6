"""Every picture of a report, with the names of its files."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitveil.errors import RunError
from splitveil.record.schema import number, section, text
from splitveil.report import bars, curves, figures, grid
from splitveil.report.canvas import PALETTE, Drawing
from splitveil.report.columns import Published
from splitveil.report.files import RunFiles
from splitveil.table import NOTHING

ALONE = 12  # more runs than this share their curves by defence


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing, the stem of its files, and the runs it is about where it is not about all."""

    stem: str
    drawing: Drawing
    runs: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The picture as a data: address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.drawing.png).decode("ascii")

    def files(self) -> dict[str, bytes]:
        """Names and contents of its files."""
        return {f"{self.stem}.png": self.drawing.png, f"{self.stem}.svg": self.drawing.svg}


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All pictures of a report; None where the runs hold nothing to draw."""

    grid: Picture | None
    tradeoff: Picture | None
    attacks: Picture | None
    curves: tuple[Picture, ...]

    def listed(self) -> list[Picture]:
        """Those that exist."""
        found = (self.grid, self.tradeoff, self.attacks, *self.curves)
        return [picture for picture in found if picture is not None]


def draw(runs: Sequence[RunFiles], published: Mapping[str, Published]) -> Pictures:
    """Every picture for which the runs have data."""
    if not runs:
        raise RunError("no runs to report; name at least one run folder")
    attacked = any(section(run.record, "attacks") for run in runs)
    placed = any(
        number(run.record, "accuracy") is not None
        and number(run.record, "strongest", "mse") is not None
        for run in runs
    )
    return Pictures(
        grid=Picture(stem="reconstructions", drawing=grid.draw_grid(runs))
        if any(run.gallery for run in runs)
        else None,
        tradeoff=Picture(stem="tradeoff", drawing=figures.scatter(runs, published))
        if placed
        else None,
        attacks=Picture(stem="attacks", drawing=bars.attack_bars(runs)) if attacked else None,
        curves=tuple(
            Picture(
                stem=f"curves-{slug}",
                drawing=curves.training_curves(group),
                runs=tuple(run.name for run in group),
            )
            for slug, group in _groups([run for run in runs if run.metrics])
        ),
    )


def _groups(runs: Sequence[RunFiles]) -> list[tuple[str, list[RunFiles]]]:
    """Runs that share a picture of their curves, each group with a part of a file name."""
    if len(runs) <= ALONE:
        return list(zip(slugs([run.name for run in runs]), ([run] for run in runs), strict=True))
    alike: dict[str, list[RunFiles]] = {}
    for run in runs:
        alike.setdefault(text(run.record, "config", "defence") or NOTHING, []).append(run)
    parts = [
        (defence, group[at : at + len(PALETTE)])
        for defence, group in alike.items()
        for at in range(0, len(group), len(PALETTE))
    ]
    return list(zip(slugs([name for name, _ in parts]), (part for _, part in parts), strict=True))


def slugs(names: Sequence[str]) -> list[str]:
    """A different, harmless part of a file name for each name.

    >>> slugs(["a/b", "a b", "veil"])
    ['a_b', 'a_b-again1', 'veil']
    """
    found: list[str] = []
    for name in names:
        slug = re.sub(r"[^\w.-]+", "_", name)[:80]
        again = sum(re.fullmatch(re.escape(slug) + r"(-again\d+)?", s) is not None for s in found)
        found.append(f"{slug}-again{again}" if again else slug)
    return found
