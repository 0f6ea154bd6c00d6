"""Auditing a run: brings run, data and attacks together and writes the record."""

import json
import time
from dataclasses import asdict, replace

import torch

from splitveil.audit.gallery import gallery
from splitveil.audit.suite import (
    Case,
    accuracy,
    answer,
    ceiling_mse,
    floor_mse,
    run_attacks,
    send,
    strongest,
    worst_case,
)
from splitveil.config import find_profile
from splitveil.data import aux_view
from splitveil.passport import command, device_name, versions
from splitveil.runs import Run, flat_config, load_data
from splitveil.surrogates.batch import FirstCall, class_batch
from splitveil.surrogates.rate import true_rate
from splitveil.train.checkpoint import read_checkpoint
from splitveil.train.files import write_text
from splitveil.types import Labelled, Progress, Record, Victim

ACCURACY_DRAWS = 4
PLACES = ("data_dir", "runs_dir")  # where files lay says nothing about a result


@torch.no_grad()
def rate_nats(victim: Victim, data: Labelled, num_classes: int, noise_std: float) -> float | None:
    """Upper bound on I(x; z̃ | y) of the scored images, total nats; None without noise.

    Clean z in eval mode, class-conditional, diagonal.
    """
    if noise_std == 0:
        return None
    parts = [victim.encoder(x.to(victim.device)).flatten(1) for x in torch.split(data.images, 1000)]
    z = torch.cat(parts).double()
    batch = class_batch(z, data.labels.to(z.device), z.shape[1], num_classes, FirstCall())
    return float(true_rate(batch, noise_std)) * z.shape[1]


def audit_run(run: Run, profile: str, *, aux: str, seed: int, progress: Progress) -> Record:
    """Attack a run and write `record.json` and `gallery.json` into its folder."""
    started = time.perf_counter()
    attacks = find_profile(profile)
    dataset, splits = load_data(run, progress)
    view = aux_view(dataset, splits, aux, run.config.split_seed)
    victim = run.victim
    dataset = dataset.to(victim.device)
    case = Case(
        victim=victim,
        head=run.model.head.eval(),
        num_classes=dataset.num_classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
    )
    test = dataset.labelled(splits.test)
    attempts = run_attacks(case, attacks, seed, progress)
    headline, ceiling = strongest(attempts), ceiling_mse(case)
    shape = run.built.image_shape
    trained = read_checkpoint(run.path / "checkpoint.safetensors").meta
    record = Record(
        accuracy=accuracy(replace(case, scored=test), seed, ACCURACY_DRAWS),
        attacks={
            name: asdict(a.scores()) | {"access": a.access, "seconds": a.seconds}
            for name, a in attempts.items()
        },
        strongest=headline,
        worst_case=worst_case(attempts),
        ceiling={"mse": ceiling},
        floor={"mse": floor_mse(case)},
        leakage=1.0 - headline["mse"] / ceiling,
        true_rate_nats=rate_nats(victim, case.scored, case.num_classes, run.noise_std),
        client={
            "macs": run.model.macs(shape),
            "params": run.model.client_params(),
            "wire_floats": run.model.wire_floats(shape),
        },
        config={k: v for k, v in flat_config(run.config).items() if k not in PLACES},
        splits=splits.hashes() | view.hashes() | {"data": run.built.data_hash},
        seeds={"train": run.config.seed, "attack": seed, "split": run.config.split_seed},
        versions=versions(),
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
            "accuracy_draws": ACCURACY_DRAWS,
            "final": run.config.final,
            "command": command(),
        },
        training={"steps": trained["step"]},
    )
    seen = answer(case.head, send(victim, case.scored.images, seed, "wire"))
    pictures = gallery(case, attempts, seen, dataset.classes)
    write_text(run.path / "gallery.json", json.dumps(pictures))
    write_text(run.path / "record.json", record.to_json())
    return record
