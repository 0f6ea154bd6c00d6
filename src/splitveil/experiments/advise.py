"""What should I ship? The client alone, split and with early exit, tried within a device's budget.

The rows are made by short trainings and measured on validation images; `choice.advice` chooses.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitveil.audits.exposure import attack_the_sent, selected, what_is_exposed
from splitveil.audits.suite import Store, run_attacks, strongest
from splitveil.audits.target import Target
from splitveil.audits.trained_run import code_version, open_run
from splitveil.config.resolve import SMALL_SERVER, SMALL_SIDE, resolve
from splitveil.config.run_config import RunConfig, defaults_for
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.errors import ConfigError, Range, RunError
from splitveil.experiments.choice import (
    Advice,
    DeviceLimits,
    Tried,
    advice,
    advice_rows,
    draw_advice,
)
from splitveil.experiments.client_search import search_alone
from splitveil.experiments.runner import (
    LiveTable,
    Trial,
    Work,
    ranking_attacks,
    run_many,
)
from splitveil.io import Json, Progress, put_all, silent
from splitveil.nets.budget import Answering, answering_clients, candidates, nothing_fits
from splitveil.nets.clients import ClientSpec, parse_client
from splitveil.nets.exit import threshold_for
from splitveil.nets.split import deployed_cost
from splitveil.record.schema import unpack
from splitveil.report.gains import Kind
from splitveil.runs import Run, load_run
from splitveil.threat import CHUNK, Attack

SLACK = (0.9, 0.75, 0.5)  # of the device, for bodies that get an early wire beside their own head
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of the images that an early-exit row sends
ATTACKS = ("linear", "decoder")  # of profile `quick`
PROFILE = "quick"
SERVER = "resnet-64"  # behind images from 32×32
MINUTES, MANY_MINUTES, MANY_IMAGES = 4.0, 6.0, 5000  # default: more time for more images
PACE = 40e9  # multiply-adds a second that two cores train, forward and backward counted as three
STEP = 0.025  # seconds that a step of a small deep net takes besides
TRAINED = 0.75  # of the minutes; the rest is for attacks
CLIENTS, TRIALS = 3, 4  # trainings of clients alone, and with a server
LEAST_IMAGES, LEAST_EPOCHS, BATCH = 1000, 3, 128


@dataclass(frozen=True)
class ExposedOnVal:
    """Measures a run on validation images: what it answers and what leaks, one row per share.

    Args:
        shares: Shares to send of a run with an exit; its threshold is set anew for each.
        unsure: Whether the strongest attack is also fitted on the images that would be sent.
    """

    shares: tuple[float, ...] = SHARES
    unsure: bool = False

    def __call__(
        self, run: Run, attacks: Mapping[str, Attack], progress: Progress = silent
    ) -> Json:
        """The numbers that rank a trial, and `rows`."""
        target, _ = open_run(run, aux="val", seed=run.config.seed)
        cost = deployed_cost(run.model, run.built.image_shape)
        costs = {
            "macs": cost.client.macs, "stored": cost.client.stored, "wire_floats": cost.wire_floats,
        }  # fmt: skip
        store = Store(run.path / "audit", code_version())
        attempts = {} if target.silent else run_attacks(target, attacks, progress, store=store)
        rows = []
        shares = [self._sending(target, share) for share in self.shares if target.exit is not None]
        for each in shares or [target]:
            every, name = attempts, "" if target.silent else strongest(attempts)["mse_by"]
            if each.exit is not None:
                asked = each.exit.asked.nonzero().flatten()
                if len(asked) == 0:
                    continue
                if self.unsure:
                    every, _, on_sent = attack_the_sent(each, attacks, attempts, progress)
                else:
                    on_sent = selected(attempts, asked)
                name = strongest(on_sent)["mse_by"]
            shown = what_is_exposed(each, every.get(name))
            limited = "leakage_sent" if each.exit is None else "exposure"
            high = shown.get("intervals", {}).get(limited, [0.0, 0.0])[1]
            right = _answers_on(each) == each.scored.labels.to("cpu")
            rows.append(
                costs
                | {
                    "accuracy": float(right.double().mean()), "exposure": float(shown["exposure"]),
                    "exposure_high": float(high), "sent": float(shown["sent"]),
                    "identified": shown["identified"], "attack": name,
                    "wire_bits": shown["sent"] * cost.wire_floats * cost.number_bits,
                    "right": base64.b64encode(np.packbits(right.numpy()).tobytes()).decode("ascii"),
                    "images": len(right), "checked": self.unsure or each.exit is None,
                }
            )  # fmt: skip
        if not rows:
            raise RunError("the exit rule sends none of the validation images at any share")
        if target.exit is not None and not self.unsure:
            rows.append(costs | _own_answers(target))
        best = max(rows, key=lambda row: row["accuracy"])
        return {"accuracy": best["accuracy"], "leakage": best["exposure"], "rows": rows}

    @staticmethod
    def _sending(target: Target, share: float) -> Target:
        """The target with the threshold at which this share of the scored images is sent."""
        device = target.exit
        # Asked for targets with an exit of a run only.
        assert device is not None and device.sure is not None  # noqa: S101, PT018
        assert device.aux_sure is not None  # noqa: S101
        threshold = threshold_for(device.sure, share)
        asked, known = device.sure < threshold, device.aux_sure < threshold
        return replace(target, exit=replace(device, asked=asked, aux_asked=known))


def _own_answers(target: Target) -> Json:
    """What the own head answers with nothing sent: a client alone, trained beside a server."""
    assert target.exit is not None  # noqa: S101 - asked for targets with an exit only
    nobody = torch.zeros_like(target.exit.asked)
    silent = replace(target, exit=replace(target.exit, asked=nobody))
    right = _answers_on(silent) == target.scored.labels.to("cpu")
    return {
        "accuracy": float(right.double().mean()), "exposure": 0.0, "exposure_high": 0.0,
        "sent": 0.0, "identified": 0.0, "attack": "", "wire_floats": 0, "wire_bits": 0.0,
        "right": base64.b64encode(np.packbits(right.numpy()).tobytes()).decode("ascii"),
        "images": len(right), "checked": True,
    }  # fmt: skip


def _answers_on(target: Target) -> torch.Tensor:
    """Classes that the device reports for the scored images, the own ones where it did not ask."""
    if target.silent and target.answers is not None:
        generator = torch.Generator(target.device)
        with torch.no_grad():
            images = target.scored.images.to(target.device)
            answers = [target.answers(x, generator)[0] for x in torch.split(images, CHUNK)]
            return torch.cat(answers).argmax(1).cpu()
    answer = target.if_asked
    if target.exit is not None and target.exit.own is not None:
        answer = torch.where(target.exit.asked, answer, target.exit.own)
    return answer.cpu()


def tried_rows(kind: Kind, name: str, config: RunConfig, found: Json) -> list[Tried]:
    """The rows of a trial, from its journal; an early exit with nothing sent is a client alone."""
    rows = []
    for row in found["rows"]:
        own = kind == "exit" and row["sent"] == 0
        bits = np.unpackbits(unpack(row["right"], "u1", "right"))[: row["images"]].astype(bool)
        called = f"{name}, {100 * row['sent']:.0f} % sent" if kind == "exit" else name
        settings: Json = {
            "defence": config.defence, "client": config.client, "server": config.server,
            "noise_std": config.noise_std,
        } | dict(config.settings)  # fmt: skip
        if kind == "exit" and not own:
            settings["send"] = round(row["sent"], 4)
        rows.append(
            Tried(
                kind="alone" if own else kind, name=called, right=bits, run=str(config.folder),
                config={k: v for k, v in settings.items() if v is not None},
                **{k: row[k] for k in (
                    "accuracy", "exposure", "exposure_high", "sent", "identified", "macs", "stored",
                    "wire_floats", "wire_bits", "checked",
                )},
            )
        )  # fmt: skip
    return rows


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long each training is: the same for all, so that the rows compare."""

    epochs: int
    batch_size: int
    held_out: float


