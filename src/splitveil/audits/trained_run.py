"""Auditing a run: brings run, data and attacks together and writes the record."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.audit.tables import Attributes, attributes_of, read_table
from splitveil.audits import Attempt, Case, Store, Wire, intercept
from splitveil.audits.certificates import Part, fingerprints, refusals
from splitveil.audits.disclosures import deployed
from splitveil.audits.pipeline import ACCURACY_DRAWS as ACCURACY_DRAWS  # noqa: PLC0414 - re-exported
from splitveil.audits.pipeline import Claim, Subject, measure
from splitveil.audits.suite import source
from splitveil.config import find_profile
from splitveil.data import AuxView, Dataset, Splits, aux_view
from splitveil.data.folder import file_names
from splitveil.errors import ConfigError, RunError
from splitveil.keeping import put_record
from splitveil.nets import front_of
from splitveil.passport import model_hash, versions
from splitveil.runs import Run, flat_config, load_data, planned_steps
from splitveil.surrogates.batch import FirstCall, class_batch
from splitveil.surrogates.rate import true_rate
from splitveil.train.checkpoint import read_checkpoint
from splitveil.train.files import atomic_file, check_folder, explain_os_error, held, stamp
from splitveil.types import Json, Labelled, Progress, Record, Victim

PLACES = ("data_dir", "runs_dir")  # where files lay says nothing about a result
COPY = "Copy the run's folder to a place where you may write, and audit the copy"


@torch.no_grad()
def rate_nats(victim: Victim, data: Labelled, num_classes: int, noise_std: float) -> float | None:
    """Upper bound on I(x; z̃ | y) of the scored images, total nats; None without noise.

    Clean z in eval mode, class-conditional, diagonal.
    """
    if noise_std == 0:
        return None
    box = victim.white_box()
    before = front_of(box.encoder, box.channel).stages  # a dictionary could magnify z
    parts = [before(victim.encoder(x.to(victim.device))) for x in torch.split(data.images, 1000)]
    z = torch.cat(parts).flatten(1).double()
    if not bool(torch.isfinite(z).all()):
        return None
    batch = class_batch(z, data.labels.to(z.device), z.shape[1], num_classes, FirstCall())
    return float(true_rate(batch, noise_std)) * z.shape[1]


def folder_store(folder: Path) -> Store:
    """Finished attacks as files of a folder; a broken file counts as absent."""

    def read(key: str) -> bytes | None:
        try:
            return (folder / f"{key}.safetensors").read_bytes()
        except OSError:
            return None

    def write(key: str, blob: bytes) -> None:
        with explain_os_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / f"{key}.safetensors") as file:
            file.write(blob)

    return Store(read, write)


def code_hash(model: nn.Module) -> str | None:
    """Content hash of the source that a model runs, torch's own aside; None if some is unread."""
    homes = {type(module).__module__ for module in model.modules()}
    texts = [source(home) for home in sorted(homes) if home.partition(".")[0] != "torch"]
    if None in texts:
        return None
    return hashlib.sha256("\x00".join(map(str, texts)).encode()).hexdigest()[:16]


