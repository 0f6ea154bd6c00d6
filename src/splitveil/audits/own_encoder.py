"""Audit of a user's encoder: a function or module, and images in; a record out."""

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.profiles import find_profile
from splitveil.audits.certificates import certified_client, certify, count_copies, refusals
from splitveil.audits.noise_tests import (
    LISTENED,
    channel_tests,
    check_noise,
    measure_noise,
    sent_rate,
)
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.target import Target, finite
from splitveil.config.resolve import import_user_code, unchanged
from splitveil.data.attributes import Attributes, attributes_of, read_table
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.data.folder import file_names
from splitveil.data.splits import aux_view, hash_all, make_splits
from splitveil.errors import AuditError, ConfigError, DataError, unknown
from splitveil.io import Json, Progress, silent
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.cost import Cost
from splitveil.record.schema import Record
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.threat import Access, Attack, Labelled, Send, Victim, by_rows, check_images

Function = Callable[..., Any]
Given = Literal["auto", "numpy", "torch"]
Shape = tuple[int, ...]
NUMPY = "numpy"
ATTACKED = (1, 3)  # axes of one image's smashed data that attacks take: vectors and maps
SERVER_SEED = 0
PROBED = 2
MET = 16  # images that are encoded alone
SAME = 1e-3  # deviations of the noise: less is rounding
UNKNOWN = "no images are known to be training data; name them with --members"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnEncoder:
    """What is audited: `client` gives what leaves the device, `server` answers it.

    `noise_std` is the declared standard deviation of Gaussian noise that the client adds last.
    With `white_box` the attacker also has the client's networks: the module itself, or `encoder`
    and `channel` of the object.
    """

    client: object
    name: str
    server: object | None = None
    server_name: str | None = None
    noise_std: float | None = None
    white_box: bool = False
    given: Given = "auto"

    def __post_init__(self) -> None:
        if self.noise_std is not None and not 0 < self.noise_std < math.inf:
            raise ConfigError(
                f"noise must be a finite number > 0, got {self.noise_std}; leave it out if the "
                "client adds none, or if you do not know it"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditImages:
    """The images of an audit: what the attacker fits on, what is scored, and `test` for accuracy.

    `knowledge` names the attacker's knowledge and `hashes` identify the images in a record.
    `members` are all images that the client was trained or chosen on, where they are known.
    """

    name: str
    classes: tuple[str, ...]
    aux: Labelled
    scored: Labelled
    test: Labelled
    knowledge: str
    hashes: Json
    members: Labelled | None = None
    attributes: Attributes | None = None


def find_encoder(
    name: str, server: str | None, noise: float | None, given: str, *, white_box: bool
) -> OwnEncoder:
    """The callables that are named, as what is to be audited."""
    if given not in get_args(Given):
        raise ConfigError(unknown("input", given, get_args(Given)))
    return OwnEncoder(
        client=import_user_code(name, "what is audited"),
        name=name,
        server=None if server is None else import_user_code(server, "--server"),
        server_name=server,
        noise_std=noise,
        white_box=white_box,
        given=given,  # type: ignore[arg-type]  # one of them, as was checked
    )


def read_images(
    data: str | None,
    aux_data: str | None,
    test_data: str | None,
    aux: str,
    *,
    members: str | None = None,
    attributes: Path | None = None,
) -> AuditImages:
    """The images of an audit, with those known to be training data and a table of attributes."""
    if data is not None and aux_data is None and test_data is None:
        found = _one_set(data, aux, attributes)
    elif data is None and aux_data is not None and test_data is not None:
        found = _two_sets(load(aux_data), load(test_data), test_data, attributes)
    else:
        raise ConfigError(
            "give --data, whose training part the attacker knows and whose test part is scored, "
            "or both --aux-data and --test-data: folder:PATH, npz:PATH or a dataset's name"
        )
    if members is None:
        return found
    trained = load(members)
    known = trained.labelled(torch.arange(len(trained)))
    _check_agree("--members", trained, "--data or --test-data", found.classes, found.test)
    if count := count_copies(found.test.images, [known.images]):
        raise DataError(
            f"{count} images of --members are among those that are scored; a client is not "
            "scored on what it was trained on: divide the images yourself"
        )
    return replace(found, members=known, hashes=found.hashes | {"members": fingerprint(trained)})


def _one_set(data: str, aux: str, attributes: Path | None) -> AuditImages:
    """One dataset divided into its parts."""
    if aux not in ("train", "test90"):
        raise ConfigError(
            f"--aux must be train or test90 for a callable, got '{aux}'; for an attacker with "
            "images of his own give --aux-data and --test-data"
        )
    dataset = load(data)
    splits = make_splits(dataset, final=True)
    view = aux_view(dataset, splits, aux)
    table = None
    if attributes is not None:
        rows = read_table(attributes, len(dataset), file_names(data))
        table = attributes_of(attributes, rows, view.aux, view.scored)
    return AuditImages(
        name=data,
        classes=dataset.classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        test=dataset.labelled(splits.test),
        knowledge=aux,
        hashes=splits.hashes() | view.hashes() | {"data": fingerprint(dataset)},
        attributes=table,
    )


def _two_sets(known: Dataset, scored: Dataset, name: str, attributes: Path | None) -> AuditImages:
    """Every image of the first for the attacker, every image of the second to score."""
    aux_rows, rows = torch.arange(len(known)), torch.arange(len(scored))
    aux, test = known.labelled(aux_rows), scored.labelled(rows)
    _check_agree("--aux-data", known, "--test-data", scored.classes, test)
    if count := count_copies(test.images, [aux.images]):
        raise DataError(
            f"{count} images of --test-data are in --aux-data too; the attacker may not know "
            "the images that are scored"
        )
    table = None
    if attributes is not None:  # the rows of the attacker's images, then those of the others
        lines = read_table(attributes, len(known) + len(scored))
        table = attributes_of(attributes, lines, aux_rows, len(known) + rows)
    hashes = hash_all({"aux": aux_rows, "scored": rows, "test": rows})
    return AuditImages(
        name=name,
        classes=scored.classes,
        aux=aux,
        scored=test,
        test=test,
        knowledge="aux-data",
        hashes=hashes | {"data": fingerprint(scored), "aux_data": fingerprint(known)},
        attributes=table,
    )


def _check_agree(
    one: str, dataset: Dataset, other: str, classes: tuple[str, ...], images: Labelled
) -> None:
    """Refuse two sets of images of other classes or shapes."""
    ours, theirs = (dataset.classes, dataset.image_shape), (classes, images.images.shape[1:])
    for what, here, there in zip(("classes", "images of shape"), ours, theirs, strict=True):
        if here != tuple(there):
            raise DataError(f"{one} has {what} {here}, {other} {tuple(there)}; they must agree")


class CallError(AuditError):
    """The user's function raised an exception of its own, `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"'{name}' failed: {reason}")
        self.reason = reason


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global streams of torch, numpy and `random` inside; restore them after.

    >>> with seeded(3):
    ...     first = (random.random(), np.random.rand(), torch.rand(()))
    >>> with seeded(3):
    ...     first == (random.random(), np.random.rand(), torch.rand(()))
    True
    """
    numpy_state, plain_state = np.random.get_state(), random.getstate()
    try:
        with seeded_globals(seed, "cuda" if torch.cuda.is_available() else "cpu"):
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(plain_state)


def draw_seed(generator: Generator) -> int:
    """A seed for a stream that is not ours."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class UserFunction(nn.Module):
    """Somebody else's function: rows (n, …) in, float32 rows on the CPU out.

    It gets copies of its input, in rows of shape `takes` where that is given, as arrays where
    `place` is "numpy" and else as tensors on that device. An `nn.Module` is copied and put into
    eval mode. Its randomness comes from `generator`: passed on if it takes an argument of that name
    (to one that gets arrays as a NumPy generator), else by seeding the global streams around the
    call. The first answer fixes the shape of a row; rows that are neither vectors nor maps
    (c, h, w) are flattened.
    """

    def __init__(
        self, function: Function, name: str, place: str, takes: Shape | None = None
    ) -> None:
        super().__init__()
        self.net = own_copy(function, name) if isinstance(function, nn.Module) else None
        # Copies share what a lambda holds, which need not be copyable.
        self._held: Callable[[], Function] = lambda: function
        self.name, self.place, self.takes = name, place, takes
        self.takes_generator = takes_generator(function)
        self.shape: Shape | None = None

    def forward(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """What the function says of x, checked."""
        if self.takes is not None:
            x = x.reshape(len(x), *self.takes)
        rows = as_rows(self._call(x, generator), len(x), self.name)
        shape = tuple(rows.shape[1:])
        if self.shape is None:
            self.shape = shape
        if shape != self.shape:
            raise AuditError(
                f"'{self.name}' changed its output shape: {shape} per image, before it was "
                f"{self.shape}; a client sends one shape per image"
            )
        return in_rows(rows)

    def _call(self, x: Tensor, generator: Generator | None) -> Any:  # noqa: ANN401 - the user's
        arrays = self.place == NUMPY
        given = x.detach().cpu().numpy().copy() if arrays else x.detach().clone().to(self.place)
        function = self._held() if self.net is None else self.net
        try:
            with unchanged():
                if generator is None:
                    return function(given)
                if self.takes_generator:
                    return function(given, generator=self._theirs(generator))
                with seeded(draw_seed(generator)):
                    return function(given)
        except (Exception, SystemExit) as err:  # a user's function may raise anything
            where = f"for {len(x)} inputs of shape {tuple(x.shape[1:])}"
            raise CallError(self.name, f"{type(err).__name__}: {err} ({where})") from err

    def _theirs(self, generator: Generator) -> object:
        """Our stream in the form the function can use."""
        if self.place == NUMPY:
            return np.random.default_rng(draw_seed(generator))
        device = torch.device(self.place)
        if device.type == generator.device.type:
            return generator
        return Generator(device=device).manual_seed(draw_seed(generator))


def own_copy(module: nn.Module, name: str) -> nn.Module:
    """A frozen copy of a user's module, in eval mode."""
    try:
        return copy.deepcopy(module).eval().requires_grad_(requires_grad=False)
    except Exception as err:  # tensors with a history, open files, whatever it holds
        raise CallError(name, f"{type(err).__name__}: {err} (while it was copied)") from err


def in_rows(z: Tensor) -> Tensor:
    """Smashed data in a form that attacks take: vectors and maps as they are, the rest flat.

    >>> in_rows(torch.zeros(2, 3, 4)).shape, in_rows(torch.zeros(2)).shape
    (torch.Size([2, 12]), torch.Size([2, 1]))
    """
    return z if z.ndim - 1 in ATTACKED else z.reshape(len(z), -1)


class InRows(nn.Module):
    """`in_rows` as a layer."""

    def forward(self, z: Tensor) -> Tensor:
        """The same numbers."""
        return in_rows(z)


def takes_generator(function: Function) -> bool:
    """Whether a function has an argument called `generator`.

    >>> takes_generator(lambda x, generator=None: x), takes_generator(lambda x: x)
    (True, False)
    """
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return "generator" in inspect.signature(called).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False


def as_rows(answer: Any, n: int, name: str) -> Tensor:  # noqa: ANN401 - a user's answer
    """An answer of any numeric kind as a fresh float32 tensor (n, …) on the CPU, or an error.

    >>> as_rows([[1, 2], [3, 4]], 2, "f")
    tensor([[1., 2.],
            [3., 4.]])
    """
    if isinstance(answer, Tensor):
        if answer.is_complex() or answer.is_quantized or answer.layout is not torch.strided:
            raise _wrong(name, f"a {answer.dtype} tensor of layout {answer.layout}")
        rows = answer.detach().to("cpu", torch.float32, copy=True)
    else:
        if answer is None or isinstance(answer, tuple | dict | str | bytes):
            raise _wrong(name, f"a {type(answer).__name__}")
        try:
            array = np.asarray(answer)
        except Exception as err:  # ragged lists, and whatever __array__ raises
            raise _wrong(name, f"a {type(answer).__name__} that is no array ({err})") from err
        if array.dtype.kind not in "fiub":
            raise _wrong(name, f"a {type(answer).__name__} of {array.dtype}")
        rows = torch.from_numpy(np.array(array, dtype=np.float64)).float()
    if rows.ndim == 0 or len(rows) != n or rows.numel() == 0:
        raise AuditError(
            f"'{name}' returned shape {tuple(rows.shape)} for {n} inputs; the first axis must be "
            f"theirs, ({n}, …), and no other may be empty"
        )
    return rows


def _wrong(name: str, got: str) -> AuditError:
    return AuditError(f"'{name}' must return one array or tensor of real numbers, got {got}")


def wrap(  # noqa: PLR0917 - the function and how it is tried
    function: object, name: str, given: Given, x: Tensor, seed: int, takes: Shape | None = None
) -> UserFunction:
    """The function as a module, after calls with x and its first row that tell what it takes.

    "auto" tries arrays, then tensors; an `nn.Module` gets tensors where its parameters lie.
    """
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(
            f"'{name}' must be a function or another object to call with images, got a {kind}"
        )
    failures = {}
    for place in places(function, given):
        wrapped = UserFunction(function, name, place, takes)
        try:
            for some in (x, x[:1]):
                wrapped(some, stream(seed, "foreign/meet"))
        except CallError as err:
            failures[f"{NUMPY} arrays" if place == NUMPY else f"tensors on {place}"] = err.reason
            continue
        return wrapped
    raise CallError(name, "; ".join(f"given {what}, {said}" for what, said in failures.items()))


def places(function: Function, given: Given) -> list[str]:
    """What to try to call a function with, in order."""
    if isinstance(function, nn.Module):
        first = next(function.parameters(), None)
        return ["cpu" if first is None else str(first.device)]
    tensors = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {"numpy": [NUMPY], "torch": tensors, "auto": [NUMPY, *tensors]}[given]


class Server(nn.Module):
    """A user's server: smashed data as the client sent it in, scores of the classes out.

    It may answer scores (n, classes) or class ids (n,); if it draws, then always the same. It gets
    0 for what is not finite.
    """

    def __init__(self, function: UserFunction, num_classes: int) -> None:
        super().__init__()
        self.function, self.num_classes = function, num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Scores (n, classes)."""
        name, kinds = self.function.name, self.num_classes
        said: Tensor = self.function(finite(z), Generator().manual_seed(SERVER_SEED))
        if said.shape[1:] == (kinds,):
            if bool(said.isnan().any()):
                raise AuditError(
                    f"'{name}' answered with NaN as a score; mend it, or leave --server out"
                )
            return said
        ids = said.flatten()
        whole = (ids == ids.round()) & (ids >= 0) & (ids < kinds)
        if said.shape[1:] != (1,) or not bool(whole.all()):
            value = f" as {float(ids[~whole][0]):.4g}" if said.shape[1:] == (1,) else ""
            raise AuditError(
                f"'{name}' must return scores (n, {kinds}) or class ids (n,) in 0..{kinds - 1}, "
                f"got {self.function.shape} per image{value}"
            )
        return nn.functional.one_hot(ids.long(), kinds).float()


class UserVictim(Victim):
    """A user's client whose networks are known; queries still go to the function itself."""

    def __init__(self, sender: UserFunction, encoder: nn.Module, channel: nn.Module) -> None:
        super().__init__(encoder, channel)
        self._sender = sender

    @torch.no_grad()
    def send(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """What leaves the client for images x (n, c, h, w) in [0, 1]."""
        check_images(x, "images given to the victim")
        sent: Tensor = self._sender(x, generator)
        return sent

    def prepare(self, images: Tensor) -> Send:
        """Every query goes to the function."""
        return by_rows(self.send, images)


def open_parts(own: OwnEncoder, sender: UserFunction, x: Tensor) -> tuple[nn.Sequential, nn.Module]:
    """Encoder and channel of a client that can be opened; refuses one that cannot.

    Without a `channel` of its own, what follows an object's `encoder` is the declared noise.
    """
    inner = getattr(own.client, "encoder", None)
    whole = isinstance(own.client, nn.Module) and not isinstance(inner, nn.Module)
    found = own.client if whole else inner
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"a white-box audit needs an nn.Module, or an object whose `encoder` is one; "
            f"'{own.name}' is a {type(own.client).__name__}: leave --white-box out"
        )
    encoder = own_copy(found, own.name).cpu()
    noise = [GaussianNoise(own.noise_std)] if own.noise_std and not whole else []
    channel: nn.Module = Channel(noise)  # of a whole module the noise, if any, is inside
    theirs = None if whole else getattr(own.client, "channel", None)
    probe = UserFunction(encoder, f"{own.name}.encoder", "cpu")  # says clearly what goes wrong
    z = probe(x)
    if callable(theirs):
        channel = UserFunction(theirs, f"{own.name}.channel", "cpu", probe.shape)
    made = channel(z, stream(0, "foreign/open")).shape
    wire = sender(x, stream(0, "foreign/open")).shape
    if not z.shape == made == wire:
        raise AuditError(
            f"of '{own.name}' the encoder gives {tuple(z.shape[1:])} per image, the channel "
            f"{tuple(made[1:])}, and {tuple(wire[1:])} is sent; in a white-box audit all three "
            "must have one shape"
        )
    return nn.Sequential(encoder, InRows()), channel


def runnable(own: OwnEncoder, attacks: Mapping[str, Attack]) -> tuple[dict[str, Attack], Json]:
    """The attacks that can be run on the client, and why the others are left out."""
    left_out: Json = {}
    for name, attack in attacks.items():
        if attack.access == Access.WHITE_BOX and not own.white_box:
            left_out[name] = "white-box: the client's networks are not given"
        elif attack.access == Access.LABEL and own.server is None:
            left_out[name] = "needs the server's answers, and no server is given"
    return {n: a for n, a in attacks.items() if n not in left_out}, left_out


def audit_encoder(
    own: OwnEncoder,
    images: AuditImages,
    profile: str,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing.

    Attacks run on the CPU, wherever the callable does its work. What the record cannot know, as
    the training or the client's multiply-adds, is null.
    """
    with seeded(derive_seed(seed, "foreign")):  # for what draws outside of a sending
        began = time.perf_counter()
        attacks, left_out = runnable(own, find_profile(profile))
        few = images.scored.images[:PROBED]
        sender = wrap(own.client, own.name, own.given, few, seed)
        parts = open_parts(own, sender, few) if own.white_box else None
        encoder = None if parts is None else parts[0]
        victim = Victim(nn.Identity(), sender) if parts is None else UserVictim(sender, *parts)
        noise, repeatable = measure_noise(victim, images.scored.images[:LISTENED], seed)
        target = Target(
            victim=victim,
            head=_head(own, sender, few, len(images.classes), seed),
            classes=images.classes,
            aux=images.aux,
            scored=images.scored,
            seed=seed,
            knowledge=images.knowledge,
            test=images.test,
            members=UNKNOWN if images.members is None else images.members,
            outsiders=images.test,
            certify=lambda target: (
                _certificates(target, own, images, encoder, noise),
                _rate(target, own),
            ),
            attributes=images.attributes,
            own_data=":" in images.name,
        )
        floats = target.sent.z[0].numel()
        if own.noise_std is not None:
            check_noise(own.noise_std, noise, min(LISTENED, len(target.scored)) * floats)
        cost = {} if encoder is None else vars(Cost.of(encoder, tuple(few.shape[1:])))
        facts = Facts(
            began=began,
            train_seconds=None,
            audit={
                "threat": "white-box" if own.white_box else "black-box",
                "left_out": left_out,
                "noise": {"declared": own.noise_std, "measured": noise},
                "input": sender.place,
                "repeatable": repeatable,
                "final": None,
                "model": None,
            },
            fields={
                "client": {key: cost.get(key) for key in ("macs", "params")}
                | {"wire_floats": floats},
                "config": {
                    "dataset": images.name,
                    "callable": own.name,
                    "server": own.server_name,
                    "noise_std": own.noise_std,
                    "defence": None,
                    "net": None,
                    "seed": None,
                },
                "splits": images.hashes,
                "seeds": {"train": None, "attack": seed, "split": None},
            },
        )
        return measure(target, attacks, profile, facts, progress=progress)


def _head(
    own: OwnEncoder, sender: UserFunction, x: Tensor, classes: int, seed: int
) -> nn.Module | None:
    if own.server is None:
        return None
    name = own.server_name or f"{own.name}'s server"
    z = finite(sender(x, stream(seed, "foreign/server")))
    return Server(wrap(own.server, name, "auto", z, seed, sender.shape), classes)


def _rate(target: Target, own: OwnEncoder) -> float | None:
    """The rate by what is sent alone; None where the noise is not declared, or z̃ not finite."""
    if own.noise_std is None or target.sent.broken:
        return None
    return sent_rate(target.victim, target.scored, target.num_classes, own.noise_std, target.seed)


def _certificates(
    target: Target,
    own: OwnEncoder,
    images: AuditImages,
    encoder: nn.Sequential | None,
    measured: float,
) -> Json:
    """The certificates of a client whose networks are given, or why there are none.

    What was sent must be the encoder's z and the declared noise, as far as tests can tell.
    """
    if measured == 0:
        return refusals("the channel is deterministic")
    if own.noise_std is None:
        return refusals("noise of unknown scale; declare it with --noise SIGMA")
    if encoder is None:
        return refusals(
            "what a callable computes before its noise is not known for certain; show its "
            "networks with --white-box"
        )
    noise, x = Channel([GaussianNoise(own.noise_std)]), target.scored.images[:LISTENED]
    failed = channel_tests(encoder, noise, target.sent.z[: len(x)], x, seed=target.seed)["failed"]
    if failed:
        return refusals(
            "what is sent is not the encoder's z and the declared noise; tests that fail: "
            f"{', '.join(failed)}"
        )
    if _mixes(encoder, x, own.noise_std):
        return refusals("z of an image depends on the other images of its batch")
    return certify(
        # Behind the flattening no bounds are found.
        certified_client(encoder[0], noise, target.device),
        target.scored,
        images.aux,
        images.test,
        None if images.members is None else [images.members],
        num_classes=target.num_classes,
        generator=stream(target.seed, "certificates", target.device),
    )


@torch.no_grad()
def _mixes(encoder: nn.Module, x: Tensor, noise_std: float) -> bool:
    """Whether an image alone is encoded otherwise than among others, beyond rounding."""
    among, alone = encoder(x), torch.cat([encoder(one[None]) for one in x[:MET]])
    return bool((among[:MET] - alone).abs().max() > SAME * noise_std)
