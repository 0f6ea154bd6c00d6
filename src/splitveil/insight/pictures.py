"""The pictures of `explain`: attention, gates, slots, spread against the noise, class maps.

Weights are relative: α_i·M_c, so that 1 is a sample's equal share whatever the size of its class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.record.files import RunFiles
from splitveil.report import canvas
from splitveil.report.canvas import GREY, INK, PALETTE, Drawing, Tile, TileRow, board, shown
from splitveil.report.curves import Series, draw_curves
from splitveil.report.words import Lang, Sentence, Value, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = 100  # a class's samples, from the heaviest to the lightest, as this many columns
ROWS = 20  # classes shown
SHOWN = 10  # classes whose images are shown
PICKED = 5  # samples shown at either end of a class
LABELS = 1.1  # inches of the names beside tiles
LESS, MORE = PALETTE[0], PALETTE[1]


@dataclass(frozen=True, kw_only=True)
class WeightWords:
    """What weights are called: headings, the quantity, its value 1, and its two ends."""

    heading: Sentence
    chosen: Sentence
    axis: Sentence
    equal: Sentence
    most: Sentence
    least: Sentence


def words_of(kind: str, **values: str) -> WeightWords:
    """The words of a kind of weights: `weight` of samples, or `slots` for how sure slots are."""
    found = {key: sentence(f"{kind}.{key}", **values) for key in WeightWords.__dataclass_fields__}
    return WeightWords(**found)


PLAIN_WORDS = words_of("weight")


def label(key: str, lang: Lang, **values: Value) -> str:
    """A text of a picture, see `[picture]` in `report/locale/`."""
    return sentence(f"picture.{key}", **values).plain(lang)


Floats = NDArray[np.floating]


def sorted_profile(weight: Floats, columns: int = COLUMNS) -> Floats:
    """Weights from the heaviest to the lightest, stretched over a fixed number of columns.

    >>> sorted_profile(np.array([1.0, 3.0]), 4).tolist()
    [3.0, 3.0, 1.0, 1.0]
    """
    ordered = np.sort(weight)[::-1]
    return ordered[np.arange(columns) * len(ordered) // columns]


Labels = NDArray[np.integer]


def attention_heatmap(
    relative: Floats,
    y: Labels,
    classes: Sequence[str],
    words: WeightWords = PLAIN_WORDS,
    *,
    lang: Lang = "en",
) -> bytes:
    """PNG: one row per class, its samples from the heaviest to the lightest as colours."""
    from matplotlib.colors import LinearSegmentedColormap

    present = [c for c in range(len(classes)) if (y == c).any()][:ROWS]
    grid = np.stack([sorted_profile(relative[y == c]) for c in present])
    octaves = np.log2(np.clip(grid, 2.0**-8, 2.0**8))
    reach = max(0.1, float(np.abs(octaves).max()))
    low = 0.0 if octaves.min() >= 0 else -reach
    inks = ["#ffffff", MORE] if low == 0 else [LESS, "#ffffff", MORE]
    paper = LinearSegmentedColormap.from_list("share", inks)
    with board(7.4, 1.1 + 0.24 * len(present), laid_out=True) as figure:
        axes = figure.subplots()
        image = axes.imshow(octaves, aspect="auto", cmap=paper, vmin=low, vmax=reach,
                            extent=(0, 100, len(present), 0), interpolation="nearest")  # fmt: skip
        axes.grid(visible=False)
        axes.set_yticks([i + 0.5 for i in range(len(present))])
        axes.set_yticklabels([shown(classes[c], 14) for c in present], fontsize=8)
        axes.set_xlabel(label("samples", lang, most=words.most))
        axes.set_title(words.axis.plain(lang), loc="left")
        ends = sorted({low, 0.0, reach})
        bar = figure.colorbar(image, ax=axes, ticks=ends)
        bar.set_ticklabels([f"×{2.0**end:.3g}" for end in ends], fontsize=8)
    return Drawing(figure).png


Pixels = NDArray[np.uint8]


def weighted_samples(
    relative: Floats,
    y: Labels,
    images: Pixels,
    classes: Sequence[str],
    words: WeightWords = PLAIN_WORDS,
    *,
    lang: Lang = "en",
) -> bytes:
    """PNG: of each class the most and the least weighted images (n, c, h, w), with their weight."""
    present = [c for c in range(len(classes)) if (y == c).sum() >= 2 * PICKED][:SHOWN]
    present = present or [c for c in range(len(classes)) if (y == c).any()][:SHOWN]

    def tile(index: int) -> Tile:
        weight = float(relative[index])
        ink = MORE if weight > 1.05 else LESS if weight < 0.95 else GREY  # noqa: PLR2004
        return Tile(image=images[index], words=f"×{weight:.2f}", ink=ink)

    rows = [_heads([words.most.plain(lang), words.least.plain(lang)], PICKED)]
    for label in present:
        own = np.flatnonzero(y == label)
        own = own[np.argsort(-relative[own], kind="stable")]
        half = min(PICKED, max(1, len(own) // 2))
        ends = [[tile(i) for i in end[:half].tolist()] for end in (own, own[::-1])]
        rows.append(_row(classes[label], ends, PICKED))
    sheet = canvas.tile_sheet(rows, size=0.62, labels=LABELS, per_group=PICKED)
    return canvas.few_colours(sheet.png)


def _heads(words: Sequence[str], per_group: int) -> TileRow:
    """A heading over the middle of each group."""
    return _row("", [[Tile(words=word, ink=INK)] for word in words], per_group)


def _row(name: str, groups: Sequence[Sequence[Tile]], per_group: int) -> TileRow:
    """A named row of groups; a single tile stands in the middle of its group, so does a dash."""
    tiles: list[Tile | None] = []
    for group in groups:
        alone = [None] * (per_group // 2) if len(group) <= 1 else []
        found = [*alone, *(group or [Tile(words="–")])]
        tiles += [*found, *[None] * (per_group - len(found))]
    return TileRow(label=shown(name, 14), tiles=tiles)


def sample_size_over_time(run: RunFiles, floor: float, lang: Lang = "en") -> bytes:
    """PNG: effective sample size over the epochs, and what the penalty was held back by.

    `floor` is 1/M_c, where one sample has all the weight.
    """
    with board(6.4, 3.2, laid_out=True) as figure:
        axes = figure.subplots()
        series: list[Series] = [("effective_sample_size", "", "-")]
        draw_curves(axes, "", 1.0, series, [run], named=True, lang=lang)
        for value, ink, dash, words in (
            (floor, canvas.WRONG, ":", label("one-sample", lang)),
            (1.0, INK, "--", label("all-alike", lang)),
        ):
            axes.axhline(value, color=ink, linestyle=dash, linewidth=1.1, label=words)
        axes.set_xlim(0.5, len(run.metrics) + 0.5)
        axes.set_ylim(0, 1.08)
        axes.set_ylabel(label("sample-size", lang))
        axes.legend(loc="center right", fontsize=8, bbox_to_anchor=(1.0, 0.35))
    return Drawing(figure).png


KEPT = 3  # images shown per slot
MOST_SLOTS = 10
MOST_CLASSES = 10


def gate_histogram(
    soft: Floats, hard: Floats, limits: tuple[float, float] | None = None, lang: Lang = "en"
) -> bytes:
    """PNG: the soft (learned) and the hard (SNR) gate over classes and dimensions.

    `limits` are the means above which the early shut-off closes, soft first; None without one.
    """
    titles = (label("soft-gate", lang), label("hard-gate", lang))
    with board(8.4, 3.0, laid_out=True) as figure:
        for at, axes in enumerate(figure.subplots(1, 2)):
            title, values = titles[at], (soft, hard)[at].ravel()
            share = np.full(len(values), 100 / len(values))
            axes.hist(values, bins=np.linspace(0, 1, 41).tolist(), weights=share, color=PALETTE[at])
            mean = float(values.mean())
            axes.axvline(
                mean, color=INK, linewidth=1.3, label=label("mean", lang, mean=f"{mean:.2f}")
            )
            if limits is not None:
                text = label("shut-above", lang, limit=f"{limits[at]:g}")
                axes.axvline(limits[at], color=GREY, linestyle="--", linewidth=1.3, label=text)
            axes.set_xlim(0, 1)
            axes.set_title(title)
            axes.set_xlabel(label("closed-open", lang))
            axes.set_ylabel(label("share-of-gates", lang) if at == 0 else "")
            corner = "upper left" if mean > 0.5 else "upper right"  # noqa: PLR2004
            axes.legend(fontsize=8, loc=corner, frameon=True, edgecolor="none", framealpha=0.9)
    return Drawing(figure).png


def group_mass(resp: Floats, y: Labels, num_classes: int) -> Floats:
    """Share (c, s) of each class's samples that each of its slots answers for; NaN if absent.

    >>> group_mass(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]), 1).tolist()
    [[0.75, 0.25]]
    """
    rows = [resp[y == c].mean(0) if (y == c).any() else np.full(resp.shape[1], np.nan)
            for c in range(num_classes)]  # fmt: skip
    return np.stack(rows)


def group_images(
    resp: Floats,
    y: Labels,
    images: Pixels,
    classes: Sequence[str],
    kind: str = "slot",
    *,
    lang: Lang = "en",
) -> bytes:
    """PNG: for each class (rows) and slot (columns) the images it answers for most.

    An image stands at the slot with its largest responsibility; an empty slot shows a dash.
    """
    present = [c for c in range(len(classes)) if (y == c).any()][:MOST_CLASSES]
    count = min(resp.shape[1], MOST_SLOTS)
    chosen = resp.argmax(1)

    def surest(label: int, slot: int) -> list[Tile]:
        own = np.flatnonzero((y == label) & (chosen == slot))
        own = own[np.argsort(-resp[own, slot], kind="stable")][:KEPT]
        return [Tile(image=images[i]) for i in own]

    heads = [label(kind, lang, number=str(slot + 1)) for slot in range(count)]
    rows = [_heads(heads, KEPT)]
    rows += [_row(classes[c], [surest(c, slot) for slot in range(count)], KEPT) for c in present]
    sheet = canvas.tile_sheet(rows, size=0.34, labels=LABELS, per_group=KEPT)
    return canvas.few_colours(sheet.png)


NAMED = 20  # classes that are written into a map
TINY = 1e-12
# The house palette and three more, so that ten classes have ten colours.
COLOURS = (*PALETTE, "#882255", "#999933", "#8b5e3c")


def class_variance(z: Floats, y: Labels) -> Floats:
    """Variance within classes of every dimension of z (n, d), weighted by class size.

    >>> class_variance(np.array([[0.0], [2.0], [5.0]]), np.array([0, 0, 1])).round(4).tolist()
    [0.6667]
    """
    total = np.zeros(z.shape[1])
    for label in np.unique(y):
        own = z[y == label]
        total += len(own) * own.var(0)
    return total / len(y)


def share_above(variance: Floats, noise_std: float) -> float:
    """Share of the dimensions whose variance exceeds that of the noise."""
    return float((variance > noise_std**2).mean())


def variance_against_noise(
    within: Floats, total: Floats, noise_std: float, lang: Lang = "en"
) -> bytes:
    """PNG: variance of each dimension, sorted; what rises above σ² can be read in the noise.

    `within` is the variance inside classes, which the penalty lowers; `total` over all images.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with board(7.4, 3.4, laid_out=True) as figure:
        axes = figure.subplots()
        rank = np.arange(1, len(within) + 1)
        wide = {"drawstyle": "steps-mid", "linewidth": 1.5}
        for values, ink, words in (
            (total, PALETTE[5], label("over-all", lang)),
            (within, PALETTE[0], label("within-class", lang)),
        ):
            axes.plot(rank, np.maximum(np.sort(values)[::-1], TINY), color=ink, label=words, **wide)  # type: ignore[arg-type]
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if noise_std > 0:
            above = 100 * share_above(within, noise_std)
            axes.axhline(noise_std**2, color=canvas.WRONG, linestyle="--", linewidth=1.3)
            axes.text(1.015, noise_std**2, label("noise", lang, value=f"{noise_std**2:.2g}"),
                      transform=axes.get_yaxis_transform(), color=canvas.WRONG, fontsize=8,
                      va="center")  # fmt: skip
            title = label("above-noise", lang, share=f"{above:.0f}", count=str(len(within)))
        else:
            title = label("without-noise", lang, count=str(len(within)))
        axes.set_title(title, loc="left")
        axes.set_xlim(1, max(len(within), 2))
        axes.set_xlabel(label("dimension", lang))
        axes.set_ylabel(label("variance", lang))
        low, high = axes.get_ylim()
        below = noise_std**2 > math.sqrt(low * high)  # the noise has its name in the upper half
        axes.legend(fontsize=8, loc="lower left" if below else "upper left",
                    bbox_to_anchor=(1.01, 0.0 if below else 1.0))  # fmt: skip
    return Drawing(figure).png


