"""One training step in one or several processes; importable by the processes it spawns."""

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.defences.base import PenaltyPlan
from splitveil.nets.channel import Channel
from splitveil.nets.split import SplitModel
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.train.step import StepLoss, Weights, new_state, own_rows


def two_steps(fabric: Fabric) -> dict[str, list[float]]:
    """`one_step` for the reference documents' penalty and for ours, under names of their own.

    Plain lists: a tensor sent back by a process that has ended cannot be opened.
    """
    seed, ours = one_step(fabric, "minimise", rate=False), one_step(fabric, "maximise", rate=True)
    found = {f"seed.{k}": v for k, v in seed.items()} | {f"ours.{k}": v for k, v in ours.items()}
    if fabric.world_size > 1:  # a group that is still open at exit can abort the process
        fabric.barrier()
        torch.distributed.destroy_process_group()
    return {k: v.flatten().tolist() for k, v in found.items()}


def one_step(fabric: Fabric, attention: str, *, rate: bool) -> dict[str, Tensor]:
    """Gradients of every parameter and the penalty, after one backward pass over 32 samples."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 6))
    head = nn.Sequential(nn.ReLU(), nn.Linear(6, 4))
    cem = GatedAttentionCEM(
        6,
        4,
        attention=attention,  # type: ignore[arg-type]
        penalty="rate" if rate else None,
        noise_std=0.1,
    )
    x, y = torch.rand(32, 1, 3, 3), torch.randint(4, (32,))
    model = SplitModel(encoder, Channel(), head)
    config = RunConfig(weight_decay=0.0)
    parts = TrainParts(model, cem, penalty=PenaltyPlan(lambd=1.0))
    state = new_state(parts, config, fabric.device)
    rows = own_rows(torch.arange(32), fabric)
    weights = Weights(encoder=3.0, scale=0.5)
    wrapped = fabric.setup_module(StepLoss(model, state, fabric))
    loss, values = wrapped(x[rows], y[rows], weights)
    fabric.backward(loss)
    found = {"rob_loss": values["rob_loss"].detach()}
    for name, module in (("model", model), ("cem", cem)):
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"{name}.{key}"] = parameter.grad.clone()
    return found
