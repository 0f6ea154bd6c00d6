"""The report as a PowerPoint deck that can be edited: the page's content, slide by slide."""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from splitveil.errors import ConfigError
from splitveil.io import put_all
from splitveil.record.files import Gallery, RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import BRIEF, number, text
from splitveil.report import canvas, curves, figures, sentences
from splitveil.report.columns import CERTIFICATES, audited, flags_of, summary_of
from splitveil.report.gains import frontier
from splitveil.report.method_charts import Chart, Spot, chart_of, read_chart
from splitveil.report.page import ReportContent
from splitveil.report.slides import (
    BODY,
    ChartSeries,
    Dash,
    Deck,
    Paragraph,
    fitting,
    lay_out,
    text_height,
    text_pages,
)
from splitveil.report.words import Lang, Sentence, Value, joined, sentence, word
from splitveil.table import NOTHING, Table, format_mse

if TYPE_CHECKING:
    from pptx.slide import Slide

DECK = "deck.pptx"
ROWS = 27  # of the results; more are cut to the front
LINES, MARKS = 7, 14  # of a chart
METHODS = 4
ALBUM, TILES, ALBUMS = 4, 8, 3  # runs and images on a slide of reconstructions, and such slides
LABELS, TILE, GAP = 3.2, 1.07, 0.09  # inches: names, a reconstruction and the gap after it
TILE_PX = 128
STRETCHES, FEW = 3, 5  # of a run's shut-off that are told, of names or commands in a list
SHOWN = (
    "run", "defence", "seed", "accuracy", "strongest", "by", "ceiling", "leakage", "sent",
    "leakage-sent", "exposure", "gain",
)  # fmt: skip
ORIGIN: Mapping[str, str] = {
    "origin.dataset": "config.dataset",
    "origin.net": "config.net",
    "origin.seeds": "config.seed",
    "origin.profile": "audit.profile",
    "origin.aux": "audit.aux",
    "origin.scored": "audit.scored",
    "origin.version": "versions.splitveil",
    "origin.commit": "versions.commit",
    "origin.torch": "versions.torch",
    "origin.device": "device",
}
PANELS: Mapping[str, tuple[str, float, float | None]] = {  # key of the log, factor, end of y
    "curve.accuracy": ("val_accuracy", 100.0, 100.0),
    "curve.train-accuracy": ("train_accuracy", 100.0, 100.0),
    "curve.penalty": ("rob_loss", 1.0, None),
    "curve.intra-mse": ("intra_mse", 1.0, None),
    "curve.sample-size": ("effective_sample_size", 1.0, None),
}
PHASES: Mapping[curves.PhaseKind, str] = {
    "warm-up": "phase.warm-up",
    "shut off": "phase.shut-off",
    "full weight": "phase.full-weight",
}
INSTALL = "make venv && . .venv/bin/activate"
REHEARSAL = (
    "splitveil reproduce gated-att-report --dataset digits --epochs 20 --profile smoke "
    "--only cem --only gated-att"
)
EXPERIMENT = "splitveil reproduce gated-att-report --seeds 0,1,2"


def write_deck(content: ReportContent, folder: Path) -> Path:
    """Write the deck into a folder as `deck.pptx`, a file for PowerPoint that can be edited.

    Args:
        content: What the report is about.
        folder: Where it goes; made when absent.

    Returns:
        The path of the deck.

    Raises:
        RunError: python-pptx is not installed, or the folder cannot be written.

    Example:
        `write_deck(read_runs([Path("runs/first")]), Path("report"))`
    """
    deck = render_deck(content)
    return put_all(folder, {folder / DECK: deck})[0]