def effort(
    minutes: float | int, macs: float | int, images: int, usual: Mapping[str, Any]
) -> Effort:
    """The length of the trainings that fit some minutes on two cores.

    Where all images would get fewer than three epochs, a share of them is left out.

    Args:
        minutes: For everything, > 0.
        macs: Multiply-adds of all trainings together for one image, forward only.
        images: Training images.
        usual: Default epochs and batch size of the dataset.

    >>> effort(5, 1e6, 1000, {"epochs": 60, "batch_size": 128})
    Effort(epochs=60, batch_size=128, held_out=0.0)
    """
    batch = min(int(usual["batch_size"]), BATCH)
    per_image = 3 * macs / PACE + (CLIENTS + TRIALS) * STEP / batch  # seconds
    passes = minutes * 60 * TRAINED / per_image
    count = min(images, max(LEAST_IMAGES, int(passes / LEAST_EPOCHS)))
    epochs = min(int(usual["epochs"]), max(LEAST_EPOCHS, int(passes / count)))
    held_out = 0.0 if count == images else round(1 - count / images, 3)
    return Effort(epochs=epochs, batch_size=batch, held_out=held_out)


def taps_of(spec: ClientSpec) -> list[int]:
    """Layers of a client's body after which the wire can be taken early: stem, then each stage.

    >>> taps_of(parse_client("inverted-24s2-24x2.32x3-e2-c8"))
    [3, 5]
    """
    ends = np.cumsum([3, *spec.depths])  # convolution, norm and activation of the stem
    return [int(end) for end in ends[:-1]]


