"""Named random streams: every random draw comes from a generator with a name.

A stream depends only on the seed of the run and on its own name. So a new consumer of randomness
never shifts the draws of the others.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Generator, Tensor

from splitveil.grid import cell_ends


def derive_seed(seed: int, name: str) -> int:
    """63-bit seed of a run's stream `name`: the first 8 bytes of SHA-256("seed/name"), halved.

    >>> derive_seed(0, "channel") == derive_seed(0, "channel") != derive_seed(1, "channel")
    True
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> Generator:
    """A fresh generator for the stream `name` of the run with this seed.

    >>> torch.rand(1, generator=stream(0, "a")) == torch.rand(1, generator=stream(0, "a"))
    tensor([True])
    """
    return Generator(device=device).manual_seed(derive_seed(seed, name))


def normal_like(like: Tensor, generator: Generator | None) -> Tensor:
    """Standard normal noise of the shape, type and device of `like`.

    It is drawn on the device of the generator, so that a CPU generator gives the same noise to a
    model on any device.
    """
    where = like.device if generator is None else generator.device
    noise = torch.randn(like.shape, dtype=like.dtype, device=where, generator=generator)
    return noise.to(like.device)


def rounded_like(like: Tensor, kind: str, generator: Generator | None) -> Tensor:
    """rint(16 ε) of standard noise ε as int64, in the shape of `like`; see `splitveil.grid`.

    Each number takes 64 bits of the generator, on its own device: two draws of 32 bits, the upper
    half first.
    """
    where = like.device if generator is None else generator.device
    shape = (2, *like.shape)
    high, low = torch.randint(1 << 32, shape, generator=generator, device=where).to(like.device)
    cells = _signed_cells(kind, like.device)
    if like.device.type != "cpu":
        return torch.searchsorted(cells, _words(high, low), right=True) - len(cells) // 2
    # On a CPU a look-up is faster than a search, and enough for almost all numbers.
    found = _first_cells(kind)[high >> 16]
    left = found < 0
    found[left] = torch.searchsorted(cells, _words(high[left], low[left]), right=True)
    return found.sub_(len(cells) // 2)


def _words(high: Tensor, low: Tensor) -> Tensor:
    """The unsigned words of 64 bits, less 2⁶³: torch has no uint64."""
    return ((high - (1 << 31)) << 32) + low


@cache
def _first_cells(kind: str) -> Tensor:
    """The cell of every word with these 16 upper bits (65536,); −1 where they leave it open."""
    cells = _signed_cells(kind, torch.device("cpu"))
    first = (torch.arange(1 << 16) - (1 << 15)) << 48
    ends = [torch.searchsorted(cells, w, right=True) for w in (first, first + ((1 << 48) - 1))]
    return torch.where(ends[0] == ends[1], ends[0], -1)


@cache  # so that a captured CUDA graph copies nothing from the host
def _signed_cells(kind: str, device: torch.device) -> Tensor:
    return torch.from_numpy((cell_ends(kind) ^ (1 << 63)).view("int64")).to(device)


@contextmanager
def seeded_globals(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global streams inside the block, on the CPU and on `device`; restore them after.

    Needed where torch accepts no generator: the initialisation of layers, and dropout.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach every GPU too
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def save_states(generators: Mapping[str, Generator]) -> dict[str, Tensor]:
    """States of the named generators and of torch's global ones, as uint8 tensors."""
    states = {f"stream.{name}": g.get_state() for name, g in generators.items()}
    states["global.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["global.cuda"] = torch.cuda.get_rng_state()
    return states


def load_states(generators: Mapping[str, Generator], states: Mapping[str, Tensor]) -> None:
    """Restore the states that `save_states` returned."""
    for name, generator in generators.items():
        generator.set_state(states[f"stream.{name}"].cpu())
    torch.set_rng_state(states["global.cpu"].cpu())
    if torch.cuda.is_available() and "global.cuda" in states:
        torch.cuda.set_rng_state(states["global.cuda"].cpu())
