"""Random crops of many images at once, cheaply."""

import torch
from torch import Tensor


class BorderedImages:
    """Images that are stored with a border around them, and windows on them of the size without.

    The images lie end to end in memory. What begins `top` rows and `left` columns into an image,
    and is as long as an image, has the window in its upper left corner. To copy that one run per
    image, and to cut it later, is several times faster than to gather each row of each window.
    """

    def __init__(self, x: Tensor, *, border: int, rows: int) -> None:
        """Copy images.

        Args:
            x: (N, ...) contiguous, in any layout in which columns follow rows, border included.
            border: pixels on each side.
            rows: the axis of x that counts rows; the next one counts columns.
        """
        self._border = border
        self._shape = x.shape[1:]
        self._steps = (x.stride(rows), x.stride(rows + 1))
        cut = [slice(None)] * x.dim()
        for axis in (rows, rows + 1):
            cut[axis] = slice(x.shape[axis] - 2 * border)
        self._cut = tuple(cut)
        size = self._shape.numel()
        stored = torch.cat(
            (x, torch.zeros_like(x[:1]))
        )  # so that the last run does not end outside
        self._images = stored[:-1]
        self._runs = stored.view(-1).as_strided((len(x) * size, size), (1, 1))

    def windows(self, index: Tensor, corners: Tensor | None) -> Tensor:
        """The windows of some images, a non-contiguous view of new memory.

        Args:
            index: (B,) which images, on their device.
            corners: (2, B) on the CPU, rows and columns to skip, 0 .. 2 border; None: the middle.

        Returns:
            (B, ...) in the layout of x.
        """
        down, right = self._steps
        if corners is None:
            skipped: Tensor | int = self._border * (down + right)
        else:
            skipped = (corners[0] * down + corners[1] * right).to(index.device)
        runs = self._runs.index_select(0, index.long() * self._shape.numel() + skipped)
        return runs.view(len(index), *self._shape)[self._cut]

    def middle(self) -> Tensor:
        """(N, ...) all images without their border, a view."""
        inner = slice(self._border, -self._border)
        return self._images[tuple(inner if part.stop is not None else part for part in self._cut)]
