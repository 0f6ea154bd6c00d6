"""Records as rows of text, the same for the page and the command line."""

from collections.abc import Sequence
from dataclasses import dataclass

from splitveil.report.fields import number, section, text
from splitveil.report.files import RunFiles
from splitveil.report.words import Lang, known, said, word

NOTHING = "–"
SMALL_MSE = 1e-3  # below this, four decimals would hide the leading digits


@dataclass(frozen=True, kw_only=True)
class Column:
    """Heading of a column; `arrow` points to where the defender wants the number to go.

    `brief` is the heading in a terminal, where a column without one is left out.
    """

    heading: str
    unit: str = ""
    arrow: str = ""
    numeric: bool = True
    brief: str = ""

    @property
    def label(self) -> str:
        """Heading, unit and arrow in one line.

        >>> Column(heading="PSNR", unit="dB", arrow="↓").label
        'PSNR (dB) ↓'
        """
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.heading}{unit}{' ' + self.arrow if self.arrow else ''}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run in one line; None is what was not measured."""

    name: str
    defence: str | None
    seed: str | None
    accuracy: float | None
    strongest_mse: float | None
    strongest_by: str | None
    psnr_pooled: float | None
    ssim: float | None
    worst_case_mse: float | None
    ceiling_mse: float | None
    leakage: float | None
    rate_nats: float | None
    client_macs: float | None
    wire_floats: float | None


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """One attack on one run; `best_for` names the metrics in which it is the strongest.

    `remark` says what sets it apart: a subset of the images, or several draws of each.
    """

    run: str
    attack: str
    access: str | None
    mse: float | None
    psnr_pooled: float | None
    ssim: float | None
    seconds: float | None
    best_for: tuple[str, ...]
    remark: str = ""


def summary_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """One row per run, in the order given."""
    return [
        Row(
            name=run.name,
            defence=text(run.record, "config", "defence"),
            seed=text(run.record, "config", "seed"),
            accuracy=number(run.record, "accuracy"),
            strongest_mse=number(run.record, "strongest", "mse"),
            strongest_by=text(run.record, "strongest", "mse_by"),
            psnr_pooled=number(run.record, "strongest", "psnr_pooled"),
            ssim=number(run.record, "strongest", "ssim"),
            worst_case_mse=number(run.record, "worst_case", "mse"),
            ceiling_mse=number(run.record, "ceiling", "mse"),
            leakage=number(run.record, "leakage"),
            rate_nats=number(run.record, "true_rate_nats"),
            client_macs=number(run.record, "client", "macs"),
            wire_floats=number(run.record, "client", "wire_floats"),
        )
        for run in runs
    ]


def columns(lang: Lang = "en") -> tuple[Column, ...]:
    """Columns of the summary table, in the order of `format_row`."""

    def column(key: str, unit: str = "", arrow: str = "", brief: str = "") -> Column:
        return Column(heading=word(f"column.{key}", lang), unit=unit, arrow=arrow, brief=brief)

    def name(key: str, brief: str = "") -> Column:
        return Column(heading=word(f"column.{key}", lang), numeric=False, brief=brief)

    return (
        name("run", "run"),
        name("defence"),
        column("seed"),
        column("accuracy", "%", "↑", "acc% ↑"),
        column("strongest", "", "↑", "MSE ↑"),
        name("by", "by"),
        column("psnr", "dB", "↓"),
        column("ssim", "", "↓", "SSIM ↓"),
        column("worst-case", "", "↑"),
        column("ceiling"),
        column("leakage", "%", "↓", "leak% ↓"),
        column("rate", word("unit.nats", lang), "↓", "nats ↓"),
        column("macs", "", "↓"),
        column("wire", "", "↓"),
    )


def format_row(row: Row) -> list[str]:
    """The cells of a summary row as text; what was not measured is an en dash."""
    return [
        row.name,
        row.defence or NOTHING,
        row.seed or NOTHING,
        percent(row.accuracy, 2),
        format_mse(row.strongest_mse),
        row.strongest_by or NOTHING,
        decimals(row.psnr_pooled, 2),
        decimals(row.ssim, 3),
        format_mse(row.worst_case_mse),
        format_mse(row.ceiling_mse),
        percent(row.leakage, 1),
        decimals(row.rate_nats, 2),
        count(row.client_macs),
        count(row.wire_floats),
    ]


def brief_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the columns that fit a terminal of 80 characters."""
    kept = [(i, column.brief) for i, column in enumerate(columns()) if column.brief]
    cells = [format_row(row) for row in rows]
    return [heading for _, heading in kept], [[line[i] for i, _ in kept] for line in cells]


