"""Two processes with half a batch each equal one process with the whole batch."""

import pytest
import torch
from lightning_fabric import Fabric
from oracles.ddp import two_steps

from splitveil.train.step import own_rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one() -> None:
    """Penalty and gradients of encoder, head and attention to 1e-5, gloo on the CPU."""
    alone = two_steps(Fabric(accelerator="cpu", devices=1))
    pair = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    together = pair.launch(two_steps)
    assert set(together) == set(alone)
    assert len(alone) > 20
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_one_process_keeps_all_rows() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    rows = torch.arange(7)
    assert torch.equal(own_rows(rows, fabric), rows)
