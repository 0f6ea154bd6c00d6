"""What a sweep leaves for a reader: a page, its plot, and a CSV file of every trial."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from splitveil.experiments.runner import trial_words
from splitveil.io import Json, put_all
from splitveil.report.answer_page import AnswerPage, Fact, Panel, write_answer
from splitveil.report.canvas import GREY, Drawing, board, colour, drawable, marker
from splitveil.report.columns import WORDS, column
from splitveil.report.words import Lang, Sentence, sentence, word
from splitveil.table import Cell, Table, csv_text, fixed, format_mse, percent

PAGE, PLOT, TRIALS = "sweep.html", "sweep", "trials.csv"
NEAR = 0.05  # of exposure: trials nearer than this protect alike


def exposed(row: Json) -> float:
    """Exposure of a trial, which is the leakage where every image is sent; at least 0."""
    return max(float(row["exposure" if "exposure" in row else "leakage"]), 0.0)


ROWS = Table(
    column("column.defence", lambda row: row["defence"], WORDS),
    column("column.settings", lambda row: trial_words(row["settings"], row["seed"]), WORDS),
    column("column.accuracy", lambda row: row.get("accuracy"), fixed(2, 100.0), "%"),
    column("column.exposure", lambda row: None if "error" in row else exposed(row),
           fixed(1, 100.0), "%"),
    column("column.mse", lambda row: format_mse(row.get("mse")), WORDS),
    column("column.attack", lambda row: row.get("attack") or row.get("error"), WORDS),
)  # fmt: skip


def conclusion(result: Json) -> list[Sentence]:
    """What a sweep found, flattering or not: the most private trial that keeps the accuracy.

    Args:
        result: What `run_sweep` returns.
    """
    base, guess = result["reference_accuracy"], result["reference_point"]["accuracy"]
    if not result["front"]:
        dead = {"best": percent(base["accuracy"], 1), "guess": percent(guess, 1)}
        return [sentence("sweep.dead", **dead), sentence("sweep.validation")]
    kept = {name: one["best"] for name, one in result["defences"].items() if one["best"]}
    name = min(kept, key=lambda one: exposed(kept[one]), default=None)
    said = [sentence("sweep.none")]
    if name is not None:
        row = kept[name]
        said = [
            sentence(
                "sweep.best", name=name, settings=trial_words(row["settings"], row["seed"]),
                exposure=percent(exposed(row), 0), accuracy=percent(row["accuracy"], 1),
                loss=f"{100 * result['allowed_loss']:g}", base=percent(base["accuracy"], 1),
                reference=base["defence"],
            )
        ]  # fmt: skip
        others = [one for one in kept if one != name]
        for other in others:
            near = exposed(kept[other]) - exposed(kept[name]) < NEAR
            share = percent(exposed(kept[other]), 0)
            said.append(
                sentence("sweep.near" if near else "sweep.other", name=other, exposure=share)
            )
    lost = tuple(one for one in result["defences"] if one not in kept)
    if lost and kept:
        said.append(sentence("sweep.lost", names=lost))
    if result["at_chance"]:
        said.append(sentence("sweep.chance", names=tuple(result["at_chance"])))
    return [*said, sentence("sweep.validation")]


def draw_trials(result: Json, lang: Lang = "en") -> Drawing:
    """Accuracy (y, %) against exposure (x, %) of every trial, and the front as a line."""
    good = [row for row in result["trials"] if "error" not in row]
    with board(8.4, 4.4, laid_out=True) as figure:
        axes = figure.add_subplot()
        line = sorted((100 * exposed(row), 100 * row["accuracy"]) for row in result["front"])
        if line:
            axes.plot(*zip(*line, strict=True), color=GREY, linestyle="--", linewidth=1.2,
                      drawstyle="steps-post", label=word("sweep.front", lang))  # fmt: skip
        for at, name in enumerate(result["defences"]):
            own = [(100 * exposed(r), 100 * r["accuracy"]) for r in good if r["defence"] == name]
            if own:
                axes.plot(*zip(*own, strict=True), marker(at), color=colour(at), label=name,
                          markersize=7, alpha=0.8)  # fmt: skip
        axes.set_xlim(left=min(-1.0, axes.get_xlim()[0]))
        axes.set_xlabel(word("picture.exposure", lang))
        axes.set_ylabel(word("picture.accuracy", lang))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
        return Drawing(figure, PLOT)


def trial_rows(result: Json) -> list[Mapping[str, Cell]]:
    """Every trial with every number, a column for each setting."""
    return [
        {key: _cell(value) for key, value in row.items() if key != "settings"}
        | {f"set.{key}": _cell(value) for key, value in row["settings"].items()}
        for row in result["trials"]
    ]


def _cell(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None if value is None else str(value)


def write_sweep(result: Json, folder: Path, lang: Lang = "en") -> list[Path]:
    """Write `sweep.html`, its plot as PNG and SVG, and `trials.csv` into the sweep's folder.

    Args:
        result: What `run_sweep` returns.
        folder: The sweep's folder.
        lang: Language of the page.

    Returns:
        The paths: page, PNG, SVG, CSV.
    """
    plan, trials = result["plan"], result["trials"]
    plot = draw_trials(result, drawable(lang)[0])
    bests = [one["best"] for one in result["defences"].values() if one["best"]]
    failed = sum("error" in row for row in trials)
    page = AnswerPage(
        title=sentence("sweep.title", name=folder.name, count=str(len(trials)),
                       dataset=str(plan["options"].get("dataset", "digits"))).plain(lang),
        verdict=conclusion(result),
        facts=(
            Fact(value=f"{len(trials) - failed} / {len(trials)}",
                 label=sentence("sweep.trials-label")),
            Fact(value=f"{result['hypervolume']['value']:.3f}",
                 label=sentence("sweep.volume-label")),
        ),
        chart=Panel(title=word("sweep.plot", lang), text=word("sweep.plot-text", lang),
                    png=plot.png),
        panels=[
            _rows_panel("sweep.front", result["front"], lang),
            _rows_panel("sweep.bests", bests, lang),
            _rows_panel("sweep.all", trials, lang),
        ],
        stamps=[sentence("front.stamp", profile=plan["profile"])],
        legend=word("sweep.legend", lang),
        footer=word("explain.footer", lang),
    )  # fmt: skip
    (made,) = write_answer(folder / PAGE, page, lang)
    files = {folder / name: content for name, content in plot.files().items()}
    files[folder / TRIALS] = csv_text(trial_rows(result)).encode()
    return [made, *put_all(folder, files)]


def _rows_panel(title: str, rows: Sequence[Json], lang: Lang) -> Panel:
    if not rows:
        return Panel(title=word(title, lang), text=word("sweep.nothing", lang))
    return Panel(title=word(title, lang), table=ROWS.render(rows, "html", lang))