def attack_rows(run: RunFiles, lang: Lang = "en") -> list[AttackRow]:
    """One row per attack of a run, in the order of its record."""
    best = {metric: text(run.record, "strongest", f"{metric}_by") for metric in ("mse", "ssim")}
    return [
        AttackRow(
            run=run.name,
            attack=attack,
            access=text(run.record, "attacks", attack, "access"),
            mse=number(run.record, "attacks", attack, "mse"),
            psnr_pooled=number(run.record, "attacks", attack, "psnr_pooled"),
            ssim=number(run.record, "attacks", attack, "ssim"),
            seconds=number(run.record, "attacks", attack, "seconds"),
            best_for=tuple(metric.upper() for metric, name in best.items() if name == attack),
            remark=_remark(run, attack, lang),
        )
        for attack in section(run.record, "attacks")
    ]


def _remark(run: RunFiles, attack: str, lang: Lang) -> str:
    """Why an attack is not ranked with the others, if it is not."""
    repeats = number(run.record, "attacks", attack, "repeats")
    if repeats is not None:
        return said("remark.draws", count=f"{repeats:.0f}").plain(lang)
    if text(run.record, "attacks", attack, "subset") is None:
        return ""
    images = count(number(run.record, "attacks", attack, "images"))
    rival = text(run.record, "attacks", attack, "beside", "attack")
    if not rival:
        return said("remark.images", count=images).plain(lang)
    there = format_mse(number(run.record, "attacks", attack, "beside", "mse"))
    return said("remark.beside", count=images, attack=rival, mse=there).plain(lang)


def attack_columns(lang: Lang = "en") -> tuple[Column, ...]:
    """Columns of the per-attack table, in the order of `format_attack_row`."""
    return (
        Column(heading=word("column.run", lang), numeric=False),
        Column(heading=word("column.attack", lang), numeric=False),
        Column(heading=word("column.access", lang), numeric=False),
        Column(heading=word("column.mse", lang), arrow="↑"),
        Column(heading=word("column.psnr", lang), unit="dB", arrow="↓"),
        Column(heading=word("column.ssim", lang), arrow="↓"),
        Column(heading=word("column.time", lang), unit=word("unit.seconds", lang)),
        Column(heading=word("column.best", lang), numeric=False),
    )


def format_attack_row(row: AttackRow, lang: Lang = "en") -> list[str]:
    """The cells of an attack row as text."""
    return [
        row.run,
        row.attack,
        NOTHING if row.access is None else known("access", row.access, lang),
        format_mse(row.mse),
        decimals(row.psnr_pooled, 2),
        decimals(row.ssim, 3),
        decimals(row.seconds, 1),
        f"★ {', '.join(row.best_for)}" if row.best_for else row.remark,
    ]


def format_mse(value: float | None) -> str:
    """A mean squared error, pixels in [0, 1].

    >>> format_mse(0.05291), format_mse(0.000362), format_mse(None)
    ('0.0529', '0.00036', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value == 0 or abs(value) >= SMALL_MSE else f"{value:.2g}"


def percent(value: float | None, digits: int) -> str:
    """A fraction as per cent, without the sign (the heading has it).

    >>> percent(0.981, 2)
    '98.10'
    """
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def decimals(value: float | None, digits: int) -> str:
    """A number with a fixed count of decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A whole number with thousands set apart.

    >>> count(1234567.0)
    '1,234,567'
    """
    return NOTHING if value is None else f"{value:,.0f}"
