"""What a server adds: rows beside the clients that answer alone, and the frontier of all of them.

The best client alone of a track is the most accurate one by its validation images, where every
record says how accurate it was there; else the most accurate one by its test images, which can only
make a gain smaller. The own head of a client with an exit rule, with nothing sent, is a client
alone, too: a server beside it in training often makes it the best one.

The frontier is that of accuracy against exposure. Its chord joins the best client alone, at
exposure 0, with the best row that sends everything: a device that tosses a coin for every image
lies on it. An exit rule must lie above it.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ConfigError
from splitveil.record.files import RunFiles, read_run
from splitveil.record.groups import Group, dataset_of, defences_of, kinds, mean_of
from splitveil.record.schema import (
    BY_ALONE,
    FAR_BELOW,
    NOT_NEEDED,
    Flag,
    Record,
    answers_of,
    answers_well,
    exposure_of,
    number,
    right_answers,
    sends_part,
    text,
)
from splitveil.record.statistics import (
    Interval,
    Sample,
    difference,
    seed_test,
    share_difference,
)
from splitveil.report.words import word

if TYPE_CHECKING:
    from splitveil.nets.split import Caps

Kind = Literal["alone", "exit", "split"]
ALONE, EXIT = "alone", "early-exit"  # the defences that answer on the device, or may
BARE = frozenset({"none", "noise", EXIT})  # hide no image by more than noise
FAR = 0.1  # accuracy that a row may lose to the same net without a defence


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Points of accuracy by which a row beats a client alone.

    Args:
        against: Name of the client alone.
        points: 100 · (accuracy − its accuracy), means over training seeds.
        limits: 95 % limits in points: seeds vary independently on both sides, images are paired
            where both rows hold their answers; None where nothing is known of the images.
        over: What the limits cover.
    """

    against: str
    points: float
    limits: tuple[float, float] | None
    over: str

    @property
    def sure(self) -> bool:
        """Whether its lower limit lies above 0."""
        return self.limits is not None and self.limits[0] > 0

    @property
    def needless(self) -> bool:
        """Whether its upper limit lies under half a point: the server is not needed."""
        return self.limits is not None and self.limits[1] < 100 * NOT_NEEDED


@dataclass(frozen=True, kw_only=True)
class Gains:
    """A row beside the clients alone: its track, the best of the track, and the same client."""

    track: str | None = None
    best: Group | None = None
    over_best: Gain | None = None
    over_same: Gain | None = None


def answers_alone(group: Group) -> bool:
    """Whether a row's clients answer on the device and send nothing."""
    return ALONE in defences_of(group)


def kind_of(group: Group) -> Kind:
    """Whether a row sends nothing ("alone"), some images ("exit") or all of them ("split")."""
    if answers_alone(group):
        return "alone"
    unknown = all(record.sent is None for record in group.records)  # nobody has audited it
    asks = unknown and EXIT in defences_of(group)
    return "exit" if asks or any(map(sends_part, group.records)) else "split"


def undefended(group: Group) -> bool:
    """Whether a row sends every image with no more than noise."""
    return kind_of(group) == "split" and BARE.issuperset(defences_of(group))


def answer_well(group: Group) -> bool:
    """Whether a row may be praised: no accuracy is at chance, or far below its net's."""
    return all(map(answers_well, group.records))


def client_of(group: Group) -> str | None:
    """The client of a row by name: without its tap, and of a net the net itself."""
    first = group.records[0]
    named = text(first, "config.client") or text(first, "config.net")
    return None if named is None else named.partition("@")[0]


def images_of(group: Group) -> tuple[str, str | None]:
    """Dataset of a row, and the hash of the images that its accuracy was measured on."""
    first = group.records[0]
    judged = "val" if first.audit.aux == "val" else "test"
    return dataset_of(group), text(first, f"splits.{judged}")


