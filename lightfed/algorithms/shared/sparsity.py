"""How many elements of every tensor a sparse model has."""

from collections.abc import Sequence
from math import prod


def erk_densities(shapes: Sequence[tuple[int, ...]], density: float) -> list[float]:
    """Erdos-Renyi-Kernel densities of tensors, for an overall density.

    A tensor's density is eps * sum(shape) / prod(shape), and 1 where that is more: the tensors that
    would exceed 1 the most are made dense, and eps is solved anew, until none exceeds it. Small
    tensors, of one dimension above all, stay dense. Mocanu et al. 2018; Evci et al., RigL, 2020;
    with every tensor maskable as in the released code of DisPFL.

    Args:
        shapes: of the tensors.
        density: in (0, 1], of all their elements together.
    """
    sizes = [prod(shape) for shape in shapes]
    raw = [sum(shape) / size if shape else 1.0 for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [i for i in range(len(shapes)) if i not in dense]
        wanted = sum(sizes[i] * density for i in sparse)
        wanted -= sum(sizes[i] * (1 - density) for i in dense)
        eps = wanted / sum(raw[i] * sizes[i] for i in sparse)
        largest = max(raw[i] for i in sparse)
        if largest * eps <= 1:
            return [1.0 if i in dense else eps * raw[i] for i in range(len(shapes))]
        dense |= {i for i in sparse if raw[i] == largest}
    return [1.0] * len(shapes)


def active_counts(shapes: Sequence[tuple[int, ...]], densities: Sequence[float]) -> list[int]:
    """Elements of every tensor at its density, rounded down."""
    return [int(d * prod(shape)) for shape, d in zip(shapes, densities, strict=True)]
