"""The memory format of a network's images."""

from torch import Tensor, nn

# The kernels of a CPU take fewer channels of a pixel one by one.
_VECTOR = 8

_IMAGE_LAYERS = (
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
)


def suits_channels_last(network: nn.Module) -> bool:
    """Return whether a network's images may have the memory format channels_last.

    In it the channels of a pixel are adjacent. Three things speak against it:

    - A layer normalizes fewer than 8 channels of an image together: steps take 1.3 to 2.2 times as
      long as in torch's own format (`docs/speed.md`).
    - Pixels are dropped: dropout draws in the order of memory, so its draws would differ from those
      of clients side by side, which have another format.
    - The network has `guarded` layers.
    """
    layers = list(network.modules())
    is_slow = any(_normalized_channels(layer) < _VECTOR for layer in layers)
    return not is_slow and not _drops_pixels(layers) and not guarded(network)


def _drops_pixels(layers: list[nn.Module]) -> bool:
    """Return whether a dropout layer comes before the last layer that works on images."""
    last = 0
    for position, layer in enumerate(layers):
        if isinstance(layer, _IMAGE_LAYERS):
            last = position
    return any(isinstance(layer, nn.Dropout) for layer in layers[:last])


def guarded(network: nn.Module) -> dict[str, nn.Module]:
    """Return the convolutions, by name, that a CPU computes in torch's own format alone.

    They are strided 1x1 convolutions of few channels. Runs with such layers in channels_last ended
    without a message under torch 2.12.1. Other versions have not been tried; the guard costs
    little, since such layers are small.
    """
    convolutions: dict[str, nn.Module] = {}
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Conv2d) or layer.in_channels >= _VECTOR:
            continue
        if max(layer.kernel_size) == 1 and max(layer.stride) > 1:
            convolutions[name] = layer
    return convolutions


def _normalized_channels(layer: nn.Module) -> int:
    """Return how many channels a layer normalizes as one; enough if it normalizes no images."""
    if isinstance(layer, nn.BatchNorm2d):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels // layer.num_groups
    if isinstance(layer, nn.InstanceNorm2d):
        return 1
    return _VECTOR


def channels_first(module: nn.Module, images: tuple[Tensor]) -> tuple[Tensor]:
    """Return a module's images (B, C, H, W) in torch's own format, as a forward pre-hook."""
    (x,) = images
    # Not x.contiguous(), which leaves images of one channel as they are.
    return (x.flatten(1).view(x.shape),)
