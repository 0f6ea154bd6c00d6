"""The same image sent k times: averaging leaves a k-th of the noise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery, averaged
from splitveil.attacks.linear import Linear
from splitveil.attacks.rmle import Rmle
from splitveil.errors import AuditError, ConfigError
from splitveil.io import Progress, silent
from splitveil.threat import Access, Attack, BlackBox, FittedAttack, Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]
TINY = Decoder(width=4, blocks=1, epochs=1, batch_size=8)


def generator(seed: int = 9) -> torch.Generator:  # not an image's seed: noise must be independent
    return torch.Generator().manual_seed(seed)


def observed(victim: Victim, x: Tensor, repeats: int) -> Observation:
    stream = generator(5)
    draws = torch.stack([victim.send(x, stream) for _ in range(repeats)])
    return Observation(draws[0], torch.zeros(len(x), dtype=torch.long), draws)


def error(victim: Victim, attack: KQuery, aux: Labelled, x: Tensor) -> float:
    seen = observed(victim, x, attack.repeats)
    return float((attack.fit(victim.black_box(), aux, generator())(seen) - x).square().mean())


@pytest.mark.parametrize("repeats", [1, 4, 16])
def test_the_inner_attack_meets_a_kth_of_the_noise(
    repeats: int, make_aux: MakeAux, noisy_victim: Victim
) -> None:
    met: list[Tensor] = []

    class Listener:
        access = Access.BLACK_BOX

        def fit(
            self,
            victim: BlackBox,
            aux: Labelled,
            stream: torch.Generator,
            progress: Progress = silent,
        ) -> FittedAttack:
            met.append(victim.send(aux.images, stream) - aux.images)
            return FittedAttack(lambda seen: seen.z)

    aux = make_aux(2000)
    KQuery(inner=Listener(), repeats=repeats).fit(noisy_victim.black_box(), aux, generator())
    # 32,000 squared normals: their mean is within 3 % of the variance, at 3.8 standard errors
    assert float(met[0].square().mean()) * repeats == pytest.approx(1.0, rel=0.03)
    assert abs(float(met[0].mean())) < 4 / (32_000 * repeats) ** 0.5


def test_sixteen_sendings_give_away_far_more_than_one(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    # Pixels are uniform, of variance 1/12; the best linear guess leaves v·s/(v + s), s = 1/k.
    aux, x = make_aux(1500), make_aux(300, seed=1).images
    errors = {k: error(noisy_victim, KQuery(inner=Linear(), repeats=k), aux, x) for k in (1, 16)}
    assert errors[1] == pytest.approx(1 / 13, rel=0.05)
    assert errors[16] == pytest.approx(1 / 28, rel=0.05)


def test_the_decoder_gains_from_repeats_too(make_aux: MakeAux, noisy_victim: Victim) -> None:
    aux, x = make_aux(400), make_aux(100, seed=1).images
    inner = Decoder(width=16, blocks=1, epochs=1, min_steps=80, batch_size=64, lr=1e-2)
    one, many = (error(noisy_victim, KQuery(inner=inner, repeats=k), aux, x) for k in (1, 16))
    assert many < 0.8 * one


@pytest.mark.parametrize("inner", [TINY, Linear()], ids=["decoder", "linear"])
def test_one_sending_is_the_inner_attack_itself(
    inner: Attack, make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux, seen = make_aux(24), observed(noisy_victim, make_aux(5, seed=1).images, 1)
    plain = inner.fit(noisy_victim.black_box(), aux, generator())(seen)
    attack = KQuery(inner=inner, repeats=1)
    assert torch.equal(attack.fit(noisy_victim.black_box(), aux, generator())(seen), plain)


def test_a_query_averages_k_sendings_and_changes_none() -> None:
    sent: list[Tensor] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        del stream
        sent.append(x + len(sent))
        return sent[-1]

    mean = averaged(send, 3)(torch.zeros(2, 1), None)
    assert mean.tolist() == [[1.0], [1.0]]  # of 0, 1 and 2
    assert [z.tolist() for z in sent] == [[[0.0], [0.0]], [[1.0], [1.0]], [[2.0], [2.0]]]


def test_it_is_the_same_twice_and_passes_the_curve_on(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux, seen = make_aux(16), observed(noisy_victim, make_aux(5, seed=1).images, 3)
    kept = [t.clone() for t in (seen.z, seen.answer, aux.images)]
    state = torch.get_rng_state()
    one, other = (
        KQuery(inner=TINY, repeats=3).fit(noisy_victim.black_box(), aux, generator())
        for _ in range(2)
    )
    guess = one(seen)
    assert torch.equal(guess, other(seen))
    assert guess.shape == (5, 1, 4, 4)
    assert not guess.requires_grad
    assert len(one.curve) == TINY.epochs
    assert one.curve == other.curve
    assert torch.equal(torch.get_rng_state(), state)
    for before, now in zip(kept, (seen.z, seen.answer, aux.images), strict=True):
        assert torch.equal(before, now)


@pytest.mark.parametrize(("draws", "got"), [(None, "none"), (2, "2"), (5, "5")])
def test_another_number_of_sendings_is_refused(
    draws: int | None, got: str, make_aux: MakeAux, noisy_victim: Victim
) -> None:
    x = make_aux(4, seed=1).images
    seen = observed(noisy_victim, x, draws or 1)
    if draws is None:
        seen = Observation(seen.z, seen.answer)
    attack = KQuery(inner=Linear(), repeats=4)
    reconstruct = attack.fit(noisy_victim.black_box(), make_aux(20), generator())
    with pytest.raises(AuditError, match=f"fitted on 4 sendings of each image, got {got}"):
        reconstruct(seen)


@pytest.mark.parametrize("inner", [Rmle(), MeanImage(), KQuery()], ids=["rmle", "mean", "k-query"])
def test_only_a_black_box_attack_can_be_repeated(inner: Attack) -> None:
    with pytest.raises(
        ConfigError, match=f"black-box attack, got one with access '{inner.access}'"
    ):
        KQuery(inner=inner)


def test_no_sending_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        KQuery(repeats=0)


def test_its_threat_model_is_repeats_and_it_is_a_value() -> None:
    assert KQuery().access is Access.REPEATS
    assert KQuery() == KQuery()
    assert hash(KQuery()) == hash(KQuery())
    assert KQuery(repeats=2) != KQuery()
