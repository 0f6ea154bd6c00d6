"""Auditing the wire: attacks on bytes that really left a client, and tests of their noise."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from splitveil.attacks.profiles import find_profile
from splitveil.audits.certificates import count_copies, refusals
from splitveil.audits.noise_tests import Clean, channel_tests
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.suite import Store
from splitveil.audits.target import Attempt, Target
from splitveil.audits.trained_run import Audited, open_run
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.errors import AuditError, DataError, WireError
from splitveil.io import Json, Progress, as_run_error, silent
from splitveil.record.schema import Record, per_image_mse
from splitveil.record.statistics import Sample, difference
from splitveil.serve.manifest import CLIENT_INT8, LOGITS, WIRE, load_half, read_manifest
from splitveil.serve.transport import Transport, read_capture
from splitveil.serve.wire import TensorSpec, decode_request
from splitveil.threat import Labelled

AGAIN = 256  # images that a second start of the client sends
ADDRESS = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")

EXPECTED = {
    "a request": {"inputs", "outputs", "parameters"},
    "its parameters": {"binary_data_output"},
    "its tensor": {"name", "shape", "datatype", "data", "parameters"},
    "its tensor's parameters": {"binary_data_size"},
    "its output": {"name", "parameters"},
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedData:
    """What a capture holds: z̃ (n, …) in the order it was sent, and facts about its bytes."""

    z: Tensor
    facts: Json
    beside: tuple[str, ...]


def read_captured(file: Path, shape: Sequence[int], most: int) -> CapturedData:
    """The smashed data of a capture, of at most so many rows of this shape."""
    spec = TensorSpec(name=WIRE, shape=tuple(shape))
    rows: list[Tensor] = []
    digest, size, beside, paths = hashlib.sha256(), 0, set[str](), set[str]()
    for number, sent in enumerate(read_capture(file), start=1):
        try:
            request = decode_request(sent.body, sent.header_length, spec, LOGITS, most)
        except WireError as err:
            raise WireError(f"call {number} of {file}: {err}") from err
        rows.append(torch.from_numpy(np.array(request.rows)))
        beside |= set(unexpected_fields(sent.body, sent.header_length))
        paths.add(sent.path)
        digest.update(sent.body)
        size += len(sent.body)
    if not rows:
        raise WireError(f"{file} holds no calls; nothing was sent while it was recorded")
    beside |= set(strange_paths(paths))
    z = torch.cat(rows)
    facts = {"capture": file.name, "sha256": digest.hexdigest(), "calls": len(rows)}
    facts |= {"rows": len(z), "bytes": size}
    return CapturedData(z=z, facts=facts, beside=tuple(sorted(beside)))


def strange_paths(paths: Collection[str]) -> list[str]:
    """What the paths of a client's calls could carry: one address of the protocol says nothing.

    >>> strange_paths({"/v2/models/m/infer"}), strange_paths({"/photo-3.png"})
    ([], ["a path that is not the protocol's"])
    """
    found = []
    if any("?" in path for path in paths):
        found.append("a query in the path")
    if not all(ADDRESS.fullmatch(path.partition("?")[0]) for path in paths):
        found.append("a path that is not the protocol's")
    if len(paths) > 1:
        found.append("paths that differ between calls")
    return found


def unexpected_fields(body: bytes, header_length: str | None) -> list[str]:
    """Names in a request that the protocol does not ask for: each could carry the image itself.

    >>> unexpected_fields(b'{"inputs": [{"name": "z", "exif": 1}], "note": ""}', None)
    ['note in a request', 'exif in its tensor']
    """
    twice: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> Json:
        # A reader keeps the last of two values of one name, and never sees the first.
        names = [name for name, _ in pairs]
        twice.extend(f"{n} given twice" for n in dict.fromkeys(names) if names.count(n) > 1)
        return dict(pairs)

    text = body if header_length is None else body[: int(header_length)]
    head = json.loads(text, object_pairs_hook=unique)
    tensor, output = head["inputs"][0], (head.get("outputs") or [{}])[0]
    parts = (head, head.get("parameters", {}), tensor, tensor.get("parameters", {}), output)
    return twice + [
        f"{name} in {where}"
        for (where, known), part in zip(EXPECTED.items(), parts, strict=True)
        for name in part
        if name not in known and (name, part[name]) != ("id", "")
    ]


def send_and_capture(
    export: Path,
    server: str | Transport,
    images: Tensor,
    folder: Path,
    *,
    token: str | None = None,
    ca_file: Path | None = None,
    int8: bool = False,
    waiting: Callable[[str, float], None] = lambda problem, seconds: None,
) -> list[Path]:
    """Captures in `folder` of the export's client: all images, and some by a second start of it."""
    from splitveil.serve.client import Client

    files = [folder / f"capture-{start}.jsonl" for start in (1, 2)]
    with (
        as_run_error(folder),
        kept_if_used(folder),
        TemporaryDirectory(dir=folder, prefix=".capture-") as scratch,
    ):
        for file, some in zip(files, (images, images[:AGAIN]), strict=True):
            with Client(
                export, server, token=token, ca_file=ca_file, int8=int8, waiting=waiting,
                capture=Path(scratch) / file.name,
            ) as client:  # fmt: skip
                client.infer(some.cpu().numpy())
        for file in files:  # captures of an earlier audit go when both are complete
            (Path(scratch) / file.name).replace(file)
    return files