def audit_run(
    run: Run,
    profile: str,
    *,
    aux: str,
    seed: int,
    progress: Progress,
    fresh: bool = False,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
) -> Record:
    """Attack a run and write `record.json` and `gallery.json` into its folder.

    An earlier record that this one does not cover is kept: see `keeping.put_record`.
    Attacks that were finished before on the same model and data are taken from `audit/` in the
    run's folder, unless `fresh`: then all are run, and replace what was there. `only` names attacks
    of the profile, which the record says and flags. `compile`: see `Run.audit`. `attributes` is a
    table of them, see `splitveil.audit.tables`.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"the seed of an audit is a whole number from 0 on, got {seed!r}")
    store = folder_store(run.path / "audit")
    if fresh:
        store = replace(store, read=lambda _: None)
    busy = f"another process is auditing {run.path}, and one record would replace the other; wait"
    check_folder(run.path, COPY)
    with held(run.path / "audit", busy):
        begun = stamp(run.path / "config.toml")
        record, pictures = examine(
            run, profile, aux=aux, seed=seed, progress=progress, store=store, only=only,
            compile=compile, attributes=attributes,
        )  # fmt: skip
        if stamp(run.path / "config.toml") != begun:
            raise RunError(f"{run.path} was trained anew; nothing was written, audit it again")
        put_record(run.path, record, pictures)
    return record


def examine(
    run: Run,
    profile: str,
    *,
    aux: str,
    seed: int,
    progress: Progress,
    store: Store | None,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing but what `store` keeps."""
    find_profile(profile, only=only)  # a typing error must not cost the time to load the data
    if compile and run.victim.device.type == "cpu":
        raise ConfigError("--compile is for a GPU, and this audit is on the CPU; leave it out")
    opened = open_run(run, aux=aux, progress=progress)
    table = None if attributes is None else opened.attributes(attributes)
    wire = intercept(opened.case, seed)
    return examine_wire(
        opened, profile, wire, progress=progress, store=store, only=only, compile=compile,
        table=table,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A run with its data: the case of its audit, and what the record says of where it is from.

    `own_data`: some images are a user's own, so that copies are looked for.
    """

    run: Run
    dataset: Dataset
    splits: Splits
    view: AuxView
    case: Case
    model: str
    hashes: Json
    began: float
    own_data: bool

    def attributes(self, path: Path) -> Attributes:
        """The attributes of aux and scored images from a table over the dataset."""
        table = read_table(path, len(self.dataset), file_names(self.run.config.dataset))
        return attributes_of(path, table, self.view.aux, self.view.scored)


def open_run(run: Run, *, aux: str, progress: Progress) -> Opened:
    """Load a run's data and make the case of its audit."""
    began = time.perf_counter()
    dataset, splits = load_data(run, progress)
    view = aux_view(dataset, splits, aux, run.config.split_seed)
    victim = run.victim
    dataset = dataset.to(victim.device)
    hashes = splits.hashes() | view.hashes() | {"data": run.built.data_hash}
    model, code = model_hash(run.model), code_hash(run.model)
    known = {k: v for k, v in versions().items() if k != "commit"} | {"device": str(victim.device)}
    case = Case(
        victim=victim,
        head=run.model.head.eval(),
        num_classes=dataset.num_classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        identity="" if code is None else json.dumps([model, code, hashes, known], sort_keys=True),
    )
    return Opened(
        run=run, dataset=dataset, splits=splits, view=view, case=case, model=model,
        hashes=hashes, began=began, own_data=":" in run.config.dataset,
    )  # fmt: skip


def examine_wire(
    opened: Opened,
    profile: str,
    wire: Wire,
    *,
    progress: Progress,
    store: Store | None,
    only: Sequence[str] = (),
    compile: bool = False,
    table: Attributes | None = None,
    heard: Json | None = None,
    uncertified: str | None = None,
    versus: Callable[[Mapping[str, Attempt]], Json] | None = None,
) -> tuple[Record, Json]:
    """The record of an audit on this draw of the scored images, and its pictures.

    `uncertified` says why what was sent is not what certificates and the rate would be of.
    """
    run, case, splits, dataset = opened.run, opened.case, opened.splits, opened.dataset
    trained = read_checkpoint(run.path / "checkpoint.safetensors").meta
    judged = splits.judged(opened.view.knowledge)
    outside = splits.held_out if len(splits.held_out) else judged
    attacks = find_profile(profile, only=only, compile=compile)
    subject = Subject(
        case=case,
        wire=wire,
        classes=dataset.classes,
        attacks=attacks,
        left_out=[name for name in find_profile(profile) if name not in attacks],
        profile=profile,
        aux=opened.view.knowledge,
        test=dataset.labelled(judged),
        members=dataset.labelled(splits.train),
        outsiders=dataset.labelled(outside),
        claim=claim_of(opened) if uncertified is None else refusals(uncertified),
        attributes=table,
        heard=heard or {},
        unfinished=_unfinished(opened, trained["step"]),
        own_data=opened.own_data,
        versus=versus,
    )
    teacher = trained["passport"].get("teacher")  # by its name: a path says nothing
    facts, pictures = measure(subject, progress=progress, store=store)
    shape = run.built.image_shape
    audit = facts.pop("audit") | {"final": run.config.final, "model": opened.model}
    audit |= ({"only": list(only)} if only else {}) | ({"compiled": True} if compile else {})
    record = Record(
        **facts,
        audit=audit,
        true_rate_nats=None
        if uncertified
        else rate_nats(case.victim, case.scored, case.num_classes, run.noise_std),
        client={
            "macs": run.model.macs(shape),
            "params": run.model.client_params(),
            "wire_floats": run.model.wire_floats(shape),
        },
        config={k: v for k, v in flat_config(run.config).items() if k not in PLACES}
        | ({"teacher": teacher["run"]} if teacher else {}),
        splits=opened.hashes,
        seeds={"train": run.config.seed, "attack": wire.seed, "split": run.config.split_seed},
        seconds={
            "train": round(trained["seconds"], 3),
            "audit": round(time.perf_counter() - opened.began, 3),
        },
        training={"steps": trained["step"], "peak_bytes": trained.get("peak_bytes")}
        | ({"teacher": teacher} if teacher else {}),
    )
    return record, pictures


def _unfinished(opened: Opened, steps: int) -> str | None:
    """How far a training came that was not trained to its end."""
    planned = planned_steps(opened.run.config, len(opened.splits.train))
    return f"{steps} of {planned} steps were trained" if steps < planned else None


def claim_of(opened: Opened) -> Claim:
    """What a run's certificates are about.

    The population's bound is measured on test images, which nothing was trained or chosen on.
    """
    splits, model = opened.splits, opened.run.model

    def part(rows: Tensor) -> Part:
        data = opened.dataset.labelled(rows)
        return Part(data=data, ids=fingerprints(data.images))  # copies are the same image

    return Claim(
        client=deployed(model.encoder, model.channel, opened.case.victim.device),
        fit=(fit := part(splits.train)),
        fresh=part(splits.judged(opened.view.knowledge)),
        seen=torch.cat([fit.ids, part(splits.val).ids]),
    )
