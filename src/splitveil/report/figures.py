"""Pictures of a report: trade-off, attack bars, reconstructions, and all of them together."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from splitveil.errors import RunError
from splitveil.record.files import Gallery, RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import number, text
from splitveil.report import canvas
from splitveil.report.canvas import CEILING, GREY, INK, Drawing, Tile, TileRow, board, colour, shown
from splitveil.report.columns import Published
from splitveil.report.curves import training_curves
from splitveil.report.gains import Frontier, FrontierPoint, frontier
from splitveil.report.words import Lang, sentence, word
from splitveil.table import NOTHING, format_mse, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NEAR_PX = 26  # a name further than this from its mark gets a line to it
CROWD_PX = (150, 40)  # marks nearer than this compete for places
MANY_MARKS = 12
FOOT, HEAD = 0.576, 0.32  # inches under and over the plot


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the trade-off: accuracy in per cent, MSE, their sd over training seeds, its look.

    Published rows are `hollow`: they were not measured here.
    """

    name: str
    accuracy: float
    mse: float
    accuracy_sd: float | None = None
    mse_sd: float | None = None
    ink: str = INK
    shape: str = "o"
    hollow: bool = False


def comparable_rows(
    runs: Sequence[RunFiles], published: Mapping[str, Published]
) -> dict[str, Published]:
    """Published rows on the dataset of some run, whose attacker knew as much as that run's."""
    known = {(run.record.audit.aux or "train", text(run.record, "config.dataset")) for run in runs}
    return {
        name: row
        for name, row in published.items()
        if any(row.aux == aux and row.is_of([dataset]) for aux, dataset in known)
    }


def scatter(
    runs: Sequence[RunFiles], published: Mapping[str, Published] | None = None, lang: Lang = "en"
) -> Drawing:
    """Accuracy (x, %) against the strongest attack's MSE (y), one named point per run.

    Runs that differ in their seeds alone share colour and mark. Published rows are hollow and dark.

    Args:
        runs: The runs; those without an accuracy or an attack are left out.
        published: Rows of others by name; only the comparable ones are drawn.
        lang: Language of its texts.

    Raises:
        RunError: No run has both numbers.
    """
    marks = []
    for at, kind in enumerate(kinds(runs)):
        for run in kind.runs:
            accuracy, mse = run.record.accuracy, run.record.strongest.mse
            if accuracy is not None and mse is not None:
                marks.append(Mark(name=shown(run.name, 30), accuracy=100 * accuracy, mse=mse,
                                  ink=colour(at), shape=canvas.marker(at)))  # fmt: skip
    if not marks:
        raise RunError("no run has both an accuracy and a strongest attack; audit a run first")
    for name, row in comparable_rows(runs, published or {}).items():
        said = shown(sentence("picture.published", name=name).plain(lang), 36)
        marks.append(Mark(name=said, accuracy=100 * row.accuracy, mse=row.mse, hollow=True))
    ceiling, floor = word("picture.ceiling", lang), word("picture.floor", lang)
    lines = [(v, ceiling, CEILING, "--") for v in canvas.references(runs, "ceiling")]
    lines += [(v, floor, canvas.FLOOR, ":") for v in canvas.references(runs, "floor")]
    return draw_tradeoff(marks, lines, lang=lang)


def draw_tradeoff(
    marks: Sequence[Mark],
    lines: Sequence[tuple[float, str, str, str]],
    legend: Sequence[tuple[Mark, str]] = (),
    lang: Lang = "en",
) -> Drawing:
    """Named marks with error bars, and horizontal reference lines (value, text, colour, dash).

    Args:
        marks: at least one point.
        lines: references; their texts stand on the right.
        legend: what a look means, drawn above the plot.
        lang: Language of the axes.
    """
    from matplotlib.lines import Line2D

    height = 4.8 + 0.12 * max(0, len(marks) - MANY_MARKS)
    with board(8.4, height) as figure:
        axes = figure.add_axes((0.09, FOOT / height, 0.7, 1 - (FOOT + HEAD) / height))
        low, high = min(m.accuracy for m in marks), max(m.accuracy for m in marks)
        pad = max(0.2 * (high - low), 0.3)
        axes.set_xlim(low - pad, high + pad)
        axes.set_xticks([t for t in axes.get_xticks() if low - pad <= t <= min(high + pad, 100)])
        top = 1.12 * max([m.mse for m in marks] + [line[0] for line in lines]) or 1.0
        axes.set_ylim(-0.04 * top, top)
        axes.set_yticks([t for t in axes.get_yticks() if 0 <= t <= top])
        axes.set_xlabel(word("picture.accuracy", lang))
        axes.set_ylabel(word("picture.strongest", lang))
        for mark in marks:
            axes.errorbar(mark.accuracy, mark.mse, xerr=mark.accuracy_sd, yerr=mark.mse_sd,
                          elinewidth=1.2, capsize=2.5, zorder=3, **_look(mark))  # fmt: skip
        canvas.draw_references(axes, lines)
        _name_marks(axes, marks)
        if legend:  # what colours and shapes mean, above the axes
            signs = [Line2D([], [], **_look(mark)) for mark, _ in legend]
            axes.legend(signs, [words for _, words in legend], loc="lower left", ncols=len(legend),
                        bbox_to_anchor=(-0.03, 1.0), fontsize=8.5, handletextpad=0.2,
                        columnspacing=1.0, borderaxespad=0.2)  # fmt: skip
        return Drawing(figure, "tradeoff")


