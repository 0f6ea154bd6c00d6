"""Early shut-off: the penalty stays out of the training while its gates are not to be trusted."""

import logging

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import Range

DECAY = 0.9
LOG_EVERY = 200
RING = 64
NEVER_CALLED = -1
RULES = ("", "early_shut_steps", "early_hard_thresh", "early_gate_thresh")

log = logging.getLogger("splitveil")


class EarlyShutoff(nn.Module):
    r"""Replaces the loss by 0, graph kept, while one of three rules holds (R1 §4.1).

    SHUTOFF while calls ≤ `steps`, or EMA(hard) > `hard_thresh`, or EMA(soft) > `soft_thresh`;
    the first rule that holds, in this order, is the one named. Each EMA has decay 0.9 and starts
    at the first mean it sees; this call's means enter before the rules are read.

    `calls`, `ema_soft`, `ema_hard` and `rule` are buffers: they survive a checkpoint. They move
    in train mode only, and only on calls with something to measure (a class of two samples,
    finite gate means). In eval mode nothing is replaced: evaluation wants the measured value.

    Each change of rule and every 200th call makes one `[CEM-GATE]` log line. On the CPU it is
    written during the call. On an accelerator reading it would stall the stream, so it stays in
    a ring of 64 lines on the device until the training loop calls `report()` at its own cadence.
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
        """Count one call with these gate means; 1 where the loss is to be shut off, else 0."""
        means = torch.stack((soft, hard)).to(self.ema_soft)
        active = active & torch.isfinite(means).all()
        emas = torch.stack((self.ema_soft, self.ema_hard))
        moved = torch.where(self.calls == 0, means, DECAY * emas + (1.0 - DECAY) * means)
        moved = torch.where(active, moved, emas)
        for ema, value in zip((self.ema_soft, self.ema_hard), moved, strict=True):
            ema.copy_(value)
        self.calls += active
        by_gate = torch.where(
            self.ema_hard > self.hard_thresh, 2, 3 * (self.ema_soft > self.soft_thresh)
        )
        rule = torch.where(self.calls <= self.steps, 1, by_gate)
        self.record(rule, active)
        self.rule.copy_(torch.where(active, rule, self.rule))
        return (rule > 0).to(soft.dtype)

    def record(self, rule: Tensor, active: Tensor) -> None:
        """Put this call into the ring if the rule has changed or it is a 200th call."""
        due = active & ((rule != self.rule) | (self.calls % LOG_EVERY == 0))
        place = (self.written % RING)[None]  # (1,): a 0-d index would be read by the host
        facts = (self.calls, rule, self.ema_hard, self.ema_soft)
        line = torch.stack([fact.to(self.ring.dtype) for fact in facts])
        kept = torch.where(due, line, self.ring.index_select(0, place))
        self.ring.index_copy_(0, place, kept)
        self.written += due
        if self.ring.device.type == "cpu":
            self.report()

    def report(self) -> None:
        """Write the `[CEM-GATE]` lines gathered since the last time; reads the device."""
        written = int(self.written)
        lost = max(written - self.emitted - RING, 0)
        if lost:
            log.warning("[CEM-GATE] %d earlier lines were overwritten unread", lost)
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
        """The loss, or 0 with the graph kept; and 1 or 0 for shut or open."""
        if not self.training:
            return loss, torch.zeros_like(loss).detach()
        shut = self.observe(soft.detach(), hard.detach(), active)
        return torch.where(shut > 0, torch.zeros_like(loss), loss), shut
