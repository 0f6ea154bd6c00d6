"""From the arrays of a run to the panels of its page; what a defence lacks is said in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitveil.explain import groups, spread
from splitveil.explain.chart import flow_chart
from splitveil.explain.page import Panel
from splitveil.insight import pictures
from splitveil.record.schema import number
from splitveil.report.flow_chart import Flow
from splitveil.threat import Json

Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Relative weights (n,) of the samples, 1 being the equal share, and what they mean."""

    relative: Floats
    text: str
    words: pictures.Words = pictures.PLAIN_WORDS


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Responsibilities (n, s) of a class's slots or clusters for its samples."""

    resp: Floats
    kind: str


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Soft and hard gates of the classes that count, and the shut-off's limits on their means."""

    soft: Floats
    hard: Floats
    limits: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything the page shows of a run. A text in place of a part says why it is missing."""

    flow: Flow
    images: NDArray[np.uint8]  # (n, c, h, w)
    labels: NDArray[np.integer]  # (n,)
    classes: tuple[str, ...]
    z: Floats  # (n, d), clean
    noise_std: float
    maps: tuple[tuple[str, Floats], ...]  # of the first samples
    epochs: tuple[Json, ...]
    per_class: float
    attention: Attention | str
    groups: Groups | str
    gates: Gates | str


def panels(story: Story) -> list[Panel]:
    """The page's panels, in order."""
    flow = Panel(
        title="What happens to an image",
        file="flow.png",
        text="Drawn from the run's configuration. The penalty, where there is one, looks at z "
        "before the noise; the dashed line is its gradient, which reaches the client only.",
        png=flow_chart(story.flow),
    )
    return [flow, *_attention(story), _sizes(story), _gates(story), _groups(story), *_data(story)]


def _attention(story: Story) -> list[Panel]:
    if isinstance(story.attention, str):
        return [Panel(title=pictures.PLAIN_WORDS.heading, text=story.attention)]
    found, y, classes = story.attention, story.labels, story.classes
    left = sum(bool((y == c).any()) for c in range(len(classes))) - pictures.ROWS
    more = f" {left} classes more are left out." if left > 0 else ""
    return [
        Panel(
            title=found.words.heading,
            file="attention-classes.png",
            text=f"{found.text} Of {len(y)} training images. Each row is a class, its samples "
            f"sorted; orange lies above “{found.words.equal}”, blue below.{more}",
            png=pictures.attention_heatmap(found.relative, y, classes, found.words),
        ),
        Panel(
            title=found.words.chosen,
            file="attention-samples.png",
            text="The images of each class at both ends of the order.",
            png=pictures.weighted_samples(found.relative, y, story.images, classes, found.words),
        ),
    ]


def _sizes(story: Story) -> Panel:
    title = "Effective sample size over time"
    lines = [e for e in story.epochs if number(e, "effective_sample_size") is not None]
    if not lines:
        return Panel(title=title, text="The log has none: no penalty was active in this run.")
    epochs = [number(e, "epoch") or 0.0 for e in lines]
    return Panel(
        title=title,
        file="sample-size.png",
        text="Share of a class's samples behind its statistics, mean over classes. 1: all weigh "
        "the same. At the dotted line one sample has all the weight and its variance says nothing.",
        png=pictures.sample_size_over_time(
            epochs,
            [number(e, "effective_sample_size") or 0.0 for e in lines],
            floor=1 / max(story.per_class, 1.0),
            last_epoch=number(story.epochs[-1], "epoch") or epochs[-1],
            shut=[number(e, "epoch") or 0.0 for e in lines if (number(e, "shut") or 0.0) > 0.5],  # noqa: PLR2004
        ),
    )


def _gates(story: Story) -> Panel:
    title = "Gates"
    if isinstance(story.gates, str):
        return Panel(title=title, text=story.gates)
    found = story.gates
    closing = (
        " While a mean lies above its dashed limit, the penalty is shut off."
        if found.limits
        else ""
    )
    return Panel(
        title=title,
        file="gates.png",
        text="What each class and dimension lets through to the penalty: the learned soft gate, "
        f"and the hard gate, open where the spread dominates the mean.{closing}",
        png=groups.gate_histogram(found.soft, found.hard, found.limits),
    )


def _groups(story: Story) -> Panel:
    if isinstance(story.groups, str):
        return Panel(title="Slots", text=story.groups)
    resp, kind = story.groups.resp, story.groups.kind
    return Panel(
        title=f"What each {kind} collects",
        file=f"{kind}-images.png",
        text=f"Images at the {kind} that answers for them most, its surest first; a dash is a "
        f"{kind} that is nobody's first.",
        png=groups.group_images(resp, story.labels, story.images, story.classes, kind),
    )


def _data(story: Story) -> list[Panel]:
    within, total = spread.class_variance(story.z, story.labels), story.z.var(0)
    y = story.labels[: len(story.maps[0][1])]
    noise = (
        "What rises above the dashed line can be read through the noise, image by image."
        if story.noise_std > 0
        else "This run adds no noise: every dimension can be read as it is."
    )
    return [
        Panel(
            title="Each dimension against the noise",
            file="variance.png",
            text=f"Variance of clean z, sorted. {noise} A good defence keeps the upper curve, "
            "which carries the class, and pushes the lower one under the line.",
            png=spread.variance_against_noise(within, total, story.noise_std),
        ),
        Panel(
            title="Map of the classes",
            file="map.png",
            text=f"t-SNE of clean z of {len(y)} training images, one colour per class: from the "
            "untrained client of the same seed, and from the trained one. Distances between "
            "groups and their sizes mean nothing in such a map.",
            png=spread.class_maps(story.maps, y, story.classes),
        ),
    ]


def summary(story: Story) -> Json:
    """The numbers behind the pictures."""
    within = spread.class_variance(story.z, story.labels)
    found: Json = {"images": len(story.labels), "dimensions": story.z.shape[1]}
    found["noise_std"] = story.noise_std
    if story.noise_std > 0:
        found["share_above_noise"] = spread.share_above(within, story.noise_std)
    found["median_class_variance"] = float(np.median(within))
    if isinstance(story.attention, Attention):
        relative = story.attention.relative
        found["relative_weight"] = _ends(relative)
    if isinstance(story.gates, Gates):
        found["soft_gate"] = float(story.gates.soft.mean())
        found["hard_gate"] = float(story.gates.hard.mean())
    if isinstance(story.groups, Groups):
        mass = groups.group_mass(story.groups.resp, story.labels, len(story.classes))
        found[f"{story.groups.kind}_mass"] = _ends(mass[np.isfinite(mass).all(1)])
    lacking: Sequence[str] = [
        part for part in (story.attention, story.gates, story.groups) if isinstance(part, str)
    ]
    return found | {"not_drawn": list(lacking)}


def _ends(values: Floats) -> Json:
    return {"min": float(values.min()), "max": float(values.max())}
