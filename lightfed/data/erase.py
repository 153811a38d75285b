"""Random erasing: a rectangle of an image becomes the mean colour.

Zhong, Zheng, Kang, Li, Yang: Random Erasing Data Augmentation. AAAI 2020.
https://arxiv.org/abs/1708.04896

The area of a rectangle is uniform between .04 and .2 of the image's. The logarithm of its height
over its width is uniform between those of 1/2 and 2. Its place is uniform. The authors of pFedMoE
use this in other repositories, by torchvision's `RandomErasing`, which erases the same rectangle of
all images of a batch.
"""

from math import prod

import torch
from torch import Tensor

_AREA = (0.04, 0.2)
_RATIO = (0.5, 2.0)

Size = tuple[int, int]
"""Height and width of an image."""


def draw_rectangles(
    count: int, size: Size, *, probability: float, generator: torch.Generator
) -> Tensor:
    """(4, count) int64 on the CPU: top, left, height and width; height and width 0 for none.

    The rectangles are cut to an image's size. `probability` is that of one, per image; the
    generator is of the CPU.
    """
    drawn = torch.rand(5, count, generator=generator, dtype=torch.float64)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * drawn[1]) * prod(size)
    ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** drawn[2]
    sides = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt())).round()
    limits = torch.tensor(size)[:, None]
    sides = torch.minimum(sides, limits) * (drawn[0] < probability)
    return torch.cat((drawn[3:] * (limits - sides + 1), sides)).long()


def hidden(size: Size, draw: Tensor, *, border: int, beyond: bool) -> Tensor:
    """(B, H, W) bool: the pixels of windows of images that are erased or in the border.

    `size` is that of a window, and of an image. `draw` is (2, B), the top and left edge of each
    window from the corner of the border, or (6, B) with the erased rectangle of each image. The
    border, in pixels, counts if `beyond`.
    """
    rows, columns = (
        torch.arange(length, device=draw.device) + start[:, None] - border
        for length, start in zip(size, draw[:2], strict=True)
    )
    mask = torch.zeros(draw.shape[1], *size, dtype=torch.bool, device=draw.device)
    if beyond:
        mask |= ~_cross(_within(rows, 0, size[0]), _within(columns, 0, size[1]))
    if len(draw) > 2:
        top, left, height, width = draw[2:, :, None]
        mask |= _cross(_within(rows, top, height), _within(columns, left, width))
    return mask


def _within(places: Tensor, start: Tensor | int, length: Tensor | int) -> Tensor:
    return (places >= start) & (places < start + length)


def _cross(rows: Tensor, columns: Tensor) -> Tensor:
    """(B, H) and (B, W) -> (B, H, W)."""
    return rows[:, :, None] & columns[:, None, :]
