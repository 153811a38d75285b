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
    """A family of models, from the full width to narrow levels."""

    name: str
    shapes: Callable[[float], Shapes]
    label_rows: tuple[str, ...] = ("linear.weight", "linear.bias")

    @cached_property
    def layout(self) -> Layout:
        return self.level(1.0)

    def level(self, rate: float) -> Layout:
        return Layout.build(self.shapes(rate))


def resnet18(base: int) -> Callable[[float], Shapes]:
    """Three-by-three stem, blocks (2, 2, 2, 2), norms with scale and shift: 62 tensors."""

    def shapes(rate: float) -> Shapes:
        widths = [ceil(base * 2**stage * rate) for stage in range(4)]
        yield from _conv("stem", widths[0], 3, 3)
        wide = widths[0]
        for stage, width in enumerate(widths):
            for block in range(2):
                name = f"layer{stage + 1}.{block}"
                yield from _conv(f"{name}.conv1", width, wide, 3)
                yield from _conv(f"{name}.conv2", width, width, 3)
                if stage > 0 and block == 0:
                    yield from _conv(f"{name}.shortcut", width, wide, 1)
                wide = width
        yield "linear.weight", (CLASSES, wide)
        yield "linear.bias", (CLASSES,)

    return shapes


def cnn(base: int) -> Callable[[float], Shapes]:
    """Four three-by-three convolutions with norms (HeteroFL's, narrower): 18 tensors."""

    def shapes(rate: float) -> Shapes:
        wide = 1
        for layer in range(4):
            width = ceil(base * 2**layer * rate)
            yield f"conv{layer}.bias", (width,)
            yield from _conv(f"conv{layer}", width, wide, 3)
            wide = width
        yield "linear.weight", (CLASSES, wide)
        yield "linear.bias", (CLASSES,)

    return shapes


def _conv(name: str, rows: int, columns: int, kernel: int) -> Shapes:
    yield f"{name}.weight", (rows, columns, kernel, kernel)
    yield f"{name}.norm.weight", (rows,)
    yield f"{name}.norm.bias", (rows,)


# 11,173,962 and 98,922 parameters; the last two are small enough for --quick and the interpreter.
RESNET18 = Model("resnet18", resnet18(64))
CNN = Model("cnn", cnn(16))
TINY = Model("cnn-w2", cnn(2))
MODELS = {model.name: model for model in (RESNET18, CNN, Model("cnn-w8", cnn(8)), TINY)}
