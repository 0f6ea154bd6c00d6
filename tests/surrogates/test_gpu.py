"""On a GPU: no surrogate makes the host wait for the device within a step."""

import sys
from pathlib import Path

import pytest
import torch

from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.train.step import NonFiniteCounter, Weights, penalty

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from surrogate_speed import SURROGATES, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", SURROGATES)
def test_a_step_without_host_sync(name: str) -> None:
    """After the first call, which looks at values, a step runs under sync debug mode `error`."""
    device = torch.device("cuda")
    z, y = draw(512, 512, 10, device)
    module = SURROGATES[name](512, 10).to(device)
    if isinstance(module, KMeansCEM):
        module.refit(z.detach(), y)
    guard, weights = NonFiniteCounter.on(device), Weights(encoder=0.3, scale=1.0)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rob, _ = penalty(z, y, module, weights=weights, guard=guard)
            (z.mean() + rob).backward()  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())
