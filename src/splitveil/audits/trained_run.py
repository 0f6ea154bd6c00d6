"""The audit of a trained run: its target, its finished attacks, replay, its fitted attacker."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES, find_profile
from splitveil.audits import metrics
from splitveil.audits.certificates import certified_client, certify
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.suite import OWN_PACKAGE, Store, code_version, folder_store
from splitveil.audits.target import Target
from splitveil.config.resolve import DataFacts, flat_config, planned_steps
from splitveil.config.run_config import PLACES, RunConfig
from splitveil.data.attributes import attributes_of, read_table
from splitveil.data.dataset import Dataset
from splitveil.data.folder import file_names
from splitveil.data.splits import Splits, aux_view
from splitveil.errors import AuditError, ConfigError, RunError
from splitveil.io import Json, Progress, check_folder, file_version, folder_lock, silent
from splitveil.nets.channel import before_noise
from splitveil.nets.split import SplitModel
from splitveil.provenance import model_hash, versions
from splitveil.record.files import write_record
from splitveil.record.schema import Record
from splitveil.rng import stream
from splitveil.surrogates.base import FirstCallCheck, class_batch, true_rate
from splitveil.threat import FittedAttack, Labelled, Victim

COPY = "Copy the run's folder to a place where you may write, and audit the copy"
RECENT = ("label_smoothing", "teacher_share", "teacher_temperature")  # older records lack them
TIMES = ("seconds", "command", "commit")  # what may differ between two equal audits


@runtime_checkable
class Audited(Protocol):
    """A trained run as an audit needs it; `splitveil.Run` is one."""

    path: Path
    model: SplitModel
    config: RunConfig
    built: DataFacts

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise the deployed channel really adds."""
        ...

    def data(self, progress: Progress = silent) -> tuple[Dataset, Splits]:
        """The dataset and splits it was trained with."""
        ...

    def trained(self) -> Json:
        """Its training: `steps`, `seconds`, `peak_bytes`, and `teacher` or None."""
        ...


def open_run(
    run: Audited,
    *,
    aux: str,
    seed: int = 0,
    attributes: Path | None = None,
    progress: Progress = silent,
) -> tuple[Target, Facts]:
    """Load a run's data; returns what is attacked, and what the record says of it."""
    began = time.perf_counter()
    config, model, built = run.config, run.model, run.built
    dataset, splits = run.data(progress)
    view = aux_view(dataset, splits, aux, config.split_seed)
    table = None
    if attributes is not None:
        rows = read_table(attributes, len(dataset), file_names(config.dataset))
        table = attributes_of(attributes, rows, view.aux, view.scored)
    victim, trained = model.victim(), run.trained()
    dataset = dataset.to(victim.device)
    hashes = splits.hashes() | view.hashes() | {"data": built.data_hash}
    test = splits.judged(view.knowledge)
    steps, planned = trained["steps"], planned_steps(config, len(splits.train))
    target = Target(
        victim=victim,
        head=model.head,
        classes=dataset.classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        seed=seed,
        identity=_identity(model, hashes, victim.device),
        knowledge=view.knowledge,
        test=dataset.labelled(test),
        members=dataset.labelled(splits.train),
        outsiders=dataset.labelled(splits.held_out if len(splits.held_out) else test),
        certify=lambda target: (
            _certificates(target, model, dataset, splits, test),
            rate_nats(victim, target.scored, target.num_classes, run.noise_std),
        ),
        attributes=table,
        own_data=":" in config.dataset,
        unfinished=f"{steps} of {planned} steps were trained" if steps < planned else None,
    )
    teacher, seconds = trained["teacher"], trained["seconds"]
    settings = {k: v for k, v in flat_config(config).items() if k not in PLACES}
    facts = Facts(
        began=began,
        train_seconds=None if seconds is None else round(seconds, 3),
        audit={"final": config.final, "model": model_hash(model)},
        fields={
            "client": {
                "macs": model.macs(built.image_shape),
                "params": model.client_params(),
                "wire_floats": model.wire_floats(built.image_shape),
            },
            "config": settings | ({"teacher": teacher["run"]} if teacher else {}),  # not its path
            "splits": hashes,
            "seeds": {"train": config.seed, "attack": seed, "split": config.split_seed},
            "training": {"steps": steps, "peak_bytes": trained["peak_bytes"]}
            | ({"teacher": teacher} if teacher else {}),
        },
    )
    return target, facts


def _identity(model: SplitModel, hashes: Json, device: torch.device) -> str:
    """Names model, data and libraries; empty if a module from outside states no `version`."""
    homes = ((type(module).__module__.partition(".")[0], module) for module in model.modules())
    outside = [module for home, module in homes if home not in (OWN_PACKAGE, "torch")]
    stated = [getattr(module, "version", None) for module in outside]
    if None in stated:
        return ""
    known = {k: v for k, v in versions().items() if k != "commit"} | {"device": str(device)}
    return json.dumps([model_hash(model), [str(v) for v in stated], hashes, known], sort_keys=True)


def _certificates(
    target: Target, model: SplitModel, dataset: Dataset, splits: Splits, test: Tensor
) -> Json:
    """A run's certificates.

    The population's bound is measured on test images, which nothing was trained or chosen on.
    """
    train, val = dataset.labelled(splits.train), dataset.labelled(splits.val)
    return certify(
        certified_client(model.encoder, model.channel, target.device),
        target.scored,
        train,
        dataset.labelled(test),
        [train, val],
        num_classes=target.num_classes,
        generator=stream(target.seed, "certificates", target.device),
    )


