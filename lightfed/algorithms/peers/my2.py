"""My-2: DisPFL with masks that change at aggregation, towards the neighbors' mean.

The second variant of the document behind DisPFL's reproduction (section 4.1). Before training, a
client drops its smallest weights and grows others where the neighbors' mean is largest. The mean is
divided by the number of neighbors, not by the number that cover a weight. Its author's code defines
the rest: in every tensor with n dropped weights it takes the n largest elements of the mean,
including those that the client has kept. For each of the latter another weight grows at random
among the missing ones, so that the number of weights stays the same.

That code computes a model with the client's own values for kept weights, as its comment says, but
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
    """DisPFL whose masks change before training, by the neighbors' plain mean."""

    def __init__(self, topology: Topology | None = None, **dispfl: Any) -> None:
        """Set DisPFL's arguments.

        Args:
            topology: See DisPFL.
            **dispfl: See DisPFL.
        """
        super().__init__(topology, regrow="random", static=False, **dispfl)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        # Drop by the client's own weights, which the exchange is about to replace.
        drops = self.drops(fed, t)
        kept = {client: self._pruned(fed, client, drops[client]) for client in self.masks}

        # 1 / J sum_j w_j,   j in S_{k,t} and k
        senders = self.all_senders(fed, t)
        self.exchange(fed, senders, masks=self.masks, over="neighbours")

        for client, kept_words in kept.items():
            self.masks[client] = self._grown(fed, client, kept_words, t, drops[client])
            row = fed.row(client).floats
            apply_mask_(row, self.masks[client].to(row.device))
        fed.train(range(fed.clients), t)

    def _pruned(self, fed: Fleet, client: int, counts: Sequence[int]) -> Tensor:
        """Return the words of the client's parameters without its smallest weights.

        Args:
            fed: The clients.
            client: A client of this rank.
            counts: How many weights of each tensor to drop.
        """
        words = self.parameter_words(self.masks[client])
        weights = self.parameters_of(fed.row(client).floats.to(fed.device))
        dropped = select_by_magnitude(weights, words, counts, self.segments, largest=False)
        return words & ~dropped

    def _grown(
        self, fed: Fleet, client: int, kept: Tensor, t: int, counts: Sequence[int]
    ) -> Tensor:
        """Grow as many weights as were dropped: the largest of the mean, and random ones.

        Args:
            fed: The clients, whose rows are the neighbors' mean.
            client: A client of this rank.
            kept: Words of the parameters that it has not dropped.
            t: The round.
            counts: How many weights of each tensor it has dropped.

        Returns:
            The new mask of the client's row, (P / 32,).
        """
        every_weight = self.segments.live_on(fed.device)
        mean = self.parameters_of(fed.row(client).floats.to(fed.device))
        largest = select_by_magnitude(mean, every_weight, counts, self.segments, largest=True)

        # Those of the largest that were there already make place for random ones.
        already_kept = count_per_tensor(largest & kept, self.segments)
        words = kept | largest
        random = self.others(fed, every_weight & ~words, already_kept, client, t)
        return self.row_mask(words | random)

    def others(self, fed: Fleet, free: Tensor, counts: Tensor, client: int, t: int) -> Tensor:
        """Draw free elements of every tensor.

        Args:
            fed: The clients.
            free: Words of the elements that may be drawn.
            counts: How many elements of each tensor to draw.
            client: The client.
            t: The round.

        Returns:
            Words of the drawn elements.
        """
        seed = derive_seed(fed.seed, "regrow", t, client)
        return select_random(free, counts, self.segments, seed=seed)
