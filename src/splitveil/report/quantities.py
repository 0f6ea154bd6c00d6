"""The quantities of a row by name: how each is read, and how it is shown."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from splitveil.errors import ConfigError, unknown
from splitveil.report.fields import number, text
from splitveil.report.published import Published, reported
from splitveil.report.rows import Group, Json, flag_names, mean_of, shortfalls, spread
from splitveil.report.tables import NOTHING, Column
from splitveil.report.tracks import aux_of, seeds_text

Said = Published | None


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something known of a row under a short `key`.

    `cell` is its text in a table. A number has `numbers`, one per training seed, accuracies as
    shares; anything else has `texts`, its different values. What `spreads` has an sd.
    """

    key: str
    column: Column
    cell: Callable[[Group, Said], str]
    numbers: Callable[[Group, Said], list[float | None]] | None = None
    texts: Callable[[Group], list[str]] | None = None
    spreads: bool = False

    def mean(self, group: Group, said: Said = None) -> float | None:
        """The number of a row, averaged over its training seeds; None where it was not measured."""
        known = [v for v in self.numbers(group, said) if v is not None] if self.numbers else []
        if len(set(known)) == 1:
            return known[0]  # a mean of equal numbers may differ in the last bit
        return statistics.fmean(known) if known else None

    def sd(self, group: Group, said: Said = None) -> float | None:
        """Standard deviation over the training seeds; None with fewer than two."""
        known = [v for v in self.numbers(group, said) if v is not None] if self.numbers else []
        return statistics.stdev(known) if len(known) > 1 else None

    def words(self, group: Group) -> list[str]:
        """The different texts of a row; empty where there is none."""
        return [word for word in (self.texts(group) if self.texts else []) if word != NOTHING]


def flags_text(group: Group) -> str:
    """How many different flags the row's audits raised; an en dash where none was asked for."""
    asked = [record for record in group.records if record.get("flags") is not None]
    return str(len(set().union(*map(flag_names, asked)))) if asked else NOTHING


def _flags(group: Group, said: Said) -> list[float | None]:
    del said
    shown = flags_text(group)
    return [None if shown == NOTHING else float(shown)]


def _remarks(group: Group) -> list[str]:
    return list(dict.fromkeys(word for record in group.records for word in shortfalls(record)))


def _on_reconstructions(group: Group, said: Said = None) -> list[float | None]:
    """The server's accuracy on what `decoder` rebuilt, the seeds' attack, per training seed.

    Of the strongest attack where `decoder` did not run.
    """
    del said

    def one(record: Json) -> float | None:
        ran = number(record, "attacks", "decoder", "accuracy") is not None
        best = "decoder" if ran else text(record, "strongest", "mse_by")
        return None if best is None else number(record, "attacks", best, "accuracy")

    return [mean_of([one(record) for record in seed]) for seed in group.seeds]


def _number(
    key: str, path: str, column: Column, *, scale: float = 1.0, digits: int = 4
) -> Quantity:
    """A number of the record, shown as mean ± sd over seeds."""
    keys = path.split(".")
    return Quantity(
        key=key,
        column=column,
        cell=lambda group, _: spread(group.values(*keys), scale, digits),
        numbers=lambda group, _: group.values(*keys),
        spreads=True,
    )


def _same(key: str, path: str, column: Column, *, scale: float = 1.0, digits: int = 0) -> Quantity:
    """A number that the seeds of a row should share, shown without a spread."""
    keys = path.split(".")

    def cell(group: Group, said: Said) -> str:
        del said
        return ", ".join(sorted({spread([v], scale, digits) for v in group.values(*keys)}))

    return Quantity(key=key, column=column, cell=cell, numbers=lambda group, _: group.values(*keys))


def _text(key: str, texts: Callable[[Group], list[str]], brief: str = "") -> Quantity:
    return Quantity(
        key=key,
        column=Column(heading=key, numeric=False, brief=brief),
        cell=lambda group, _: ", ".join(texts(group)),
        texts=texts,
    )


def _at(*path: str) -> Callable[[Group], list[str]]:
    return lambda group: group.distinct(*path)


_ACCURACY = Column(heading="accuracy", unit="%", arrow="↑", brief="acc% ↑")
_MSE = Column(heading="strongest attack MSE", arrow="↑", brief="MSE ↑")
_SSIM = Column(heading="SSIM", arrow="↓", brief="SSIM ↓")
_PSNR = Column(heading="pooled PSNR", unit="dB", arrow="↓")
_LEAKAGE = Column(heading="leakage", unit="%", arrow="↓", brief="leak% ↓")
_RATE = Column(heading="rate", unit="nats", arrow="↓")

