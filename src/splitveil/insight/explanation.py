"""`explain`: the arrays behind a run's pictures, the panels that show them, and the page."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitveil.config.resolve import plan_of
from splitveil.data.dataset import Dataset
from splitveil.data.splits import Splits
from splitveil.insight import pictures
from splitveil.insight.diagnosis import diagnose, read_case
from splitveil.insight.run_page import curves_panel, findings_panel, run_page
from splitveil.insight.verdict import judge
from splitveil.io import Json
from splitveil.record.files import RunFiles, read_run
from splitveil.record.schema import number
from splitveil.report.answer_page import Panel, write_answer
from splitveil.report.canvas import drawable
from splitveil.report.flow_chart import Flow, FlowStep, draw_flow_chart, run_flow
from splitveil.report.words import Lang, Sentence, Value, sentence
from splitveil.rng import stream
from splitveil.runs import Run, load_run
from splitveil.surrogates.base import (
    ClassBatch,
    FirstCallCheck,
    class_batch,
    class_moments,
    plain_layernorm,
    with_bank,
)
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.gates import snr_gate
from splitveil.surrogates.kmeans import assign
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM
from splitveil.surrogates.slots import slot_moments
from splitveil.train.state import load_module, read_checkpoint

PAGE = "explain.html"


Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class SampleWeights:
    """Relative weights (n,) of the samples, 1 being the equal share, and what they mean."""

    relative: Floats
    text: Sentence
    words: pictures.WeightWords = pictures.PLAIN_WORDS


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
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything the page shows of a run. A text in place of a part says why it is missing."""

    flow: Flow
    images: NDArray[np.uint8]  # (n, c, h, w)
    labels: NDArray[np.integer]  # (n,)
    classes: tuple[str, ...]
    z: Floats  # (n, d), clean
    noise_std: float
    maps: tuple[tuple[str, Floats], ...]  # of the first samples, under keys of `[picture]`
    files: RunFiles
    per_class: float
    attention: SampleWeights | Sentence
    groups: Groups | Sentence
    gates: Gates | Sentence


@dataclass(frozen=True)
class Teller:
    """Makes the panels of a page in the language `lang`, with pictures in `drawn`."""

    lang: Lang
    drawn: Lang

    def panel(self, key: str, file: str, png: bytes, **values: Value) -> Panel:
        """A picture under its title and with its words, `[explain]` in `report/locale/`."""
        title = sentence(f"explain.{key}-title").plain(self.lang)
        text = sentence(f"explain.{key}", **values).plain(self.lang)
        return Panel(title=title, text=text, file=file, png=png)

    def note(self, title: Sentence, why: Sentence) -> Panel:
        """Why there is no picture."""
        return Panel(title=title.plain(self.lang), text=why.plain(self.lang))


def panels(story: Story, lang: Lang = "en") -> list[Panel]:
    """The page's panels, in order."""
    teller = Teller(lang, drawable(lang)[0])
    flow = teller.panel("flow", "flow.png", draw_flow_chart(story.flow, teller.drawn))
    return [
        flow,
        *([curves_panel(story.files, lang)] if story.files.metrics else []),
        *_attention(story, teller),
        _sizes(story, teller),
        _gates(story, teller),
        _groups(story, teller),
        *_data(story, teller),
    ]


def _attention(story: Story, teller: Teller) -> list[Panel]:
    if isinstance(story.attention, Sentence):
        return [teller.note(pictures.PLAIN_WORDS.heading, story.attention)]
    found, y, classes = story.attention, story.labels, story.classes
    left = sum(bool((y == c).any()) for c in range(len(classes))) - pictures.ROWS
    drawn = sentence(
        "explain.attention-more" if left > 0 else "explain.attention",
        text=found.text, count=str(len(y)), equal=found.words.equal, left=str(left),
    )  # fmt: skip
    chosen = sentence("explain.chosen", most=found.words.most, least=found.words.least)
    return [
        Panel(
            title=found.words.heading.plain(teller.lang),
            file="attention-classes.png",
            text=drawn.plain(teller.lang),
            png=pictures.attention_heatmap(
                found.relative, y, classes, found.words, lang=teller.drawn
            ),
        ),
        Panel(
            title=found.words.chosen.plain(teller.lang),
            file="attention-samples.png",
            text=chosen.plain(teller.lang),
            png=pictures.weighted_samples(
                found.relative, y, story.images, classes, found.words, lang=teller.drawn
            ),
        ),
    ]


