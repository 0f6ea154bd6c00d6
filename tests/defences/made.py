"""Runs short enough for a test."""

from pathlib import Path

from torch import Tensor

from splitveil import RunConfig, fit


def trained(
    folder: Path, name: str, defence: str, *, held_out: float = 0.8, **settings: float | str
) -> dict[str, Tensor]:
    """Weights after one epoch on a fifth of the digits, into folder/name."""
    config = RunConfig(
        dataset="digits", defence=defence, epochs=1, runs_dir=str(folder), name=name,
        settings=settings, device="cpu", held_out=held_out,
    )  # fmt: skip
    return fit(config).model.state_dict()