@contextmanager
def kept_if_used(folder: Path) -> Iterator[None]:
    """A folder that is made here goes again when the block fails with nothing in it."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


def int8_encoder(export: Path) -> Clean:
    """The client in eight bits of an export, without its channel."""
    half = load_half(export, read_manifest(export), CLIENT_INT8)
    return lambda x: torch.from_numpy(half(x.numpy()))


@runtime_checkable
class AuditedBefore(Audited, Protocol):
    """A run whose own audit, if there is one, is compared with what was captured."""

    @property
    def record(self) -> Record | None:
        """What the last audit measured; None before one. A broken file raises when it is read."""
        ...


def audit_wire(
    run: AuditedBefore,
    captures: Sequence[Path] | Callable[[Tensor], Sequence[Path]],
    profile: str,
    *,
    aux: str = "train",
    images: Dataset | None = None,
    seed: int = 0,
    clean: Clean | None = None,
    store: Store | None = None,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """The record of attacks on what was captured, and the pictures; writes nothing.

    Args:
        run: The run whose client sent it.
        captures: One or two captures, or a function that sends the scored images and returns
            them. The first holds the scored images in their order; the second holds the first of
            them again, sent by another start of the client.
        profile: Name of the attacks' profile.
        aux: What the attacker knows.
        images: Those that were sent, in place of the run's own scored ones.
        seed: Seed of the attacks.
        clean: Gives z of images if the client's encoder is not the run's own, as in eight bits.
        store: Where finished attacks are kept.
        progress: Told how far the attacks have come.
    """
    attacks = find_profile(profile)
    target, facts = open_run(run, aux=aux, seed=seed, progress=progress)
    if images is not None:
        scored = own_images(target, images)
        target = replace(target, scored=scored, own_data=True)
        hashes = facts.fields["splits"] | {"scored": fingerprint(images)}
        facts = replace(facts, fields=facts.fields | {"splits": hashes})
    files = captures(target.scored.images) if callable(captures) else captures
    shape = run.model.wire_shape(run.built.image_shape)
    first, *others = (read_captured(file, shape, len(target.scored)) for file in files)
    check_rows(first, others, len(target.scored))
    tests = channel_tests(
        clean or run.model.encoder, run.model.channel, first.z, target.scored.images.cpu(),
        again=others[0].z if others else None, seed=seed,
    )  # fmt: skip
    identity = json.dumps([target.identity, first.facts["sha256"]]) if target.identity else ""
    target = replace(target, captured=first.z.to(target.device), identity=identity)
    told = {
        "captures": [data.facts for data in (first, *others)],
        "beside": sorted({name for data in (first, *others) for name in data.beside}),
        "accuracy": float((target.sent.answer == target.scored.labels).double().mean()),
        **tests,
    }
    earlier = run.record

    def wire(attempts: Mapping[str, Attempt]) -> Json:
        return told | {"offline": compare_with_audit(earlier, profile, facts, attempts)}

    target = replace(target, wire=wire)
    if reason := _not_the_runs(tests["failed"], eight_bits=clean is not None):
        target = replace(target, certify=lambda target: (refusals(reason), None))
    return measure(target, attacks, profile, facts, store=store, progress=progress)


def _not_the_runs(failed: Sequence[str], *, eight_bits: bool) -> str | None:
    """Why no certificate of the run holds for what was captured; None if one may."""
    if eight_bits:
        return "what was sent is not of the run's encoder but of its copy in eight bits"
    told = "what was sent is not the encoder's z and the channel's noise; tests that fail: "
    return told + ", ".join(failed) if failed else None


def own_images(target: Target, images: Dataset) -> Labelled:
    """The auditor's images in place of the scored ones; refuses those the attacker knows."""
    classes, shape = list(target.classes), tuple(target.scored.images.shape[1:])
    if unknown := sorted(set(images.classes) - set(classes)):
        raise DataError(
            f"--sent has classes that the run has not: {', '.join(unknown)}; the run has "
            f"{', '.join(classes)}"
        )
    if images.image_shape != shape:
        raise DataError(f"--sent has images of shape {images.image_shape}, the run takes {shape}")
    found = images.to(target.scored.images.device).labelled(torch.arange(len(images)))
    places = torch.tensor([classes.index(name) for name in images.classes])
    found = replace(found, labels=places.to(found.labels.device)[found.labels])
    if shared := count_copies(found.images, [target.aux.images]):
        raise DataError(
            f"{shared} images of --sent are among the attacker's own; he may not know the images "
            "that are scored: send others"
        )
    return found


def check_rows(first: CapturedData, others: Sequence[CapturedData], images: int) -> None:
    """Refuse captures whose rows cannot be told which image they are of."""
    if len(others) > 1:
        raise AuditError("give one capture, and at most one of another start of the client")
    if len(first.z) != images:
        raise AuditError(
            f"{first.facts['capture']} holds {len(first.z)} rows for {images} images; it must hold "
            "each image once, in order: the run's scored ones, or those that --sent names"
        )


def compare_with_audit(
    old: Record | None, profile: str, facts: Facts, attempts: Mapping[str, Attempt]
) -> Json:
    """Compares attempts on captured requests with the run's own audit, image by image."""
    splits, seeds = facts.fields["splits"], facts.fields["seeds"]
    wanted = (profile, seeds["attack"], facts.audit["model"], splits["aux"], splits["scored"])
    if old is None or wanted != (
        old.audit.profile, old.seeds.attack, old.audit.model, old.splits.aux, old.splits.scored,
    ):  # fmt: skip
        return {"refused": "the run has no audit of this model, profile, seed and images"}
    theirs, name = per_image_mse(old), old.per_image.attack
    if theirs is None or name is None or name not in attempts:
        return {"refused": "the run's audit kept no errors of single images"}
    ours = attempts[name].mse.double().cpu().numpy()
    found = difference(Sample.of(ours[None]), Sample.of(theirs[None]), paired=True)
    return {
        "attack": name,
        "mse": float(theirs.mean()),
        "difference": found.interval.mean,
        "difference_low": found.interval.low,
        "difference_high": found.interval.high,
        "p": found.p_value,
    }
