"""A small net that has learned the digits, and its export."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from splitveil.nets.blocks import conv3x3, conv_bn_relu
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import SplitModel, cut
from splitveil.provenance import model_hash
from splitveil.serve.export import export_model
from splitveil.serve.manifest import Manifest

NOISE, EPOCHS = 0.05, 8


@dataclass(frozen=True)
class Exported:
    """A model, where it was exported to, and every digit."""

    model: SplitModel
    folder: Path
    manifest: Manifest
    images: NDArray[np.float32]
    labels: NDArray[np.int64]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exported with an int8 client and an audit's verdict."""
    found = load_digits()
    images = (found.images[:, None] / 16).astype(np.float32)
    labels = found.target.astype(np.int64)
    torch.manual_seed(0)
    client = nn.Sequential(conv_bn_relu(1, 32, 2), conv3x3(32, 8), nn.Sigmoid())
    server = nn.Sequential(nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = cut(nn.Sequential(client, server), 1, Channel([GaussianNoise(NOISE)]))
    x, y = torch.from_numpy(images[:1400]), torch.from_numpy(labels[:1400])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=generator).chunk(22):
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x[rows], generator), y[rows]))
            optimiser.step()
    folder = tmp_path_factory.mktemp("exported") / "digits"
    manifest = export_model(
        model.eval(),
        (1, 8, 8),
        folder,
        name="digits",
        audit={"leakage": 0.25, "audit": {"model": model_hash(model)}},
        source={"run": "digits"},
        calibration=images[:256],
    )
    return Exported(model, folder, manifest, images, labels)