@dataclass(frozen=True, kw_only=True)
class Advised:
    """Everything that `run_advise` found.

    Args:
        advice: What to ship.
        rows: What was tried.
        limits: The device, and what may leak.
        effort: How long each training was.
        images: Training images of each, and validation images.
        missing: What was not tried, in words.
        failed: Errors of trials, by label.
        folder: Where picture and JSON are.
    """

    advice: Advice
    rows: Sequence[Tried]
    limits: DeviceLimits
    effort: Effort
    images: tuple[int, int]
    missing: Sequence[str]
    failed: Mapping[str, str]
    folder: Path

    def to_json(self) -> Json:
        """Plain JSON types."""
        made = self.advice
        return {
            "sentence": made.sentence, "case": made.case,
            "chosen": made.chosen and made.chosen.name, "limits": asdict(self.limits),
            "rows": advice_rows(self.rows, self.limits, made), "effort": asdict(self.effort),
            "train_images": self.images[0], "val_images": self.images[1],
            "not_tried": list(self.missing),
            "failed": [{"trial": k, "error": v} for k, v in self.failed.items()],
            "picture": str(self.folder / "frontier.png"),
        }  # fmt: skip


def run_advise(
    config: RunConfig,
    limits: DeviceLimits,
    *,
    minutes: float | int | None = None,
    server: str | None = None,
    progress: LiveTable | None = None,
) -> Advised:
    """Try a client alone, split and with early exit, and say what to ship.

    The best of some clients alone is searched first. Its body then gets a server: with everything
    sent, and with early exit, whose wire is taken after the body's first stage. The runs go to the
    folder `advisor` of `runs_dir`; the same call again continues.

    Args:
        config: Dataset, seed, device and folders; the rest is chosen here.
        limits: The device, and what may leak.
        minutes: About how long it may take on two cores, > 0; None: 4, or 6 for 5,000 images and
            more.
        server: What follows the client; None: `small` for images under 32×32, else `resnet-64`.
        progress: The table that shows what happens.
    """
    dataset = load(config.dataset, config.data_dir)
    if minutes is None:
        minutes = MINUTES if len(dataset) < MANY_IMAGES else MANY_MINUTES
    Range(0, math.inf, above=True).check("minutes", minutes)
    shape = dataset.image_shape
    server = server or (SMALL_SERVER if min(shape[1:]) < SMALL_SIDE else SERVER)
    clients, missing = _clients_alone(dataset, limits)
    specs = [one.spec for one in clients] or [_split_client(dataset, limits)]
    spent = _planned_macs(config, specs[0], clients, dataset, server)
    images = round(0.9 * len(dataset.pool))
    length = effort(minutes, spent, images, defaults_for(config))
    below = replace(
        config, name=None, defence="none", epochs=length.epochs, batch_size=length.batch_size,
        held_out=length.held_out, runs_dir=str(Path(config.runs_dir) / "advisor"),
    )  # fmt: skip
    table, rows, failed = progress or LiveTable(), list[Tried](), dict[str, str]()
    work = Work(profile=PROFILE, aux="val", only=ATTACKS, measure=ExposedOnVal())
    if clients:
        up = replace(below, runs_dir=config.runs_dir)
        ranked, failed = search_alone(clients, up, limits.hold, table, measure=ExposedOnVal())
        specs = list(dict.fromkeys(parse_client(row["client"]) for row in ranked))
        rows += [
            row
            for one in ranked
            if one["epochs"] == ranked[0]["epochs"]
            for row in _alone_rows(one, below)
        ]
    trials = _with_server(below, specs, dataset, limits, server, missing)
    for kind, trial in trials:
        for ended in run_many([trial], work, progress=table):
            if ended.found is None:
                failed[ended.label] = ended.reason
            else:
                rows += tried_rows(kind, ended.label, ended.config, ended.found)
    if not rows:
        raise RunError("every trial failed: " + "; ".join(f"{k}: {v}" for k, v in failed.items()))
    made = advice(rows, limits)
    while made.chosen is not None and not made.chosen.checked:  # exit rows: a fit for this share
        rows[rows.index(made.chosen)] = _checked(made.chosen)
        made = advice(rows, limits)
    missing += _not_tried(rows, length, images, len(rows[0].right), server)
    folder = Path(config.runs_dir) / "advice" / config.dataset.replace(":", "-").replace("/", "-")
    found = Advised(
        advice=made, rows=rows, limits=limits, effort=length, missing=missing, failed=failed,
        images=(round(images * (1 - length.held_out)), len(rows[0].right)), folder=folder,
    )  # fmt: skip
    write_advice(found)
    return found


