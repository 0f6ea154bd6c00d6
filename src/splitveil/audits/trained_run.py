"""The audit of a trained run, its replay, and its strongest decoder fitted again for export."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitveil import __version__
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES, at_precision, find_profile
from splitveil.audits import metrics
from splitveil.audits.certificates import certify_split
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.suite import OWN_PACKAGE, Store
from splitveil.audits.target import DeviceAnswers, Target, read_attributes
from splitveil.config.machine import (
    check_precision,
    computing_threads,
    find_precision,
)
from splitveil.config.resolve import DataFacts, flat_config, planned_steps
from splitveil.config.run_config import PLACES, RunConfig
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset
from splitveil.data.folder import file_names
from splitveil.data.splits import Splits, aux_view
from splitveil.errors import AuditError, ConfigError, RunError
from splitveil.grid import STEPS
from splitveil.io import Json, Progress, check_folder, file_version, folder_lock, silent
from splitveil.nets.exit import TappedClient, sureness
from splitveil.nets.split import SplitModel, deployed_cost
from splitveil.provenance import commit, model_hash, versions
from splitveil.record.files import write_record
from splitveil.record.schema import BY_ALONE, Record
from splitveil.rng import stream
from splitveil.threat import Access, FittedAttack, Labelled, chunk_for

COPY = "Copy the run's folder to a place where you may write, and audit the copy"
RECENT = (  # older records lack them
    "label_smoothing", "teacher_share", "teacher_temperature", "nesterov", "flips",
)  # fmt: skip
TIMES = ("seconds", "command", "commit")  # what may differ between two equal audits


@runtime_checkable
class Audited(Protocol):
    """A trained run as an audit needs it; `splitveil.Run` is one."""

    path: Path
    model: SplitModel
    config: RunConfig
    built: DataFacts

    def data(self, progress: Progress = silent) -> tuple[Dataset, Splits]:
        """The dataset and splits it was trained with."""
        ...

    def trained(self) -> Json:
        """Its training: `steps`, `seconds`, `peak_bytes`, accuracies on val, `teacher` or None."""
        ...


def open_run(
    run: Audited,
    *,
    aux: str,
    seed: int = 0,
    attributes: Path | None = None,
    precision: str = "auto",
    progress: Progress = silent,
) -> tuple[Target, Facts]:
    """Load a run's data; returns what is attacked, and what the record says of it.

    Args:
        run: The run.
        aux: What the attacker knows: "train", "held-out", "test90" or "val".
        seed: Seed of the attacks.
        attributes: A CSV table of attributes of the images.
        precision: What the decoders are fitted in.
        progress: Told how far a download has come.
    """
    began = time.perf_counter()
    config, model, shape = run.config, run.model, run.built.image_shape
    dataset, splits = run.data(progress)
    view = aux_view(dataset, splits, aux, config.split_seed)
    victim, trained = model.victim(), run.trained()
    dataset = dataset.to(victim.device)
    hashes = splits.hashes() | view.hashes() | {"data": run.built.data_hash}
    test = dataset.labelled(splits.judged(view.knowledge))
    known, members, val = (dataset.labelled(s) for s in (view.aux, splits.train, splits.val))
    own_hash = model_hash(model)
    # What an attack meets: another exit rule on the same network sends the same numbers.
    attacked = own_hash
    if model.exit is not None:
        attacked = model_hash(model.encoder, model.channel, model.head)
    steps, planned = trained["steps"], planned_steps(config, len(splits.train))

    # The population's bound is measured on images that nothing was trained or chosen on.
    certificates: Any = partial(
        certify_split, model=model, fit=members, fresh=test, seen=[members, val]
    )
    scored = dataset.labelled(view.scored)
    if model.silent:
        certificates = "nothing is sent"
    target = Target(
        victim=victim, head=None if model.silent else model.head, classes=dataset.classes,
        aux=known,
        scored=scored, seed=seed, knowledge=view.knowledge, test=test,
        identity=_identity(model, attacked, hashes, victim.device), members=members,
        outsiders=dataset.labelled(splits.held_out) if len(splits.held_out) else test,
        attributes=read_attributes(
            attributes, len(dataset), view.aux, view.scored, lambda: file_names(config.dataset)
        ) or dataset.own_attributes(view.aux, view.scored),
        own_data=":" in config.dataset, certify=certificates,
        unfinished=f"{steps} of {planned} steps were trained" if steps < planned else None,
        answers=model.deployed().eval().answer if model.silent or model.exit is not None else None,
        exit=exit_of(model, scored, known), silent=model.silent,
    )  # fmt: skip
    settings = {k: v for k, v in flat_config(config).items() if k not in PLACES}
    training = {k: trained[k] for k in ("steps", "peak_bytes", "val_accuracy")}
    if (own := trained["val_own_accuracy"]) is not None:
        training["val_own_accuracy"] = own
    if teacher := trained["teacher"]:
        settings["teacher"] = teacher["run"]  # not the path to it
        training["teacher"] = teacher
    share_sent = 0.0 if model.silent else 1.0
    if target.exit is not None:
        share_sent = float(target.exit.asked.double().mean())
    fields = {
        **deployed_cost(model, shape).to_json(share_sent),
        "config": settings,
        "splits": hashes,
        "seeds": {"train": config.seed, "attack": seed, "split": config.split_seed},
        "training": training,
    }
    seconds = None if trained["seconds"] is None else round(trained["seconds"], 3)
    audit = {
        "final": config.final,
        "model": own_hash,
        "grid": STEPS if model.noisy else None,
    }
    chosen = find_precision(precision, victim.device.type, shape)
    return target, Facts(
        began=began, train_seconds=seconds, audit=audit, fields=fields, precision=chosen
    )


@torch.no_grad()
def exit_of(model: SplitModel, scored: Labelled, aux: Labelled) -> DeviceAnswers | None:
    """What a device with an exit does with the scored images and the attacker's; None without."""
    if model.exit is None or not isinstance(model.encoder, TappedClient):
        return None
    rule, body = model.exit, model.encoder.body

    @torch.no_grad()
    def own(images: Tensor) -> Tensor:
        return torch.cat([rule.head(body(x)) for x in torch.split(images, chunk_for(images))])

    here, known = own(scored.images), own(aux.images)
    everything = torch.ones(len(here), dtype=torch.bool, device=here.device)

    def averaged(server: Tensor) -> Tensor:
        return rule.answers(here, server, everything).argmax(1)

    return DeviceAnswers(
        asked=rule.asks(here), aux_asked=rule.asks(known), asks=lambda x: rule.asks(own(x)),
        aux_sure=sureness(known, rule.kind, rule.temperature),
        sure=sureness(here, rule.kind, rule.temperature), own=here.argmax(1),
        reports=averaged if rule.average else None,
    )  # fmt: skip