STANDARD: tuple[Quantity, ...] = (
    _text("row", lambda group: [group.name], "row"),
    _text("net", _at("config", "net")),
    Quantity(
        key="seeds",
        column=Column(heading="seeds", brief="n"),
        cell=lambda group, _: seeds_text(group),
        numbers=lambda group, _: [float(len(group.seeds))],
    ),
    _number("accuracy", "accuracy", _ACCURACY, scale=100.0, digits=2),
    Quantity(
        key="reported-accuracy",
        column=Column(heading="reported accuracy", unit="%"),
        cell=lambda _, said: "" if said is None else f"{100 * said.accuracy:.2f}",
        numbers=lambda _, said: [None if said is None else said.accuracy],
    ),
    _number("mse", "strongest.mse", _MSE),
    Quantity(
        key="reported-mse",
        column=Column(heading="reported MSE"),
        cell=lambda _, said: "" if said is None else f"{said.mse:.4f}",
        numbers=lambda _, said: [None if said is None else said.mse],
    ),
    _text("by", _at("strongest", "mse_by"), "by"),
    _number("ssim", "strongest.ssim", _SSIM, digits=3),
    _number("psnr", "strongest.psnr_pooled", _PSNR, digits=2),
    _number("worst", "worst_case.mse", Column(heading="worst-case MSE", arrow="↑")),
    _number("leakage", "leakage", _LEAKAGE, scale=100.0, digits=1),
    _number("rate", "true_rate_nats", _RATE, digits=1),
    _same("macs", "client.macs", Column(heading="client MMAC", arrow="↓"), scale=1e-6, digits=1),
    _same(
        "params",
        "client.params",
        Column(heading="client parameters", unit="k", arrow="↓"),
        scale=1e-3,
    ),
    _same("wire", "client.wire_floats", Column(heading="wire", arrow="↓")),
    _number("seconds", "seconds.train", Column(heading="train", unit="s"), digits=0),
    Quantity(
        key="flags",
        column=Column(heading="flags", arrow="↓"),
        cell=lambda group, _: flags_text(group),
        numbers=_flags,
    ),
    _text("remark", _remarks, "remark"),
)
_FURTHER = (
    Quantity(
        key="rec-accuracy",
        column=Column(heading="accuracy on reconstructions", unit="%", arrow="↓"),
        cell=lambda group, _: spread(_on_reconstructions(group), 100.0, 2),
        numbers=_on_reconstructions,
        spreads=True,
    ),
    _number("ssim-zeropad", "strongest.ssim_zeropad", Column(heading="zero-pad SSIM", arrow="↓")),
    _text("defence", _at("config", "defence")),
    _text("dataset", _at("config", "dataset")),
    _text("aux", lambda group: [aux_of(group)]),
    _text("profile", _at("audit", "profile")),
    _same("epochs", "config.epochs", Column(heading="epochs")),
    _same("lambd", "config.lambd", Column(heading="lambd"), digits=3),
    _same("noise", "config.noise_std", Column(heading="noise"), digits=3),
    _number("ceiling", "ceiling.mse", Column(heading="ceiling MSE")),
)
QUANTITIES: Mapping[str, Quantity] = {q.key: q for q in (*STANDARD, *_FURTHER)}


def find_quantity(key: str, what: str) -> Quantity:
    """The quantity of a key; `what` says in the message where it was asked for.

    >>> find_quantity("mse", "column").column.heading
    'strongest attack MSE'
    """
    if key not in QUANTITIES:
        raise ConfigError(unknown(what, key, QUANTITIES))
    return QUANTITIES[key]


def parse_columns(text: str) -> tuple[Quantity, ...]:
    """Quantities from keys with commas between; the row's name is always the first.

    >>> [quantity.key for quantity in parse_columns("mse, accuracy")]
    ['row', 'mse', 'accuracy']
    """
    keys = [key.strip() for key in text.split(",") if key.strip()]
    chosen = [find_quantity(key, "column") for key in dict.fromkeys(["row", *keys])]
    return tuple(
        replace(q, column=replace(q.column, brief=q.column.brief or q.column.label)) for q in chosen
    )


def plain_row(
    group: Group, quantities: Sequence[Quantity], published: Mapping[str, Published]
) -> dict[str, float | str | None]:
    """What is known of a row without rounding: means over seeds, and their sd."""
    said = reported(group, published)
    made: dict[str, float | str | None] = {}
    for quantity in quantities:
        if quantity.numbers is None:
            made[quantity.key] = ", ".join(quantity.words(group)) or None
        else:
            made[quantity.key] = quantity.mean(group, said)
        if quantity.spreads:
            made[f"{quantity.key}_sd"] = quantity.sd(group, said)
    return made
