"""An audit step by step: attacks, summary, certificates, leaks, flags, record."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from splitveil.attacks.profiles import ATTACKS_VERSION, LEAK_BUDGETS, at_precision
from splitveil.audits.beyond_pixels import leaks_beyond_pixels
from splitveil.audits.certificates import refusals
from splitveil.audits.exposure import (
    at_shares,
    attack_the_sent,
    exit_leaks,
    packed,
    per_image_of_exit,
    probe_answers,
    server_need,
    what_is_exposed,
)
from splitveil.audits.flags import raise_flags
from splitveil.audits.suite import (
    Store,
    label_only_mse,
    right_counts,
    run_attacks,
    scaled_searches,
    summarise,
)
from splitveil.audits.target import Target, gallery
from splitveil.cuda import Precision
from splitveil.errors import AuditError
from splitveil.io import Json, Progress, silent
from splitveil.provenance import command, device_name, versions
from splitveil.record.schema import Record
from splitveil.threat import Attack

ALIKE = 1e-13  # a mean squared error this small is rounding
ACCURACY_DRAWS = 4  # how often the test images are sent for the accuracy


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a record says of the target's origin: a run, a user's encoder, or captured requests.

    Args:
        began: When the audit began, by `time.perf_counter`, in seconds.
        train_seconds: How long the training took; None if it is not known.
        audit: Keys of the record's `audit` that only this kind of audit has.
        fields: Other fields of the record.
        precision: What the decoders are fitted in and answer in.
        left_out: Attacks of the profile that the user chose not to run.
    """

    began: float
    train_seconds: float | None
    audit: Json
    fields: Json
    precision: Precision
    left_out: Sequence[str] = ()


def measure(
    target: Target,
    attacks: Mapping[str, Attack],
    profile: str,
    facts: Facts,
    *,
    store: Store | None = None,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """Attack a target and measure what leaks.

    Args:
        target: What is attacked.
        attacks: Those attacks of the profile that are run.
        profile: Name of the profile; the budget of the leaks depends on it.
        facts: Where the target is from.
        store: Where finished attacks are kept; None to run all of them.
        progress: Told how far the attacks have come.

    Returns:
        The record, and the pictures of `gallery.json`.
    """
    if label_only_mse(target.aux, target.scored, target.num_classes) < ALIKE:
        raise AuditError(
            "all images of a class are alike, so the class alone gives away the image and there is "
            "nothing left to protect; use a dataset whose classes hold different images"
        )
    attacks = scaled_searches(at_precision(attacks, facts.precision), target.scored)
    attempts = run_attacks(target, attacks, progress, store=store)
    every, sent, on_sent = attempts, target, attempts
    if target.keeps is not None:
        every, sent, on_sent = attack_the_sent(target, attacks, attempts, progress)
    summary = summarise(sent, on_sent)
    best = every.get(str(summary["strongest"]["mse_by"]))
    exposed = what_is_exposed(target, best)
    if target.exit is not None and best is not None:
        summary["per_image"] |= per_image_of_exit(target, best)
        fitted_on_all = str(summary["strongest"]["mse_by"]).removesuffix("-unsure")
        exposed["shares"] = at_shares(target, every[fitted_on_all])
    rate: float | None = None
    if isinstance(target.certify, str):
        certificates = refusals(target.certify)
    else:
        certificates, rate = target.certify(target)
    leaks: Json = {"refused": {"every": "nothing is sent"}}
    if not target.silent:
        leaks = leaks_beyond_pixels(sent, on_sent, LEAK_BUDGETS[profile])
        exposed["probe"] = server_need(target, probe_answers(target))
    if target.exit is not None:
        leaks["exit"] = exit_leaks(target)
    wire = target.wire(on_sent)
    right = right_counts(target, ACCURACY_DRAWS)
    if right is not None:
        summary["per_image"]["right"] = packed(right, "u1")
    correct = None if right is None else float(right.double().mean()) / ACCURACY_DRAWS
    flags = raise_flags(
        sent, on_sent, certificates=certificates, leaks=leaks, wire=wire, left_out=facts.left_out,
        probe=exposed.get("probe", {}), accuracy=correct,
    )  # fmt: skip
    audit: Json = {
        "profile": profile, "attacks_version": ATTACKS_VERSION, "precision": facts.precision,
        "aux": target.knowledge, "aux_images": len(target.aux),
        "scored": len(target.scored), "not_finite": list(target.sent.broken),
        "accuracy_draws": None if correct is None else ACCURACY_DRAWS, "command": command(),
    }  # fmt: skip
    if wire:
        audit["wire"] = wire
    if target.attributes is not None:
        audit["attributes"] = sorted(target.attributes.aux)
    spent = round(time.perf_counter() - facts.began, 3)
    record = Record.of(
        accuracy=correct, **summary, true_rate_nats=rate, certificates=certificates, leaks=leaks,
        flags=[asdict(flag) for flag in flags], versions=versions(),
        device=device_name(target.device), audit=audit | facts.audit,
        seconds={"train": facts.train_seconds, "audit": spent},
        **facts.fields, **exposed,
    )  # fmt: skip
    return record, gallery(target, every)
