"""Checks of the sizes that a configuration gives to a network."""

from collections.abc import Sequence

from torch import nn

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import require


def image_shape(input_shape: Sequence[int], *, at_least: int = 1) -> tuple[int, int, int]:
    """The shape of one image: (channels, height, width).

    A UserError if the samples are not images, or smaller than `at_least` in height or width.
    """
    found, fix = f"samples of shape {tuple(input_shape)}", "use images: (channels, height, width)"
    require(len(input_shape) == 3, "input_shape", found, fix)
    channels, height, width = input_shape
    found = f"images of {height}x{width} pixels, of which none are left after pooling"
    fix = f"use images of at least {at_least}x{at_least} (Digits: image_size: {at_least})"
    require(min(height, width) >= at_least, "input_shape", found, fix)
    return channels, height, width


def scaled(sizes: Sequence[int], width: float) -> list[int]:
    """Channels or units times `width`, rounded up; a UserError if it is not positive."""
    require(width > 0, "width", width, "give a positive factor such as 0.25")
    return [rounded_up(size * width) for size in sizes]


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Group normalisation; a UserError if the groups do not divide the channels."""
    fits = 1 <= groups <= channels and channels % groups == 0
    found = f"{groups}, which do not divide {channels} channels"
    require(fits, "groups", found, "use a divisor of them, or another width")
    return nn.GroupNorm(groups, channels)
