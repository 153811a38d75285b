"""What the slice operations compute, tensor by tensor and client by client, in float64."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightfed_kernels.layout import Entry, Layout

Shape = tuple[int, ...]


def covered_index(wide: Entry, narrow: Entry, groups: Shape) -> tuple[Tensor, ...]:
    """Return the indices of the elements of a tensor that its slice has, dimension by dimension.

    In a dimension of several groups, these are the leading elements of every group: place o of
    group h is at h D + o, where D is the size of a group.
    """
    index = []
    for size, kept, num_groups in zip(wide.shape, narrow.shape, groups, strict=True):
        starts = torch.arange(num_groups) * (size // num_groups)
        places = torch.arange(kept // num_groups)
        index.append((starts[:, None] + places).flatten())
    return torch.meshgrid(*index, indexing="ij") if index else ()


def merge(
    out: Tensor,
    target: Layout,
    rows: Sequence[Tensor],
    layouts: Sequence[Layout],
    *,
    weights: Sequence[float] | None = None,
    labels: Sequence[Sequence[int] | None] | None = None,
    label_rows: Sequence[str] = (),
    groups: Mapping[str, Shape] | None = None,
) -> Tensor:
    """Return the weighted mean where somebody covers and `out` elsewhere, as (P,) of float64.

    Args:
        out: (P,) the target's old values.
        target: Its layout.
        rows: The clients' rows.
        layouts: The layout of every client's row.
        weights: The clients' weights; all 1 by default.
        labels: The labels of every client; None for all labels.
        label_rows: The tensors of which a client gives only the rows of its labels.
        groups: The numbers of groups of the dimensions of a tensor, where not all are 1.
    """
    mean = out.double().cpu().clone()
    for entry in target:
        total = torch.zeros(entry.shape, dtype=torch.float64)
        count = torch.zeros(entry.shape, dtype=torch.float64)
        for k, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
            narrow = next((e for e in layout if e.name == entry.name), None)
            weight = 1.0 if weights is None else weights[k]
            if narrow is None or narrow.numel == 0 or weight == 0:
                continue

            # The client's values and what it covers, in the shape of the target's tensor.
            values = torch.zeros(entry.shape, dtype=torch.float64)
            covers = torch.zeros(entry.shape, dtype=torch.float64)
            index = covered_index(entry, narrow, _groups_of(entry, groups))
            values[index] = layout.view(row, narrow).double().cpu()
            covers[index] = 1.0

            labels_of_client = None if labels is None else labels[k]
            if entry.name in label_rows and labels_of_client is not None:
                for label in range(entry.shape[0]):
                    if label not in labels_of_client:
                        values[label] = 0.0
                        covers[label] = 0.0
            total += weight * values
            count += weight * covers

        view = target.view(mean, entry)
        view.copy_(torch.where(count > 0, total / count, view))
    return mean


def take(
    row: Tensor, target: Layout, layout: Layout, *, groups: Mapping[str, Shape] | None = None
) -> Tensor:
    """Return a client's row with the target's elements; zeros where the target has none."""
    out = layout.new_row(dtype=row.dtype)
    wide = {entry.name: entry for entry in target}
    for narrow in layout:
        entry = wide.get(narrow.name)
        if entry is not None:
            index = covered_index(entry, narrow, _groups_of(entry, groups))
            layout.view(out, narrow).copy_(target.view(row.cpu(), entry)[index])
    return out


def _groups_of(entry: Entry, groups: Mapping[str, Shape] | None) -> Shape:
    """Return the numbers of groups of a tensor's dimensions."""
    ungrouped = (1,) * len(entry.shape)
    return ungrouped if groups is None else groups.get(entry.name, ungrouped)