def group_track(group: Group) -> str | None:
    """The smallest track that every client of a row keeps to, such as B5; None if there is none."""
    from splitveil.nets.split import TRACKS  # imports torch, which most comparisons do not need

    for name, caps in TRACKS.items():
        if all(_within(record, caps) for record in group.records):
            return name
    return None


def _within(record: Record, caps: "Caps") -> bool:
    """Whether a record's client is within the caps; older ones do not say what is stored."""
    cost = record.client
    stored = cost.params if cost.stored is None else cost.stored
    wire = 0 if record.sent == 0 else cost.wire_floats or 0
    return None not in (cost.macs, stored) and caps.hold(cost.macs or 0, stored or 0, wire, 32)


def keeps_to(group: Group, track: str | None) -> bool:
    """Whether a row's clients keep to a track."""
    from splitveil.nets.split import TRACKS

    own, order = group_track(group), [*TRACKS]
    return None not in (own, track) and order.index(str(own)) <= order.index(str(track))


def right_table(group: Group) -> NDArray[np.float64] | None:
    """Share of right answers per training seed and test image, attack seeds averaged; or None."""
    seeds = [[right_answers(record) for record in seed] for seed in group.seeds]
    lengths = {None if values is None else len(values) for seed in seeds for values in seed}
    if None in lengths or len(lengths) != 1:
        return None
    return np.stack([np.mean(cast(list[Any], seed), axis=0) for seed in seeds])


def gain(ours: Group, alone: Group) -> Gain | None:
    """What a row's server adds to a client alone; None where an accuracy is not known."""
    a, b = ([v for v in g.values("accuracy") if v is not None] for g in (ours, alone))
    if not a or not b:
        return None
    mine, theirs, made = right_table(ours), right_table(alone), None
    if mine is not None and theirs is not None and mine.shape[1] == theirs.shape[1] > 1:
        made = difference(Sample.of(mine), Sample.of(theirs), paired=False).interval
    else:
        images = min((r.audit.scored or 0 for g in (ours, alone) for r in g.records), default=0)
        made = share_difference(a, b, images) if images > 1 else None
    return _gain(alone.name, 100 * (float(np.mean(a)) - float(np.mean(b))), made)


def _gain(against: str, points: float, made: Interval | None) -> Gain:
    limits = None if made is None else (100 * made.low, 100 * made.high)
    return Gain(against=against, points=points, limits=limits, over=made.scope if made else "")


def best_alone(rows: Sequence[Group]) -> Group | None:
    """The most accurate row: by validation images where all rows know them, else by test images."""
    validated = [row.mean("training.val_accuracy") for row in rows]
    chosen = validated if None not in validated else [row.mean("accuracy") for row in rows]
    known = [(row, value) for row, value in zip(rows, chosen, strict=True) if value is not None]
    return max(known, key=lambda pair: pair[1])[0] if known else None


def clients_alone(rows: Sequence[Group]) -> list[Group]:
    """The rows that answer alone; beside one, also the own heads of the rows with an exit rule.

    Own heads have no rows of their own, and nobody trained one for this: without a row that answers
    alone there is nothing to compare with.
    """
    trained = list(filter(answers_alone, rows))
    heads = [head for row in rows if (head := nothing_sent(row)) is not None]
    return trained + heads if trained else []


def nothing_sent(group: Group) -> Group | None:
    """A row with an exit rule as a client alone: its own head with nothing sent, where known."""
    return _without_rule(group, 0, _by_own_head)


def everything_sent(group: Group) -> Group | None:
    """A row with an exit rule as a split: its server with everything sent, where known."""
    return _without_rule(group, 100, _by_server)


def _without_rule(
    group: Group, percent: int, change: Callable[[Record], Record | None]
) -> Group | None:
    if kind_of(group) != "exit":
        return None
    seeds = [[change(record) for record in seed] for seed in group.seeds]
    if any(record is None for seed in seeds for record in seed):
        return None
    name = f"{group.name or 'own head'} ({percent} % sent)"
    return Group(name, cast(Any, tuple(map(tuple, seeds))), group.runs)


