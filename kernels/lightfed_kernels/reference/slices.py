"""What the slice operations compute, tensor by tensor and client by client, in float64."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightfed_kernels.layout import Entry, Layout

Shape = tuple[int, ...]


def covered_index(wide: Entry, narrow: Entry, groups: Shape) -> tuple[Tensor, ...]:
    """The indices of the elements of a tensor that its slice has, dimension by dimension.

    In a dimension of g groups, the leading elements of every group: group h, place o -> h D_h + o.
    """
    index = []
    for size, kept, count in zip(wide.shape, narrow.shape, groups, strict=True):
        group, own = size // count, kept // count
        index.append((torch.arange(count)[:, None] * group + torch.arange(own)).flatten())
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
    """(P,) float64: the weighted mean where somebody covers, elsewhere `out` (P,).

    Args:
        out: the target's old values.
        target: its layout.
        rows: of the clients.
        layouts: of every client's row.
        weights: 1 for all by default.
        labels: of every client, None for all labels.
        label_rows: tensors of whose rows a client only gives those of its labels.
        groups: of the dimensions of a tensor, where not all are 1.
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
            part = torch.zeros(entry.shape, dtype=torch.float64)
            held = torch.zeros(entry.shape, dtype=torch.float64)
            index = covered_index(
                entry, narrow, (groups or {}).get(entry.name, (1,) * len(entry.shape))
            )
            part[index] = layout.view(row, narrow).double().cpu()
            held[index] = 1.0
            own = None if labels is None else labels[k]
            if entry.name in label_rows and own is not None:
                others = [i for i in range(entry.shape[0]) if i not in set(own)]
                part[others], held[others] = 0.0, 0.0
            total += weight * part
            count += weight * held
        view = target.view(mean, entry)
        view.copy_(torch.where(count > 0, total / count, view))
    return mean


def take(
    row: Tensor, target: Layout, layout: Layout, *, groups: Mapping[str, Shape] | None = None
) -> Tensor:
    """The client's row of the elements it covers; zeros where the target has none."""
    out = layout.new_row(dtype=row.dtype)
    wide = {entry.name: entry for entry in target}
    for narrow in layout:
        entry = wide.get(narrow.name)
        if entry is not None:
            index = covered_index(
                entry, narrow, (groups or {}).get(entry.name, (1,) * len(entry.shape))
            )
            layout.view(out, narrow).copy_(target.view(row.cpu(), entry)[index])
    return out