def _look(mark: Mark) -> dict[str, Any]:
    return {"marker": mark.shape, "linestyle": "", "color": mark.ink, "markersize": 8,
            "markerfacecolor": "white" if mark.hollow else mark.ink,
            "markeredgewidth": 1.4}  # fmt: skip


def _name_marks(axes: "Axes", marks: Sequence[Mark]) -> None:
    """Write each name beside its mark without covering a mark, a bar or another name."""
    ends = [(m.accuracy + (m.accuracy_sd or 0), m.mse + (m.mse_sd or 0)) for m in marks]
    _name_points(axes, [m.name for m in marks], [(m.accuracy, m.mse) for m in marks], ends)


def _name_points(
    axes: "Axes",
    names: Sequence[str],
    places: Sequence[tuple[float, float]],
    ends: Sequence[tuple[float, float]],
) -> None:
    """Write names beside points (x, y) whose error bars reach to `ends` (x, y)."""
    to_px = axes.transData.transform
    anchors = to_px(places)
    half = np.maximum(to_px(ends) - anchors, canvas.MARKER_PX / 2)  # (n, 2): bars, or the mark
    thin = np.full(len(names), canvas.MARKER_PX)
    bars = [np.column_stack([anchors, 2 * half[:, 0], thin]),
            np.column_stack([anchors, thin, 2 * half[:, 1]])]  # fmt: skip
    # Marks with many neighbours first: they have the fewest places for a name.
    near = (np.abs(anchors[:, None] - anchors) < CROWD_PX).all(-1).sum(1)
    order = sorted(range(len(names)), key=lambda at: (-near[at], *anchors[at]))
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    texts = [
        axes.text(0, 0, names[at], ha="center", va="center", fontsize=8.5, zorder=2.5, bbox=paper)
        for at in order
    ]
    sizes = np.array(
        [(box.width + 4, box.height + 2) for box in (t.get_window_extent() for t in texts)]
    )
    area = axes.get_window_extent()
    frame = np.array([(area.x0 + area.x1) / 2, (area.y0 + area.y1) / 2, area.width, area.height])
    boxes = canvas.place_labels(anchors[order], sizes, frame, np.vstack(bars))
    to_data = axes.transData.inverted().transform
    for name, anchor, box in zip(texts, anchors[order], boxes, strict=True):
        name.set_position(tuple(to_data(box[:2])))
        edge = np.clip(anchor, box[:2] - box[2:] / 2, box[:2] + box[2:] / 2)
        if ((edge - anchor) ** 2).sum() > NEAR_PX**2:
            line = to_data([anchor, edge])
            axes.plot(line[:, 0], line[:, 1], color=GREY, linewidth=0.7, zorder=2)


KINDS: Mapping[str, str] = {"alone": "D", "split": "o", "exit": "s"}  # marks of the frontier