def render_deck(content: ReportContent) -> bytes:
    """The deck as a file of PowerPoint, every text, table and chart its own."""
    deck = Deck(content.lang, content.heading)
    _title(deck, content)
    _problem(deck, content)
    for chart in methods(content.runs, content.lang):
        title = word("deck.method", content.lang).format(name=chart.title)
        deck.flow(deck.slide(title), chart, BODY)
        _formulas(deck, chart)
    _results(deck, content)
    _curves(deck, content)
    _pictures(deck, content)
    _verdict(deck, content)
    _next_steps(deck, content)
    _again(deck, content)
    _origin(deck, content)
    return deck.to_bytes()


def methods(runs: Sequence[RunFiles], lang: Lang) -> list[Chart]:
    """The flow charts of the runs' defences, each once."""
    names = dict.fromkeys(chart_of(run.record.config) for run in runs)
    return [read_chart(name, lang) for name in names if name != "split"][:METHODS]


def passports(runs: Sequence[RunFiles], lang: Lang) -> str:
    """The speaker's notes under numbers: where each run's come from, one per line."""
    lines = [word("deck.passports", lang)]
    for run in runs:
        said = {
            "train": text(run.record, "seeds.train"),
            "attack": text(run.record, "seeds.attack"),
            "profile": run.record.audit.profile,
            "aux": run.record.audit.aux,
            "scored": text(run.record, "audit.scored"),
            "commit": text(run.record, "versions.commit"),
            "command": run.record.audit.command,
        }
        known = {key: value or NOTHING for key, value in said.items()}
        lines.append(sentence("deck.passport", name=run.name, **known).plain(lang))
    return "\n".join(lines)


def _title(deck: Deck, content: ReportContent) -> None:
    lang = content.lang
    slide = deck.slide(content.heading, passports(content.runs, lang))
    said = [Paragraph(text=sentences.statement(content.runs).plain(lang))]
    deck.text(slide, said, replace(BODY, top=1.7, height=2.6), (32.0, 28.0, 24.0, 20.0))
    names = joined([run.name for run in content.runs], lang)
    said = [Paragraph(text=sentence("deck.runs", names=names).plain(lang), ink=canvas.GREY)]
    deck.text(slide, said, replace(BODY, top=4.7, height=2.1), (18.0, 16.0, 14.0, 12.0, 10.0))


def _problem(deck: Deck, content: ReportContent) -> None:
    lang = content.lang
    slide = deck.slide(word("deck.problem", lang))
    points = [
        Paragraph(text=sentence(key).plain(lang), bullet=True)
        for key in ("deck.device", "deck.attacker", "deck.goal")
    ]
    deck.text(slide, points, replace(BODY, height=2.7))
    low = Spot(BODY.left, BODY.top + 2.9, BODY.width, BODY.height - 2.9)
    deck.flow(slide, read_chart("split", lang), low)


def _formulas(deck: Deck, chart: Chart) -> None:
    lang = deck.lang
    heads = [[Paragraph(text=word(f"deck.{key}", lang), bold=True)]
             for key in ("step", "formula", "shapes")]  # fmt: skip
    rows = [
        [
            [Paragraph(text=box.title)],
            [Paragraph(text=line, formula=True) for line in box.formulas],
            [Paragraph(text=box.shape, formula=True, ink=canvas.GREY)],
        ]
        for box in chart.boxes
        if box.formulas
    ]
    title = word("deck.formulas", lang).format(name=chart.title)
    _table_slides(deck, title, [heads, *rows], [False] * len(heads))


def _table_slides(
    deck: Deck,
    title: str,
    rows: Sequence[Sequence[Sequence[Paragraph]]],
    right: Sequence[bool],
    *,
    notes: str = "",
    below: Sequence[str] = (),
) -> None:
    """A table on as many slides as it needs, with remarks below it."""
    remarks = [Paragraph(text=remark, ink=canvas.GREY) for remark in below if remark]
    foot = text_height(remarks, BODY.width, 12.0) + 0.2 if remarks else 0.0
    pages = lay_out(rows, BODY.width, right).pages(BODY.height - foot)
    for at, page in enumerate(pages, start=1):
        slide = deck.slide(_part(title, at, len(pages), deck.lang), notes)
        deck.table(slide, page, BODY.left, BODY.top)
        if remarks:
            place = replace(BODY, top=BODY.top + sum(page.heights) + 0.15, height=foot - 0.15)
            deck.text(slide, remarks, place, (12.0,))


