"""The adversary of `arl`: who pays for what, and that it learns from training images alone."""

from pathlib import Path

import pytest
import torch
from defences.made import trained
from torch import Tensor, nn

from splitveil.config import build_defence, find_defence, make_config
from splitveil.defences import Arl, DecodingAdversary
from splitveil.errors import ConfigError
from splitveil.graphs import compile_methods
from splitveil.nets import NETS, cut
from splitveil.similarity import ssim
from splitveil.types import Companion

WIRE, IMAGE = (4, 4, 4), (1, 8, 8)
Y = torch.zeros(8, dtype=torch.long)


def adversary(strength: float = 0.3, threshold: float = 0.5) -> DecodingAdversary:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return DecodingAdversary(WIRE, IMAGE, strength=strength, threshold=threshold, lr=1e-3)


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(n, *WIRE, generator=g).requires_grad_(), torch.rand(n, *IMAGE, generator=g)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_it_is_a_companion() -> None:
    assert isinstance(adversary(), Companion)


def test_its_own_loss_trains_the_decoder_and_leaves_the_encoder_alone() -> None:
    duel, (z, x) = adversary(), batch()
    duel.learn(z, x, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is None
    assert sum(float(g.abs().sum()) for g in gradients(duel)) > 0


def test_the_penalty_moves_the_encoder_and_leaves_the_decoder_alone() -> None:
    duel, (z, x) = adversary(threshold=-1.0), batch()
    duel.penalty(z, x, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0
    assert gradients(duel) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_compiled_it_says_and_moves_the_same() -> None:
    found = []
    for backend in (None, "aot_eager"):
        duel, (z, x) = adversary(threshold=-1.0), batch()
        if backend:
            compile_methods(duel, "learn", "penalty", backend=backend)
        own, paid = duel.learn(z, x, Y), duel.penalty(z, x, Y)
        moved = torch.autograd.grad(own + paid, [z, *duel.parameters()])
        found.append((own, paid, moved))
    torch.testing.assert_close(found[1], found[0])


def test_the_penalty_is_the_hinge_of_what_the_frozen_decoder_reaches() -> None:
    duel, (z, x) = adversary(strength=0.7, threshold=-0.25), batch()
    with torch.no_grad():
        reached = ssim(duel.decoder.eval()(z), x)
    assert duel.penalty(z, x, Y).item() == pytest.approx(0.7 * (float(reached) + 0.25), rel=1e-5)


def test_below_the_threshold_the_encoder_pays_nothing() -> None:
    duel, (z, x) = adversary(threshold=0.99), batch()
    paid: Tensor = duel.penalty(z, x, Y)
    paid.backward()  # type: ignore[no-untyped-call]
    assert paid.item() == 0
    assert z.grad is not None
    assert float(z.grad.abs().sum()) == 0


def test_the_penalty_reads_statistics_and_does_not_move_them() -> None:
    duel, (z, x) = adversary(), batch()
    before = {k: v.clone() for k, v in duel.decoder.named_buffers()}
    duel.penalty(z, x, Y)
    assert all(torch.equal(v, before[k]) for k, v in duel.decoder.named_buffers())
    duel.learn(z, x, Y)
    assert not all(torch.equal(v, before[k]) for k, v in duel.decoder.named_buffers())


def test_one_backward_pass_serves_both() -> None:
    duel, (z, x) = adversary(threshold=-1.0), batch()
    (duel.learn(z, x, Y) + duel.penalty(z, x, Y)).backward()  # type: ignore[no-untyped-call]
    both, alone = z.grad, adversary(threshold=-1.0)
    fresh = z.detach().clone().requires_grad_()
    alone.learn(fresh, x, Y)  # moves the statistics that the penalty reads
    alone.penalty(fresh, x, Y).backward()  # type: ignore[no-untyped-call]
    assert both is not None
    assert fresh.grad is not None
    torch.testing.assert_close(both, fresh.grad)


@pytest.mark.parametrize(
    ("key", "value"),
    [("arl_strength", -0.1), ("arl_strength", float("nan")), ("adversary_lr", 0.0),
     ("ssim_threshold", 1.5)],
)  # fmt: skip
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} .*, got {value}"):
        build_defence(make_config({"defence": "arl", key: value}))


@pytest.mark.parametrize("name", ["arl+cem", "arl+veil"])
def test_it_stacks_with_a_penalty(name: str) -> None:
    defence = find_defence(name)
    model = cut(NETS["small"].build(IMAGE, 10), 1)
    assert defence.companion(model, IMAGE, 10) is not None
    assert defence.surrogate(64, 10, 0.05) is not None
    assert defence.noisy


def test_two_adversaries_are_refused() -> None:
    with pytest.raises(ConfigError, match="'arl' stands twice"):
        find_defence("arl+arl")


def test_at_strength_zero_it_is_training_with_noise_bit_for_bit(tmp_path: Path) -> None:
    off = trained(tmp_path, "off", "arl", arl_strength=0.0)
    plain = trained(tmp_path, "plain", "noise")
    assert all(torch.equal(off[k], plain[k]) for k in plain)


def test_above_zero_it_changes_the_encoder_and_is_logged(tmp_path: Path) -> None:
    on = trained(tmp_path, "on", "arl", arl_strength=0.3, ssim_threshold=-1.0)
    plain = trained(tmp_path, "plain", "noise")
    assert any(not torch.equal(on[k], plain[k]) for k in plain if k.startswith("encoder"))
    assert '"companion_penalty"' in (tmp_path / "on" / "metrics.jsonl").read_text()


def test_the_published_values_are_the_defaults() -> None:
    defence = Arl(summary="")
    assert (defence.arl_strength, defence.ssim_threshold, defence.adversary_lr) == (0.3, 0.5, 1e-3)
