import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from splitveil.train.loop import first_flips
from splitveil.train.step import crop_and_flip, mirrored_in


def slow_augment(x: Tensor, crop_pad: int, flip: bool, generator: Generator) -> Tensor:
    """Obviously correct: one image after the other, with the draws in the documented order."""
    n, c, h, w = x.shape
    shifts = torch.randint(2 * crop_pad + 1, (2, n), generator=generator) if crop_pad else None
    mirrors = torch.randint(2, (n,), generator=generator) if flip else None
    out = []
    for i in range(n):
        image = x[i]
        if shifts is not None:
            canvas = torch.zeros(c, h + 2 * crop_pad, w + 2 * crop_pad, dtype=x.dtype)
            canvas[:, crop_pad : crop_pad + h, crop_pad : crop_pad + w] = image
            top, left = int(shifts[0, i]), int(shifts[1, i])
            image = canvas[:, top : top + h, left : left + w]
        if mirrors is not None and mirrors[i]:
            image = image[:, :, range(w - 1, -1, -1)]
        out.append(image)
    return torch.stack(out) if out else x


@settings(deadline=None)
@given(
    n=st.integers(0, 5),
    c=st.integers(1, 3),
    h=st.integers(1, 6),
    w=st.integers(1, 6),
    crop_pad=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_loop_over_images(
    *, n: int, c: int, h: int, w: int, crop_pad: int, flip: bool, seed: int
) -> None:
    x = torch.rand(n, c, h, w, generator=Generator().manual_seed(seed))
    got = crop_and_flip(x, crop_pad=crop_pad, flip=flip, generator=Generator().manual_seed(seed))
    expected = slow_augment(x, crop_pad, flip, Generator().manual_seed(seed))
    assert torch.equal(got, expected)


def test_switched_off_returns_the_same_object_and_draws_nothing() -> None:
    x, generator = torch.rand(3, 1, 4, 4), Generator().manual_seed(0)
    before = generator.get_state()
    assert crop_and_flip(x, crop_pad=0, flip=False, generator=generator) is x
    assert torch.equal(generator.get_state(), before)


def test_flip_alone_mirrors_about_half() -> None:
    x = torch.rand(2000, 1, 1, 2, generator=Generator().manual_seed(0))
    got = crop_and_flip(x, crop_pad=0, flip=True, generator=Generator().manual_seed(1))
    mirrored = (got == x.flip(3)).all(dim=(1, 2, 3))
    assert torch.equal(got[~mirrored], x[~mirrored])
    assert abs(float(mirrored.float().mean()) - 0.5) < 0.05


def test_given_images_are_mirrored_without_a_draw() -> None:
    x, generator = torch.rand(3, 1, 1, 2), Generator().manual_seed(0)
    before = generator.get_state()
    mirrored = torch.tensor([True, False, True])
    got = crop_and_flip(x, crop_pad=0, flip=True, generator=generator, mirrored=mirrored)
    assert torch.equal(got, torch.stack([x[0].flip(2), x[1], x[2].flip(2)]))
    assert torch.equal(generator.get_state(), before)


def test_alternating_flips_show_every_image_both_ways_in_two_epochs() -> None:
    first = first_flips(1000, seed=3)
    assert torch.equal(first, first_flips(1000, seed=3))
    assert 450 < int(first.sum()) < 550
    epochs = [mirrored_in(first, epoch) for epoch in (1, 2, 3)]
    assert bool((epochs[0] ^ epochs[1]).all())
    assert torch.equal(epochs[0], epochs[2])


def test_every_window_occurs_and_the_input_is_untouched() -> None:
    x = torch.zeros(900, 1, 3, 3)
    x[:, :, 1, 1] = 1.0
    got = crop_and_flip(x, crop_pad=1, flip=False, generator=Generator().manual_seed(0))
    places = got.flatten(1).argmax(1).bincount(minlength=9)
    assert got.sum() == 900
    assert places.min() > 60  # 100 expected in each of the nine
    assert x[:, 0, 1, 1].sum() == 900


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cpu_generator_gives_the_same_on_the_device() -> None:
    x = torch.rand(8, 3, 6, 6)
    here = crop_and_flip(x, crop_pad=2, flip=True, generator=Generator().manual_seed(0))
    there = crop_and_flip(x.cuda(), crop_pad=2, flip=True, generator=Generator().manual_seed(0))
    assert torch.equal(there.cpu(), here)
    on_device = Generator("cuda").manual_seed(0)
    assert crop_and_flip(x.cuda(), crop_pad=2, flip=True, generator=on_device).is_cuda
