"""The first screen of a report: what the rows say in a few sentences, and one table with pictures.

The sentences follow from the rows by plain rules, flattering or not. The pictures are the first of
six classes, the same in every row, so that no result decides what is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitveil.record.files import Gallery, RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import BRIEF, get, text, unpack
from splitveil.report.columns import BOUND, WORDS, column
from splitveil.report.figures import image_uri
from splitveil.report.gains import (
    BARE,
    Kind,
    answer_well,
    client_of,
    exposure_over,
    gains,
    kind_of,
)
from splitveil.report.words import Lang, Sentence, sentence, word
from splitveil.table import NOTHING, Format, Table, spread

PICTURES = 6
NEAR, LITTLE = 0.5, 5.0  # points that count as equal accuracy, and as equal leakage
SIDE, WIDEST = 72, 96  # px of a picture on the page
ONE = {"alone": "front.one-alone", "exit": "front.one-exit", "split": "front.one-split"}
TOLD = {
    "alone": "front.kind-alone", "exit": "front.kind-exit", "split": "front.kind-split",
    "undefended": "front.kind-undefended",
}  # fmt: skip
SIGNED = Format(text=lambda value, _: signed(value))


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """A row of the first table: runs that differ in their seeds alone, with their means.

    Args:
        name: What the runs are called.
        kind: "alone" sends nothing, "exit" some images, "split" all of them.
        defence: Name of the defence.
        client: Name of the client or net.
        macs: Multiply-adds of the client for one image.
        accuracy: In [0, 1].
        spread: The same in per cent, with its sd over seeds.
        sent: Share of the images that are sent.
        leakage: 1 − MSE/label-only error of what is sent; None if nothing is.
        exposure: What leaks over all images.
        adds: Points of accuracy over the same client alone; None where no row says.
        poor: Whether its accuracy is at chance, or far below that of its net without a defence.
        runs: The run folders.
    """

    name: str
    kind: Kind
    defence: str
    client: str = ""
    macs: float | None = None
    accuracy: float | None = None
    spread: str = NOTHING
    sent: float = 1.0
    leakage: float | None = None
    exposure: float | None = None
    adds: float | None = None
    poor: bool = False
    runs: tuple[RunFiles, ...] = ()

    @property
    def undefended(self) -> bool:
        """Whether everything is sent with no more than noise."""
        return self.kind == "split" and BARE.issuperset(self.defence.split("+"))

    @property
    def rebuilt(self) -> Sentence | str | None:
        """What a stranger rebuilds: the exposure, and for an exit rule of what and of how much."""
        if self.runs and not any(run.audited for run in self.runs):
            return sentence("front.not-audited")
        if self.exposure is None:
            return None
        if self.kind != "exit" or self.leakage is None:
            return f"{_leak(self.exposure)} %"
        return sentence(
            "front.rebuilt-exit", rebuilt=_leak(self.leakage), sent=f"{10 * self.sent:.0f}",
            exposure=_leak(self.exposure),
        )  # fmt: skip


def front_rows(runs: Sequence[RunFiles]) -> list[FrontRow]:
    """The rows of some runs, in their order; seeds of one setting are one row."""
    groups = kinds(runs)
    return [_row(group, groups) for group in groups]


def _row(group: Group, groups: Sequence[Group]) -> FrontRow:
    kind = kind_of(group)
    leakage = group.mean("leakage") if kind != "alone" else None
    exposed, sent = exposure_over(group), group.mean("sent")
    gained = gains(group, groups).over_same
    adds = group.mean("gain_over_same_client") if gained is None else gained.points
    return FrontRow(
        name=group.name,
        kind=kind,
        defence=text(group.runs[0].settings, "defence") or NOTHING,
        client=client_of(group) or NOTHING,
        macs=group.mean("client.macs"),
        accuracy=group.mean("accuracy"),
        spread=spread(group.values("accuracy"), 100.0, 1),
        sent=(0.0 if kind == "alone" else 1.0) if sent is None else sent,
        leakage=group.mean("leakage_sent") if kind == "exit" else leakage,
        exposure=0.0 if kind == "alone" else None if exposed is None else exposed[0],
        adds=None if kind == "alone" else adds,
        poor=not answer_well(group),
        runs=group.runs,
    )


def conclusions(rows: Sequence[FrontRow]) -> list[Sentence]:
    """What the rows say, in the order: a client alone, asking when unsure, sending always.

    Args:
        rows: Rows on the same images.
    """
    known = [row for row in rows if row.accuracy is not None]
    good = [row for row in known if not row.poor]
    dead = tuple(row.name for row in known if row.poor)
    said = [sentence("front.poor", names=dead)] if dead else []
    if not known:
        leaking = [row for row in rows if row.leakage is not None]
        if not leaking:
            return [sentence("verdict.none")]
        worst = max(leaking, key=lambda row: row.leakage or 0.0)
        return [sentence("front.no-accuracy", name=worst.name, rebuilt=_leak(worst.leakage))]
    if not good:
        return said
    if len(good) == 1:
        return [_only(good[0]), *said]
    senders = [row for row in good if row.kind != "alone"]
    if all(row.kind != "alone" for row in good):
        said = [sentence("front.no-alone"), *said]
    return [*_without_server(good, senders), *_sending_all(senders), *said]


def _only(row: FrontRow) -> Sentence:
    """A single row."""
    return sentence(
        ONE[row.kind], name=row.name, accuracy=_per_cent(row.accuracy), rebuilt=_leak(row.leakage),
        kept=_kept(row), exposure=_leak(row.exposure),
    )  # fmt: skip


def _without_server(good: Sequence[FrontRow], senders: Sequence[FrontRow]) -> list[Sentence]:
    """Whether a client alone does as well, and whether to ask only when unsure."""
    if not senders:
        best = _most_accurate(good)
        return [sentence("front.best-alone", name=best.name, accuracy=_per_cent(best.accuracy))]
    best = _most_accurate(senders)
    others = [row for row in good if row.kind == "alone" and row.client != best.client]
    same = next((r for r in good if r.kind == "alone" and r.client == best.client), None)
    said, enough = [], False
    if others:
        larger = _most_accurate(others)
        gap = _points(larger, best)
        enough = gap >= -NEAR
        key = "front.larger" if enough else "front.larger-short"
        told = "front.more" if gap > NEAR else "front.as"
        said.append(
            sentence(
                key, macs=mmacs(larger.macs), how=sentence(told), gap=f"{-gap:.1f}",
                accuracy=_per_cent(larger.accuracy), name=best.name, best=_per_cent(best.accuracy),
            )
        )  # fmt: skip
    unsure = [r for r in senders if r.kind == "exit" and (same is None or r.client == same.client)]
    if unsure:
        said.append(_asking(_most_accurate(unsure), same, enough=enough))
    elif same is not None:
        adds = _points(best, same)
        said.append(
            sentence(
                "front.server" if adds >= NEAR else "front.no-server", adds=f"{adds:.1f}",
                alone=_per_cent(same.accuracy), best=_per_cent(best.accuracy),
            )
        )  # fmt: skip
    return said


def _asking(row: FrontRow, same: FrontRow | None, *, enough: bool) -> Sentence:
    """What asking only when unsure gives; `enough` if a larger client alone does as well."""
    if same is None:
        return sentence("front.unsure-only", accuracy=_per_cent(row.accuracy), kept=_kept(row))
    adds = _points(row, same)
    if adds < NEAR:
        return sentence("front.unsure-nothing", adds=signed(adds), name=same.name)
    key = "front.unsure-else" if enough else "front.unsure"
    return sentence(key, adds=signed(adds), name=same.name, kept=_kept(row))


def _sending_all(senders: Sequence[FrontRow]) -> list[Sentence]:
    """What a stranger rebuilds if everything is sent, and what defences make of that."""
    measured = [row for row in senders if row.kind == "split" and row.leakage is not None]
    bare = [row for row in measured if row.undefended]
    defended = [row for row in measured if not row.undefended]
    said = []
    open_ = max(bare, key=lambda row: row.leakage or 0.0, default=None)
    if open_ is not None:
        little = 100 * (open_.leakage or 0.0) < LITTLE
        key = "front.undefended-little" if little else "front.undefended"
        said.append(sentence(key, rebuilt=_leak(open_.leakage)))
    if not defended:
        return said
    best = min(defended, key=lambda row: row.leakage or 0.0)
    told = {"name": best.name, "rebuilt": _leak(best.leakage)}
    if open_ is None:
        return [*said, sentence("front.defended", **told)]
    if 100 * ((open_.leakage or 0.0) - (best.leakage or 0.0)) < LITTLE:
        return [*said, sentence("front.defence-little", **told)]
    cost = _points(open_, best)
    change = "costs" if cost >= NEAR else "gains" if cost <= -NEAR else "same"
    priced = sentence(f"front.{change}", points=f"{abs(cost):.1f}")
    return [*said, sentence("front.defence", price=priced, **told)]


def _most_accurate(rows: Sequence[FrontRow]) -> FrontRow:
    return max(rows, key=lambda row: row.accuracy or 0.0)


def _points(one: FrontRow, other: FrontRow) -> float:
    return 100 * ((one.accuracy or 0.0) - (other.accuracy or 0.0))


def _per_cent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}"


def _leak(leakage: float | None) -> str:
    """A leakage in whole per cent; one below 0 has nothing more to hide."""
    return NOTHING if leakage is None else f"{100 * max(leakage, 0.0):.0f}"


def _kept(row: FrontRow) -> str:
    return f"{10 * (1 - row.sent):.0f}"


def signed(points: float) -> str:
    """Points with their sign.

    >>> signed(6.62), signed(-1.7)
    ('+6.6', '−1.7')
    """
    return f"{points:+.1f}".replace("-", "−")


def mmacs(macs: float | int | None) -> str:
    """Multiply-adds in millions, two digits where they are few.

    >>> mmacs(84_672), mmacs(1_234_567), mmacs(19_900_000)
    ('0.085', '1.2', '19.9')
    >>> mmacs(19_600)  # as many digits as 0.019 beside it
    '0.020'
    """
    if macs is None:
        return NOTHING
    return f"{macs / 1e6:.1f}" if macs >= 1e6 else f"{macs / 1e6:#.2g}"  # noqa: PLR2004


@dataclass(frozen=True, kw_only=True)
class Look:
    """A cell with a picture: a data: address and what it shows, or words alone."""

    words: str
    uri: str = ""
    alt: str = ""
    wrong: bool = False


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """A row as the page shows it: its texts by name, its pictures, its bar in per cent."""

    name: str
    told: str
    cells: dict[str, str]
    bar: float | None
    looks: tuple[Look, ...]
    note: str = ""
    extra: tuple[Look, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FrontTable:
    """Rows whose pictures are of the same images, the originals, and the side of a picture."""

    originals: tuple[Look, ...]
    rows: tuple[ShownRow, ...]
    side: int = SIDE


def front_tables(rows: Sequence[FrontRow], lang: Lang) -> list[FrontTable]:
    """The rows with pictures; those on other images follow in a table of their own."""
    albums: dict[object, list[FrontRow]] = {}
    for row in rows:
        gallery = row.runs[0].gallery
        key = None if gallery is None else (gallery.indices, gallery.original.tobytes())
        albums.setdefault(key, []).append(row)
    pictured = [key for key in albums if key is not None]
    if len(pictured) == 1 and None in albums:  # rows without pictures stand among the others
        albums = {pictured[0]: list(rows)}
    return [_table(same, lang) for same in albums.values()]


def _table(rows: Sequence[FrontRow], lang: Lang) -> FrontTable:
    gallery = next((g for row in rows if (g := row.runs[0].gallery) is not None), None)
    if gallery is None:
        return FrontTable(originals=(), rows=tuple(_shown(row, None, lang) for row in rows))
    originals = tuple(_original(gallery, at, lang) for at in shown_at(gallery))
    side = max(gallery.original.shape[2:])
    times = max(1, -(-SIDE // side))
    return FrontTable(
        originals=originals,
        rows=tuple(_shown(row, gallery, lang) for row in rows),
        side=max(SIDE, min(times * side, WIDEST)),
    )


def shown_at(gallery: Gallery) -> range:
    """Places of the images that are shown: a gallery begins with the first image of each class."""
    return range(min(PICTURES, len(gallery.indices)))


def _original(gallery: Gallery, at: int, lang: Lang) -> Look:
    name = gallery.label_names[at]
    alt = sentence("gallery.alt-original", index=str(gallery.indices[at]), name=name).plain(lang)
    return Look(words=name, uri=image_uri(gallery.original[at]), alt=alt)


FRONT = Table(
    column("front.row", lambda row: row.name, brief="row"),
    column("front.macs", lambda row: mmacs(row.macs), BOUND, brief="MMAC"),
    column("front.accuracy", lambda row: row.spread, BOUND, "%", brief="acc%"),
    column("front.adds", lambda row: row.adds, SIGNED, brief="server adds"),
    column("front.rebuilt", lambda row: row.rebuilt, WORDS, brief="a stranger rebuilds"),
)


def _shown(row: FrontRow, album: Gallery | None, lang: Lang) -> ShownRow:
    gallery, run = row.runs[0].gallery, row.runs[0]
    places = [] if album is None else shown_at(album)
    looks: tuple[Look, ...] = tuple(Look(words=NOTHING) for _ in places)
    note, extra = "", tuple[Look, ...]()
    if gallery is not None:
        sent = sent_at(run, gallery)
        looks = tuple(_look(row, gallery, at, lang, sent=sent[at]) for at in places)
        if row.kind == "exit" and not any(sent[at] for at in places):
            first = next((at for at, there in enumerate(sent) if there), None)
            note = word("front.none-sent" if first is None else "front.first-sent", lang)
            if first is not None:
                made = _look(row, gallery, first, lang, sent=True)
                extra = (_original(gallery, first, lang), made)
    kind = row.kind if row.kind != "split" else "undefended" if row.undefended else "split"
    told = sentence(TOLD[kind], defence=row.defence).plain(lang)
    return ShownRow(
        name=row.name,
        told=" · ".join([told, *[word("front.poor-row", lang)] * row.poor]),
        cells={column.key: column.cell(row, lang) for column in FRONT.columns},
        bar=None if row.exposure is None else round(100 * min(max(row.exposure, 0.0), 1.0), 1),
        looks=looks,
        note=note,
        extra=extra,
    )


def _look(row: FrontRow, gallery: Gallery, at: int, lang: Lang, *, sent: bool) -> Look:
    """What a row has of an image: the answer, the reconstruction, or that it stays."""
    answer = gallery.answer_names[at]
    wrong = gallery.answers[at] != gallery.labels[at]
    if row.kind == "alone":
        return Look(words=answer, wrong=wrong)
    if not sent:
        return Look(words=word("front.stays", lang), wrong=wrong)
    attack = row.runs[0].record.strongest.mse_by or ""
    if attack not in gallery.reconstructions:
        return Look(words=NOTHING)
    error = gallery.mse.get(attack, ())
    alt = sentence(
        "gallery.alt", index=str(gallery.indices[at]), attack=attack, run=row.name,
        mse=f"{error[at]:.4f}" if error else NOTHING,
    ).plain(lang)  # fmt: skip
    return Look(words=answer, uri=image_uri(gallery.reconstructions[attack][at]), alt=alt)


def sent_at(run: RunFiles, gallery: Gallery) -> list[bool]:
    """Whether each image of a gallery was sent; all are without an exit rule."""
    packed = get(run.record, "per_image.sent")
    if not isinstance(packed, str):
        return [True] * len(gallery.indices)
    bits = np.unpackbits(unpack(packed, "u1", "per_image.sent"))
    return [at < len(bits) and bool(bits[at]) for at in gallery.indices]


def stamps(runs: Sequence[RunFiles]) -> list[Sentence]:
    """What to write on numbers of a weak audit: its profile."""
    found = dict.fromkeys(run.record.audit.profile for run in runs if run.audited)
    return [sentence("front.stamp", profile=name) for name in found if name in BRIEF]