def _identity(model: SplitModel, own_hash: str, hashes: Json, device: torch.device) -> str:
    """Names model, data and libraries; empty if a module from outside states no `version`."""
    homes = ((type(module).__module__.partition(".")[0], module) for module in model.modules())
    outside = [module for home, module in homes if home not in (OWN_PACKAGE, "torch")]
    stated = [getattr(module, "version", None) for module in outside]
    if None in stated:
        return ""
    known = {k: v for k, v in versions().items() if k != "commit"} | {"device": str(device)}
    return json.dumps([own_hash, [str(v) for v in stated], hashes, known], sort_keys=True)


def audit(
    run: Audited,
    profile: str = "quick",
    *,
    aux: str = "train",
    seed: int = 0,
    progress: Progress = silent,
    fresh: bool = False,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
    precision: str = "auto",
    threads: int | None = None,
    store: Store | None = None,
) -> Record:
    """Attack a run, write `record.json` and `gallery.json` into its folder, return the record.

    Attacks that were finished before on the same model and data are read from `audit/` in the
    run's folder. An earlier record that this one does not cover is kept: see `write_record`.

    Args:
        run: A trained run, from `fit` or `load_run`.
        profile: Budget of the attacks: smoke, demo, quick, laptop, standard or paper.
        aux: What the attacker knows: train, held-out, test90, or val to choose settings by.
        seed: Seed of the attacks, 0 or more.
        progress: Told of every attack.
        fresh: Run every attack again, also those finished before.
        only: Names of attacks of the profile, to run no others; the record says so and is flagged.
        compile: Have torch compile the decoders, on a GPU.
        attributes: A CSV table of attributes of the images.
        precision: "float32" or "bf16" for the decoders; "auto" as for a training, see `RunConfig`.
        threads: CPU threads; default all cores that this process may use.
        store: Where finished attacks are kept; default the run's own folder.

    Returns:
        The record; `record.strongest.mse` is the headline number.

    Example:
        `record = splitveil.audit(splitveil.load_run("runs/first"), profile="smoke")`
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"the seed of an audit is a whole number from 0 on, got {seed!r}")
    busy = f"another process is auditing {run.path}, and one record would replace the other; wait"
    check_folder(run.path, COPY)
    check_precision(precision, run.model.device.type)
    with folder_lock(run.path / "audit", busy), computing_threads(threads):
        begun = file_version(run.path / "config.toml")
        record, pictures = measure_run(
            run, profile, aux=aux, seed=seed, only=only, compile=compile, attributes=attributes,
            precision=precision, store=store or run_store(run, fresh=fresh), progress=progress,
        )  # fmt: skip
        # Whoever trains does not take the audit's lock: the folder may hold another model by now.
        if file_version(run.path / "config.toml") != begun:
            raise RunError(
                f"{run.path} was trained again meanwhile; nothing was written, audit it again"
            )
        write_record(run.path, record, pictures, list(PROFILES))
    return record


def code_version() -> str | None:
    """Version and commit of this package; None in a checkout with changes."""
    found = commit()
    return None if found and found.endswith("+") else f"{__version__} {found}"


def run_store(run: Audited, *, fresh: bool = False) -> Store:
    """Where a run's finished attacks are kept; a fresh audit reads none of them."""
    return Store(run.path / "audit", code_version(), fresh)


