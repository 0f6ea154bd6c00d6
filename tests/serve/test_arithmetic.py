"""What the real client sends gives the arithmetic attacker no more than distance does."""

import pytest
import torch
from serve.conftest import Exported
from torch import Tensor

from splitveil.attacks.arithmetic import Arithmetic, model_of, reaches_by_floats
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import SplitModel
from splitveil.record.statistics import exact
from splitveil.serve.client import Client
from splitveil.serve.export import export_model
from splitveil.serve.manifest import CLIENT, load_half

SENT = 60


@pytest.mark.parametrize("std", [0.025, 0.5, 5.0])
def test_the_clients_noise_cannot_be_undone_by_arithmetic(
    exported: Exported, tmp_path_factory: pytest.TempPathFactory, std: float
) -> None:
    """With noise in floats: at σ .5 .13 by distance and .63 with arithmetic, at σ 5 .00 and 1."""
    split = SplitModel(exported.model.encoder, Channel([GaussianNoise(std)]), exported.model.head)
    folder = tmp_path_factory.mktemp("arithmetic") / "e"
    manifest = export_model(split, (1, 8, 8), folder, name="digits")
    z = torch.from_numpy(load_half(folder, manifest, CLIENT, 1)(exported.images)).flatten(1)
    with Client(folder, "http://localhost:1", threads=1) as client:
        rows = torch.from_numpy(client.send(exported.images[: 2 * SENT])).flatten(1)
    sent, own = rows[:SENT], rows[SENT:]  # the attacker has the client, and sends images of its own
    model = model_of(own, z[SENT : 2 * SENT], std)
    shares = [share(a) for a in Arithmetic().name(sent, z, std, model)[:2]]
    low, high = exact(round(shares[1] * SENT), SENT)
    assert low <= shares[0] <= high
    assert model == "grid"


def share(answers: Tensor) -> float:
    return float((answers == torch.arange(SENT)).double().mean())


def test_a_float_that_the_old_client_could_not_send_is_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    z, other = torch.rand(2, 400, generator=generator)
    n = torch.randn(400, generator=generator)
    sent = z + 5.0 * n
    assert bool(reaches_by_floats(sent, z, 5.0).all())
    assert float(reaches_by_floats(sent, other, 5.0).double().mean()) < 0.99
