"""The cases of every operation."""

from collections.abc import Iterator, Sequence

import torch

from bench.case import Case
from bench.cases import masked_mean, masks, means, select, slices, steps
from bench.models import Model

# Files of cases; each has OPERATIONS and a function `cases`.
PARTS = (masked_mean, slices, select, masks, means, steps)

OPERATIONS = tuple(name for part in PARTS for name in part.OPERATIONS)


def build_cases(
    operations: Sequence[str],
    models: Sequence[Model],
    clients: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Iterator[Case]:
    """Yield the chosen cases, operation by operation.

    A case of a single client comes up for every number of clients, and one of masks alone for every
    dtype. Each is yielded once.
    """
    seen: set[str] = set()
    for part in PARTS:
        if set(part.OPERATIONS).isdisjoint(operations):
            continue
        for model in models:
            for count in clients:
                for dtype in dtypes:
                    for case in part.cases(model, count, dtype, device):
                        is_new = case.title not in seen
                        if is_new and case.operation in operations:
                            seen.add(case.title)
                            yield case