def _part(title: str, at: int, count: int, lang: Lang) -> str:
    if count == 1:
        return title
    said = {"title": title, "at": str(at), "all": str(count)}
    return word("deck.part", lang).format(**said)


def _cells(table: Table, runs: Sequence[RunFiles], lang: Lang) -> list[list[list[Paragraph]]]:
    """A table of the page, heading first; its numbers are those of the page."""
    heads = [[Paragraph(text=column.label(lang), bold=True)] for column in table.columns]
    return [heads, *([[Paragraph(text=cell)] for cell in row] for row in table.cells(runs, lang))]


def _results(deck: Deck, content: ReportContent) -> None:
    runs, lang = content.runs, content.lang
    notes = passports(runs, lang)
    shown = runs if len(runs) <= ROWS else content.key_runs
    cut = len(runs) - len(shown)
    more = sentence("note.more-rows", count=str(cut)).plain(lang) if cut else ""
    below = [word("note.arrows", lang), more]
    told = summary_of(runs)
    table = told.only(*(column.key for column in told.columns if column.key in SHOWN))
    _table_slides(deck, word("heading.summary", lang), _cells(table, shown, lang),
                  [column.fmt.numeric for column in table.columns], notes=notes,
                  below=below)  # fmt: skip
    _frontier(deck, content, notes)
    _tradeoff(deck, content, notes)
    _attacks(deck, content, notes)
    checked = audited(shown)
    if checked:
        _table_slides(deck, word("heading.audit", lang), _cells(CERTIFICATES, checked, lang),
                      [column.fmt.numeric for column in CERTIFICATES.columns], notes=notes,
                      below=[word("caption.audit", lang)])  # fmt: skip


def _chosen(content: ReportContent, most: int) -> tuple[list[Group], str]:
    """At most so many kinds of runs for a chart, and a remark if there are more."""
    found = kinds(content.runs)
    if len(found) <= most:
        return found, ""
    front = [any(run in kind.runs for run in content.key_runs) for kind in found]
    first = sorted(range(len(found)), key=lambda at: not front[at])[:most]
    cut = sentence("deck.cut", count=str(len(found) - most)).plain(content.lang)
    return [found[at] for at in sorted(first)], cut


def _remarks(deck: Deck, slide: "Slide", *remarks: str) -> None:
    words = [Paragraph(text=remark, ink=canvas.GREY) for remark in remarks if remark]
    if words:
        deck.text(slide, words, Spot(BODY.left, 6.15, BODY.width, 0.8), (12.0, 11.0, 10.0))


def _frontier(deck: Deck, content: ReportContent, notes: str) -> None:
    """Accuracy against exposure where a client answers alone or asks when unsure; else nothing."""
    lang = content.lang
    found = frontier(kinds([run for run in content.runs if run.audited]))
    if found is None or not found.points:
        return
    slide = deck.slide(word("heading.frontier", lang), notes)
    png = figures.draw_frontier(found, lang).png
    deck.picture(slide, png, within(png, BODY), word("alt.frontier", lang))


