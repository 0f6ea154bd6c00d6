"""The attacked object is the deployed client, and nothing can be done to it but asking."""

import copy
from dataclasses import fields

import pytest
import torch
from audits.reach import models, reachable
from torch import Tensor, nn

from splitveil.errors import AuditError
from splitveil.nets.catalogue import small
from splitveil.nets.channel import Channel, GaussianNoise, deployed
from splitveil.nets.split import SplitModel, cut
from splitveil.threat import BlackBox, Victim, opaque

IMAGE = (1, 8, 8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model() -> SplitModel:
    """A small net whose BatchNorm has seen data, in training mode."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        built = cut(small(IMAGE, 10), 1, Channel([GaussianNoise(0.1)]))
    with torch.no_grad():
        built.train()(torch.rand(32, *IMAGE, generator=generator(5)), generator(6))
    return built


@pytest.fixture
def images() -> Tensor:
    return torch.rand(16, *IMAGE, generator=generator(7))


def test_send_is_channel_of_encoder_bit_for_bit(model: SplitModel, images: Tensor) -> None:
    sent = model.victim().send(images, generator())
    model.eval()
    with torch.no_grad():
        z = model.encoder(images)
        assert torch.equal(sent, deployed(model.channel)(z, generator()))
        assert torch.equal(sent, model.victim().black_box().send(images, generator()))
        trained = model.split_forward(images, generator()).z_sent  # continuous noise
    assert not torch.equal(sent, trained)
    assert torch.equal(trained, model.channel(z, generator()))


def test_a_victim_of_a_model_in_training_mode_is_in_eval_mode(
    model: SplitModel, images: Tensor
) -> None:
    early = model.train().victim().send(images, generator())
    assert model.training
    assert torch.equal(early, model.eval().victim().send(images, generator()))


def test_sending_does_not_depend_on_the_batch(model: SplitModel, images: Tensor) -> None:
    victim = Victim(model.encoder, Channel())
    alone = torch.cat([victim.send(x[None]) for x in images])
    torch.testing.assert_close(victim.send(images), alone, rtol=0, atol=1e-6)


def test_training_the_model_afterwards_changes_nothing(model: SplitModel, images: Tensor) -> None:
    victim = model.victim()
    before = victim.send(images, generator())
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()(images).square().sum().backward()
    optimiser.step()
    assert not torch.equal(model.victim().send(images, generator()), before)
    assert torch.equal(victim.send(images, generator()), before)


def test_sending_moves_no_buffer(model: SplitModel, images: Tensor) -> None:
    victim = model.victim()
    before = copy.deepcopy(victim.encoder.state_dict())
    assert any(key.endswith("running_mean") for key in before)
    for seed in range(3):
        victim.send(images, generator(seed))
    after = victim.encoder.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_nothing_in_a_victim_or_its_answers_needs_a_gradient(
    model: SplitModel, images: Tensor
) -> None:
    victim = model.victim()
    assert not any(p.requires_grad for p in victim.encoder.parameters())
    assert not victim.send(images.clone().requires_grad_(), generator()).requires_grad
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.full((2, *IMAGE), 1.001), r"lie in \[0, 1\], got values from 1.001 to 1.001"),
        (torch.full((2, *IMAGE), -0.5), "got values from -0.5 to -0.5"),
        (torch.rand(2, *IMAGE) * 255, r"lie in \[0, 1\]"),
        (torch.full((2, *IMAGE), float("nan")), "from nan to nan"),
        (torch.full((2, *IMAGE), float("inf")), "from inf to inf"),
        (torch.zeros((2, *IMAGE), dtype=torch.uint8), "torch.uint8; divide uint8 by 255"),
    ],
)
def test_images_that_are_no_images_are_refused(
    model: SplitModel, bad: Tensor, message: str
) -> None:
    with pytest.raises(AuditError, match=f"images given to the victim must .*{message}"):
        model.victim().send(bad, generator())


def test_a_single_bad_pixel_is_enough(model: SplitModel, images: Tensor) -> None:
    images[3, 0, 2, 2] = float("nan")
    with pytest.raises(AuditError, match="images given to the victim"):
        model.victim().send(images, generator())


def test_the_ends_of_the_range_are_images(model: SplitModel) -> None:
    x = torch.stack([torch.zeros(IMAGE), torch.ones(IMAGE)])
    assert model.victim().send(x, generator()).shape == (2, 4, 4, 4)


def test_no_images_give_no_smashed_data(model: SplitModel) -> None:
    assert model.victim().send(torch.zeros(0, *IMAGE), generator()).shape == (0, 4, 4, 4)


def test_a_client_without_parameters_lives_on_the_cpu() -> None:
    assert Victim(nn.Flatten(), Channel()).device == torch.device("cpu")


def test_a_black_box_answers_as_the_victim_does(model: SplitModel, images: Tensor) -> None:
    victim = model.victim()
    box = victim.black_box()
    assert torch.equal(box.send(images, generator()), victim.send(images, generator()))
    assert box.device == victim.device


def test_a_black_box_has_only_ways_to_send_and_its_device(model: SplitModel) -> None:
    assert [f.name for f in fields(BlackBox)] == ["send", "device", "prepare", "fits"]
    box = model.victim().black_box()
    own = {name for name in dir(box) if not name.startswith("__")}
    assert own == {"send", "device", "prepare", "sender", "fits"}
    assert box.fits is None  # an audit adds an empty one, which attacks fill


def test_nothing_a_black_box_holds_leads_to_the_victim(model: SplitModel) -> None:
    victim = model.victim()
    box = victim.black_box()
    assert not hasattr(box.send, "__self__")
    assert models(box) == []
    assert not any(isinstance(thing, Victim | Tensor) for thing in reachable(box))
    assert models(victim.send)


def test_a_black_box_refuses_what_the_victim_refuses(model: SplitModel) -> None:
    with pytest.raises(AuditError, match=r"lie in \[0, 1\]"):
        model.victim().black_box().send(torch.full((2, *IMAGE), 2.0), generator())


def test_a_sealed_function_is_called_every_time_with_everything() -> None:
    heard: list[tuple[Tensor, torch.Generator | None]] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        heard.append((x, stream))
        return x + len(heard)

    handle, x, stream = opaque(send), torch.zeros(2), generator()
    assert handle(x, stream).tolist() == [1.0, 1.0]
    assert handle(x, None).tolist() == [2.0, 2.0]
    assert [s for _, s in heard] == [stream, None]
    assert all(given is x for given, _ in heard)
    assert send not in reachable(handle)


def test_a_white_box_has_the_networks_and_the_same_queries(
    model: SplitModel, images: Tensor
) -> None:
    victim = model.victim()
    box = victim.white_box()
    assert isinstance(box, BlackBox)
    sent = victim.send(images, generator())
    assert torch.equal(box.send(images, generator()), sent)
    assert torch.equal(box.channel(box.encoder(images), generator()), sent)
    assert not box.encoder.training
    assert not box.channel.training


def test_a_white_box_lets_gradients_through_to_the_image(model: SplitModel, images: Tensor) -> None:
    box = model.victim().white_box()
    x = images.clone().requires_grad_()
    box.channel(box.encoder(x), generator()).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


def test_training_a_white_boxs_networks_changes_no_other(model: SplitModel, images: Tensor) -> None:
    victim = model.victim()
    box, other = victim.white_box(), victim.white_box()
    before = victim.send(images, generator())
    box.encoder.train().requires_grad_()
    box.encoder(images).square().sum().backward()
    torch.optim.SGD(box.encoder.parameters(), lr=1.0).step()
    changed = box.channel(box.encoder.eval()(images), generator())
    assert not torch.equal(changed, before)
    for view in (victim, box, other):
        assert torch.equal(view.send(images, generator()), before)
    assert torch.equal(other.channel(other.encoder(images), generator()), before)
    assert all(p.requires_grad for p in model.parameters())


def test_prepared_images_are_sent_as_if_asked_for_one_by_one(
    model: SplitModel, images: Tensor
) -> None:
    victim = model.victim()
    rows = torch.tensor([3, 0, 3, 15])
    for box in (victim.black_box(), victim.white_box()):
        send = box.sender(images)
        torch.testing.assert_close(
            send(rows, generator(1)), victim.send(images[rows], generator(1))
        )
        assert not torch.equal(send(rows, generator(2)), send(rows, generator(3)))
        twice = send(rows, generator(4))
        assert not torch.equal(twice[0], twice[2])  # the same image, another draw


def test_a_box_that_prepares_nothing_asks_every_time(model: SplitModel, images: Tensor) -> None:
    box = BlackBox(model.victim().send, torch.device("cpu"))
    rows = torch.tensor([1, 2])
    sent = box.sender(images)(rows, generator())
    assert torch.equal(sent, model.victim().send(images[rows], generator()))


class Restless(nn.Module):
    """An encoder that adds noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(())


def test_an_encoder_that_draws_is_not_encoded_once_for_all(images: Tensor) -> None:
    send = Victim(Restless(), Channel()).black_box().sender(images)
    rows = torch.arange(4)
    assert not torch.equal(send(rows, None), send(rows, None))


def test_a_wire_too_wide_to_keep_is_asked_every_time(
    model: SplitModel, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitveil.threat.KEPT_BYTES", 100)
    victim = model.victim()
    sent = victim.prepare(images)(torch.tensor([5, 6]), generator())
    assert torch.equal(sent, victim.send(images[5:7], generator()))


def test_nobody_is_asked_to_encode_no_images(images: Tensor) -> None:
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), -1)  # torch cannot guess −1 of nothing

    sent = Victim(Careful(), Channel()).prepare(images)(torch.tensor([1, 0]), None)
    assert torch.equal(sent, images[[1, 0]].flatten(1))


def test_prepared_sendings_hide_model_and_clean_features(model: SplitModel, images: Tensor) -> None:
    victim = model.victim()
    send = victim.black_box().sender(images)
    assert not models(send)
    assert not any(isinstance(thing, Tensor) for thing in reachable(send))


def test_prepared_images_are_checked(model: SplitModel, images: Tensor) -> None:
    with pytest.raises(AuditError, match="must lie in"):
        model.victim().black_box().sender(2 * images + 1)
