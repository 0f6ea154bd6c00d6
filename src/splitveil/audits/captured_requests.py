"""Audit of captured requests: attacks on bytes that really left a client, tests of their noise."""

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from splitveil.attacks.profiles import find_profile
from splitveil.audits.certificates import count_copies
from splitveil.audits.noise_tests import ALPHA, NOT_THE_NOISE, Clean, channel_tests, expected
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.suite import Store
from splitveil.audits.target import Attempt, Target
from splitveil.audits.trained_run import Audited, exit_of, open_run
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.errors import AuditError, DataError, ExportError, ServerError, WireError
from splitveil.io import Json, Progress, as_run_error, parse_json, silent
from splitveil.nets.channel import deployed
from splitveil.record.schema import Record, per_image_mse
from splitveil.record.statistics import Sample, difference
from splitveil.serve.exits import sureness
from splitveil.serve.export import export_parts, stages_json
from splitveil.serve.manifest import CLIENT_INT8, LOGITS, WIRE, load_client, read_manifest
from splitveil.serve.stages import wire_step
from splitveil.serve.transport import Transport, read_capture
from splitveil.serve.wire import FLOATS, TensorSpec, decode_request
from splitveil.threat import CHUNK, Labelled

Decides = Callable[[Tensor], tuple[Tensor, Tensor]]
Costs = Float[Tensor, "m n"]

NEAR = 1e-4  # of sureness: nearer to the threshold ONNX and torch may decide otherwise
SILENT = 1e-3  # of z's size: the distance that counts where there is no noise
AGAIN = 256  # images that the client sends again after a restart
NOTHING_SENT = (
    "answers on the device and sends nothing, so there is nothing to capture; audit the run "
    "itself: splitveil audit RUN"
)
ADDRESS = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")