def draw_frontier(found: Frontier, lang: Lang = "en") -> Drawing:
    """Accuracy (y, %) against exposure (x, %); what is not surely a gain is grey.

    Clients alone stand at exposure 0, and the chord leads from the best of them to the best row
    that sends everything. A line through an early exit shows the other shares it may send.

    Args:
        found: At least one point.
        lang: Language of its texts.
    """
    from matplotlib.lines import Line2D

    points = sorted(found.points, key=lambda p: (p.exposure, p.accuracy))
    height = 4.8 + 0.12 * max(0, len(points) - MANY_MARKS)
    with board(8.4, height) as figure:
        axes = figure.add_axes((0.09, FOOT / height, 0.87, 1 - (FOOT + HEAD) / height))
        heights = [100 * y for p in points for y in (p.accuracy, *(a for _, a in p.curve))]
        pad = max(0.15 * (max(heights) - min(heights)), 0.3)
        ends_of = (
            100 * x
            for p in points
            for x in (p.exposure, (p.limits or (0, 0))[1], *(at for at, _ in p.curve))
        )
        right = max(1.0, *ends_of)
        axes.set_xlim(-0.03 * right, 1.08 * right)
        axes.set_ylim(min(heights) - pad, max(heights) + pad)
        axes.set_xlabel(word("picture.exposure", lang))
        axes.set_ylabel(word("picture.accuracy", lang))
        if found.chord is not None:
            (x0, y0), (x1, y1) = found.chord
            axes.plot([100 * x0, 100 * x1], [100 * y0, 100 * y1], color=CEILING, linestyle="--",
                      linewidth=1.2, zorder=1.5)  # fmt: skip
        inks = {kind: colour(at) for at, kind in enumerate(KINDS)}
        for point in points:
            ink = inks[point.kind] if point.sure else GREY
            x, y = 100 * point.exposure, 100 * point.accuracy
            if point.curve:
                line = 100 * np.array(point.curve)
                axes.plot(line[:, 0], line[:, 1], color=ink, linewidth=1, marker=".", zorder=2)
            ends = (point.exposure, point.exposure) if point.limits is None else point.limits
            bars = [[max(0.0, x - 100 * ends[0])], [max(0.0, 100 * ends[1] - x)]]
            axes.errorbar(x, y, xerr=bars, color=ink, marker=KINDS[point.kind], linestyle="",
                          markersize=8, elinewidth=1.2, capsize=2.5, zorder=3)  # fmt: skip
        places = [(100 * p.exposure, 100 * p.accuracy) for p in points]
        reach = [
            (100 * (p.limits or (0, p.exposure))[1], 100 * p.accuracy) for p in points
        ]  # fmt: skip
        _name_points(axes, [_frontier_name(p, lang) for p in points], places, reach)
        signs = [Line2D([], [], color=inks[k], marker=KINDS[k], linestyle="", markersize=8)
                 for k in KINDS]  # fmt: skip
        signs.append(Line2D([], [], color=GREY, marker="o", linestyle="", markersize=8))
        signs.append(Line2D([], [], color=CEILING, linestyle="--", linewidth=1.2))
        words = [word(f"frontier.{key}", lang) for key in (*KINDS, "grey", "chord")]
        axes.legend(signs, words, loc="lower left", ncols=len(words), bbox_to_anchor=(-0.07, 1.0),
                    fontsize=8, handletextpad=0.2, columnspacing=0.9,
                    borderaxespad=0.2)  # fmt: skip
        return Drawing(figure, "frontier")


def _frontier_name(point: FrontierPoint, lang: Lang) -> str:
    """A row's name, and the share of images that what it sends identifies."""
    name, share = shown(point.group.name, 24), point.group.mean("identified")
    if share is None or point.kind == "alone":
        return name
    return sentence("frontier.name", name=name, share=percent(share, 0)).plain(lang)


BarPanel = list[tuple[int, Group, RunFiles]]  # the place of a run's kind, which gives its colour
PER_PANEL = len(canvas.PALETTE)  # more runs than colours go into another panel
MANY_BARS = 18  # from here the numbers stand upright
MANY_RUNS = 2 * PER_PANEL  # beyond, the numbers stand in the table alone
MARGINS, TALL, NAME = 2.45, 3.9, 0.9  # inches: both sides, a panel, an attack's name


def attack_bars(runs: Sequence[RunFiles], lang: Lang = "en") -> Drawing:
    """MSE of every attack, a group of bars per attack and a bar per run.

    Runs that differ in their seeds alone stand together and have one colour, in every panel.
    """
    attacks = list(dict.fromkeys(name for run in runs for name in run.record.attacks))
    if not attacks:
        raise RunError("no run has an attack in its record; audit a run first")
    panels = _bar_panels(kinds(runs))
    bars = len(attacks) * max(len(panel) for panel in panels)
    upright = bars > MANY_BARS
    width = MARGINS + max(5.95, (0.17 if upright else 0.53) * bars, NAME * len(attacks))
    with board(width, TALL * len(panels), laid_out=True) as figure:
        fields = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, panel in zip(fields, panels, strict=True):
            few = len(runs) <= MANY_RUNS
            _draw_bars(axes, panel, attacks, upright=upright, numbers=few, lang=lang)
        return Drawing(figure, "attacks")


