"""The cases of every operation."""

from collections.abc import Iterator, Sequence

import torch

from bench.case import Case
from bench.cases import masked_mean, masks, means, select, slices, steps
from bench.models import Model

PARTS = (masked_mean, slices, select, masks, means, steps)

OPERATIONS = tuple(name for part in PARTS for name in part.OPERATIONS)


def build_cases(
    operations: Sequence[str],
    models: Sequence[Model],
    clients: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Iterator[Case]:
    """The chosen cases, operation by operation.

    What is about one client, or about masks alone, comes up for every number of clients or every
    dtype; it is given once.
    """
    seen: set[str] = set()
    for part in PARTS:
        if set(part.OPERATIONS).isdisjoint(operations):
            continue
        for model in models:
            for count in clients:
                for dtype in dtypes:
                    for case in part.cases(model, count, dtype, device):
                        if case.operation in operations and case.title not in seen:
                            seen.add(case.title)
                            yield case
