"""The models whose rows are measured: shapes only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from lightfed_kernels.layout import Layout

Shapes = Iterator[tuple[str, tuple[int, ...]]]

CLASSES = 10

# HeteroFL's levels a .. e.
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)


@dataclass(frozen=True)
class Model:
    """A family of models, from the full width to narrow levels.

    Attributes:
        name: Its name in the table.
        shapes: Yields the names and shapes of the tensors at a rate of the full width.
        label_rows: The tensors whose rows are labels.
    """

    name: str
    shapes: Callable[[float], Shapes]
    label_rows: tuple[str, ...] = ("linear.weight", "linear.bias")

    @cached_property
    def layout(self) -> Layout:
        """The layout of the full width."""
        return self.level(1.0)

    def level(self, rate: float) -> Layout:
        """Return the layout at a rate of the full width."""
        return Layout.build(self.shapes(rate))


def resnet18(base: int) -> Callable[[float], Shapes]:
    """Return the shapes of a ResNet-18 whose first stage has `base` channels: 62 tensors.

    It has a three-by-three stem, blocks (2, 2, 2, 2), and norms with scale and shift.
    """

    def shapes(rate: float) -> Shapes:
        widths = [ceil(base * 2**stage * rate) for stage in range(4)]
        yield from _conv("stem", widths[0], 3, 3)
        channels = widths[0]
        for stage, width in enumerate(widths):
            for block in range(2):
                name = f"layer{stage + 1}.{block}"
                yield from _conv(f"{name}.conv1", width, channels, 3)
                yield from _conv(f"{name}.conv2", width, width, 3)
                if stage > 0 and block == 0:
                    yield from _conv(f"{name}.shortcut", width, channels, 1)
                channels = width
        yield "linear.weight", (CLASSES, channels)
        yield "linear.bias", (CLASSES,)

    return shapes


def cnn(base: int) -> Callable[[float], Shapes]:
    """Return the shapes of four three-by-three convolutions with norms: 18 tensors.

    They are HeteroFL's, but narrower: the first has `base` channels.
    """

    def shapes(rate: float) -> Shapes:
        channels = 1
        for layer in range(4):
            width = ceil(base * 2**layer * rate)
            yield f"conv{layer}.bias", (width,)
            yield from _conv(f"conv{layer}", width, channels, 3)
            channels = width
        yield "linear.weight", (CLASSES, channels)
        yield "linear.bias", (CLASSES,)

    return shapes


def _conv(name: str, rows: int, columns: int, kernel: int) -> Shapes:
    """Yield the tensors of a convolution and the norm behind it."""
    yield f"{name}.weight", (rows, columns, kernel, kernel)
    yield f"{name}.norm.weight", (rows,)
    yield f"{name}.norm.bias", (rows,)


RESNET18 = Model("resnet18", resnet18(64))  # 11,173,962 parameters
CNN = Model("cnn", cnn(16))  # 98,922 parameters
SMALL = Model("cnn-w8", cnn(8))  # for --quick
TINY = Model("cnn-w2", cnn(2))  # for Triton's interpreter
MODELS = {model.name: model for model in (RESNET18, CNN, SMALL, TINY)}