def _sizes(story: Story, teller: Teller) -> Panel:
    if all(number(entry, "effective_sample_size") is None for entry in story.files.metrics):
        return teller.note(sentence("explain.sizes-title"), sentence("explain.no-sizes"))
    floor = 1 / max(story.per_class, 1.0)
    png = pictures.sample_size_over_time(story.files, floor, teller.drawn)
    return teller.panel("sizes", "sample-size.png", png)


def _gates(story: Story, teller: Teller) -> Panel:
    found = story.gates
    if isinstance(found, Sentence):
        return teller.note(sentence("explain.gates-title"), found)
    png = pictures.gate_histogram(found.soft, found.hard, found.limits, teller.drawn)
    return teller.panel("shut-gates" if found.limits else "gates", "gates.png", png)


def _groups(story: Story, teller: Teller) -> Panel:
    if isinstance(story.groups, Sentence):
        return teller.note(sentence("explain.groups-title"), story.groups)
    resp, kind = story.groups.resp, story.groups.kind
    png = pictures.group_images(
        resp, story.labels, story.images, story.classes, kind, lang=teller.drawn
    )
    return teller.panel(kind, f"{kind}-images.png", png)


def _data(story: Story, teller: Teller) -> list[Panel]:
    within, total = pictures.class_variance(story.z, story.labels), story.z.var(0)
    y = story.labels[: len(story.maps[0][1])]
    noise = sentence("explain.noise" if story.noise_std > 0 else "explain.no-noise")
    maps = [(pictures.label(key, teller.drawn), points) for key, points in story.maps]
    variance = pictures.variance_against_noise(within, total, story.noise_std, teller.drawn)
    return [
        teller.panel("variance", "variance.png", variance, noise=noise),
        teller.panel(
            "map", "map.png", pictures.class_maps(maps, y, story.classes), count=str(len(y))
        ),
    ]


def summary(story: Story, lang: Lang = "en") -> Json:
    """The numbers behind the pictures."""
    within = pictures.class_variance(story.z, story.labels)
    found: Json = {"images": len(story.labels), "dimensions": story.z.shape[1]}
    found["noise_std"] = story.noise_std
    if story.noise_std > 0:
        found["share_above_noise"] = pictures.share_above(within, story.noise_std)
    found["median_class_variance"] = float(np.median(within))
    if isinstance(story.attention, SampleWeights):
        found["relative_weight"] = _ends(story.attention.relative)
    if isinstance(story.gates, Gates):
        found["soft_gate"] = float(story.gates.soft.mean())
        found["hard_gate"] = float(story.gates.hard.mean())
    if isinstance(story.groups, Groups):
        mass = pictures.group_mass(story.groups.resp, story.labels, len(story.classes))
        found[f"{story.groups.kind}_mass"] = _ends(mass[np.isfinite(mass).all(1)])
    parts = (story.attention, story.gates, story.groups)
    missing = [part.plain(lang) for part in parts if isinstance(part, Sentence)]
    return found | {"not_drawn": missing}


def _ends(values: Floats) -> Json:
    return {"min": float(values.min()), "max": float(values.max())}


LIMIT = 1000  # images looked at
NUMBERS = 2**26  # of a temporary: slots and clusters need images · slots · dimensions
MAPPED = 500  # images in a map
PERPLEXITY = 30
Looked = tuple[SampleWeights | Sentence, Groups | Sentence, Gates | Sentence]


def explain_run(
    folder: Path, target: Path | None = None, lang: Lang = "en"
) -> tuple[list[Path], Json]:
    """Write `explain.html` and its PNGs. The same run gives the same bytes on a CPU.

    Args:
        folder: The run.
        target: Folder for the page; None for the run's own.
        lang: Language of the page, and of its pictures where a font has its signs.

    Returns:
        The paths, the page first, and the numbers behind the pictures, with `why` in words.
    """
    run = load_run(folder)
    dataset, splits = run.data()
    story = tell(run, dataset, splits)
    case, numbers = read_case(folder, begun=True), summary(story, lang)
    verdict = judge(case, numbers.get("share_above_noise"))
    drawn = panels(story, lang)
    shown = {"noise": "variance.png", "training": "curves.png", None: None}[verdict.shows]
    page = run_page(
        case, verdict, "explain.title", lang,
        panels=[findings_panel(diagnose(case, lang), lang), *(p for p in drawn if p.file != shown)],
        chart=next((panel for panel in drawn if panel.file == shown), None),
    )  # fmt: skip
    paths = write_answer((target or folder) / PAGE, page, lang)
    said = " ".join(told.plain(lang) for told in verdict.said)
    return paths, {"why": said} | numbers


