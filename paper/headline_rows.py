"""The tables that paper/headline.py makes. A row is one training per seed, and its audits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitveil.config.recipes import Setting
from splitveil.experiments.reproduction import EXPERIMENTS

REPORT = next(iter(EXPERIMENTS.values()))  # the experiment of the reference documents

OWN_OPTIONS = (
    "dataset",
    "defence",
    "net",
    "client",
    "server",
    "epochs",
)  # the others are given with --set
QUIET = 0.01  # the smallest noise of CEM's scripts: both penalties need some


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the attacker knows, the seed of the attacks, and which of them if not all."""

    aux: str = "train"
    seed: int = 0
    attacks: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: options of `splitveil train`, and the audits of each seed, the main one first.

    `length` is the training's time in trainings of `none`; only the order counts. Runs are called
    `stem`-s<seed>: rows of two tables with one stem share their trainings.
    """

    name: str
    stem: str
    options: tuple[str, ...]
    length: float = 1.0
    audits: tuple[Audit, ...] = (Audit(),)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows, the folder below results/ where their records go, and the seeds of a whole table.

    `final`: train on the validation images, too; `profile`: of the audits.
    """

    folder: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    final: bool = True
    profile: str = "standard"


def words(options: Mapping[str, Setting]) -> tuple[str, ...]:
    """Settings as options of `splitveil train`; the table says whether with --final.

    >>> words({"defence": "arl", "nesterov": True, "noise_std": 0.0, "final": True})
    ('--defence', 'arl', '--set', 'nesterov=true', '--set', 'noise_std=0.0')
    """
    made: list[str] = []
    for key, value in options.items():
        if key in OWN_OPTIONS:
            made += [f"--{key}", str(value)]
        elif key != "final":
            written = str(value).lower() if isinstance(value, bool) else value
            made += ["--set", f"{key}={written}"]
    return tuple(made)


def _recipe(name: str, *audits: Audit, length: float = 1.0) -> Row:
    recipe = f"cifar10-{name.replace('+', '-')}"
    return Row(
        name=name, stem=name, options=("--recipe", recipe), length=length,
        audits=audits or (Audit(),),
    )  # fmt: skip


TWICE = (Audit(), Audit(seed=1))
HEADLINE = (
    _recipe("none"),
    _recipe("noise"),
    _recipe("cem", *TWICE, length=1.2),
    _recipe("veil", *TWICE, Audit(aux="test90"), length=4.0),
    _recipe("veil-accurate", length=4.0),
    _recipe("veil-fast", length=1.6),
    _recipe("veil-vgg11", length=1.2),
    _recipe("gated-att", length=1.2),
    _recipe("slot-cross", length=1.4),
    _recipe("arl+cem", length=3.1),
    _recipe("arl+veil", length=3.1),
    _recipe("arl+veil-long", length=6.2),
)
# The flagship's client with noise alone and with CEM's penalty shows what the client itself does;
# the adversary and CEM trained longer shows what the training does.
CONTROLS = (
    *(
        Row(
            name=f"{name}-thin-deep", stem=f"{name}-thin-deep", length=4.0,
            options=("--recipe", f"cifar10-{name}", "--net", "thin-deep", "--epochs", "160"),
        )
        for name in ("noise", "cem")
    ),
    Row(
        name="arl+cem-long", stem="arl+cem-long", length=7.8,
        options=(
            "--recipe", "cifar10-arl-cem", "--epochs", "160", "--set", "label_smoothing=0.1",
        ),
    ),
)  # fmt: skip

# What the flagship's client answers without any server, trained as long as with it.
ALONE = (
    Row(
        name="alone-thin-deep", stem="alone-thin-deep", length=4.0,
        options=("--dataset", "cifar10", "--defence", "alone", "--net", "thin-deep", "--epochs",
                 "160"),
    ),
)  # fmt: skip


def _three(
    name: str, defence: str, length: float, alone: float | None = None, joined: float | None = None
) -> tuple[Row, ...]:
    """A defence alone, with CEM's penalty and with ours; noise as given, else the dataset's."""

    def row(added: str, noise: float | None) -> Row:
        options: dict[str, Setting] = {
            "dataset": "cifar10", "defence": defence + added, "net": "vgg11",
        }  # fmt: skip
        options |= {} if noise is None else {"noise_std": noise}
        return Row(
            name=name + added, stem=f"table1-{name}{added}", options=words(options),
            length=length + 0.2 * bool(added),
        )  # fmt: skip

    return row("", alone), row("+cem", joined), row("+veil", joined)


# The paper does not say which noise its rows had. DistCorr and ResSFL, whose noisy versions have
# names of their own there, get none alone.
TABLE1 = (
    _recipe("none"),
    _recipe("noise"),
    _recipe("cem", length=1.2),
    _recipe("veil-vgg11", length=1.2),
    *_three("DistCorr", "nopeek", 1.3, alone=0.0, joined=QUIET),
    *_three("dropout", "dropout", 1.0),
    *_three("patrol", "patrol", 3.1),
    *_three("ResSFL", "arl", 2.9, alone=0.0, joined=QUIET),
    *_three("nopeek", "nopeek", 1.3),
    _three("arl", "arl", 2.9)[0],
    _recipe("arl+cem", length=3.1),
    _recipe("arl+veil", length=3.1),
)