def _bar_panels(found: Sequence[Group]) -> list[BarPanel]:
    """At most `PER_PANEL` runs each, those of a kind together where they fit.

    A panel holds fewer kinds than there are colours, one after another: none of them share one.
    """
    panels: list[BarPanel] = []
    for place, kind in enumerate(found):
        for at in range(0, len(kind.runs), PER_PANEL):
            part = [(place, kind, run) for run in kind.runs[at : at + PER_PANEL]]
            if not panels or len(panels[-1]) + len(part) > PER_PANEL:
                panels.append([])
            panels[-1] += part
    return panels


def _bar_names(panel: BarPanel, lang: Lang) -> dict[int, str]:
    """What the legend says of each kind in a panel, by its place among all."""
    names = {}
    for place, same in groupby(panel, itemgetter(0)):
        (_, kind, run), *more = same
        count = str(1 + len(more))
        several = sentence("picture.runs", name=shown(kind.name, 16), count=count).plain(lang)
        names[place] = several if more else shown(run.name)
    return names


def _draw_bars(
    axes: "Axes",
    panel: BarPanel,
    attacks: Sequence[str],
    *,
    upright: bool,
    numbers: bool,
    lang: Lang,
) -> None:
    """The bars of up to `PER_PANEL` runs, the ceiling, and the names over them."""
    runs = [run for _, _, run in panel]
    rows = [[number(run.record, f"attacks.{a}.mse") for a in attacks] for run in runs]
    ceilings = canvas.references(runs, "ceiling")
    top = max([0.0, *ceilings, *(v for row in rows for v in row if v is not None)]) or 1.0
    axes.set_ylim(0, (1.2 if upright else 1.1) * top)
    share, signs = 0.8 / len(runs), {}
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85}
    for at, ((place, _, _), row) in enumerate(zip(panel, rows, strict=True)):
        shift = (at - (len(runs) - 1) / 2) * share
        known = [(i + shift, value) for i, value in enumerate(row) if value is not None]
        bars = axes.bar([x for x, _ in known], [v for _, v in known], 0.92 * share,
                        color=colour(place))  # fmt: skip
        signs[place] = bars
        if numbers:
            axes.bar_label(bars, [format_mse(v) for _, v in known], padding=2, fontsize=7,
                           rotation=90 if upright else 0, bbox=paper)  # fmt: skip
    axes.set_xlim(-0.5, len(attacks) - 0.5)
    words = [fill(shown(name, 24), 11, break_long_words=False) for name in attacks]
    axes.set_xticks(range(len(attacks)), words)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(word("picture.mse", lang))
    known_label = word("picture.ceiling", lang)
    canvas.draw_references(axes, [(v, known_label, CEILING, "--") for v in ceilings])
    names = _bar_names(panel, lang)
    axes.legend([signs[place] for place in names], list(names.values()), loc="lower left",
                bbox_to_anchor=(0, 1.0), ncols=4, handlelength=1, borderaxespad=0.1)  # fmt: skip


MAX_COLUMNS = 10
MAX_RUNS, MAX_VALUES = 12, 1_500_000  # a larger picture is not read, and too heavy for a page
MAX_CLASS_NAME = 11
TILE, LABELS = 0.74, 2.17  # inches: a side of a tile, and the names beside the tiles
Album = list[tuple[RunFiles, Gallery]]  # runs that show the same images


def draw_grid(runs: Sequence[RunFiles], lang: Lang = "en") -> Drawing:
    """Originals on top, below one row per model and attack, the strongest marked.

    Runs that scored the same images share their columns; others get a grid of their own.

    Raises:
        RunError: No run has a gallery.
    """
    albums: dict[object, Album] = {}
    for run, gallery in _chosen(runs):
        key = (gallery.indices, gallery.original.shape, gallery.original.tobytes())
        albums.setdefault(key, []).append((run, gallery))
    if not albums:
        raise RunError(
            "none of the runs has a gallery.json; audit a run again to save reconstructions"
        )
    rows = [row for album in albums.values() for row in _album_rows(album, lang)]
    return canvas.tile_sheet(rows, size=TILE, labels=LABELS, stem="reconstructions")