def write_advice(found: Advised) -> None:
    """Write the picture and `advice.json` into the folder."""
    drawing = draw_advice(found.rows, found.limits, found.advice)
    text = json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n"
    put_all(
        found.folder,
        {found.folder / "frontier.png": drawing.png, found.folder / "advice.json": text.encode()},
    )


def _alone_rows(one: Json, below: RunConfig) -> list[Tried]:
    config = replace(
        below, defence="alone", client=one["client"], settings={"pooling": one["pooling"]},
        name=Path(one["run"]).name,
    )  # fmt: skip
    name = f"alone, {one['client']}" + (", flattened" if one["pooling"] == "flatten" else "")
    return tried_rows("alone", name, config, one["found"])


def _checked(row: Tried) -> Tried:
    """The row with the attack fitted on the images that would be sent, too."""
    run = load_run(row.run)
    attacks = ranking_attacks(PROFILE, ATTACKS)
    found = ExposedOnVal(shares=(row.sent,), unsure=True)(run, attacks)["rows"][0]
    worse = {k: max(found[k], getattr(row, k)) for k in ("exposure", "exposure_high")}
    return replace(row, checked=True, **worse)


def _clients_alone(
    dataset: Dataset, limits: DeviceLimits, share: float = 1.0
) -> tuple[list[Answering], list[str]]:
    """Clients alone to try within a share of the device; where none fits, none, and why."""
    stored = None if limits.stored is None else share * limits.stored
    try:
        found = answering_clients(
            dataset.image_shape, dataset.num_classes, max_macs=share * limits.macs,
            max_stored=stored, wire_floats=limits.wire_floats,
            most=CLIENTS,
            deepest=False,
        )  # fmt: skip
    except ConfigError as error:
        return [], [f"a client alone: {error}"]
    return found, []


def _split_client(dataset: Dataset, limits: DeviceLimits) -> ClientSpec:
    """The first client that fits as one half of a split."""
    budget = {
        "max_macs": limits.macs, "wire_floats": limits.wire_floats, "max_stored": limits.stored,
    }  # fmt: skip
    found = candidates(dataset.image_shape, **budget)  # type: ignore[arg-type]
    if not found:
        raise ConfigError(nothing_fits(dataset.image_shape, **budget))  # type: ignore[arg-type]
    return found[0].spec


