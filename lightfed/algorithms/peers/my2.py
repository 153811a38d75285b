"""My-2: DisPFL with masks that change at aggregation, towards the neighbours' mean.

The second variant of the document behind DisPFL's reproduction (section 4.1). Before training, a
client drops its smallest weights and grows where the neighbours' mean is largest. The mean is
divided by the number of neighbours, not by the number that cover a weight. Its author's code
defines the rest: in every tensor with n dropped weights it takes the n largest elements of the
mean, including kept ones. For each of these that the client has kept, another weight grows at
random among the missing ones, so that the number of weights stays the same.

The code computes a model with the client's own values for kept weights, as its comment says, but
then uses the mean everywhere, as here.
"""

from collections.abc import Sequence
from typing import Any

from lightfed_kernels import apply_mask_, count_per_tensor, select_by_magnitude, select_random
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import Topology
from lightfed.api.fleet import Fleet
from lightfed.utils.rng import derive_seed


class My2(DisPFL):
    """DisPFL with masks changed by the neighbours' plain mean before training."""

    def __init__(self, topology: Topology | None = None, **dispfl: Any) -> None:
        """Set DisPFL's arguments.

        Args:
            topology: See DisPFL.
            **dispfl: See DisPFL.
        """
        super().__init__(topology, regrow="random", static=False, **dispfl)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        drops = self.drops(fed, t)
        kept = {k: self._pruned(fed, k, drops[k]) for k in self.masks}
        fed.exchange(self.all_senders(fed, t), masks=self.masks, over="neighbours")  # 1/J sum_j w_j
        for client, mask in kept.items():
            self.masks[client] = self._grown(fed, client, mask, t, drops[client])
            row = fed.row(client).floats
            apply_mask_(row, self.masks[client].to(row.device))
        fed.train(range(fed.clients), t)

    def _pruned(self, fed: Fleet, client: int, counts: Sequence[int]) -> Tensor:
        """The client's mask of the parameters, without its smallest weights."""
        mask = self._words(self.masks[client])
        weights = self._weights(fed.row(client).floats.to(fed.device))
        dropped = select_by_magnitude(weights, mask, counts, self._segments, largest=False)
        return mask & ~dropped

    def _grown(
        self, fed: Fleet, client: int, kept: Tensor, t: int, counts: Sequence[int]
    ) -> Tensor:
        """Grow as many weights as were dropped: the largest of the mean, and random ones."""
        segments, live = self._segments, self._segments.live_on(fed.device)
        mean = self._weights(fed.row(client).floats.to(fed.device))
        largest = select_by_magnitude(mean, live, counts, segments, largest=True)
        twice = count_per_tensor(largest & kept, segments)
        mask = kept | largest
        others = self.others(fed, live & ~mask, twice, client, t)
        return self._whole(mask | others)

    def others(self, fed: Fleet, free: Tensor, counts: Tensor, client: int, t: int) -> Tensor:
        """Random free elements of every tensor, as many as given."""
        seed = derive_seed(fed.seed, "regrow", t, client)
        return select_random(free, counts, self._segments, seed=seed)