# All that the protocol asks for, part by part: any other field could carry the image itself.
EXPECTED = {
    "a request": {"inputs", "outputs", "parameters"},
    "its parameters": {"binary_data_output"},
    "its tensor": {"name", "shape", "datatype", "data", "parameters"},
    "its tensor's parameters": {"binary_data_size"},
    "its output": {"name", "parameters"},
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedData:
    """A capture: z̃ (n, …) in the order it was sent, facts about its bytes, and what is beside z̃."""

    z: Tensor
    facts: Json
    beside: tuple[str, ...]


def read_captured(
    file: Path, shape: Sequence[int], most: int, *, step: float | None = None
) -> CapturedData:
    """Read a capture.

    Args:
        file: The capture, one request per line.
        shape: Shape of one row of z̃.
        most: How many rows one request may hold.
        step: Step of the grid that integers count; None if the run's noise has no single one.
    """
    rows: list[Tensor] = []
    digest, size, beside, paths = hashlib.sha256(), 0, set[str](), set[str]()
    for number, sent in enumerate(read_capture(file), start=1):
        try:
            spec = sent_tensor(sent.body, sent.header_length, tuple(shape), step)
            request = decode_request(sent.body, sent.header_length, spec, LOGITS, most, twice=[])
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


def sent_tensor(
    body: bytes, header_length: str | None, shape: tuple[int, ...], step: float | None
) -> TensorSpec:
    """The tensor of a request by the datatype that it states: floats, or integers of the grid."""
    try:
        head = body if header_length is None else body[: int(header_length)]
        told = json.loads(head)["inputs"][0]["datatype"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        told = FLOATS  # what is wrong with it is said where it is decoded
    if told not in ("INT16", "INT32"):
        return TensorSpec(name=WIRE, shape=shape)
    if step is None:
        raise WireError("it holds integers, but the run's noise has no one grid that they count")
    return TensorSpec(name=WIRE, shape=shape, datatype=told, step=step)


def run_step(run: Audited) -> float | None:
    """Step of the grid that the run's exported client counts; None if it sends floats."""
    try:
        return wire_step(stages_json(export_parts(run.model, run.built.image_shape).channel))
    except ExportError:  # a stage that cannot be exported
        return None


def strange_paths(paths: Collection[str]) -> list[str]:
    """What the paths of requests could carry; a single address of the protocol carries nothing.

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
    """The fields of a request that the protocol does not ask for.

    >>> unexpected_fields(b'{"inputs": [{"name": "z", "exif": 1}], "note": ""}', None)
    ['note in a request', 'exif in its tensor']
    """
    twice: list[str] = []

    text = body if header_length is None else body[: int(header_length)]
    # Of two values with one name a JSON reader keeps the last, and nobody sees the first.
    head = parse_json(text, twice=twice)
    tensor, output = head["inputs"][0], (head.get("outputs") or [{}])[0]
    parts = (head, head.get("parameters", {}), tensor, tensor.get("parameters", {}), output)
    return [f"{name} given twice" for name in twice] + [
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
    allow_no_noise: bool = False,
    waiting: Callable[[str, float], None] = lambda problem, seconds: None,
) -> list[Path]:
    """Send images with the export's client; returns two captures in `folder`.

    The first holds all images, the second the first `AGAIN` of them after a restart of the client;
    of an early exit those that its rule sends.

    Args:
        export: Folder of the export.
        server: The server's address, or what takes its place.
        images: Images (n, c, h, w) in [0, 1].
        folder: Where the captures go; those of an earlier audit are replaced.
        token: Bearer token of the server.
        ca_file: Certificates that the server's is checked with.
        int8: Whether to use the client in eight bits.
        allow_no_noise: Whether the export may send features without noise, as the run does.
        waiting: Told of a problem and the seconds until the next try.
    """
    from splitveil.serve.client import NOT_REACHED, Client

    if read_manifest(export).silent:
        raise AuditError(f"{export} {NOTHING_SENT}")
    files = [folder / f"capture-{start}.jsonl" for start in (1, 2)]
    with (
        as_run_error(folder),
        kept_if_used(folder),
        TemporaryDirectory(dir=folder, prefix=".capture-") as scratch,
    ):
        for file, some in zip(files, (images, images[:AGAIN]), strict=True):
            with Client(
                export, server, token=token, ca_file=ca_file, int8=int8, waiting=waiting,
                allow_no_noise=allow_no_noise, capture=Path(scratch) / file.name,
            ) as client:  # fmt: skip
                where = client.answer(some.cpu().numpy()).where
            if NOT_REACHED in where:
                raise ServerError(
                    f"{server if isinstance(server, str) else 'the server'} was not reached, so "
                    "images that the exit rule sends were not sent; start it, then audit again"
                )
        for file in files:  # an earlier audit's captures are replaced when both are complete
            (Path(scratch) / file.name).replace(file)
    return files


@contextmanager
def kept_if_used(folder: Path) -> Iterator[None]:
    """Make a folder; remove it again if the block fails and leaves nothing in it."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


def int8_client(export: Path) -> tuple[Clean, Decides | None]:
    """The encoder of an export's client in eight bits, without its channel; and what it sends.

    The latter is None for a client that sends every image.
    """
    manifest = read_manifest(export)
    network = load_client(export, manifest, CLIENT_INT8)
    rule = manifest.rule_of(CLIENT_INT8)

    def clean(x: Tensor) -> Tensor:
        return torch.from_numpy(network(x.numpy())[0])

    if rule is None:
        return clean, None

    def decides(x: Tensor) -> tuple[Tensor, Tensor]:
        own = np.concatenate([network(part.cpu().numpy())[1] for part in torch.split(x, CHUNK)])
        sure = torch.from_numpy(sureness(own, rule.kind, rule.temperature))
        near = near_threshold(sure, torch.tensor(rule.thresholds)[torch.from_numpy(own).argmax(1)])
        return torch.from_numpy(rule.asks(own)), near

    return clean, decides


def audit_wire(
    run: Audited,
    captures: Sequence[Path] | Callable[[Tensor], Sequence[Path]],
    profile: str,
    *,
    aux: str = "train",
    images: Dataset | None = None,
    seed: int = 0,
    clean: Clean | None = None,
    decides: Decides | None = None,
    earlier: Record | None = None,
    store: Store | None = None,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """Attack captured requests; writes nothing but what `store` keeps.

    Args:
        run: The run whose client sent them.
        captures: One or two captures, or a function that sends the scored images and returns
            them. The first holds the scored images in their order; the second holds the first of
            them again, sent after a restart of the client.
        profile: Budget of the attacks, such as "quick".
        aux: What the attacker knows.
        images: The images that were sent; None for the run's own scored ones.
        seed: Seed of the attacks.
        clean: Gives z of images if the client's encoder is not the run's, as in eight bits.
        decides: Says of images whether that client sends them, and whether they are so near to
            its threshold that rounding may decide.
        earlier: The record of the run's own audit, to compare with.
        store: Where finished attacks are kept.
        progress: Told how far the attacks have come.

    Returns:
        The record, and the pictures of `gallery.json`.
    """
    attacks = find_profile(profile)
    if run.model.silent:
        raise AuditError(f"{run.path} {NOTHING_SENT}")
    target, facts = open_run(run, aux=aux, seed=seed, progress=progress)
    if images is not None:
        target = replace(target, scored=own_images(target, images), own_data=True)
        target = replace(target, exit=exit_of(run.model, target.scored, target.aux))
        facts.fields["splits"] |= {"scored": fingerprint(images)}
    scored = target.scored
    files = captures(scored.images) if callable(captures) else captures
    if len(files) > 2:  # noqa: PLR2004 - with more it is not clear which starts are compared
        raise AuditError(
            "give one capture, or two, of which the second was recorded after the client was "
            "started again"
        )
    shape = run.model.wire_shape(run.built.image_shape)
    step = run_step(run)
    read = [read_captured(file, shape, len(scored), step=step) for file in files]
    first, again = read[0], read[1].z if read[1:] else None
    encoder, channel = clean or run.model.encoder, run.model.channel
    rows, rule = torch.arange(len(scored)), None
    if target.exit is not None:
        rule = sent_rows(run, target, encoder, first.z, decides)
        rows = rule.rows
    elif len(first.z) != len(scored):
        raise AuditError(
            f"{first.facts['capture']} holds {len(first.z)} rows for {len(scored)} images; it must "
            "hold each image once, in order: the run's scored ones, or those that --sent names"
        )
    those = scored.images[rows.to(scored.labels.device)].cpu()
    tests = channel_tests(encoder, channel, first.z, those, again=again, seed=seed)
    reason = None
    if clean is not None:
        reason = "the 8-bit client sent this; certificates hold only for the run's own encoder"
    elif tests["failed"]:
        failed = ", ".join(tests["failed"])
        reason = f"{NOT_THE_NOISE}{failed}"
    identity = json.dumps([target.identity, first.facts["sha256"]]) if target.identity else ""

    def wire(attempts: Mapping[str, Attempt]) -> Json:
        """What the record says of the capture, from the attempts on what was sent."""
        return {
            "captures": [data.facts for data in read],
            "beside": sorted({name for data in read for name in data.beside}),
            "accuracy": float((target.sent.answer == scored.labels)[rows].double().mean()),
            **({} if rule is None else {"rule": rule.to_json()}),
            **tests,
            "offline": compare_with_audit(earlier, profile, facts, attempts),
        }

    captured, asked = first.z.to(target.device), target.exit
    if asked is not None:  # what was not sent is filled up: nobody attacks it
        captured = target.sent.z.clone()
        captured[rows] = first.z.to(captured)
        sent = torch.zeros_like(asked.asked)
        sent[rows] = True
        asked = replace(asked, asked=sent)
    target = replace(
        target, captured=captured, identity=identity, wire=wire, exit=asked,
        certify=reason or target.certify,
    )  # fmt: skip
    return measure(target, attacks, profile, facts, store=store, progress=progress)


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """The images of a capture's rows.

    Args:
        rows: For each row of the capture the place of its image among the n (m,), rising.
        allowed: How many of the images the exit rule sends.
        beyond: How many rows are surely of other images, or too many.
        images: How many images there are.
    """

    rows: Int64[Tensor, " m"]
    allowed: int
    beyond: int
    images: int

    def to_json(self) -> Json:
        """The part `rule` of what a record says of a capture."""
        return {
            "images": self.images, "allowed": self.allowed, "sent": len(self.rows),
            "not_allowed": self.beyond,
        }  # fmt: skip


@torch.no_grad()
def find_sent(
    encoder: Clean, channel: nn.Module, sent: Tensor, x: Tensor, *, asked: Tensor, allowed: Tensor
) -> SentRows:
    """Find the images of captured rows, which a client sent in the images' order.

    Args:
        encoder: From images to clean z.
        channel: What follows it on the client.
        sent: The captured rows (m, …).
        x: The images (n, c, h, w), which were classified in this order.
        asked: Which of them the exit rule sends, bool (n,).
        allowed: The same, and those so near to the threshold that rounding may decide, bool (n,).
    """
    m, n = len(sent), len(x)
    asked, allowed = asked.cpu(), allowed.cpu()
    if m > n:
        raise AuditError(
            f"the capture holds {m} rows for {n} images; it must hold each image once at most, in "
            "order: the run's scored ones, or those that --sent names"
        )
    cost = log_densities(encoder, channel, sent, x).neg()
    # A row counts as another image's only if that is surely likelier than each allowed one: under
    # a sound client the ratio of two densities exceeds c with a chance of at most 1/c.
    here = cost.masked_fill(~allowed, math.inf).amin(1)
    there = cost.masked_fill(allowed, math.inf).amin(1)
    surely = int((here - there > math.log(m * n / ALPHA)).sum())
    if m == n:
        rows = torch.arange(n)
    elif m == int(asked.sum()) and not surely:
        rows = asked.nonzero().flatten()
    else:
        rows = in_order(cost)
    beyond = max(surely, m - int(allowed.sum()), 0)
    return SentRows(rows=rows, allowed=int(asked.sum()), beyond=beyond, images=n)


def log_densities(encoder: Clean, channel: nn.Module, sent: Tensor, x: Tensor) -> Costs:
    """Log-density of each row (m,) under each image (n,), up to a constant.

    It is exact for Gaussian noise. For other channels it only ranks the images.
    """
    x = x.cpu()
    if isinstance(encoder, nn.Module):
        encoder = copy.deepcopy(encoder).cpu().eval()
    z = torch.cat([encoder(part) for part in torch.split(x, CHUNK)])
    mean, std = expected(deployed(channel).cpu().eval(), z)
    known = mean.flatten(1).double()
    size = SILENT * float(known.square().mean().sqrt()) + 1e-300
    scale = torch.as_tensor(1.0 if std is None else std, dtype=torch.float64)
    scale = scale.flatten().clamp_min(size)
    rows = sent.cpu().flatten(1).double()
    return -0.5 * torch.cdist(rows / scale, known / scale).square()


def in_order(cost: Costs) -> Int64[Tensor, " m"]:
    """The rising places (m,) of least total cost: rows and images keep their order.

    >>> in_order(torch.tensor([[1.0, 0.0, 5.0], [0.0, 9.0, 2.0]])).tolist()
    [1, 2]
    """
    m, n = cost.shape
    steps = cost.cpu().numpy()
    best = np.zeros(n + 1)  # cheapest way to place the rows so far among the first j images
    came = np.zeros((m, n), np.int32)  # where the cheapest place of row i among the first j + 1 is
    for i in range(m):
        ends = best[:-1] + steps[i]
        least = np.minimum.accumulate(ends)
        came[i] = np.maximum.accumulate(np.where(ends <= least, np.arange(n), 0))
        best = np.concatenate([[np.inf], least])
    places, j = np.zeros(m, np.int64), n
    for i in reversed(range(m)):
        j = int(came[i, j - 1])
        places[i] = j
    return torch.from_numpy(places)


def near_threshold(sure: Tensor, thresholds: Tensor) -> Bool[Tensor, " n"]:
    """Images so near to their threshold (n,) that rounding may decide whether they are sent."""
    return (sure - thresholds).abs() < NEAR


def sent_rows(
    run: Audited, target: Target, encoder: Clean, z: Tensor, decides: Decides | None
) -> SentRows:
    """The scored images that captured rows are of, by the run's exit rule or another one."""
    device, rule, x = target.exit, run.model.exit, target.scored.images
    if device is None or device.sure is None or device.own is None or rule is None:
        raise AuditError("this client has no exit rule")
    if decides is None:
        asked, near = device.asked, near_threshold(device.sure, rule.thresholds[device.own])
    else:
        asked, near = decides(x)
    return find_sent(encoder, run.model.channel, z, x, asked=asked, allowed=asked | near)


def own_images(target: Target, images: Dataset) -> Labelled:
    """The user's images as scored ones, classes matched by name; none may be the attacker's."""
    classes, shape = list(target.classes), tuple(target.scored.images.shape[1:])
    if unknown := sorted(set(images.classes) - set(classes)):
        raise DataError(
            f"--sent has classes that the run does not know: {', '.join(unknown)}; the run knows "
            f"{', '.join(classes)}"
        )
    if images.image_shape != shape:
        raise DataError(f"--sent has images of shape {images.image_shape}, the run takes {shape}")
    found = images.to(target.scored.images.device).labelled(torch.arange(len(images)))
    places = torch.tensor([classes.index(name) for name in images.classes])
    found = replace(found, labels=places.to(found.labels.device)[found.labels])
    if shared := count_copies(found.images, [target.aux.images]):
        raise DataError(
            f"{shared} images of --sent are among the attacker's; the attacker must not know the "
            "images that are scored: send others"
        )
    return found


def compare_with_audit(
    old: Record | None, profile: str, facts: Facts, attempts: Mapping[str, Attempt]
) -> Json:
    """Compare attempts on captured requests with the run's own audit, image by image."""
    splits, seeds = facts.fields["splits"], facts.fields["seeds"]
    wanted = (profile, seeds["attack"], facts.audit["model"], splits["aux"], splits["scored"])
    if old is None or wanted != (
        old.audit.profile, old.seeds.attack, old.audit.model, old.splits.aux, old.splits.scored,
    ):  # fmt: skip
        return {"refused": "the run has no audit of this model, profile, seed and images"}
    theirs, name = per_image_mse(old), old.per_image.attack
    if theirs is None or name is None or name not in attempts:
        return {"refused": "the run's audit kept no errors per image"}
    if len(theirs) != len(attempts[name].mse):
        return {"refused": "other images were sent than in the run's audit"}
    ours = attempts[name].mse.double().cpu().numpy()
    found = difference(Sample.of(ours[None]), Sample.of(theirs[None]), paired=True)
    limits = found.interval
    return {
        "attack": name, "mse": float(theirs.mean()), "difference": limits.mean,
        "difference_low": limits.low, "difference_high": limits.high, "p": found.p_value,
    }  # fmt: skip
