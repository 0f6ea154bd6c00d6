"""Audit of a user's own encoder: a function or a module, and images in; a record out."""

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.base import draw_seed
from splitveil.attacks.profiles import find_profile
from splitveil.audits.certificates import certify_networks, count_copies, refusals
from splitveil.audits.noise_tests import (
    LISTENED,
    NOT_THE_NOISE,
    channel_tests,
    check_noise,
    measure_noise,
    sent_rate,
)
from splitveil.audits.pipeline import Facts, measure
from splitveil.audits.target import DeviceAnswers, Target, answer, read_attributes
from splitveil.config.machine import find_precision
from splitveil.config.resolve import import_user_code, unchanged
from splitveil.data.catalogue import load
from splitveil.data.dataset import Attributes, Dataset, fingerprint
from splitveil.data.folder import file_names
from splitveil.data.splits import aux_view, hash_all, make_splits
from splitveil.errors import AuditError, ConfigError, DataError, unknown
from splitveil.io import Json, Progress, silent
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import count_network
from splitveil.record.schema import Record
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.threat import (
    CHUNK,
    Access,
    Labelled,
    Send,
    Victim,
    by_rows,
    check_images,
    without_nan,
)

Function = Callable[..., Any]
DeviceReports = Callable[[Tensor, Generator], tuple[Tensor, Tensor]]
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
    """What is audited: `client` computes what leaves the device, `server` answers it.

    Args:
        client: A function or module that takes images (n, c, h, w) in [0, 1].
        name: What messages and the record call it.
        server: Takes what the client sent, and returns scores (n, classes) or class ids (n,).
        server_name: What messages and the record call the server.
        noise_std: Standard deviation of the Gaussian noise that the client adds last, > 0; None
            if it adds none or if it is not known.
        white_box: Whether the attacker also has the client's networks: the module itself, or
            `encoder` and `channel` of the object.
        given: What the client takes: "numpy" arrays, "torch" tensors, or "auto" to try both.
        asks: Says for images (n, c, h, w) whether each is sent, (n,) booleans or 0 and 1; None if
            all are.
        asks_name: What messages and the record call it.
        device: Answers images on the device, as the server answers what is sent; None if it is not
            known.
        device_name: What messages and the record call it.
    """

    client: object
    name: str
    server: object | None = None
    server_name: str | None = None
    noise_std: float | None = None
    white_box: bool = False
    given: Given = "auto"
    asks: object | None = None
    asks_name: str | None = None
    device: object | None = None
    device_name: str | None = None

    def __post_init__(self) -> None:
        if self.device is not None and self.asks is None:
            raise ConfigError(
                "the device's own answers are for a client that does not send every image; say "
                "which are sent with --asks, or leave --own out"
            )
        if self.noise_std is not None and not 0 < self.noise_std < math.inf:
            raise ConfigError(
                f"noise must be a finite number > 0, got {self.noise_std}; leave it out if the "
                "client adds none, or if you do not know it"
            )

    @property
    def declared(self) -> Channel:
        """The declared noise as a channel, without stages if none is declared."""
        return Channel([] if self.noise_std is None else [GaussianNoise(self.noise_std)])


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditImages:
    """The images of an audit.

    Args:
        name: The dataset's name, as the record has it.
        classes: Names of the classes.
        aux: Images the attacker fits on.
        scored: Images that are attacked.
        test: Images on which the accuracy is measured.
        knowledge: Name of what the attacker knows, such as "train".
        hashes: Identify the images in the record.
        members: All images that the client was trained or chosen on; None if they are not known.
        attributes: Attributes of the images, from a table.
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
    name: str,
    server: str | None,
    noise: float | None,
    given: str,
    *,
    white_box: bool,
    asks: str | None = None,
    device: str | None = None,
) -> OwnEncoder:
    """Import the named functions; each is MODULE:FUNCTION."""
    if given not in get_args(Given):
        raise ConfigError(unknown("input", given, get_args(Given)))
    client = import_user_code(name, "what is audited")
    others = {"--server": server, "--asks": asks, "--own": device}
    answers, rule, own = (
        None if place is None else import_user_code(place, option)
        for option, place in others.items()
    )
    return OwnEncoder(
        client=client, name=name, server=answers, server_name=server, noise_std=noise,
        white_box=white_box, given=given,  # type: ignore[arg-type]  # checked above
        asks=rule, asks_name=asks, device=own, device_name=device,
    )  # fmt: skip


def read_images(
    data: str | None,
    aux_data: str | None,
    test_data: str | None,
    aux: str,
    *,
    members: str | None = None,
    attributes: Path | None = None,
) -> AuditImages:
    """Load the images of an audit.

    Args:
        data: One dataset, which is divided into what the attacker knows and what is scored.
        aux_data: In place of `data`, the attacker's images, and
        test_data: the images that are scored.
        aux: What the attacker knows of `data`: "train" or "test90".
        members: A dataset of all images that the client was trained or chosen on.
        attributes: A CSV table of attributes of the images.
    """
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
            f"{count} images of --members are among those that are scored; a client must not be "
            "scored on what it was trained on: split the images yourself"
        )
    return replace(found, members=known, hashes=found.hashes | {"members": fingerprint(trained)})


def _one_set(data: str, aux: str, attributes: Path | None) -> AuditImages:
    """One dataset divided into its parts."""
    if aux not in ("train", "test90"):
        raise ConfigError(
            f"--aux must be train or test90 for a callable, got '{aux}'; if the attacker has "
            "other images, give --aux-data and --test-data"
        )
    dataset = load(data)
    splits = make_splits(dataset, final=True)
    view = aux_view(dataset, splits, aux)
    rows = (view.aux, view.scored, splits.test)
    known, scored, test = (dataset.labelled(some) for some in rows)
    return AuditImages(
        name=data, classes=dataset.classes, aux=known, scored=scored, test=test, knowledge=aux,
        hashes=splits.hashes() | view.hashes() | {"data": fingerprint(dataset)},
        attributes=read_attributes(attributes, len(dataset), *rows[:2], lambda: file_names(data))
        or dataset.own_attributes(*rows[:2]),
    )  # fmt: skip


def _two_sets(known: Dataset, scored: Dataset, name: str, attributes: Path | None) -> AuditImages:
    """Every image of the first for the attacker, every image of the second to score."""
    aux_rows, rows = torch.arange(len(known)), torch.arange(len(scored))
    aux, test = known.labelled(aux_rows), scored.labelled(rows)
    _check_agree("--aux-data", known, "--test-data", scored.classes, test)
    if count := count_copies(test.images, [aux.images]):
        raise DataError(
            f"{count} images of --test-data are in --aux-data too; the attacker must not know "
            "the images that are scored"
        )
    hashes = hash_all({"aux": aux_rows, "scored": rows, "test": rows})
    hashes |= {"data": fingerprint(scored), "aux_data": fingerprint(known)}
    # The table has the rows of the attacker's images first, then those of the scored ones.
    places = (aux_rows, len(known) + rows)
    return AuditImages(
        name=name, classes=scored.classes, aux=aux, scored=test, test=test, knowledge="aux-data",
        hashes=hashes,
        attributes=read_attributes(attributes, len(known) + len(scored), *places),
    )  # fmt: skip


def _check_agree(
    one: str, dataset: Dataset, other: str, classes: tuple[str, ...], images: Labelled
) -> None:
    """Refuse two sets of images of other classes or shapes."""
    ours, theirs = (dataset.classes, dataset.image_shape), (classes, images.images.shape[1:])
    for what, here, there in zip(("classes", "images of shape"), ours, theirs, strict=True):
        if here != tuple(there):
            raise DataError(f"{one} has {what} {here}, {other} {tuple(there)}; they must agree")


class CallError(AuditError):
    """The user's function raised an exception; `reason` says which."""

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


