"""The memory format of a network's images."""

from torch import Tensor, nn

_VECTOR = 8  # channels: a CPU's kernels take fewer of a pixel one by one
_OF_IMAGES = (
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
)


def suits_channels_last(network: nn.Module) -> bool:
    """Whether no layer normalises fewer than 8 channels of an image together, or drops its pixels.

    Nor may it have `guarded` layers.
    In the memory format channels_last the channels of a pixel are adjacent. Steps of networks that
    normalise so few take 1.3 to 2.2 times as long in it as in torch's own format
    (`docs/speed.md`). Dropout draws in the order of memory: in another format than that of clients
    side by side it has other draws.
    """
    layers = list(network.modules())
    images = max((i for i, layer in enumerate(layers) if isinstance(layer, _OF_IMAGES)), default=0)
    drops = any(isinstance(layer, nn.Dropout) for layer in layers[:images])
    slow = any(_normalised_channels(layer) < _VECTOR for layer in layers)
    return not (drops or slow or guarded(network))


def guarded(network: nn.Module) -> dict[str, nn.Module]:
    """Convolutions, by name, that a CPU computes in torch's own format alone.

    Runs with such layers in channels_last ended without a message under torch 2.12.1. Other
    versions have not been tried; the guard costs little, since such layers are small.
    """
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Conv2d)
        and layer.in_channels < _VECTOR
        and max(layer.kernel_size) == 1 < max(layer.stride)
    }


def _normalised_channels(layer: nn.Module) -> int:
    """Channels that a layer normalises as one; enough for layers that normalise no images."""
    if isinstance(layer, nn.BatchNorm2d):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels // layer.num_groups
    return 1 if isinstance(layer, nn.InstanceNorm2d) else _VECTOR


def channels_first(module: nn.Module, images: tuple[Tensor]) -> tuple[Tensor]:
    """A forward pre-hook that gives a module its images (B, C, H, W) in torch's own format."""
    (x,) = images
    # Not x.contiguous(), which leaves images of one channel as they are.
    return (x.flatten(1).view(x.shape),)