def within(png: bytes, place: Spot) -> Spot:
    """The largest place of a PNG's own shape in the middle of another, inches."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        wide, high = picture.size
    scale = min(place.width / wide, place.height / high)
    width, height = wide * scale, high * scale
    left, top = (place.width - width) / 2, (place.height - height) / 2
    return Spot(place.left + left, place.top + top, width, height)


def _tradeoff(deck: Deck, content: ReportContent, notes: str) -> None:
    runs, lang = content.runs, content.lang
    shown, cut = _chosen(content, MARKS)
    series = []
    for at, kind in enumerate(shown):
        points = [
            (100 * run.record.accuracy, run.record.strongest.mse)
            for run in kind.runs
            if run.record.accuracy is not None and run.record.strongest.mse is not None
        ]
        if points:
            series.append(ChartSeries(name=kind.name, points=points, ink=canvas.colour(at), dash="",
                                 marker=canvas.marker(at)))  # fmt: skip
    if not series:
        return
    for name, row in figures.comparable_rows(runs, content.published).items():
        said = sentence("deck.published", name=name).plain(lang)
        series.append(ChartSeries(name=said, points=[(100 * row.accuracy, row.mse)], ink=canvas.INK,
                             dash="", marker="o", hollow=True))  # fmt: skip
    accuracies = [x for one in series for x, _ in one.points]
    ends = (floor(min(accuracies)) - 1.0, ceil(max(accuracies)) + 1.0)
    series += _references(runs, ends, lang)
    slide = deck.slide(word("heading.tradeoff", lang), notes)
    axes = (word("deck.accuracy-axis", lang), word("deck.mse-axis", lang))
    deck.curves(slide, series, replace(BODY, height=4.8), axes, ends=ends)
    sources = "" if content.sources is None else content.sources.plain(lang)
    _remarks(deck, slide, word("caption.tradeoff", lang), sources, cut)


def _references(runs: Sequence[RunFiles], ends: Sequence[float], lang: Lang) -> list[ChartSeries]:
    """The ceilings and floors of the runs as lines across a chart."""
    looks: tuple[tuple[str, str, str, Dash], ...] = (
        ("ceiling", "deck.ceiling", canvas.CEILING, "--"),
        ("floor", "deck.floor", canvas.FLOOR, ":"),
    )
    return [
        ChartSeries(name=f"{word(key, lang)} {format_mse(value)}",
               points=[(x, value) for x in ends], ink=ink, dash=dash)
        for what, key, ink, dash in looks
        for value in canvas.references(runs, what)
    ]  # fmt: skip


def _attacks(deck: Deck, content: ReportContent, notes: str) -> None:
    lang = content.lang
    shown, cut = _chosen(content, LINES)
    names = list(dict.fromkeys(name for kind in shown for r in kind.records for name in r.attacks))
    if not names:
        return
    series = [(kind.name, [kind.mean(f"attacks.{a}.mse") for a in names]) for kind in shown]
    slide = deck.slide(word("heading.attacks", lang), notes)
    axes = ("", word("deck.mse-axis", lang))
    deck.bars(slide, names, series, replace(BODY, height=4.8), axes)
    ceilings = {format_mse(v) for v in canvas.references(content.runs, "ceiling")}
    told = sentence("deck.bars", ceilings=tuple(sorted(ceilings)) or NOTHING).plain(lang)
    _remarks(deck, slide, told, cut)


def _curves(deck: Deck, content: ReportContent) -> None:
    """Four native charts over the epochs, a line for the first run of each kind."""
    lang = content.lang
    shown, cut = _chosen(content, LINES)
    runs = [run for kind in shown if (run := next((r for r in kind.runs if r.metrics), None))]
    panels = [
        (word(key, lang), lines, top)
        for key, (log, scale, top) in PANELS.items()
        if (lines := _lines(runs, log, scale))
    ]
    if not panels:
        return
    told = {title for title, *_ in panels}
    if word("curve.accuracy", lang) in told:  # on training images only where there are no others
        panels = [panel for panel in panels if panel[0] != word("curve.train-accuracy", lang)]
    slide = deck.slide(word("heading.training", lang), passports(runs, lang))
    deck.legend(slide, [(run.name, canvas.colour(at)) for at, run in enumerate(runs)],
                replace(BODY, height=0.55))  # fmt: skip
    epochs = [x for _, lines, _ in panels for line in lines for x, _ in line.points]
    ends = (min(epochs), max(epochs) + float(min(epochs) == max(epochs)))
    across, down = min(len(panels), 2), ceil(len(panels) / 2)
    wide, high = BODY.width / across, 4.3 / down
    for at, (title, lines, top) in enumerate(panels):
        place = Spot(BODY.left + at % 2 * wide, BODY.top + 0.55 + at // 2 * high, wide, high)
        axes = (word("deck.epoch", lang) if at >= len(panels) - across else "", "")
        deck.curves(slide, lines, place, axes, title=title, legend=False, ends=ends, top=top)
    more = len(content.runs) > len(runs)
    seeds = word("deck.first-seeds", lang) if more and not cut else ""
    _remarks(deck, slide, phases_told(runs, lang), seeds, cut)


def _lines(runs: Sequence[RunFiles], log: str, scale: float) -> list[ChartSeries]:
    """What the runs logged under a key; none if no run did."""
    made = []
    for at, run in enumerate(runs):
        epochs, values = curves.logged(run, log)
        points = [(epoch, scale * value) for epoch, value in zip(epochs, values, strict=True)]
        if points:
            made.append(ChartSeries(name=run.name, points=points, ink=canvas.colour(at)))
    return made


def phases_told(runs: Sequence[RunFiles], lang: Lang) -> str:
    """When the penalties did not act, run by run; empty if they always did."""
    told = []
    for run in runs:
        found = [
            sentence(
                PHASES[phase.kind],
                epochs=f"{phase.first:g}–{phase.last:g}"
                if phase.first < phase.last
                else f"{phase.first:g}",
            )
            for phase in curves.phases(run)
        ]
        said = joined([one.plain(lang) for one in found[:STRETCHES]], lang)
        if found:
            more = " …" if len(found) > STRETCHES else ""
            told.append(sentence("deck.phases", name=run.name, said=said + more).plain(lang))
    return " ".join(told)


def _pictures(deck: Deck, content: ReportContent) -> None:
    """Originals, and what the strongest attack on each run rebuilds from them."""
    lang = content.lang
    albums: dict[object, list[tuple[RunFiles, Gallery]]] = {}
    for run in content.runs:
        if run.gallery is not None and run.gallery.reconstructions:
            key = (run.gallery.indices, run.gallery.original.tobytes())
            albums.setdefault(key, []).append((run, run.gallery))
    pages = [
        album[at : at + ALBUM] for album in albums.values() for at in range(0, len(album), ALBUM)
    ][:ALBUMS]  # fmt: skip
    for at, page in enumerate(pages, start=1):
        title = _part(word("heading.pictures", lang), at, len(pages), lang)
        slide = deck.slide(title, passports([run for run, _ in page], lang))
        _album(deck, slide, page)


def _album(deck: Deck, slide: "Slide", page: Sequence[tuple[RunFiles, Gallery]]) -> None:
    lang, first = deck.lang, page[0][1]
    count = min(len(first.indices), TILES)
    left = BODY.left + LABELS
    for at, label in enumerate(first.label_names[:count]):
        name = [Paragraph(text=label, ink=canvas.GREY)]
        place = Spot(left + at * TILE, BODY.top, TILE - GAP, 0.25)
        deck.text(slide, name, place, (12.0, 11.0, 10.0, 9.0))
    rows = [([Paragraph(text=word("gallery.original", lang), bold=True)], first.original)]
    for run, gallery in page:
        attack = run.record.strongest.mse_by
        if attack not in gallery.reconstructions:
            attack = next(iter(gallery.reconstructions))
        mse = format_mse(number(run.record, f"attacks.{attack}.mse"))
        star = " ★" * (attack == run.record.strongest.mse_by)
        under = Paragraph(text=f"{attack}{star}  MSE {mse}", ink=canvas.GREY)
        rows.append(([Paragraph(text=run.name, bold=True), under], gallery.reconstructions[attack]))
    for at, (words, images) in enumerate(rows):
        top = BODY.top + 0.3 + at * TILE
        deck.text(slide, words, Spot(BODY.left, top, LABELS - 0.15, TILE - GAP),
                  (14.0, 12.0, 10.0), middle=True)  # fmt: skip
        place = Spot(left, top, count * TILE - GAP, TILE - GAP)
        alt = joined([one.text for one in words], lang)
        deck.picture(slide, image_row(images[:count]), place, alt)


def image_row(images: canvas.Pixels) -> bytes:
    """Images (n, c, h, w) side by side as a PNG, with gaps as wide as on the slide."""
    from PIL import Image

    gap = round(TILE_PX * GAP / (TILE - GAP))
    wide = len(images) * (TILE_PX + gap) - gap
    sheet = Image.new("RGB", (wide, TILE_PX), "white")
    for at, image in enumerate(np.moveaxis(images, 1, -1)):
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        way = Image.Resampling.NEAREST if max(image.shape) < TILE_PX else Image.Resampling.BOX
        sheet.paste(picture.resize((TILE_PX, TILE_PX), way), (at * (TILE_PX + gap), 0))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _verdict(deck: Deck, content: ReportContent) -> None:
    """The verdict; under it what to know before believing it, or on slides of its own."""
    runs, lang = content.runs, content.lang
    notes = passports(runs, lang)
    slide = deck.slide(word("deck.verdict", lang), notes)
    said = [Paragraph(text=sentences.verdict(runs).plain(lang), bold=True)]
    caveats = [Paragraph(text=one.plain(lang), bullet=True) for one in sentences.caveats(runs)]
    low = Spot(BODY.left, 2.9, BODY.width, 4.0)
    fits = text_height(caveats, low.width, 13.0) <= low.height
    high = replace(BODY, height=low.top - BODY.top - 0.2) if fits else BODY
    deck.text(slide, said, high, (24.0, 22.0, 20.0, 18.0, 16.0, 14.0), middle=True)
    if fits:
        deck.text(slide, caveats, low, (18.0, 16.0, 14.0, 13.0))
    else:
        _text_slides(deck, word("heading.believe", lang), caveats, notes)


def _text_slides(deck: Deck, title: str, words: Sequence[Paragraph], notes: str = "") -> None:
    size = fitting(words, BODY, (18.0, 16.0, 14.0))
    pages = text_pages(words, BODY, size)
    for at, page in enumerate(pages, start=1):
        slide = deck.slide(_part(title, at, len(pages), deck.lang), notes)
        deck.text(slide, page, BODY, (size, 12.0))


def _next_steps(deck: Deck, content: ReportContent) -> None:
    lang = content.lang
    said = [one.plain(lang) for one in next_steps(content.runs)]
    points = [Paragraph(text=text, bullet=True) for text in said]
    _text_slides(deck, word("deck.next", lang), points)


def next_steps(runs: Sequence[RunFiles]) -> list[Sentence]:
    """What to do with these runs: what their flags say, what is missing, what comes after."""
    flagged: dict[str, tuple[Value, Value, list[str]]] = {}
    for run in runs:
        for title, _, advice in flags_of(run) or ():
            flagged.setdefault(str(title), (title, advice, []))[2].append(run.name)
    made = [
        sentence("deck.step-flag", flag=title, names=_few(names), advice=advice)
        for title, advice, names in flagged.values()
    ]
    named = {
        "deck.step-audit": [run.name for run in runs if not run.audited],
        "deck.step-standard": [run.name for run in runs if run.record.audit.profile in BRIEF],
        "deck.step-seeds": [kind.name for kind in kinds(runs) if len(kind.seeds) == 1],
    }
    made += [sentence(key, names=_few(names)) for key, names in named.items() if names]
    if all(text(run.record, "config.defence") != "none" for run in runs):
        made.append(sentence("deck.step-none"))
    if not all(run.record.config.get("final") for run in runs):
        made.append(sentence("deck.step-final"))
    return [*made, sentence("deck.step-deploy")]


def _few(names: Sequence[str]) -> tuple[str, ...]:
    return (*names[:FEW], "…") if len(names) > FEW else tuple(names)


def _again(deck: Deck, content: ReportContent) -> None:
    """The commands that make these runs again, and the documents' own experiment."""
    lang = content.lang
    each, unknown = commands(content.runs)
    every = [kind.runs[0].name for kind in kinds(content.runs)]
    first = [each[name] for name in every if name in each][:FEW]
    own = run_names(content.runs).values()
    folders = " ".join(shlex.quote(f"runs/{name}") for name in own) if len(own) <= FEW else "runs/*"
    chinese = " --lang zh" * (lang == "zh")
    blocks = [
        ("deck.install", [INSTALL]),
        ("deck.train", [line for lines in first for line in lines]),
        ("deck.report", [f"splitveil report {folders} --out page --pptx{chinese}"]),
        ("deck.experiment", [REHEARSAL, EXPERIMENT]),
    ]
    words = [
        one
        for key, lines in blocks
        if lines
        for one in (Paragraph(text=word(key, lang), bold=True, bullet=True),
                    *(Paragraph(text=line, code=True) for line in lines))
    ]  # fmt: skip
    if len(first) < len(each):
        words.append(Paragraph(text=word("deck.more", lang)))
    if unknown:
        words.append(Paragraph(text=sentence("deck.unknown", names=_few(unknown)).plain(lang)))
    notes = "\n".join(line for lines in each.values() for line in lines)
    _text_slides(deck, word("deck.again", lang), words, notes)