@torch.no_grad()
def tell(run: Run, dataset: Dataset, splits: Splits) -> Story:
    """The arrays of a run's explanation, of at most a thousand training images."""
    config, built = run.config, run.built
    plan = plan_of(config, built)
    untrained = plan.build()
    surrogate, width = untrained.surrogate, run.model.wire_floats(built.image_shape)
    if surrogate is not None:
        saved = read_checkpoint(run.path / "checkpoint.safetensors").part("surrogate")
        load_module(surrogate, saved, "surrogate")
        surrogate.eval()
    slots = int(getattr(surrogate, "num_slots", getattr(surrogate, "clusters", 1)))
    room = max(2, min(LIMIT, NUMBERS // (slots * width)))
    order = torch.randperm(len(splits.train), generator=stream(config.seed, "explain"))
    rows = splits.train.cpu()[order[:room]]
    data = dataset.labelled(rows)
    device = next(run.model.parameters()).device
    z = _features(run.model.encoder, data.images.to(device)).cpu()
    before = _features(untrained.model.encoder.eval(), data.images).numpy()
    flat = plan.settings()
    attention, groups, gates = _look(surrogate, z, data.labels, float(flat.get("lambd") or 0))
    batch = float(config.batch_size or len(splits.train))
    flow = run_flow(
        flat, run.model, built, _stages(run.model.channel),
        statistic=getattr(surrogate, "statistic", None),
        companion=_beside(untrained.companion, plan.defence.settings()),
    )  # fmt: skip
    return Story(
        flow=flow,
        images=dataset.images[rows.to(dataset.images.device)].cpu().numpy(),
        labels=data.labels.cpu().numpy(),
        classes=dataset.classes,
        z=z.numpy(),
        noise_std=run.noise_std,
        maps=(
            ("before", tsne(before[:MAPPED])),
            ("after", tsne(z.numpy()[:MAPPED])),
        ),
        files=read_run(run.path, audited=False),
        per_class=min(batch, len(splits.train)) / built.num_classes,
        attention=attention,
        groups=groups,
        gates=gates,
    )


def _features(encoder: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([encoder(x).float().flatten(1) for x in torch.split(images, LIMIT // 4)])


def _stages(channel: nn.Module) -> tuple[FlowStep, ...]:
    """The channel's stages under their own names, with their own numbers."""
    words = {"GaussianNoise": "noise", "TopK": "prune", "Quantise": "round to levels"}
    stages = cast(nn.ModuleList, getattr(channel, "stages", [channel]))
    return tuple(
        FlowStep(words.get(type(s).__name__, _spaced(type(s).__name__)), (s.extra_repr(),))
        for s in stages
    )


def _beside(companion: nn.Module | None, settings: Json) -> tuple[FlowStep, ...]:
    """What is trained alongside the model, by its class's name, with the defence's settings."""
    if companion is None:
        return ()
    lines = tuple(f"{key} {value}" for key, value in settings.items())
    name = _spaced(type(companion).__name__)
    return FlowStep("trained alongside", (name,)), FlowStep("settings", lines[:4])


def _spaced(name: str) -> str:
    """A class's name in words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _look(surrogate: nn.Module | None, z: Tensor, y: Tensor, lambd: float) -> Looked:
    """Attention, groups and gates of the samples; a sentence where a surrogate has no such part."""
    if surrogate is None or lambd == 0:
        why = sentence("explain.no-penalty" if surrogate is None else "explain.off")
        return why, why, why
    if isinstance(surrogate, SlotCrossAttentionCEM):
        return _look_slots(surrogate, z, y)
    if isinstance(surrogate, GatedAttentionCEM):
        return _look_gated(surrogate, z, y)
    groups: Groups | Sentence = sentence("explain.no-slots")
    if isinstance(surrogate, KMeansCEM):
        groups = _look_clusters(surrogate, z, y)
    return sentence("explain.no-attention"), groups, sentence("explain.no-gates")


def _joined(
    surrogate: GatedAttentionCEM | SlotCrossAttentionCEM, z: Tensor, y: Tensor
) -> ClassBatch:
    """The samples as one batch, with the surrogate's bank where it has one."""
    batch = class_batch(z, y, surrogate.feature_dim, surrogate.num_classes, FirstCallCheck())
    return with_bank(batch, surrogate.bank, push=False, skips=None)


def _look_gated(surrogate: GatedAttentionCEM, z: Tensor, y: Tensor) -> Looked:
    batch = _joined(surrogate, z, y)
    weight = surrogate.weights(batch)
    relative = (weight * batch.count[batch.y])[: len(z)].numpy()
    attention: SampleWeights | Sentence = SampleWeights(
        relative=relative, text=sentence("explain.weights")
    )
    if surrogate.attention == "uniform":
        attention = sentence("explain.uniform")
    slots = sentence("explain.one-pool")
    gate = surrogate.dimension_gate
    if gate is None:
        return attention, slots, sentence("explain.form-without-gates")
    x = plain_layernorm(batch.z) if surrogate.statistic == "layernorm" else batch.z
    found = class_moments(x, weight, batch.y, batch.num_classes)
    mean, var = found.mean[batch.counted > 0], found.var[batch.counted > 0]
    hard = snr_gate(mean, var, surrogate.snr_thresh, surrogate.snr_sharp, surrogate.eps)
    soft = gate(torch.log(var.clamp_min(surrogate.eps) + surrogate.gamma), None)
    return attention, slots, Gates(soft=soft.numpy(), hard=hard.numpy())


def _look_slots(surrogate: SlotCrossAttentionCEM, z: Tensor, y: Tensor) -> Looked:
    batch, scalars = _joined(surrogate, z, y), surrogate.scalars()
    x, resp = surrogate.assign(batch, scalars["assign_temp"])
    own, count = resp[: len(z)].numpy(), surrogate.num_slots
    attention: SampleWeights | Sentence = SampleWeights(
        relative=own.max(1) * count,
        words=pictures.words_of("slots", count=str(count)),
        text=sentence("explain.sure", count=str(count)),
    )
    groups: Groups | Sentence = Groups(resp=own, kind="slot")
    if surrogate.attention == "uniform":
        attention = groups = sentence("explain.uniform-slots")
    gate = surrogate.dimension_gate
    if gate is None:
        return attention, groups, sentence("explain.rate-without-gates")
    found = slot_moments(x, resp, batch.y, batch.num_classes)
    mean, var = (part[batch.counted > 0].flatten(0, 1) for part in (found.mean, found.var))
    hard = snr_gate(mean, var, scalars["snr_thresh"], scalars["snr_sharp"], surrogate.eps)
    limits = (surrogate.shutoff.soft_thresh, surrogate.shutoff.hard_thresh)
    soft = gate(torch.log(var.clamp_min(surrogate.eps) + surrogate.gamma), None)
    return attention, groups, Gates(soft=soft.numpy(), hard=hard.numpy(), limits=limits)


def _look_clusters(surrogate: KMeansCEM, z: Tensor, y: Tensor) -> Groups | Sentence:
    if not bool(surrogate.fitted):
        return sentence("explain.never-fitted")
    nearest = assign(z, y, surrogate.centroids.to(z), surrogate.weights > 0)
    resp = nn.functional.one_hot(nearest, surrogate.clusters).float()
    return Groups(resp=resp.numpy(), kind="cluster")


def tsne(z: NDArray[np.floating]) -> NDArray[np.floating]:
    """A plane map (n, 2) of features (n, d), the same for the same input."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    wide = np.asarray(z, dtype=np.float64)
    if wide.shape[1] > 50:  # noqa: PLR2004 - as t-SNE's authors advise
        wide = PCA(min(50, len(wide)), svd_solver="full", random_state=0).fit_transform(wide)
    near = min(PERPLEXITY, max(1.0, (len(wide) - 1) / 3))
    maker = TSNE(perplexity=near, init="random", random_state=0, max_iter=500, n_jobs=1)
    made: NDArray[np.floating] = maker.fit_transform(wide)
    return made
