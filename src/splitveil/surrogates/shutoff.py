"""Early shut-off: the penalty is 0 while its gates cannot be trusted yet."""

import logging

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import Range

DECAY = 0.9
LOG_EVERY = 200  # calls
RING = 64  # log lines that can wait on the device
NEVER_CALLED = -1
RULES = ("", "early_shut_steps", "early_hard_thresh", "early_gate_thresh")

log = logging.getLogger("splitveil")


class EarlyShutoff(nn.Module):
    r"""Replaces the loss by 0 while one of three rules holds (R1 §4.1).

    SHUTOFF while calls ≤ `steps`, or EMA(hard) > `hard_thresh`, or EMA(soft) > `soft_thresh`. If
    several hold, the log names the first. Each moving average (EMA) of a gate's mean has decay 0.9
    and starts at the first mean; the present call's means enter before the rules are tested.

    `calls`, `ema_soft`, `ema_hard` and `rule` are buffers and survive a checkpoint. They change in
    train mode only, and only on calls that measure something (a class with two samples, finite gate
    means). In eval mode the loss passes unchanged.

    Each change of rule and every 200th call writes one `[CEM-GATE]` log line: on the CPU at once;
    on an accelerator, where reading would stall the stream, when the training loop calls `report`.

    Args:
        steps: Calls at the start with a loss of 0, ≥ 0.
        hard_thresh: Limit of EMA(hard) in [0, 1]; 1 never shuts.
        soft_thresh: Limit of EMA(soft) in [0, 1]; 1 never shuts.
    """

    calls: Tensor
    ema_soft: Tensor
    ema_hard: Tensor
    rule: Tensor
    ring: Tensor
    written: Tensor

    def __init__(self, steps: int, hard_thresh: float, soft_thresh: float) -> None:
        super().__init__()
        Range(0).check("early_shut_steps", steps)
        for name, got in (("early_hard_thresh", hard_thresh), ("early_gate_thresh", soft_thresh)):
            Range(0, 1, hint="1 never shuts").check(name, got)
        self.steps, self.hard_thresh, self.soft_thresh = steps, hard_thresh, soft_thresh
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema_soft", torch.zeros(()))
        self.register_buffer("ema_hard", torch.zeros(()))
        self.register_buffer("rule", torch.full((), NEVER_CALLED))
        self.register_buffer("ring", torch.zeros(RING, 4), persistent=False)
        self.register_buffer("written", torch.zeros((), dtype=torch.long), persistent=False)
        self.emitted = 0

    @torch.no_grad()
    def observe(
        self, soft: Float[Tensor, ""], hard: Float[Tensor, ""], active: Tensor
    ) -> Float[Tensor, ""]:
        """Count one call with these gate means; returns 1 if the loss is shut off, else 0."""
        means = torch.stack((soft, hard)).to(self.ema_soft)
        active = active & torch.isfinite(means).all()
        emas = torch.stack((self.ema_soft, self.ema_hard))
        moved = torch.where(self.calls == 0, means, DECAY * emas + (1.0 - DECAY) * means)
        moved = torch.where(active, moved, emas)
        self.ema_soft.copy_(moved[0])
        self.ema_hard.copy_(moved[1])
        self.calls += active
        by_gate = torch.where(
            self.ema_hard > self.hard_thresh, 2, 3 * (self.ema_soft > self.soft_thresh)
        )
        rule = torch.where(self.calls <= self.steps, 1, by_gate)
        self._record(rule, active)
        self.rule.copy_(torch.where(active, rule, self.rule))
        return (rule > 0).to(soft.dtype)

    def _record(self, rule: Tensor, active: Tensor) -> None:
        """Put this call into the ring if the rule has changed or it is a 200th call."""
        due = active & ((rule != self.rule) | (self.calls % LOG_EVERY == 0))
        place = (self.written % RING)[None]  # (1,): the host would have to read a 0-d index
        facts = (self.calls, rule, self.ema_hard, self.ema_soft)
        line = torch.stack([fact.to(self.ring.dtype) for fact in facts])
        kept = torch.where(due, line, self.ring.index_select(0, place))
        self.ring.index_copy_(0, place, kept)
        self.written += due
        if self.ring.device.type == "cpu":
            self.report()

    def report(self) -> None:
        """Write the `[CEM-GATE]` lines gathered since the last call; reads the device."""
        written = int(self.written)
        lost = max(written - self.emitted - RING, 0)
        if lost:
            log.warning("[CEM-GATE] %d earlier lines were overwritten before they were read", lost)
        for i in range(self.emitted + lost, written):
            call, rule, hard, soft = self.ring[i % RING].tolist()
            state = f"SHUTOFF by {RULES[int(rule)]}" if rule else "OK"
            level = logging.WARNING if rule > 1 else logging.INFO
            log.log(
                level,
                "[CEM-GATE] call %d: %s (hard gate mean %.4f, limit %g; soft %.4f, limit %g; "
                "early steps %d)",
                *(int(call), state, hard, self.hard_thresh, soft, self.soft_thresh, self.steps),
            )
        self.emitted = written

    def forward(
        self,
        loss: Float[Tensor, ""],
        soft: Float[Tensor, ""],
        hard: Float[Tensor, ""],
        active: Tensor,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The loss, or 0 with its graph kept; and 1 if it is shut off, else 0."""
        if not self.training:
            return loss, torch.zeros_like(loss).detach()
        shut = self.observe(soft.detach(), hard.detach(), active)
        return torch.where(shut > 0, torch.zeros_like(loss), loss), shut