def class_maps(maps: Sequence[tuple[str, Floats]], y: Labels, classes: Sequence[str]) -> bytes:
    """PNG: plane maps (n, 2) side by side, one colour and marker per class."""
    present = [c for c in range(len(classes)) if (y == c).any()]
    with board(4.2 * len(maps), 4.3, laid_out=True) as figure:
        fields = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, (title, points) in zip(fields, maps, strict=True):
            axes.set_title(title)
            for label in present:
                own = points[y == label]
                axes.plot(*own.T, canvas.marker(label), color=_ink(label), markersize=3.2,
                          alpha=0.65, markeredgewidth=0)  # fmt: skip
            _name_classes(axes, points, y, [(c, classes[c]) for c in present])
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(visible=False)
            for side in ("top", "right", "bottom", "left"):
                axes.spines[side].set_visible(True)
                axes.spines[side].set_color(GREY)
    return Drawing(figure).png


def _ink(label: int) -> str:
    return COLOURS[label % len(COLOURS)]


def _name_classes(
    axes: "Axes", points: Floats, y: Labels, named: Sequence[tuple[int, str]]
) -> None:
    """Each class's name at the sample nearest to the median of its points."""
    if len(named) > NAMED:
        return
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.75}
    for label, name in named:
        own = points[y == label]
        centre = np.median(own, axis=0)
        x, height = own[((own - centre) ** 2).sum(1).argmin()]
        axes.text(float(x), float(height), shown(name, 12), color=_ink(label), weight="bold",
                  fontsize=9, ha="center", va="center", bbox=paper)  # fmt: skip