def _planned_macs(
    config: RunConfig,
    spec: ClientSpec,
    clients: Sequence[Answering],
    dataset: Dataset,
    server: str,
) -> int:
    """Multiply-adds of one pass over an image through every training that is planned."""
    plain = replace(config, defence="none", client=str(spec), server=server, settings={})
    model = resolve(plain, dataset).build_model()
    cost = deployed_cost(model, dataset.image_shape)
    after = 0 if cost.server is None else cost.server.macs
    return sum(one.macs for one in clients) + TRIALS * (cost.client.macs + after)


def _with_server(  # noqa: PLR0917 - what `run_advise` knows
    below: RunConfig,
    specs: Sequence[ClientSpec],
    dataset: Dataset,
    limits: DeviceLimits,
    server: str,
    missing: list[str],
) -> list[tuple[Kind, Trial]]:
    """Rows with a server: everything sent, and early exit, each with the best body that fits."""
    usual = float(defaults_for(below)["noise_std"])
    split = next(
        (s for s in map(str, specs) if _fits(below, "noise", s, server, dataset, limits)), None
    )
    trials: list[tuple[Kind, Trial]] = []
    if split is None:
        split = str(_split_client(dataset, limits))
    for name, defence in (("split, noise", "noise"), ("split, veil", "veil")):
        run = replace(below, defence=defence, client=split, server=server, noise_std=usual)
        trials.append(("split", Trial(label=name, config=run)))
    early = _early_client(below, specs, server, dataset, limits)
    if early is None:
        missing.append("early exit: no body with an own head and an early wire fits the device")
        return trials
    for name, defence in (
        ("early exit, noise", "early-exit"),
        ("early exit, veil", "early-exit+veil"),
    ):
        run = replace(below, defence=defence, client=early, server=server, noise_std=usual)
        trials.append(("exit", Trial(label=name, config=run)))
    return trials


def _early_client(
    below: RunConfig,
    specs: Sequence[ClientSpec],
    server: str,
    dataset: Dataset,
    limits: DeviceLimits,
) -> str | None:
    """The best body that still fits with a wire from an early layer, else a smaller one.

    The wire from an early layer costs more than the convolution that a body alone ends with.
    """
    smaller = [one.spec for share in SLACK for one in _clients_alone(dataset, limits, share)[0]]
    best = specs[0]
    # stable: of each kind the largest share first
    smaller.sort(key=lambda s: (s.family, s.stem_stride) != (best.family, best.stem_stride))
    for spec in chain(specs, smaller):
        for tap in taps_of(spec)[1:] or taps_of(spec):
            if _fits(below, "early-exit", place := f"{spec}@{tap}", server, dataset, limits):
                return place
    return None


def _fits(  # noqa: PLR0917 - what decides it
    below: RunConfig, defence: str, client: str, server: str, dataset: Dataset, limits: DeviceLimits
) -> bool:
    """Whether a run's client fits the device; one that cannot be built does not."""
    try:
        run = replace(below, defence=defence, client=client, server=server)
        cost = deployed_cost(resolve(run, dataset).build_model(), dataset.image_shape)
    except ConfigError:
        return False
    return limits.hold(cost.client.macs, cost.client.stored, cost.wire_floats)


def _not_tried(
    rows: Sequence[Tried], length: Effort, images: int, judged: int, server: str
) -> list[str]:
    """What a reader must know before believing the rows."""
    used = round(images * (1 - length.held_out))
    searched = sum(row.config["defence"] == "alone" for row in rows)
    return [
        f"longer trainings: each row had {length.epochs} epochs over {used:,} of {images:,} "
        "images, and a longer one can change the order",
        f"other seeds: one seed, and {judged:,} validation images both chose and measured",
        f"stronger attackers: {' and '.join(ATTACKS)} of profile {PROFILE}; audit what you ship",
        f"more clients alone: {searched} were trained; `splitveil clients --alone` tries 16",
        f"other servers than {server}, other defences than noise and veil, other strengths and "
        "taps",
    ]
