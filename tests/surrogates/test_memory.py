"""What a surrogate keeps for its backward pass beyond z and its parameters, as a formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

SLOTS, ROUNDS, WIDTH = 8, 3, 32

Build = Callable[[int, int], nn.Module]
Formula = Callable[[int, int, int], float]


def hidden(d: int) -> int:
    return min(512, max(64, d // 4))


# Numbers kept for n samples of d features in c classes: the table of docs/reference/maths.md.
FORMULAS: dict[str, tuple[Build, Formula]] = {
    "rate": (lambda d, c: Rate(d, c, noise_std=0.1), lambda n, d, c: 2 * c * d + n),
    "rate, full": (
        lambda d, c: Rate(d, c, noise_std=0.1, covariance="full"),
        lambda n, d, c: 2.75 * n * n + 2 * n * d,
    ),
    "gated-att": (
        GatedAttentionCEM,
        lambda n, d, c: n * (2 * d + 3 * hidden(d)) + 12 * c * d,
    ),
    "veil": (
        lambda d, c: GatedAttentionCEM(d, c, penalty="rate", attention="maximise"),
        lambda n, d, c: n * (d + 3 * hidden(d) + 8) + 2 * c * d,
    ),
    "slot-cross": (
        lambda d, c: SlotCrossAttentionCEM(
            d, c, slot_dim=WIDTH, num_slots=SLOTS, num_iterations=ROUNDS
        ),
        lambda n, d, c: (4 * ROUNDS * n + 20 * ROUNDS * c) * SLOTS * WIDTH + n * d,
    ),
    "cem": (KMeansCEM, lambda n, d, c: n * (d + 6)),
}


def kept_numbers(module: nn.Module, n: int, d: int, c: int) -> float:
    """Bytes of the distinct storages autograd holds, over four; inputs and parameters left out."""
    z, y = torch.rand(n, d), torch.arange(n) % c
    if isinstance(module, KMeansCEM):
        module.refit(z, y)
    features = z.requires_grad_() * 1.0
    free = [features, y, *module.parameters(), *module.buffers()]
    known = {t.untyped_storage().data_ptr() for t in free}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(features, y)  # held: what it keeps must not be freed and counted twice
    assert out.loss.requires_grad
    return sum(sizes.values()) / 4


@pytest.mark.parametrize(("n", "d", "c"), [(128, 64, 4), (256, 64, 8), (128, 256, 8)])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_memory_is_what_the_formula_says(name: str, n: int, d: int, c: int) -> None:
    build, formula = FORMULAS[name]
    kept = kept_numbers(build(d, c), n, d, c)
    assert 0.75 * formula(n, d, c) < kept < 1.15 * formula(n, d, c)
