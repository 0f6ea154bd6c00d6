"""A stranger's function as a module: what it is given, what it may return, and its randomness."""

import copy
import inspect
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor, nn

from splitveil.errors import AuditError, ConfigError
from splitveil.rng import seeded_globals, stream

Function = Callable[..., Any]
Given = Literal["auto", "numpy", "torch"]
Shape = tuple[int, ...]

NUMPY = "numpy"
ATTACKED = (1, 3)  # axes of one image's smashed data that attacks take: vectors and maps
SERVER_SEED = 0


class CallError(AuditError):
    """The stranger's function raised an exception of its own, `reason`."""

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


@contextmanager
def unchanged() -> Iterator[None]:
    """What changes of torch's default type, its gradients and the current folder lasts inside."""
    dtype, gradients, folder = torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        os.chdir(folder)


def draw_seed(generator: Generator) -> int:
    """A seed for a stream that is not ours."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class _Held:
    """A function that copies of its holder share: what it closes over need not be copyable."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __deepcopy__(self, memo: object) -> "_Held":
        return self


class Stranger(nn.Module):
    """Somebody else's function: rows (n, …) in, float32 rows on the CPU out.

    It gets copies of its input, as arrays where `place` is "numpy" and else as tensors on that
    device. An `nn.Module` is copied and put into eval mode. Its randomness comes from `generator`:
    passed on if it takes an argument of that name (to one that gets arrays as a NumPy generator),
    else by seeding the global streams around the call. The first answer fixes the shape of a row;
    rows that are neither vectors nor maps (c, h, w) are flattened.
    """

    def __init__(self, function: Function, name: str, place: str) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        if isinstance(function, nn.Module):
            self.net = own_copy(function, name)
        self._held = _Held(function)
        self.name, self.place = name, place
        self.takes_generator = takes_generator(function)
        self.shape: Shape | None = None

    def forward(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """What the function says of x, checked."""
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

    def _call(self, x: Tensor, generator: Generator | None) -> Any:  # noqa: ANN401 - the stranger's
        arrays = self.place == NUMPY
        given = x.detach().cpu().numpy().copy() if arrays else x.detach().clone().to(self.place)
        function = self._held.function if self.net is None else self.net
        try:
            with unchanged():
                if generator is None:
                    return function(given)
                if self.takes_generator:
                    return function(given, generator=self._theirs(generator))
                with seeded(draw_seed(generator)):
                    return function(given)
        except (Exception, SystemExit) as err:  # a stranger's function may raise anything
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
    """A frozen copy of a stranger's module, in eval mode."""
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
    try:
        parameters = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        ).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False
    return "generator" in parameters


def as_rows(answer: Any, n: int, name: str) -> Tensor:  # noqa: ANN401 - a stranger's answer
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


def meet(function: object, name: str, given: Given, x: Tensor, seed: int) -> Stranger:
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
        stranger = Stranger(function, name, place)
        try:
            for some in (x, x[:1]):
                stranger(some, stream(seed, "foreign/meet"))
        except CallError as err:
            failures[f"{NUMPY} arrays" if place == NUMPY else f"tensors on {place}"] = err.reason
            continue
        return stranger
    raise CallError(name, "; ".join(f"given {what}, {said}" for what, said in failures.items()))


def places(function: Function, given: Given) -> list[str]:
    """What to try to call a function with, in order."""
    if isinstance(function, nn.Module):
        first = next(function.parameters(), None)
        return ["cpu" if first is None else str(first.device)]
    tensors = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {"numpy": [NUMPY], "torch": tensors, "auto": [NUMPY, *tensors]}[given]


class InShape(nn.Module):
    """A stranger who is given rows in the shape he knows, before `in_rows`."""

    def __init__(self, stranger: Stranger, shape: Shape) -> None:
        super().__init__()
        self.stranger, self.shape = stranger, shape

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """What he says of z."""
        said: Tensor = self.stranger(z.reshape(len(z), *self.shape), generator)
        return said


class Server(nn.Module):
    """A stranger's server: smashed data as its client sent it in, scores of the classes out.

    It may answer scores (n, classes) or class ids (n,); if it draws, then always the same. It gets
    0 for what is not finite.
    """

    def __init__(self, stranger: Stranger, wire: Shape, num_classes: int) -> None:
        super().__init__()
        self.answers, self.num_classes = InShape(stranger, wire), num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Scores (n, classes)."""
        generator = Generator().manual_seed(SERVER_SEED)
        said: Tensor = self.answers(z.nan_to_num(0.0, 0.0, 0.0), generator)
        if said.shape[1:] == (self.num_classes,) and bool(said.isnan().any()):
            raise AuditError(
                f"'{self.answers.stranger.name}' answered with NaN as a score; mend it, or "
                "leave --server out"
            )
        if said.shape[1:] == (self.num_classes,):
            return said
        ids = said.flatten()
        whole = (ids == ids.round()) & (ids >= 0) & (ids < self.num_classes)
        if said.shape[1:] != (1,) or not bool(whole.all()):
            value = f" as {float(ids[~whole][0]):.4g}" if said.shape[1:] == (1,) else ""
            stranger = self.answers.stranger
            raise AuditError(
                f"'{stranger.name}' must return scores (n, {self.num_classes}) or class ids (n,) "
                f"in 0..{self.num_classes - 1}, got {stranger.shape} per image{value}"
            )
        return nn.functional.one_hot(ids.long(), self.num_classes).float()
