"""Random crop and horizontal flip of a whole batch, on its device."""

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.nn import functional as F


def crop_and_flip(
    x: Float[Tensor, "n c h w"], *, crop_pad: int, flip: bool, generator: Generator
) -> Float[Tensor, "n c h w"]:
    """Pad each image with zeros and cut out a random window of its size; mirror half of the images.

    Args:
        x: Images (n, c, h, w).
        crop_pad: Pixels of padding on each side; 0 switches the crop off.
        flip: Whether to mirror.
        generator: Draws the windows (rows, then columns), then the mirrored images. A CPU generator
            gives the same result on any device.

    Returns:
        Images of the same shape; x itself, without a draw, if both are switched off.

    >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> crop_and_flip(x, crop_pad=0, flip=False, generator=torch.Generator()) is x
    True
    """
    n, c, h, w = x.shape
    if crop_pad:
        size = 2 * crop_pad + 1
        top, left = _draw(size, (2, n), generator, x.device)
        rows = torch.arange(h, device=x.device) + top[:, None]  # (n, h)
        columns = torch.arange(w, device=x.device) + left[:, None]  # (n, w)
        x = F.pad(x, (crop_pad,) * 4)
        x = x.gather(2, rows[:, None, :, None].expand(n, c, h, x.shape[3]))
        x = x.gather(3, columns[:, None, None, :].expand(n, c, h, w))
    if flip:
        mirrored = _draw(2, (n,), generator, x.device).bool()
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    return x


def _draw(high: int, shape: tuple[int, ...], generator: Generator, device: torch.device) -> Tensor:
    """Integers in [0, high), drawn on the device of the generator, then moved to `device`."""
    drawn = torch.randint(high, shape, generator=generator, device=generator.device)
    # Without non_blocking the host would wait for all work that is queued on the device.
    return drawn.to(device, non_blocking=True)
