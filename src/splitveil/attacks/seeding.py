"""Network initialisation that depends on the attack's generator and leaves no trace elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator


@contextmanager
def seeded(generator: Generator, device: torch.device) -> Iterator[None]:
    """Seed torch's global streams from `generator` inside, and put them back afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