def _chosen(runs: Sequence[RunFiles]) -> Album:
    """The first runs with a gallery, as many as there is room for, and at least one."""
    pairs = [(run, run.gallery) for run in runs if run.gallery is not None][:MAX_RUNS]
    values = accumulate(_drawn_values(gallery) for _, gallery in pairs)
    return pairs[: max(1, sum(total <= MAX_VALUES for total in values))]


def _drawn_values(gallery: Gallery) -> int:
    """Numbers that the reconstructions of a run bring into the picture."""
    n, c, h, w = (int(side) for side in gallery.original.shape)
    tile = c * min(h, round(TILE * canvas.DPI)) * min(w, round(TILE * canvas.DPI))
    return len(gallery.reconstructions) * min(n, MAX_COLUMNS) * tile


def left_out(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the runs that have a gallery but no room in the grid."""
    return [run.name for run in runs if run.gallery is not None][len(_chosen(runs)) :]


def _album_rows(album: Album, lang: Lang) -> list[TileRow]:
    """The originals under the names of their classes, then each model with its attacks."""
    first = album[0][1]
    names = [shown(name, MAX_CLASS_NAME) for name in first.label_names]
    tiles = [Tile(image=i, words=n) for i, n in zip(first.original, names, strict=True)]
    rows = [TileRow(label=word("gallery.original", lang), bold=True, tiles=tiles[:MAX_COLUMNS])]
    for run, gallery in album:
        rows.append(_head(run, gallery, lang))
        rows += [_attack_row(run, gallery, attack, lang) for attack in gallery.reconstructions]
    return rows


def _head(run: RunFiles, gallery: Gallery, lang: Lang) -> TileRow:
    """Name and accuracy of a model, and the server's answer over each column."""
    tiles, named = [], zip(gallery.answer_names, gallery.answers, gallery.labels, strict=True)
    for answered, answer, label in named:
        name, right = shown(answered, MAX_CLASS_NAME), answer == label
        ink = INK if right else canvas.WRONG
        tiles.append(Tile(words=name if right else f"{name} ✗", ink=ink))
    accuracy = percent(run.record.accuracy, 1)
    note = sentence("picture.answers", accuracy=accuracy).plain(lang)
    return TileRow(label=shown(run.name, 24), note=note, bold=True, ruled=True,
                   tiles=tiles[:MAX_COLUMNS])  # fmt: skip


def _attack_row(run: RunFiles, gallery: Gallery, attack: str, lang: Lang) -> TileRow:
    """An attack's images and mean MSE: over all scored images, or else over those shown."""
    mse, told = number(run.record, f"attacks.{attack}.mse"), "picture.attack"
    if mse is None and attack in gallery.mse:
        mse, told = float(np.mean(gallery.mse[attack])), "picture.attack-shown"
    strongest = attack == run.record.strongest.mse_by
    frame = CEILING if strongest else canvas.RULE
    star = f"  ★ {word('gallery.strongest', lang)}" if strongest else ""
    return TileRow(
        label=shown(attack, 20),
        note=sentence(told, mse=format_mse(mse), star=star).plain(lang),
        ink=CEILING if strongest else INK,
        bold=strongest,
        tiles=[Tile(image=i, frame=frame) for i in gallery.reconstructions[attack][:MAX_COLUMNS]],
    )


LARGEST = 160  # px of a side; larger images are shown smaller
BUDGET = 5_000_000  # characters of all tiles together; the page must stay small enough to mail


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """A scored image and its reconstruction as data: addresses; `rank` is a key of `[gallery]`."""

    rank: str
    index: int
    class_name: str
    mse: str
    original: str
    made: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """An attack on a run: up to three tiles, worst for the defender first."""

    run: str
    attack: str
    mse: str
    strongest: bool
    tiles: tuple[Reconstruction, ...]

    @property
    def size(self) -> int:
        """Characters its pictures take in a page."""
        return sum(len(tile.original) + len(tile.made) for tile in self.tiles)


def picks(errors: Sequence[float]) -> list[tuple[str, int]]:
    """Ranks and positions of the images to show: lowest, median and highest error.

    >>> picks([0.3, 0.1, 0.2, 0.9])
    [('worst', 1), ('median', 2), ('best', 3)]
    >>> picks([0.3]), picks([0.3, 0.1])
    ([('only', 0)], [('worst', 1), ('best', 0)])
    """
    order = sorted(range(len(errors)), key=lambda at: errors[at])
    if len(order) == 1:
        return [("only", order[0])]
    middle = [("median", order[(len(order) - 1) // 2])] if len(order) > 2 else []  # noqa: PLR2004
    return [("worst", order[0]), *middle, ("best", order[-1])]


def strips(runs: Sequence[RunFiles], budget: int = BUDGET) -> tuple[list[Strip], int]:
    """The strips of all runs, and how many were left out because the page would grow too large.

    Room goes to the strongest attack of every run first.

    Args:
        runs: The runs; those without a gallery have no strips.
        budget: Characters that all pictures together may take.
    """
    wanted = [
        (run, run.gallery, attack, attack == run.record.strongest.mse_by)
        for run in runs
        if run.gallery is not None
        for attack in run.gallery.reconstructions
    ]
    made: dict[int, Strip] = {}
    for at in sorted(range(len(wanted)), key=lambda at: not wanted[at][3]):
        strip = _strip(*wanted[at])
        if strip.size > budget:
            break
        budget -= strip.size
        made[at] = strip
    return [made[at] for at in sorted(made)], len(wanted) - len(made)


def _strip(run: RunFiles, gallery: Gallery, attack: str, strongest: bool) -> Strip:
    errors = image_errors(gallery, attack)
    tiles = tuple(
        Reconstruction(
            rank=rank,
            index=gallery.indices[at],
            class_name=gallery.label_names[at],
            mse=format_mse(errors[at]),
            original=image_uri(gallery.original[at]),
            made=image_uri(gallery.reconstructions[attack][at]),
        )
        for rank, at in picks(errors)
    )
    mse = format_mse(number(run.record, f"attacks.{attack}.mse"))
    return Strip(run=run.name, attack=attack, mse=mse, strongest=strongest, tiles=tiles)


def image_errors(gallery: Gallery, attack: str) -> list[float]:
    """MSE of each image: as the audit measured it, else from the saved pixels (0 to 255)."""
    known = gallery.mse.get(attack, ())
    if known and all(np.isfinite(known)):
        return list(known)
    gaps = (gallery.original.astype(np.float64) - gallery.reconstructions[attack]) / 255
    return [float(value) for value in np.square(gaps).mean((1, 2, 3))]


def image_uri(image: canvas.Pixels) -> str:
    """An image (c, h, w) as a data: address of a PNG."""
    from PIL import Image

    picture = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
    tile = Image.fromarray(np.ascontiguousarray(picture))
    if max(tile.size) > LARGEST:
        tile.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    buffer = io.BytesIO()
    tile.save(buffer, "PNG", optimize=True)
    return canvas.png_uri(buffer.getvalue())


ALONE = 12  # more runs than this share their curves by defence


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All pictures of a report; None where the runs hold nothing to draw."""

    grid: Drawing | None
    tradeoff: Drawing | None
    attacks: Drawing | None
    curves: tuple[Drawing, ...]
    frontier: Drawing | None = None

    def listed(self) -> list[Drawing]:
        """Those that exist."""
        found = (self.grid, self.frontier, self.tradeoff, self.attacks, *self.curves)
        return [picture for picture in found if picture is not None]


def draw_pictures(
    runs: Sequence[RunFiles], published: Mapping[str, Published], lang: Lang = "en"
) -> Pictures:
    """Every picture for which the runs have data."""
    if not runs:
        raise RunError("no runs to report; name at least one run folder")
    groups = _groups([run for run in runs if run.metrics])
    found = frontier(kinds([run for run in runs if run.audited]))
    return Pictures(
        grid=_if_possible(lambda: draw_grid(runs, lang)),
        tradeoff=_if_possible(lambda: scatter(runs, published, lang)),
        attacks=_if_possible(lambda: attack_bars(runs, lang)),
        curves=tuple(training_curves(group, f"curves-{slug}", lang) for slug, group in groups),
        frontier=draw_frontier(found, lang) if found is not None and found.points else None,
    )


def _if_possible(draw: Callable[[], Drawing]) -> Drawing | None:
    with suppress(RunError):  # no run has anything to draw
        return draw()
    return None


def _groups(runs: Sequence[RunFiles]) -> list[tuple[str, list[RunFiles]]]:
    """Runs that share a picture of their curves, each group with a part of a file name."""
    parts = [(run.name, [run]) for run in runs]
    if len(runs) > ALONE:
        alike: dict[str, list[RunFiles]] = {}
        for run in runs:
            alike.setdefault(text(run.record, "config.defence") or NOTHING, []).append(run)
        parts = [
            (defence, group[at : at + PER_PANEL])
            for defence, group in alike.items()
            for at in range(0, len(group), PER_PANEL)
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