def _by_own_head(record: Record) -> Record | None:
    right = answers_of(record, "own")
    if right is None:
        return None
    validated = {"val_accuracy": number(record, "training.val_own_accuracy")}
    return _answered_by_one(record, right, ALONE, sent=0.0, exposure=0.0, training=validated)


def _by_server(record: Record) -> Record | None:
    right = answers_of(record, "server")
    exposure = next((share.exposure for share in record.shares if share.sent == 1), None)
    if right is None or exposure is None:
        return None
    defence = text(record, "config.defence") or ""
    return _answered_by_one(record, right, defence, sent=1.0, exposure=exposure)


def _answered_by_one(
    record: Record, right: NDArray[np.uint8], defence: str, **facts: object
) -> Record:
    data = record.to_dict()
    counts = base64.b64encode(right.tobytes()).decode("ascii")
    return Record.from_dict(
        data | {
            "accuracy": float(right.mean()), "leakage_sent": None,
            "config": data["config"] | {"defence": defence},
            "audit": data["audit"] | {"accuracy_draws": 1},
            "per_image": {"right": counts}, "intervals": {}, "shares": [],
        } | facts
    )  # fmt: skip


def gains(ours: Group, rows: Sequence[Group]) -> Gains:
    """A row beside the clients alone among other rows.

    Args:
        ours: The row.
        rows: All rows at hand; those on other images are not looked at.

    Returns:
        Its track, the best client alone that keeps to it, and the gains. Without a track, only the
        same client is compared, as a row that answers alone. A client alone gains nothing.
    """
    here = [row for row in rows if images_of(row) == images_of(ours)]
    trained = list(filter(answers_alone, here))
    if answers_alone(ours) or not trained:
        return Gains()
    listed = {id(record) for row in here for record in row.records}
    new = [] if listed.intersection(map(id, ours.records)) else [ours]  # its own head counts, too
    track = group_track(ours)
    best = best_alone([r for r in clients_alone([*here, *new]) if keeps_to(r, track)])
    same = best_alone([r for r in trained if client_of(r) == client_of(ours)])
    return Gains(
        track=track,
        best=best,
        over_best=None if best is None else gain(ours, best),
        over_same=None if same is None else gain(ours, same),
    )


def beside(record: Record, rows: Sequence[Group]) -> Record:
    """A record with what it says beside other rows.

    Args:
        record: The record; what it holds already stays where the rows say nothing.
        rows: All rows at hand.

    Returns:
        The same with `alone`, `server_gain`, `gain_over_same_client`, their `intervals`, and the
        flags that need another row.
    """
    found = gains(Group("", ((record,),)), rows)
    data = record.to_dict()
    limits = dict(record.intervals)
    if found.best is not None or found.over_same is not None:
        data |= {"alone": _alone(found), "server_gain": None, "gain_over_same_client": None}
    for key, made in (
        ("server_gain", found.over_best),
        ("gain_over_same_client", found.over_same),
    ):
        if made is not None:
            data[key] = made.points
            limits[key] = None if made.limits is None else list(made.limits)
    flags = [*(record.flags or ()), *_raised(record, found, rows)]
    if limits:
        data["intervals"] = limits
    if record.flags is not None or flags:
        data["flags"] = [asdict(flag) for flag in flags]
    return Record.from_dict(data)


def _alone(found: Gains) -> dict[str, Any]:
    best = found.best
    return {
        "row": None if best is None else best.name,
        "track": found.track,
        "accuracy": None if best is None else best.mean("accuracy"),
        "seeds": None if best is None else len(best.seeds),
        "same_client": None if found.over_same is None else found.over_same.against,
    }


