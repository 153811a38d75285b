"""The samples that models are tested on: those of each client, and those of all together."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import Batch, Resident

TestSplit = Literal["test", "validation"]
"""`test` is for figures that are reported. `validation`, a part of the clients' training samples,
is for choices: of a rate, of a round, of when to stop."""

TEST_SPLITS: tuple[TestSplit, ...] = get_args(TestSplit)


class TestedSamples:
    """The samples of one of `TEST_SPLITS`. Their order is fixed, and they are not augmented.

    Args:
        of_clients: The split of the data set that holds the samples of clients.
        index_of: Returns the samples of a client, as indices into `of_clients`.
        whole: The split of the data set that holds the samples of all together.
        whole_index: Those samples, as ascending indices into `whole`; None for all of `whole`.
        batch_size: The samples of a batch.
    """

    __test__ = False  # pytest takes the name for a test

    def __init__(
        self,
        of_clients: Resident,
        index_of: Callable[[int], np.ndarray],
        whole: Resident,
        whole_index: np.ndarray | None,
        *,
        batch_size: int,
    ) -> None:
        self._of_clients = of_clients
        self._index_of = index_of
        self._whole = whole
        self._whole_index = np.arange(len(whole)) if whole_index is None else whole_index
        self._batch_size = batch_size

    def index(self, client: int) -> np.ndarray:
        """Return the samples of a client, or of all together for -1, as indices."""
        return self._whole_index if client < 0 else self._index_of(client)

    def samples(self, client: int, index: Tensor) -> Batch:
        """Return samples by indices of `index`.

        Args:
            client: Any client, or -1 for the samples of all together.
            index: The samples, (B,).
        """
        split = self._whole if client < 0 else self._of_clients
        return split.batch(index)

    def batches(self, client: int) -> Iterator[Batch]:
        """Yield the samples of a client; no batch if it has none."""
        plan = self._of_clients.plan(self._index_of(client), batch_size=self._batch_size)
        return self._of_clients.batches(plan)

    @property
    def num_whole_batches(self) -> int:
        """The number of batches of the samples of all together."""
        return -(-len(self._whole_index) // self._batch_size)

    def whole_batch(self, i: int) -> Batch:
        """Return batch i of the samples of all together."""
        start = i * self._batch_size
        positions = self._whole_index[start : start + self._batch_size]
        return self._whole.batch(torch.from_numpy(positions))
