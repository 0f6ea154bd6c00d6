"""The adversary of `arl`: who pays for what, and that it learns from training images alone."""

from pathlib import Path

import pytest
import torch
from defences.made import trained
from torch import Tensor, nn

from splitveil.config.resolve import build_defence, make_config
from splitveil.cuda import compile_methods
from splitveil.defences.arl import Arl, DecodingAdversary, Measure, explained_share
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError
from splitveil.functional import ssim
from splitveil.nets.catalogue import NETS
from splitveil.nets.split import cut

WIRE, IMAGE = (4, 4, 4), (1, 8, 8)
Y = torch.zeros(8, dtype=torch.long)


def adversary(
    strength: float = 0.3, threshold: float = 0.5, measure: Measure = "ssim"
) -> DecodingAdversary:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return DecodingAdversary(
            WIRE, IMAGE, strength=strength, threshold=threshold, lr=1e-3, measure=measure
        )


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(n, *WIRE, generator=g).requires_grad_(), torch.rand(n, *IMAGE, generator=g)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_it_is_a_companion() -> None:
    assert isinstance(adversary(), Companion)


def test_its_own_loss_trains_the_decoder_alone() -> None:
    duel, (z, x) = adversary(), batch()
    duel.own_loss(z, x, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is None
    assert sum(float(g.abs().sum()) for g in gradients(duel)) > 0


def test_the_penalty_moves_the_encoder_alone() -> None:
    duel, (z, x) = adversary(threshold=-1.0), batch()
    duel.penalty(z, x, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0
    assert gradients(duel) == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run")  # the compiler cannot trace the tests' shape checks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_compiled_losses_and_gradients_are_the_same() -> None:
    found = []
    for backend in (None, "aot_eager"):
        duel, (z, x) = adversary(threshold=-1.0), batch()
        if backend:
            compile_methods(duel, "own_loss", "penalty", backend=backend)
        own, paid = duel.own_loss(z, x, Y), duel.penalty(z, x, Y)
        moved = torch.autograd.grad(own + paid, [z, *duel.parameters()])
        found.append((own, paid, moved))
    torch.testing.assert_close(found[1], found[0])


def test_the_penalty_is_a_hinge_on_the_frozen_decoder() -> None:
    duel, (z, x) = adversary(strength=0.7, threshold=-0.25), batch()
    with torch.no_grad():
        reached = ssim(duel.decoder.eval()(z), x)
    assert duel.penalty(z, x, Y).item() == pytest.approx(0.7 * (float(reached) + 0.25), rel=1e-5)


def test_a_copy_explains_all_and_the_mean_image_nothing() -> None:
    _, x = batch()
    mean = x.mean(0, keepdim=True).expand_as(x)
    assert explained_share(x, x).item() == 1.0
    assert explained_share(mean, x).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_share(x + 2 * (mean - x), x).item() == pytest.approx(-3.0, rel=1e-5)
    assert explained_share(0.5 * (x + mean), x).item() == pytest.approx(0.75, rel=1e-5)


def test_explained_is_one_minus_the_errors_share() -> None:
    _, x = batch()
    guess = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
    error = sum(float(((g - t) ** 2).mean()) for g, t in zip(guess, x, strict=True)) / len(x)
    floor = float(((x - x.mean(0)) ** 2).mean())
    assert explained_share(guess, x).item() == pytest.approx(1 - error / floor, rel=1e-5)


def test_the_share_explained_has_a_sound_gradient() -> None:
    _, x = batch(3)
    guess = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(explained_share, (guess.requires_grad_(), x.double()))


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_images_that_are_all_alike_leave_it_finite(shift: float) -> None:
    x = torch.full((4, *IMAGE), 0.25)
    guess = (x + shift).requires_grad_()
    found = explained_share(guess, x)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(1 - shift**2 / 1e-6)
    assert guess.grad is not None
    assert bool(guess.grad.isfinite().all())


def test_it_plays_for_the_measure_it_is_given() -> None:
    duel, (z, x) = adversary(strength=0.7, threshold=-9.0, measure="explained"), batch()
    with torch.no_grad():
        reached = float(explained_share(duel.decoder.eval()(z), x))
    assert duel.penalty(z, x, Y).item() == pytest.approx(0.7 * (reached + 9.0), rel=1e-5)
    with torch.no_grad():
        own = 1 - float(explained_share(duel.decoder.train()(z), x))
    assert adversary(measure="explained").own_loss(z, x, Y).item() == pytest.approx(own, rel=1e-4)


def test_each_measure_has_its_own_threshold() -> None:
    given = {"defence": "arl", "ssim_threshold": 0.6, "explained_threshold": 0.2}
    for measure, threshold in (("ssim", 0.6), ("explained", 0.2)):
        defence = build_defence(make_config({**given, "arl_measure": measure}))
        model = cut(NETS["small"].build(IMAGE, 10), 1)
        made = defence.companion(model, IMAGE, 10)
        assert isinstance(made, DecodingAdversary)
        assert (made.measure, made.threshold) == (measure, threshold)


def test_a_measure_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="arl_measure"):
        make_config({"defence": "arl", "arl_measure": "psnr"})


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
    duel.own_loss(z, x, Y)
    assert not all(torch.equal(v, before[k]) for k, v in duel.decoder.named_buffers())


def test_one_backward_pass_serves_both() -> None:
    duel, (z, x) = adversary(threshold=-1.0), batch()
    (duel.own_loss(z, x, Y) + duel.penalty(z, x, Y)).backward()  # type: ignore[no-untyped-call]
    both, alone = z.grad, adversary(threshold=-1.0)
    fresh = z.detach().clone().requires_grad_()
    alone.own_loss(fresh, x, Y)  # moves the statistics that the penalty reads
    alone.penalty(fresh, x, Y).backward()  # type: ignore[no-untyped-call]
    assert both is not None
    assert fresh.grad is not None
    torch.testing.assert_close(both, fresh.grad)


@pytest.mark.parametrize(
    ("key", "value"),
    [("arl_strength", -0.1), ("arl_strength", float("nan")), ("adversary_lr", 0.0),
     ("ssim_threshold", 1.5), ("explained_threshold", -0.1), ("explained_threshold", 1.1)],
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
    with pytest.raises(ConfigError, match="'arl' appears twice"):
        find_defence("arl+arl")


def test_a_run_with_it_logs_what_the_encoder_pays(tmp_path: Path) -> None:
    trained(tmp_path, "on", "arl", ssim_threshold=-1.0)
    assert '"companion_penalty"' in (tmp_path / "on" / "metrics.jsonl").read_text()


def test_the_published_values_are_the_defaults() -> None:
    defence = Arl(summary="")
    assert (defence.arl_strength, defence.ssim_threshold, defence.adversary_lr) == (0.3, 0.5, 1e-3)
