"""Auditing a run: brings run, data and attacks together and writes the record."""

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from splitveil.audit import (
    Case,
    Evidence,
    Store,
    accuracy,
    by_attack,
    ceiling_mse,
    floor_mse,
    gallery,
    intercept,
    per_image,
    raise_flags,
    run_attacks,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.config import find_profile
from splitveil.data import aux_view
from splitveil.disclosures import Kept, certificates, leakage_by_repeats, other_leaks
from splitveil.nets import front_of
from splitveil.passport import command, device_name, versions
from splitveil.runs import Run, flat_config, load_data
from splitveil.surrogates.batch import FirstCall, class_batch
from splitveil.surrogates.rate import true_rate
from splitveil.train.checkpoint import read_checkpoint
from splitveil.train.files import atomic_file, explain_os_error, write_text
from splitveil.types import Json, Labelled, Progress, Record, Victim

ACCURACY_DRAWS = 4
PLACES = ("data_dir", "runs_dir")  # where files lay says nothing about a result


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


def model_hash(*modules: nn.Module) -> str:
    """Content hash of modules: their structure, and every tensor they hold."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(repr(module).encode())
        for name, value in module.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def audit_run(
    run: Run, profile: str, *, aux: str, seed: int, progress: Progress, fresh: bool = False
) -> Record:
    """Attack a run and write `record.json` and `gallery.json` into its folder.

    Attacks that were finished before on the same model and data are taken from `audit/` in the
    run's folder, unless `fresh`: then all are run, and replace what was there.
    """
    store = folder_store(run.path / "audit")
    if fresh:
        store = replace(store, read=lambda _: None)
    record, pictures = examine(run, profile, aux=aux, seed=seed, progress=progress, store=store)
    write_text(run.path / "gallery.json", json.dumps(pictures))
    write_text(run.path / "record.json", record.to_json())
    return record


def examine(
    run: Run, profile: str, *, aux: str, seed: int, progress: Progress, store: Store | None
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing but what `store` keeps."""
    started = time.perf_counter()
    attacks = find_profile(profile)
    dataset, splits = load_data(run, progress)
    view = aux_view(dataset, splits, aux, run.config.split_seed)
    victim = run.victim
    dataset = dataset.to(victim.device)
    hashes = splits.hashes() | view.hashes() | {"data": run.built.data_hash}
    model = model_hash(run.model)
    passport = versions()
    known = {k: v for k, v in passport.items() if k != "commit"} | {"device": str(victim.device)}
    case = Case(
        victim=victim,
        head=run.model.head.eval(),
        num_classes=dataset.num_classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        identity=json.dumps([model, hashes, known], sort_keys=True),
    )
    test = dataset.labelled(splits.test)
    wire = intercept(case, seed)
    kept = Kept()
    attempts = run_attacks(case, attacks, seed, progress, wire=wire, store=store, look=kept)
    headline = strongest(attempts)
    ceiling = ceiling_mse(case.aux, case.scored, case.num_classes)
    certified = certificates(
        run.model,
        case,
        dataset,
        splits,
        seed=seed,
        leakage=leakage_by_repeats(attempts, ceiling),
    )
    outside = splits.held_out if len(splits.held_out) else splits.test
    told = other_leaks(
        case,
        attacks,
        attempts,
        dataset.labelled(splits.train),
        dataset.labelled(outside),
        wire=wire,
        kept=kept,
        profile=profile,
    )
    shape = run.built.image_shape
    trained = read_checkpoint(run.path / "checkpoint.safetensors").meta
    record = Record(
        accuracy=accuracy(replace(case, scored=test), seed, ACCURACY_DRAWS),
        attacks=by_attack(attempts),
        strongest=headline,
        strongest_blackbox=strongest_blackbox(attempts),
        worst_case=worst_case(attempts),
        ceiling={"mse": ceiling},
        floor={"mse": floor_mse(case.aux, case.scored)},
        leakage=1.0 - headline["mse"] / ceiling,
        true_rate_nats=rate_nats(victim, case.scored, case.num_classes, run.noise_std),
        per_image=per_image(attempts),
        certificates=certified,
        leaks=told,
        flags=[asdict(f) for f in raise_flags(Evidence(case, wire, attempts, certified))],
        client={
            "macs": run.model.macs(shape),
            "params": run.model.client_params(),
            "wire_floats": run.model.wire_floats(shape),
        },
        config={k: v for k, v in flat_config(run.config).items() if k not in PLACES},
        splits=hashes,
        seeds={"train": run.config.seed, "attack": seed, "split": run.config.split_seed},
        versions=passport,
        device=device_name(victim.device),
        seconds={
            "train": round(trained["seconds"], 3),
            "audit": round(time.perf_counter() - started, 3),
        },
        audit={
            "profile": profile,
            "aux": aux,
            "aux_images": len(case.aux),
            "scored": len(case.scored),
            "not_finite": list(wire.broken),
            "accuracy_draws": ACCURACY_DRAWS,
            "final": run.config.final,
            "model": model,
            "command": command(),
        },
        training={"steps": trained["step"], "peak_bytes": trained.get("peak_bytes")},
    )
    return record, gallery(case.scored, attempts, wire.seen.answer, dataset.classes)
