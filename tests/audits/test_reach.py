"""A black-box attack can reach no network: the walk that looks for one finds it where it is."""

import functools
from collections.abc import Callable

import pytest
import torch
from audits.made import Spy, a_target
from audits.reach import models, reachable
from torch import Generator, Tensor, nn

from splitveil.attacks.baseline import MeanImage
from splitveil.audits.suite import run_attacks
from splitveil.io import Progress
from splitveil.threat import Access, BlackBox, Labelled, Reconstructor, Victim, WhiteBox

CPU = torch.device("cpu")


def a_victim() -> Victim:
    return Victim(nn.Conv2d(1, 2, 3), nn.Identity())


class Holder:
    """Keeps a victim under a private name."""

    def __init__(self, victim: Victim) -> None:
        self._inner = [victim]

    def send(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        return self._inner[0].send(x, generator)


def by_closure(victim: Victim) -> object:
    return lambda x, generator=None: victim.send(x, generator)


def by_default(victim: Victim) -> object:
    def send(x: Tensor, generator: Generator | None = None, inner: Victim = victim) -> Tensor:
        return inner.send(x, generator)

    return send


def by_wrapper(victim: Victim) -> object:
    @functools.wraps(victim.send)
    def send(*_: object) -> None:
        return None

    return send


NAIVE: dict[str, Callable[[Victim], object]] = {
    "closure": by_closure,
    "default": by_default,
    "wrapper": by_wrapper,
    "bound method": lambda victim: victim.send,
    "partial": lambda victim: functools.partial(victim.send, generator=None),
    "object": lambda victim: Holder(victim).send,
    "cache": lambda victim: functools.lru_cache(maxsize=0)(victim.send),
    "parameter": lambda victim: {"w": [next(victim.encoder.parameters())]},
}


@pytest.mark.parametrize("kind", NAIVE)
def test_the_walk_finds_a_network_behind_a_naive_handle(kind: str) -> None:
    assert models(NAIVE[kind](a_victim()))


def test_no_way_leads_from_a_black_box_to_a_network() -> None:
    victim = a_victim()
    box = victim.black_box()
    assert models(box) == []
    assert not any(isinstance(t, Victim | Tensor) for t in reachable(box))
    assert models(victim.white_box())


@pytest.mark.parametrize("access", sorted(set(Access) - {Access.WHITE_BOX}))
def test_nothing_an_attack_is_given_leads_to_a_network(access: Access) -> None:
    case = a_target(nn.Conv2d(1, 4, 3, padding=1))
    held = {t.data_ptr() for t in case.victim.encoder.state_dict().values()}
    secret = {case.scored.images.data_ptr(), *held}
    spy = Spy(access, repeats=2 if access is Access.REPEATS else 1)
    run_attacks(case, {"spy": spy})
    assert type(spy.boxes[0]) is BlackBox
    for given in (spy.boxes[0], spy.auxes[0], spy.seen[0], spy.heard):
        assert models(given) == []
        tensors = [t for t in reachable(given) if isinstance(t, Tensor) and t.numel()]
        assert not any(t.data_ptr() in secret for t in tensors)


def test_a_white_box_attack_is_given_networks() -> None:
    case, spy = a_target(nn.Conv2d(1, 4, 3, padding=1)), Spy(Access.WHITE_BOX)
    run_attacks(case, {"spy": spy})
    box = spy.boxes[0]
    assert isinstance(box, WhiteBox)
    assert isinstance(box.encoder, nn.Conv2d)
    assert box.encoder is not case.victim.encoder
    assert case.victim.encoder not in models(box)


class Vandal(MeanImage):
    """Trains, moves and spoils everything in a white box."""

    def fit(
        self,
        victim: BlackBox,
        aux: Labelled,
        generator: Generator,
        progress: Progress = lambda *_: None,
    ) -> Reconstructor:
        assert isinstance(victim, WhiteBox)
        victim.encoder.train()
        victim.encoder(aux.images)
        for module in (victim.encoder, victim.channel):
            for tensor in module.state_dict().values():
                tensor.zero_()
        return super().fit(victim, aux, generator, progress)


def test_a_white_box_attack_cannot_change_the_victim() -> None:
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
    case, spy = a_target(encoder, noise_std=0.0), Spy()
    before = case.victim.send(case.scored.images)
    state = {k: v.clone() for k, v in case.victim.encoder.state_dict().items()}
    run_attacks(case, {"vandal": Vandal(access=Access.WHITE_BOX), "spy": spy})
    assert torch.equal(case.victim.send(case.scored.images), before)
    assert torch.equal(spy.boxes[0].send(case.scored.images, None), before)
    after = case.victim.encoder.state_dict()
    assert all(torch.equal(after[k], v) for k, v in state.items())
    assert not case.victim.encoder.training
