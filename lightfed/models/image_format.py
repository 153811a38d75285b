"""The memory format of the images that a network gets on a CPU."""

from torch import Tensor, nn

_VECTOR = 8  # channels: a CPU normalises fewer of a pixel one by one


def suits_channels_last(network: nn.Module) -> bool:
    """Whether no layer normalises fewer than 8 channels of an image together.

    In the memory format channels_last the channels of a pixel are adjacent. Steps of networks with
    such layers take 1.3 to 3 times as long in it as in torch's own format (`docs/speed.md`).
    """
    return all(_together(layer) >= _VECTOR for layer in network.modules())


def _together(layer: nn.Module) -> int:
    """Channels that a layer normalises together; enough for layers that normalise no images."""
    if isinstance(layer, nn.BatchNorm2d):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels // layer.num_groups
    return 1 if isinstance(layer, nn.InstanceNorm2d) else _VECTOR


def channels_first(network: nn.Module, images: tuple[Tensor]) -> tuple[Tensor]:
    """A forward pre-hook that gives a network its images (B, C, H, W) in torch's own format."""
    (x,) = images
    # Not x.contiguous(), which leaves images of one channel as they are.
    return (x.flatten(1).view(x.shape),)