def _raised(record: Record, found: Gains, rows: Sequence[Group]) -> list[Flag]:
    """The flags that need another row, without those that the record has already."""
    seen = {
        "server not needed": _not_needed(found),
        FAR_BELOW: _far_below(record, rows),
    }
    return [
        Flag(name, what, word(f"advice.{name}"))
        for name, what in seen.items()
        if what is not None and name not in record.flag_names
    ]


def _not_needed(found: Gains) -> str | None:
    made, best = found.over_best, found.best
    if made is None or best is None or made.limits is None or not made.needless:
        return None
    return (
        f"{BY_ALONE} {best.name} answers {100 * (best.mean('accuracy') or 0):.2f} %; the "
        f"server adds {made.points:+.2f} points, at most {made.limits[1]:+.2f}"
    )


def _far_below(record: Record, rows: Sequence[Group]) -> str | None:
    """A defence that costs so much accuracy protects nothing that anybody would use."""
    own = Group("", ((record,),))
    sends_all = record.sent in (None, 1)  # who sends less pays with answers of its own
    if record.accuracy is None or not sends_all or _plain(own):
        return None
    alike = [r for r in rows if _plain(r) and client_of(r) == client_of(own)]
    for row in alike:
        bare = row.mean("accuracy")
        if bare is None or images_of(row) != images_of(own) or record.accuracy >= bare - FAR:
            continue
        return (
            f"accuracy is {100 * record.accuracy:.2f} %, that of {row.name} without a defence "
            f"{100 * bare:.2f} %"
        )
    return None


def _plain(group: Group) -> bool:
    return defences_of(group) == ("none",)


def exposure_over(group: Group) -> tuple[float, tuple[float, float] | None] | None:
    """Mean exposure of a row, and its 95 % limits where its records have them.

    Of several seeds, Student's interval over seeds and the mean half width over images are added as
    squares.
    """
    seeds = [mean_of([exposure_of(record) for record in seed]) for seed in group.seeds]
    known = [value for value in seeds if value is not None]
    widths = [r.intervals.get("exposure") for r in group.records]
    if not known:
        return None
    mean = float(np.mean(known))
    if None in widths or not widths:
        return mean, None
    if len(known) == 1 and len(widths) == 1:
        low, high = cast(list[float], widths[0])
        return mean, (low, high)
    of_images = float(np.mean([(high - low) / 2 for low, high in cast(Any, widths)]))
    of_seeds = 0.0
    if len(known) > 1:
        made = seed_test(known, [0.0] * len(known), paired=True)
        of_seeds = 0.0 if made is None else made.interval.high - made.interval.mean
    half = float(np.hypot(of_images, of_seeds))
    return mean, (mean - half, mean + half)


def rows_beside(groups: Sequence[Group]) -> list[Group]:
    """Rows whose records say what they say beside each other."""
    return [
        Group(
            group.name,
            tuple(tuple(beside(record, groups) for record in seed) for seed in group.seeds),
            group.runs,
        )
        for group in groups
    ]