def _documents() -> tuple[Row, ...]:
    """The rows of the reference documents' experiment, attacked as there.

    Then its rows again with the layer behind the client. The two that R3 reports, CEM and the
    hinge, are also attacked by one who knows the training set; gated attention by every attack.
    """
    lengths = {"slot-cross": 1.4, "cem": 1.0}
    attacks = ",".join(REPORT.attacks)
    reported, known = Audit(aux=REPORT.aux, attacks=attacks), Audit(attacks=attacks)
    more = {
        "sparse+gated-att": (Audit(),), "sparse+gated-att-simple": (known,),
        "sparse+cem": (known,),
    }  # fmt: skip

    def row(name: str, settings: Mapping[str, Setting], *others: Audit) -> Row:
        defence = str(settings["defence"])
        penalty = defence.removeprefix("sparse").removeprefix("+")
        return Row(
            name=name, stem=f"documents-{name}", options=words(settings),
            length=10 * lengths.get(penalty, 1.2) + ("sparse" in defence),
            audits=(reported, *others),
        )  # fmt: skip

    layers = [name for name in REPORT.rows if name.startswith("sparse+") and "tuned" not in name]
    return (
        *(row(name, REPORT.settings(name), *more.get(name, ())) for name in REPORT.rows),
        *(
            row(
                f"{name}-wire", REPORT.settings(name) | {"sparse_place": "wire"},
                *more["sparse+gated-att"] * (name == "sparse+gated-att"),
            )
            for name in layers
        ),
    )  # fmt: skip


LAPTOP: Mapping[str, Setting] = {
    "dataset": "cifar10", "server": "resnet-96", "epochs": 12, "batch_size": 250,
    "label_smoothing": 0.1, "nesterov": True, "threads": 1,
}  # fmt: skip
CLAIMED = 0.2  # share of the images that early-exit rows send; their records hold others, too


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The clients of a track: one that sends everything, the best alone, and one that asks."""

    split: str
    alone: str
    asks: str


def _frontier(track: str, devices: Devices, defences: Mapping[str, Mapping[str, Setting]]) -> Table:
    """Rows of one track, trained by the laptop recipe: same epochs, server and settings for all.

    Args:
        track: Its name.
        devices: Its clients.
        defences: Own settings of each row, by its name; `defence` is the name's where not given.
    """

    def row(name: str, own: Mapping[str, Setting]) -> Row:
        settings = {**LAPTOP, "defence": name, **own}
        defence = str(settings["defence"])
        if defence == "alone":
            settings["client"] = devices.alone
        elif defence.startswith("early-exit"):
            settings |= {"client": devices.asks, "send": CLAIMED}
        else:
            settings["client"] = devices.split
        return Row(name=name, stem=f"{track}-{name}", options=words(settings))

    return Table(
        folder=f"cifar10-{track.lower()}", seeds=(0,), final=False, profile="laptop",
        rows=tuple(row(name, own) for name, own in defences.items()),
    )  # fmt: skip


# A wire from an early layer costs more than the convolution at a body's end, so on B5 the client of
# the early exits is one channel narrower than the best client alone.
B1 = _frontier(
    "B1",
    Devices(
        split="strided-12s2-12.16x3-c8",
        alone="inverted-8s2-8.16x6-e3-c8",
        asks="inverted-8s2-8.16x6-e3-c8@4",
    ),
    {
        "alone": {}, "early-exit": {}, "early-exit+veil": {"lambd": 0.1}, "noise": {},
        "veil": {"lambd": 0.1},
    },
)  # fmt: skip
B5 = _frontier(
    "B5",
    Devices(
        split="strided-16s2-32.60x2-c8",
        alone="inverted-24s2-24.48x4-e3-c8",
        asks="inverted-24s2-24.47x4-e3-c8@4",
    ),
    {
        "alone": {}, "early-exit": {}, "early-exit+veil": {"lambd": 0.1}, "none": {}, "noise": {},
        "cem": {}, "gated-att-simple": {}, "slot-cross": {},
        "veil-weak": {"defence": "veil", "lambd": 0.03},
        "veil": {"lambd": 0.1},
        "veil-strong": {"defence": "veil", "lambd": 0.3},
    },
)  # fmt: skip


def _claimed(table: Table) -> Table:
    """The early exit of a frontier, which its claim rests on, audited by `standard`."""
    rows = tuple(row for row in table.rows if row.name == "early-exit")
    return replace(
        table, rows=rows, folder=f"{table.folder}-standard", seeds=(0, 1, 2), profile="standard"
    )


TABLES: Mapping[str, Table] = {
    "headline": Table(folder="cifar10", rows=HEADLINE, seeds=(0, 1, 2)),
    "controls": Table(folder="cifar10", rows=CONTROLS, seeds=(0,)),
    "alone": Table(folder="cifar10", rows=ALONE, seeds=(0, 1, 2)),
    "table1": Table(folder="cifar10-table1", rows=TABLE1, seeds=(0,)),
    "documents": Table(folder="cifar10-seed-003", rows=_documents(), seeds=(0,)),
    "frontier-b1": B1,
    "frontier-b5": B5,
    "frontier-b1-standard": _claimed(B1),
    "frontier-b5-standard": _claimed(B5),
}
