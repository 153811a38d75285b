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


def erased(size: Size, rectangles: Tensor) -> Tensor:
    """(B, H, W) bool: the pixels of images that are in their rectangles, (4, B)."""
    top, left, height, width = rectangles[:, :, None]
    rows, columns = (torch.arange(length, device=rectangles.device) for length in size)
    inside = (rows >= top) & (rows < top + height)
    return inside[:, :, None] & ((columns >= left) & (columns < left + width))[:, None]
