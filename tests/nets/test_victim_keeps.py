"""What a victim encoded for one attack serves the next, and never outlives what it was made of."""

import pytest
import torch
from torch import Tensor, nn

from splitveil.nets.channel import Channel
from splitveil.threat import Victim


@pytest.fixture
def images() -> Tensor:
    return torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(7))


class Counting(nn.Module):
    """An encoder that multiplies, and counts the images it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shown: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shown.append(len(x))
        return self.scale * x


def counting_victim() -> tuple[Victim, list[int]]:
    victim = Victim(Counting(), Channel())
    shown: list[int] = victim.encoder.shown  # type: ignore[assignment]
    return victim, shown


def test_attacks_share_what_was_encoded_for_the_first(images: Tensor) -> None:
    victim, shown = counting_victim()
    rows = torch.tensor([4, 1])
    sent = [box.sender(images)(rows, None) for box in (victim.black_box(), victim.white_box())]
    assert shown == [16, 16]  # once, and once more to see whether the encoder draws
    for each in sent:
        assert torch.equal(each, 2 * images[rows])
    copied = images.clone()
    victim.prepare(copied)
    assert len(shown) == 4  # other images, though equal ones
    for known in (images, copied):
        victim.prepare(known)
    assert len(shown) == 4


def test_the_oldest_makes_room(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, shown = counting_victim()
    monkeypatch.setattr("splitveil.threat.KEPT_BYTES", 2 * images.nbytes)
    second, third = images.clone(), images.clone()
    for each in (images, second, third):
        victim.prepare(each)
    assert len(shown) == 6
    for each in (third, second):
        victim.prepare(each)
    assert len(shown) == 6
    victim.prepare(images)
    assert len(shown) == 8


def test_large_images_go_through_a_cpu_in_small_parts() -> None:
    victim, shown = counting_victim()
    large = torch.rand(300, 3, 32, 32)
    sent = victim.prepare(large)(torch.arange(300), None)
    assert shown == [128, 128, 128, 44]
    assert torch.equal(sent, 2 * large)


@pytest.mark.parametrize("written", ["images", "weights", "weights' data", "encoder"])
def test_what_was_encoded_is_not_kept_when_its_makers_change(written: str, images: Tensor) -> None:
    victim, _ = counting_victim()
    victim.prepare(images)
    weight: nn.Parameter = victim.encoder.scale  # type: ignore[assignment]
    with torch.no_grad():
        if written == "images":
            images.mul_(0.5)
        elif written == "weights":
            weight.mul_(3.0)
        elif written == "weights' data":
            weight.data = torch.tensor(5.0)
        else:
            victim.encoder = nn.Identity()
    sent = victim.prepare(images)(torch.arange(16), None)
    assert torch.equal(sent, victim.send(images))


def test_what_was_encoded_goes_with_its_images(images: Tensor) -> None:
    victim, _ = counting_victim()
    other = images.clone()
    for each in (images, other):
        victim.prepare(each)
    del each, other
    assert list(vars(victim)["_clean"]) == [id(images)]


def test_tensors_that_do_not_count_their_writes_are_encoded_anew(images: Tensor) -> None:
    victim, shown = counting_victim()
    with torch.inference_mode():
        made = images * 0.5
    for _ in range(2):
        sent = victim.prepare(made)(torch.arange(16), None)
        assert torch.equal(sent, 2 * made)
    assert len(shown) == 4


@pytest.mark.parametrize("few", [True, False])
def test_an_encoder_that_changes_its_shape_is_asked_as_it_stands(few: bool) -> None:
    class ByBatch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) if (len(x) < 128) is few else x

    images = torch.rand(130, 3, 32, 32)
    victim = Victim(ByBatch(), Channel())
    for rows in (torch.arange(2), torch.arange(130)):
        assert torch.equal(victim.prepare(images)(rows, None), victim.send(images[rows]))