class UserFunction(nn.Module):
    """A user's function as a module: rows (n, …) in, float32 rows on the CPU out.

    The function gets a copy of its input. An `nn.Module` is copied too, and put into eval mode.
    If the function has an argument called `generator`, it gets our stream, as a NumPy generator
    where it takes arrays; otherwise the global streams are seeded around the call. Its first
    answer fixes the shape of a row. Rows that are neither vectors nor maps (c, h, w) are flattened.

    Args:
        function: What is called.
        name: What messages call it.
        place: "numpy" to call it with arrays, or the device of the tensors it takes.
        takes: The shape of one row of its input; None leaves the input as it is.
    """

    def __init__(
        self, function: Function, name: str, place: str, takes: Shape | None = None
    ) -> None:
        super().__init__()
        self.net = own_copy(function, name) if isinstance(function, nn.Module) else None
        # A deep copy of this module shares what the lambda holds, which need not be copyable.
        self._held: Callable[[], Function] = lambda: function
        self.name, self.place, self.takes = name, place, takes
        self.takes_generator = takes_generator(function)
        self.shape: Shape | None = None

    def forward(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """The function's answer for x, checked."""
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
    """Smashed data in a form that attacks take: vectors and maps as they are, all else flattened.

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
    """The function as a module; it is called with x and with one row of x, to see what it takes.

    "auto" tries arrays, then tensors; an `nn.Module` gets tensors on the device of its parameters.
    """
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(
            f"'{name}' must be a function or another object to call with images, got a {kind}"
        )
    failures = []
    for place in places(function, given):
        wrapped = UserFunction(function, name, place, takes)
        try:
            for some in (x, x[:1]):
                wrapped(some, stream(seed, "foreign/meet"))
        except CallError as err:
            what = f"{NUMPY} arrays" if place == NUMPY else f"tensors on {place}"
            failures.append(f"given {what}, {err.reason}")
            continue
        return wrapped
    raise CallError(name, "; ".join(failures))


def places(function: Function, given: Given) -> list[str]:
    """What to try to call a function with, in order."""
    if isinstance(function, nn.Module):
        first = next(function.parameters(), None)
        return ["cpu" if first is None else str(first.device)]
    tensors = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {"numpy": [NUMPY], "torch": tensors, "auto": [NUMPY, *tensors]}[given]


class Server(nn.Module):
    """A user's server: takes smashed data as the client sent it, gives scores of the classes.

    It may answer scores (n, classes) or class ids (n,). Values that are not finite reach it as 0.
    A server that draws random numbers gets the same ones at every call.
    """

    def __init__(self, function: UserFunction, num_classes: int) -> None:
        super().__init__()
        self.function, self.num_classes = function, num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Scores (n, classes)."""
        name, classes = self.function.name, self.num_classes
        said: Tensor = self.function(without_nan(z), Generator().manual_seed(SERVER_SEED))
        if said.shape[1:] == (classes,):
            if bool(said.isnan().any()):
                raise AuditError(
                    f"'{name}' answered with NaN as a score; correct it, or leave --server out"
                )
            return said
        ids, value = said.flatten(), ""
        if said.shape[1:] == (1,):
            whole = (ids == ids.round()) & (ids >= 0) & (ids < classes)
            if bool(whole.all()):
                return nn.functional.one_hot(ids.long(), classes).float()
            value = f" as {float(ids[~whole][0]):.4g}"
        raise AuditError(
            f"'{name}' must return scores (n, {classes}) or class ids (n,) in 0..{classes - 1}, "
            f"got {self.function.shape} per image{value}"
        )


class OwnRule:
    """A user's exit rule: whether each image is sent, as booleans or 0 and 1.

    A rule that draws random numbers gets the same ones for the same images.

    Args:
        function: The user's function.
        seed: Of its random numbers.
    """

    def __init__(self, function: UserFunction, seed: int) -> None:
        self.function, self.seed = function, seed

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Whether each of some images (m, c, h, w) is sent, bool (m,)."""
        draws, name = stream(self.seed, "foreign/asks"), self.function.name
        said = torch.cat([self.function(x, draws) for x in torch.split(images, CHUNK)])
        if said.shape[1:] != (1,):
            raise AuditError(
                f"'{name}' must return one value per image, got shape {self.function.shape}; "
                "True or 1 for an image that is sent, False or 0 for one that is not"
            )
        sent = said.flatten()
        if bool((odd := (sent != 0) & (sent != 1)).any()):
            raise AuditError(
                f"'{name}' must say True or 1 for an image that is sent, False or 0 for one that "
                f"is not, got {float(sent[odd][0]):.4g}; compare with the threshold inside it"
            )
        return sent == 1


class UserVictim(Victim):
    """A user's client: every query goes to the function itself.

    A white-box attack also gets `encoder` and `channel`.
    """

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
    """Encoder and channel of a white-box client, or an error.

    An object without a `channel` has its declared noise as the channel.
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
    # A whole module has its noise inside, if it has any: nothing follows it.
    channel: nn.Module = Channel() if whole else own.declared
    theirs = None if whole else getattr(own.client, "channel", None)
    # As a `UserFunction` the encoder fails with a message of ours.
    probe = UserFunction(encoder, f"{own.name}.encoder", "cpu")
    z = probe(x)
    if callable(theirs):
        channel = UserFunction(theirs, f"{own.name}.channel", "cpu", probe.shape)
    made = channel(z, stream(0, "foreign/open")).shape
    wire = sender(x, stream(0, "foreign/open")).shape
    if not z.shape == made == wire:
        raise AuditError(
            f"the encoder of '{own.name}' gives {tuple(z.shape[1:])} per image, its channel "
            f"{tuple(made[1:])}, and {tuple(wire[1:])} is sent; in a white-box audit all three "
            "must have one shape"
        )
    return nn.Sequential(encoder, InRows()), channel


def audit_encoder(
    own: OwnEncoder,
    images: AuditImages,
    profile: str,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """Audit a user's encoder; writes nothing.

    Attacks run on the CPU, wherever the client computes. What the record cannot know, such as the
    training or the client's multiply-adds, is null.

    Args:
        own: The client and, if there is one, its server.
        images: What the attacker knows and what is scored.
        profile: Budget of the attacks, such as "quick".
        seed: Seed of the attacks, 0 or more.
        progress: Told how far the attacks have come.

    Returns:
        The record, and the pictures of `gallery.json`.
    """
    with seeded(derive_seed(seed, "foreign")):  # for what draws outside of a sending
        began, attacks = time.perf_counter(), find_profile(profile)
        missing: dict[str, str] = {}
        if not own.white_box:
            missing[Access.WHITE_BOX] = "white-box: the client's networks are not given"
        if own.server is None:
            missing[Access.LABEL] = "needs the server's answers, and no server is given"
        left_out = {n: missing[a.access] for n, a in attacks.items() if a.access in missing}
        few = images.scored.images[:PROBED]
        sender = wrap(own.client, own.name, own.given, few, seed)
        parts = open_parts(own, sender, few) if own.white_box else (nn.Sequential(), sender)
        victim, head = UserVictim(sender, *parts), None
        if own.server is not None:
            z = without_nan(sender(few, stream(seed, "foreign/server")))
            name = own.server_name or f"{own.name}'s server"
            server = wrap(own.server, name, "auto", z, seed, sender.shape)
            head = Server(server, len(images.classes))
        exit, answers = device_answers(own, images, head, victim, seed)
        noise, repeatable = measure_noise(victim, images.scored.images[:LISTENED], seed)
        target = Target(
            victim=victim, head=head, classes=images.classes, aux=images.aux,
            scored=images.scored, seed=seed, knowledge=images.knowledge, test=images.test,
            members=UNKNOWN if images.members is None else images.members,
            outsiders=images.test, attributes=images.attributes, own_data=":" in images.name,
            certify=lambda target: _certificates(target, own, images, parts[0], noise),
            exit=exit, answers=answers,
        )  # fmt: skip
        floats = target.sent.z[0].numel()
        if own.noise_std is not None:
            check_noise(own.noise_std, noise, min(LISTENED, len(target.scored)) * floats)
        cost: Json = dict.fromkeys(("macs", "params", "stored"))
        if own.white_box:
            found = count_network(parts[0], tuple(few.shape[1:]))
            cost = {"macs": found.macs, "params": found.params, "stored": found.stored}
        facts = Facts(
            began=began, train_seconds=None,
            audit={
                "threat": "white-box" if own.white_box else "black-box", "left_out": left_out,
                "noise": {"declared": own.noise_std, "measured": noise}, "input": sender.place,
                "repeatable": repeatable, "final": None, "model": None,
            },
            fields={
                "client": {**cost, "wire_floats": floats},
                "config": {
                    "dataset": images.name, "callable": own.name, "server": own.server_name,
                    "noise_std": own.noise_std, "defence": None, "net": None, "seed": None,
                    **({"asks": own.asks_name, "own": own.device_name} if own.asks else {}),
                },
                "splits": images.hashes,
                "seeds": {"train": None, "attack": seed, "split": None},
            },
            precision=find_precision("auto", "cpu", images.scored.images.shape[1:]),
        )  # fmt: skip
        run = {name: attack for name, attack in attacks.items() if name not in left_out}
        return measure(target, run, profile, facts, progress=progress)


def device_answers(
    own: OwnEncoder, images: AuditImages, head: nn.Module | None, victim: Victim, seed: int
) -> tuple[DeviceAnswers | None, DeviceReports | None]:
    """What a device with an exit rule does with the images, and what it reports for others.

    Both are None without a rule. What it reports is None, too, where the device's own answers or
    the server's are not known.
    """
    if own.asks is None:
        return None, None
    few = images.scored.images[:PROBED]
    name = own.asks_name or f"{own.name}'s exit rule"
    rule = OwnRule(wrap(own.asks, name, "auto", few, seed), seed)
    asked = rule(images.scored.images)
    if not bool(asked.any()):
        raise AuditError(
            f"'{name}' sends none of the {len(asked)} scored images, so there is nothing to "
            "attack; raise its threshold, or give other images"
        )
    here: Server | None = None
    if own.device is not None:
        named = own.device_name or f"{own.name}'s own answers"
        here = Server(wrap(own.device, named, "auto", few, seed), len(images.classes))
    told = None if here is None else answer(here, images.scored.images)
    found = DeviceAnswers(asked=asked, aux_asked=rule(images.aux.images), asks=rule, own=told)
    if here is None or head is None:
        return found, None
    device, server = here, head

    def reports(x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        sent = rule(x)
        return torch.where(sent[:, None], server(victim.send(x, generator)), device(x)), sent

    return found, reports


def _certificates(
    target: Target, own: OwnEncoder, images: AuditImages, encoder: nn.Sequential, measured: float
) -> tuple[Json, float | None]:
    """The certificates or why there are none, and the rate in nats by what is sent.

    There is no rate where the noise is not declared, or where z̃ is not finite.
    """
    if reason := _no_certificate(target, own, encoder, measured):
        found = refusals(reason)
    else:
        # Without `InRows`, behind which the bounds of z are not found.
        seen = None if images.members is None else [images.members]
        found = certify_networks(target, encoder[0], own.declared, images.aux, images.test, seen)
    std, classes = own.noise_std, target.num_classes
    if std is None or target.sent.broken:
        return found, None
    return found, sent_rate(target.victim, target.scored, classes, std, target.seed)


def _no_certificate(
    target: Target, own: OwnEncoder, encoder: nn.Sequential, measured: float
) -> str | None:
    """Why a client can have no certificates; None if it can.

    What was sent must be the encoder's z and the declared noise, as far as tests can tell.
    """
    if measured == 0:
        return "the channel is deterministic"
    if own.noise_std is None:
        return "noise of unknown scale; declare it with --noise SIGMA"
    if not own.white_box:
        return (
            "what a callable computes before its noise is not known for certain; show its "
            "networks with --white-box"
        )
    x, sent = target.scored.images[:LISTENED], target.sent.z[:LISTENED]
    if failed := channel_tests(encoder, own.declared, sent, x, seed=target.seed, own=True)[
        "failed"
    ]:
        return NOT_THE_NOISE + ", ".join(failed)
    with torch.no_grad():
        among, alone = encoder(x)[:MET], torch.cat([encoder(one[None]) for one in x[:MET]])
    # Beyond rounding, an image must be encoded alone as it is among others.
    if bool((among - alone).abs().max() > SAME * own.noise_std):
        return "z of an image depends on the other images of its batch"
    return None