def measure_run(
    run: Audited,
    profile: str,
    *,
    aux: str,
    seed: int,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
    precision: str = "auto",
    store: Store | None = None,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing but what `store` keeps."""
    # Unknown attacks are refused before any data are loaded.
    attacks = find_profile(profile, only=only, compile=compile)
    if compile and run.model.device.type == "cpu":
        raise ConfigError("--compile is for a GPU, and this audit is on the CPU; leave it out")
    target, facts = open_run(
        run, aux=aux, seed=seed, attributes=attributes, precision=precision, progress=progress
    )
    chosen = ({"only": list(only)} if only else {}) | ({"compiled": True} if compile else {})
    left_out = [name for name in find_profile(profile) if name not in attacks]
    if run.model.silent:  # no other attack has anything to look at
        blind = (Access.NONE, Access.LABEL)
        attacks = {n: a for n, a in attacks.items() if a.access in blind}
    facts = replace(facts, audit=facts.audit | chosen, left_out=left_out)
    return measure(target, attacks, profile, facts, store=store, progress=progress)


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Every place where two JSON values differ, apart from times, commands and commits.

    >>> list(differences({"a": [1, 2], "seconds": 3}, {"a": [1, 5], "seconds": 4}))
    ['a[1]: 2 was recorded, 5 was measured']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *[k for k in new if k not in old]]:
            if key not in TIMES:
                path = f"{where}.{key}" if where else key
                yield from differences(old.get(key), new.get(key), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif old != new:
        yield f"{where}: {old!r} was recorded, {new!r} was measured"


def check_replayable(record: Record) -> None:
    """Refuse a record that was made with more than its run and its data."""
    made = record.audit
    source = DATASETS.get(str(record.config.get("dataset")))
    own = source.attributes if source else ()  # of the dataset itself, not of a table
    if made.wire or (made.attributes or own) != own:
        what = "captured requests" if made.wire else "a table of attributes"
        raise AuditError(
            f"the record was made with {what}, so it cannot be replayed from the run alone; "
            "repeat the audit with the same inputs"
        )


def replay(run: Audited, record: Record, progress: Progress = silent) -> list[str]:
    """Repeat the audit of a record without stored attacks; returns one line per difference.

    The numbers are equal to the bit only on the same type of machine, with the same version of
    torch and the same number of threads.
    """
    made, seed = record.audit, record.seeds.attack
    if made.profile is None or made.aux is None or seed is None:
        raise AuditError("the record does not say how it was made; audit the run again")
    check_replayable(record)
    own = model_hash(run.model)
    if made.model is not None and made.model != own:
        raise AuditError(
            f"the record is of another model: its hash is {made.model}, the run's is {own}; "
            "give the record of this run"
        )
    if made.grid is None and run.model.noisy:
        raise AuditError(
            "the record was made by an earlier version, which drew the noise in floating point. "
            "Now it is drawn on a grid, so that no number can be repeated to the bit; this is no "
            "fault of the record. Audit the run again to get a record that can be replayed"
        )
    fresh, _ = measure_run(
        run, made.profile, aux=made.aux, seed=seed, only=made.only, compile=bool(made.compiled),
        precision=record.audit_precision, progress=progress,
    )  # fmt: skip
    old: Json = json.loads(json.dumps(record.to_dict()))  # NaN in a record differs, as it should
    earlier = {k: getattr(RunConfig, k) for k in RECENT} | {"precision": run.config.precision}
    old["config"] = earlier | old["config"]
    _forget_others(old)
    return list(differences(old, json.loads(fresh.to_json())))


def _forget_others(record: Json) -> None:
    """Take out of a record what it says beside other runs, which a replay does not have."""
    gained = ("server_gain", "gain_over_same_client")
    record |= {key: None for key in ("alone", *gained) if key in record}
    for key in gained:
        (record.get("intervals") or {}).pop(key, None)
    if record.get("flags"):
        kept = [f for f in record["flags"] if not str(f["seen"]).startswith(BY_ALONE)]
        record["flags"] = kept


def fit_attacker(
    run: Audited, record: Record, progress: Progress = silent
) -> tuple[nn.Module, Json]:
    """The decoder with the lowest error of an audit, fitted again, and facts about it.

    An audit keeps reconstructions, not networks. With the same aux and the same seed the decoder
    comes out equal, to the bit on the same CPU.
    """
    profile, aux = str(record.audit.profile), str(record.audit.aux)
    name = strongest_decoder(record, profile)
    target, _ = open_run(run, aux=aux, seed=record.seeds.attack or 0, progress=progress)
    attack = at_precision(find_profile(profile), record.audit_precision)[name]
    generator = stream(target.seed, f"attack/{name}", target.device)
    fitted = attack.fit(target.view(attack.access), target.aux, generator, progress)
    net = fitted.net if isinstance(fitted, FittedAttack) else None
    if net is None:
        raise AuditError(f"attack '{name}' does not name its network; leave --attacker out")
    errors = metrics.mse(target.scored.images, fitted(target.sent))
    error = (errors if target.exit is None else errors[target.exit.asked]).mean()
    facts = {"attack": name, "profile": profile, "aux": aux, "seed": target.seed}
    return net, facts | {"mse": float(error), "audited_mse": record.attacks[name].mse}


def strongest_decoder(record: Record, profile: str) -> str:
    """Name of the decoder attack with the lowest mean squared error in a record."""
    decoders = [name for name, a in find_profile(profile).items() if isinstance(a, Decoder)]
    attacks = record.attacks.items()
    errors = {n: a.mse for n, a in attacks if n in decoders and a.mse is not None}
    if not errors:
        raise AuditError(
            f"the audit (profile '{profile}') has no decoder attack to export; audit the run "
            "without --attacks, or with a decoder among them"
        )
    return min(errors, key=lambda name: errors[name])