def commands(runs: Sequence[RunFiles]) -> tuple[dict[str, list[str]], list[str]]:
    """How to train and audit each run again, by its name; and the runs that this version cannot."""
    from splitveil.config.resolve import train_command  # loads torch, which reading does not need

    made: dict[str, list[str]] = {}
    names = run_names(runs)
    for run in runs:
        own = names[run.name]
        try:
            train = train_command(run.record.config, own)
        except ConfigError:  # a defence that is not in this installation
            continue
        audit = ["splitveil", "audit", f"runs/{own}"]
        facts = {"--profile": run.record.audit.profile, "--aux": run.record.audit.aux,
                 "--seed": text(run.record, "seeds.attack"),
                 "--attacks": ",".join(run.record.audit.only)}  # fmt: skip
        usual = {"--aux": "train", "--seed": "0"}
        for option, value in facts.items():
            audit += [option, value] if value and value != usual.get(option) else []
        made[run.name] = [train, shlex.join(audit)] if run.audited else [train]
    return made, [run.name for run in runs if run.name not in made]


def run_names(runs: Sequence[RunFiles]) -> dict[str, str]:
    """A different name for each run's folder, as `--name` takes it.

    A letter that no name may hold becomes a dash.
    """
    plain = [re.sub(r"[^A-Za-z0-9._+-]+", "-", run.name).strip("-._+") or "run" for run in runs]
    names = figures.slugs([re.sub(r"\+", "_", name)[:80] for name in plain])
    return dict(zip((run.name for run in runs), names, strict=True))


def _origin(deck: Deck, content: ReportContent) -> None:
    runs, lang = content.runs, content.lang
    rows = [
        [
            [Paragraph(text=word("deck.what", lang), bold=True)],
            [Paragraph(text=word("deck.value", lang), bold=True)],
        ]
    ]
    for key, path in ORIGIN.items():
        values = sentences.distinct(runs, path)
        if values:
            rows.append([[Paragraph(text=word(key, lang))], [Paragraph(text=joined(values, lang))]])
    if len(rows) > 1:
        _table_slides(deck, word("deck.origin", lang), rows, [False, False],
                      notes=passports(runs, lang))  # fmt: skip