def runs_beside(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Runs whose records say what they say beside the others; without a record as they are."""
    rows = kinds([run for run in runs if run.audited])
    return [replace(run, record=beside(run.record, rows)) if run.audited else run for run in runs]


def read_alone(paths: Sequence[Path]) -> list[Group]:
    """The rows of some audited runs that answer alone; other runs are refused."""
    runs: list[RunFiles] = [read_run(path) for path in paths]
    for run in runs:
        defence = text(run.record, "config.defence")
        if ALONE not in (defence or "").split("+"):
            raise ConfigError(
                f"--alone takes runs of the defence 'alone', but {run.path} has '{defence}'; train "
                "one with `splitveil train --defence alone`, and audit it"
            )
    return kinds(runs)


def is_of(record: Record, model: str, profile: str, aux: str, seed: int) -> bool:
    """Whether a record is of this model, by all attacks of this profile."""
    made = record.audit
    wanted = (model, profile, aux, seed, ())
    return wanted == (made.model, made.profile, made.aux, record.seeds.attack, made.only)


def check_data(dataset: str, rivals: Sequence[Group]) -> None:
    """Refuse clients alone that answer other data."""
    for rival in rivals:
        if (theirs := dataset_of(rival)) != dataset:
            raise ConfigError(
                f"{rival.name} answers '{theirs}' and this run '{dataset}', and accuracies on "
                f"different data do not compare; give runs of --defence alone on {dataset}"
            )


def check_rivals(record: Record, rivals: Sequence[Group]) -> None:
    """Refuse clients alone that a record cannot be compared with."""
    own = Group("", ((record,),))
    if answers_alone(own):
        raise ConfigError(
            "this run answers alone, so it has no server to judge; give --alone to the audit of a "
            "run that sends"
        )
    check_data(dataset_of(own), rivals)
    images, track = images_of(own), group_track(own)
    for rival in rivals:
        if images_of(rival) != images:
            raise ConfigError(
                f"{rival.name} was judged on other images (hash {images_of(rival)[1]}) than this "
                f"run (hash {images[1]}); audit both with the same split_seed and the same --aux"
            )
        if keeps_to(rival, track) or client_of(rival) == client_of(own):
            continue
        theirs = group_track(rival) or "none"
        raise ConfigError(
            f"the client of {rival.name} belongs to track {theirs}, this run's to {track or 'none'}"
            "; give a client alone of its track or a smaller one, or the same client"
        )


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A row of the frontier.

    Args:
        group: The row.
        kind: Whether it answers alone, sends some images, or all of them.
        accuracy: Its mean accuracy, in [0, 1].
        exposure: Its mean exposure, at least 0.
        limits: 95 % limits of the exposure, if they are known.
        gain: Over the best client alone of its track; None where none is at hand.
        over_chord: Over the chord at the same exposure, for a row that sends a part.
        curve: Exposure and accuracy at other shares of the same client, least sent first.
    """

    group: Group
    kind: Kind
    accuracy: float
    exposure: float
    limits: tuple[float, float] | None = None
    gain: Gain | None = None
    over_chord: Gain | None = None
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def sure(self) -> bool:
        """Whether it stands for a gain: its lower limits lie above 0. A client alone needs none."""
        if self.kind == "alone":
            return True
        gained = self.gain is not None and self.gain.sure
        above = self.over_chord is not None and self.over_chord.sure
        return gained and (above or self.kind == "split")


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Points on one set of images, and the ends (exposure, accuracy) of the chord, if it has any.

    `left_out` names rows whose accuracy is at chance or far below the undefended model.
    """

    points: tuple[FrontierPoint, ...]
    chord: tuple[tuple[float, float], tuple[float, float]] | None = None
    left_out: tuple[str, ...] = ()


def frontier(groups: Sequence[Group]) -> Frontier | None:
    """The frontier of some rows; None where no row answers alone or sends only a part.

    Of rows on several sets of images, those on the images of the first such row are taken.
    """
    telling = [g for g in groups if kind_of(g) != "split"]
    if not telling:
        return None
    here = [g for g in groups if images_of(g) == images_of(telling[0])]
    good = [g for g in here if answer_well(g)]
    points = [point for g in good if (point := _point(g, good)) is not None]
    alone = best_alone(clients_alone(good))
    ends = None if alone is None else _chord(alone, good)
    return Frontier(
        points=tuple(points),
        chord=ends,
        left_out=tuple(g.name for g in here if g not in good),
    )


def _point(group: Group, rows: Sequence[Group]) -> FrontierPoint | None:
    accuracy, exposed = group.mean("accuracy"), exposure_over(group)
    if accuracy is None or exposed is None:
        return None
    kind, found = kind_of(group), gains(group, rows)
    above = None
    if kind == "exit" and found.best is not None:
        above = over_chord(group, found.best, rows)
    return FrontierPoint(
        group=group,
        kind=kind,
        accuracy=accuracy,
        exposure=max(0.0, exposed[0]),
        limits=exposed[1],
        gain=found.over_best,
        over_chord=above,
        curve=_curve(group) if kind == "exit" else (),
    )


def _curve(group: Group) -> tuple[tuple[float, float], ...]:
    """Exposure and accuracy at other shares, means over the records that measured them."""
    at: dict[float, list[tuple[float, float]]] = {}
    for share in (share for record in group.records for share in record.shares):
        if share.sent is not None and share.exposure is not None and share.accuracy is not None:
            at.setdefault(share.sent, []).append((max(0.0, share.exposure), share.accuracy))
    means = [np.mean(pairs, axis=0) for pairs in at.values()]
    return tuple(sorted((float(exposure), float(accuracy)) for exposure, accuracy in means))


def senders(rows: Sequence[Group], like: Group) -> list[Group]:
    """The rows that send every image, on the images of another row.

    The server of a row with an exit rule could be sent everything: such a row is among them, too.
    """
    every = [*rows, *(whole for row in rows if (whole := everything_sent(row)) is not None)]
    return [
        row
        for row in every
        if kind_of(row) == "split" and images_of(row) == images_of(like)
        and row.mean("accuracy") is not None and exposure_over(row) is not None
    ]  # fmt: skip


def _leaks(row: Group) -> float:
    exposed = exposure_over(row)
    return 0.0 if exposed is None else max(0.0, exposed[0])


def _share(row: Group, exposure: float) -> float:
    """The share of images that a device may send at random as this row does, at an exposure."""
    leaks = _leaks(row)
    return 1.0 if leaks <= exposure else exposure / leaks


def _height(row: Group, alone: Group, exposure: float) -> float:
    """Accuracy of a device that sends that share at random, and answers alone otherwise."""
    low, high, share = alone.mean("accuracy"), row.mean("accuracy"), _share(row, exposure)
    return (1 - share) * (low or 0.0) + share * (high or 0.0)


def over_chord(ours: Group, alone: Group, rows: Sequence[Group]) -> Gain | None:
    """What a row that sends a part gains over sending at random, at the same exposure.

    Args:
        ours: The row.
        alone: The client alone that the random device has.
        rows: All rows at hand; of those that send everything, the best at this exposure counts.

    Returns:
        The gain in points, images paired where all three hold their answers; None without a row
        that sends everything.
    """
    exposed, accuracy = exposure_over(ours), ours.mean("accuracy")
    rivals = senders(rows, ours)
    if exposed is None or accuracy is None or not rivals:
        return None
    at = max(0.0, exposed[0])
    rival = max(rivals, key=lambda row: _height(row, alone, at))
    share, limits, over = _share(rival, at), None, ""
    mine, low, high = (right_table(group) for group in (ours, alone, rival))
    if mine is None or low is None or high is None:
        pass
    elif mine.shape[1] == low.shape[1] == high.shape[1]:
        seeds = min(len(low), len(high))  # both arms are independent, so any pairing will do
        mixed = (1 - share) * low[:seeds] + share * high[:seeds]
        made = difference(Sample.of(mine), Sample.of(mixed), paired=False).interval
        limits, over = (100 * made.low, 100 * made.high), made.scope
    points = 100 * (accuracy - _height(rival, alone, at))
    return Gain(against=rival.name, points=points, limits=limits, over=over)


def _chord(
    alone: Group, rows: Sequence[Group]
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The ends of the steepest chord from a client alone to a row that sends everything."""
    low = alone.mean("accuracy") or 0.0
    rivals = [row for row in senders(rows, alone) if _leaks(row) > 0]
    if not rivals:
        return None
    best = max(rivals, key=lambda row: ((row.mean("accuracy") or 0.0) - low) / _leaks(row))
    return (0.0, low), (_leaks(best), best.mean("accuracy") or 0.0)
