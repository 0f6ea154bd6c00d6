"""A surrogate in your own training loop: three added lines, marked below.

Run it with `python examples/own_loop.py`; it trains a small split classifier on digits twice,
without and with the penalty, and prints what happens to accuracy and to the rate.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import splitveil as sv

NOISE, WEIGHT = 0.05, 0.3


def train(epochs: int, weight: float) -> tuple[float, float]:
    """Plain PyTorch; returns test accuracy through the noise and the rate in nats per number."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    client = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, stride=2, padding=1),
        nn.Flatten(), nn.Sigmoid(),
    )  # fmt: skip
    server = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    rate = sv.surrogates.Rate(feature_dim=64, num_classes=10, noise_std=NOISE)  # added line 1
    optimiser = torch.optim.Adam([*client.parameters(), *server.parameters()], lr=3e-3)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(1400), 100):
            z = client(x[rows])
            loss = F.cross_entropy(server(z + NOISE * torch.randn_like(z)), y[rows])
            penalty = rate(sv.train.scale_gradient(z, weight), y[rows]).loss  # added line 2
            loss = loss + penalty  # added line 3
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        z = client(x[1400:])
        answers = server(z + NOISE * torch.randn_like(z)).argmax(1)
        return (answers == y[1400:]).float().mean().item(), rate(z, y[1400:]).loss.item()


def main(epochs: int = 20) -> dict[str, tuple[float, float]]:
    """Both runs, side by side."""
    results = {"plain": train(epochs, 0.0), "with the penalty": train(epochs, WEIGHT)}
    for name, (accuracy, nats) in results.items():
        print(f"{name:18s} accuracy {100 * accuracy:5.1f} %   rate {nats:.3f} nats per number")
    return results


if __name__ == "__main__":
    main()