@torch.no_grad()
def rate_nats(victim: Victim, data: Labelled, num_classes: int, noise_std: float) -> float | None:
    """Upper bound on I(x; z̃ | y) of the scored images, total nats; None without noise.

    Clean z in eval mode, class-conditional, diagonal.
    """
    if noise_std == 0:
        return None
    box = victim.white_box()
    before = before_noise(box.encoder, box.channel).stages  # a dictionary could magnify z
    parts = [before(victim.encoder(x.to(victim.device))) for x in torch.split(data.images, 1000)]
    z = torch.cat(parts).flatten(1).double()
    if not bool(torch.isfinite(z).all()):
        return None
    batch = class_batch(z, data.labels.to(z.device), z.shape[1], num_classes, FirstCallCheck())
    return float(true_rate(batch, noise_std)) * z.shape[1]


def audit_run(
    run: Audited,
    profile: str,
    *,
    aux: str = "train",
    seed: int = 0,
    progress: Progress = silent,
    fresh: bool = False,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
) -> Record:
    """Attack a run and write `record.json` and `gallery.json` into its folder.

    An earlier record that this one does not cover is kept: see `write_record`.
    Attacks that were finished before on the same model and data are taken from `audit/` in the
    run's folder, unless `fresh`: then all are run, and replace what was there. `only` names attacks
    of the profile, which the record says and flags. `compile`: see `Run.audit`. `attributes` is a
    table of them, see `splitveil.data.attributes`.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"the seed of an audit is a whole number from 0 on, got {seed!r}")
    busy = f"another process is auditing {run.path}, and one record would replace the other; wait"
    check_folder(run.path, COPY)
    with folder_lock(run.path / "audit", busy):
        begun = file_version(run.path / "config.toml")
        record, pictures = measure_run(
            run, profile, aux=aux, seed=seed, only=only, compile=compile, attributes=attributes,
            store=run_store(run, fresh=fresh), progress=progress,
        )  # fmt: skip
        if file_version(run.path / "config.toml") != begun:
            raise RunError(f"{run.path} was trained anew; nothing was written, audit it again")
        write_record(run.path, record, pictures, list(PROFILES))
    return record


def run_store(run: Audited, *, fresh: bool = False) -> Store:
    """Where a run's finished attacks are kept; a fresh audit reads none of them."""
    store = folder_store(run.path / "audit", code_version())
    return replace(store, read=lambda key: None) if fresh else store


def measure_run(
    run: Audited,
    profile: str,
    *,
    aux: str,
    seed: int,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
    store: Store | None = None,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing but what `store` keeps."""
    attacks = find_profile(profile, only=only, compile=compile)  # before any data are loaded
    if compile and run.model.victim().device.type == "cpu":
        raise ConfigError("--compile is for a GPU, and this audit is on the CPU; leave it out")
    target, facts = open_run(run, aux=aux, seed=seed, attributes=attributes, progress=progress)
    told = ({"only": list(only)} if only else {}) | ({"compiled": True} if compile else {})
    left_out = [name for name in find_profile(profile) if name not in attacks]
    facts = replace(facts, audit=facts.audit | told, left_out=left_out)
    return measure(target, attacks, profile, facts, store=store, progress=progress)


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Every place where two JSON values differ, times and commands left out.

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
    told = record.audit
    what = "captured requests" if told.wire else "a table of attributes"
    if told.wire or told.attributes is not None:
        raise AuditError(
            f"the record was made with {what} and cannot be replayed from the run alone; audit "
            "again as it was made"
        )


def replay(run: Audited, record: Record, progress: Progress = silent) -> list[str]:
    """Audit again as a record says, without anything stored; returns what differs.

    The bits are promised on the same type of machine with the same torch and number of threads.
    """
    told, seed = record.audit, record.seeds.attack
    if told.profile is None or told.aux is None or seed is None:
        raise AuditError("the record does not say how it was made; audit the run again")
    check_replayable(record)
    own = model_hash(run.model)
    if told.model is not None and told.model != own:
        raise AuditError(
            f"the record is of another model: its hash is {told.model}, the run's is {own}; "
            "give the record of this run"
        )
    fresh, _ = measure_run(
        run, told.profile, aux=told.aux, seed=seed, only=told.only, compile=bool(told.compiled),
        progress=progress,
    )  # fmt: skip
    old: Json = json.loads(json.dumps(record.to_dict()))  # NaN in a record differs, as it should
    old["config"] = {k: getattr(RunConfig, k) for k in RECENT} | old["config"]
    return list(differences(old, json.loads(fresh.to_json())))


def fit_attacker(
    run: Audited, record: Record, progress: Progress = silent
) -> tuple[nn.Module, Json]:
    """The decoder with the lowest error of an audit, and facts about it.

    An audit keeps what its attacks made, not their networks. The decoder is fitted again on the
    same aux and with the same seed: on the same machine the same, bit for bit on a CPU.
    """
    profile, aux = str(record.audit.profile), str(record.audit.aux)
    name = strongest_decoder(record, profile)
    target, _ = open_run(run, aux=aux, seed=record.seeds.attack or 0, progress=progress)
    attack = find_profile(profile)[name]
    generator = stream(target.seed, f"attack/{name}", target.device)
    fitted = attack.fit(target.view(attack.access), target.aux, generator, progress)
    net = fitted.net if isinstance(fitted, FittedAttack) else None
    if net is None:
        raise AuditError(f"attack '{name}' does not name its network; leave --attacker out")
    error = metrics.mse(target.scored.images, fitted(target.sent)).mean()
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
