"""The cases of every operation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightfed_kernels.bench.case import Case
from lightfed_kernels.bench.cases import masked_mean, masks, means, select, slices, steps
from lightfed_kernels.bench.cases.common import Build
from lightfed_kernels.bench.models import Model


@dataclass(frozen=True)
class Part:
    """Operations whose cases are built together.

    Attributes:
        per_client: whether they are about several clients.
        per_dtype: whether they are about rows.
    """

    operations: tuple[str, ...]
    build: Build
    per_client: bool = True
    per_dtype: bool = True


PARTS = (
    Part(("masked_mean",), masked_mean.cases),
    Part(("slice_merge", "slice_take"), slices.cases),
    Part(("prune_regrow",), select.cases, per_client=False),
    Part(masks.WORD_OPERATIONS, masks.word_cases, per_client=False, per_dtype=False),
    Part(masks.ROW_OPERATIONS, masks.row_cases, per_client=False),
    Part(means.OPERATIONS, means.cases),
    Part(steps.OPERATIONS, steps.cases, per_client=False),
)

OPERATIONS = tuple(name for part in PARTS for name in part.operations)


def build_cases(
    operations: Sequence[str],
    models: Sequence[Model],
    clients: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Iterator[Case]:
    """The chosen cases, operation by operation."""
    for part in PARTS:
        if not set(part.operations) & set(operations):
            continue
        for model in models:
            for count in clients if part.per_client else clients[:1]:
                for dtype in dtypes if part.per_dtype else dtypes[:1]:
                    for case in part.build(model, count, dtype, device):
                        if case.operation in operations:
                            yield case
