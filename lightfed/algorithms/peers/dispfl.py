"""DisPFL: decentralised, sparse, personalised training; every client has its own mask.

Dai, Shen, He, Tian, Tao: DisPFL: Towards Communication-Efficient Personalized Federated Learning
via Decentralized Sparse Training. ICML 2022. https://arxiv.org/abs/2206.00187

There is no server. Client k receives from the clients S_k of a graph and averages every weight over
those whose masks cover it. It keeps and trains only the weights that its own mask covers. Then it
drops its smallest weights and grows others. Where the paper is silent, the released code decides:
the average counts the masks that the neighbours trained with (the paper's line 7 has the new ones);
weights that a mask drops are sent once more; a client that is not active in a round trains without
communicating; gradients are clipped (trainer.gradient_clip_val: 10) before they are masked.

Deviations: the mask search (line 15) runs at the start of the next round, from the same values, so
that a client keeps one mask between rounds instead of two. Its draws do not depend on the device.
The number of weights to drop is computed in float64.
"""

from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Literal

import torch
from lightfed_kernels import (
    Layout,
    Segments,
    apply_mask_,
    count_per_tensor,
    prune_counts,
    prune_regrow,
)
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.peers.peers import Peers
from lightfed.algorithms.peers.sparsity import keep_masks, random_mask
from lightfed.algorithms.topology.topology import Topology
from lightfed.api.algorithm import KEY, require_argument
from lightfed.api.fleet import Fleet
from lightfed.state.client_state import Kept
from lightfed.utils.bounds import Count, Part, Share
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, numpy_generator


class DisPFL(Peers):
    """Personal sparse masks; weights drop by magnitude and grow by gradient or at random."""

    side_by_side = True

    def __init__(
        self,
        topology: Topology | None = None,
        density: Share | list[Share] = 0.5,
        distribution: Literal["erk", "uniform"] = "erk",
        prune_rate: Part = 0.5,
        regrow: Literal["random", "gradient"] = "random",
        static: bool = False,
        active: Share = 1.0,
        buffers: Literal["refuse", "average"] = "refuse",
        rounds: Count | None = None,
    ) -> None:
        """Set the graph, the sparsity and how masks change.

        Args:
            topology: The graph; by default every client receives from 10 clients, redrawn every
                round.
            density: Share of its weights that a client has; with a list, client i has entry
                i mod length.
            distribution: Of the density over the tensors: erk (Erdos-Renyi-Kernel) keeps small
                tensors dense, uniform treats all alike.
            prune_rate: alpha_0, share of a mask that is dropped and grown in the first round; it
                decays to 0 along a cosine.
            regrow: Grow weights at random, as in the released scripts, or where the gradient of a
                batch is largest, as in the paper.
            static: Keep the initial masks.
            active: Probability that a client communicates in a round; all train.
            buffers: BatchNorm statistics have no mask: refuse a model that has any, or average
                them over a client and its senders.
            rounds: T of the cosine; the length of the run by default.
        """
        super().__init__(topology)
        self.parts = [density] if isinstance(density, int | float) else list(density)
        fix = "give one share for all clients, or a list of them"
        require_argument(bool(self.parts), "density", "an empty list", fix)
        self.distribution, self.prune_rate = distribution, prune_rate
        self.regrow, self.static, self.active, self.statistics = regrow, static, active, buffers
        self.rounds = rounds
        if not static:
            self.no_memory = "masks change, and what a client remembers would not"
        self.masks: Kept  # what clients last trained
        self._segments: Segments  # of the parameters, the leading part of a row
        self._buffer_words: Tensor  # mask of a row's buffers: all ones

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self._check(fed)
        found = "nothing, and trainer.max_epochs does not say how long the run is"
        known = bool(self.rounds or fed.rounds or self.static)
        require_argument(known, "rounds", found, "give the number of rounds of the cosine")
        layout = fed.groups[0].layout
        parameters = layout.floats.entries[: layout.parameters]
        shapes = [(entry.name, entry.shape) for entry in parameters]
        self._segments = Segments.build(Layout.build(shapes), device=fed.device)
        every = Segments.build(layout.floats).live_on(fed.device)
        self._buffer_words = every[len(self._segments.live) :]
        self.masks = keep_masks(fed)
        for client in fed.mine(range(fed.clients)):
            self.masks[client] = self._first_mask(fed, client)
            row = fed.row(client).floats  # w_0, the same for all
            apply_mask_(row, self.masks[client].to(row.device))

    def _check(self, fed: Fleet) -> None:
        """Reject a model with buffers, and rounds in which not all clients train; names the key."""
        layout = fed.groups[0].layout
        statistics = layout.floats.entries[layout.parameters :]
        if statistics and self.statistics == "refuse":
            found = f"the model has buffers, such as {statistics[0].name}, which have no mask"
            fix = f"use a model without (ResNet18GN), or set {KEY}.buffers: average"
            raise UserError("model.clients", found, fix)
        if fed.work.fraction != 1.0 or fed.work.clients_per_round is not None:
            key = "fraction" if fed.work.clients_per_round is None else "clients_per_round"
            fix = f"leave it out; {KEY}.active and the topology say who communicates"
            raise UserError(f"model.{key}", "a part of the clients, but all train", fix)

    def _first_mask(self, fed: Fleet, client: int) -> Tensor:
        """m_{k,0}: random weights of every tensor, at its density."""
        density = self.parts[client % len(self.parts)]
        seed = derive_seed(fed.seed, "first-mask", client=client)
        erk = self.distribution == "erk"
        drawn = random_mask(self._segments, density, erk=erk, seed=seed, device=fed.device)
        return self._whole(drawn)

    def _whole(self, parameters: Tensor) -> Tensor:
        """The mask of a row: the given mask for parameters, ones for buffers."""
        return torch.cat([parameters, self._buffer_words])

    @override
    def round(self, fed: Fleet, t: int) -> None:
        masks = self.next_masks(fed, t)  # m_{k,t}: line 15 of the round before
        # w_{k,t+1/2} = (sum_j w_{j,t} / sum_j m_j) * m_{k,t},   j in S_{k,t} and k: line 7
        self.exchange(fed, self.all_senders(fed, t), masks=self.masks, keep=masks)
        self.masks.update(masks)
        fed.train(range(fed.clients), t)  # E local epochs under the masks: lines 8-14

    def all_senders(self, fed: Fleet, t: int) -> dict[int, list[int]]:
        """S_{k,t} of every client; empty for one that is not active."""
        draws = (numpy_generator(fed.seed, "active", t, k) for k in range(fed.clients))
        active = [k for k, draw in enumerate(draws) if draw.random() < self.active]
        return {k: [] for k in range(fed.clients)} | self.senders(fed, t, active)

    def next_masks(self, fed: Fleet, t: int) -> Mapping[int, Tensor]:
        """Masks of round t, from the weights trained in the previous round: algorithm 2."""
        if t == 0 or self.static:
            return self.masks
        drops = self.drops(fed, t - 1)
        return {k: self._search(fed, k, t - 1, drops[k]) for k in self.masks}

    def _search(self, fed: Fleet, client: int, t: int, counts: Sequence[int]) -> Tensor:
        """Drop so many of a client's smallest weights and grow as many others."""
        weights = self._weights(fed.row(client).floats.to(fed.device))
        mask = self._words(self.masks[client])
        grown = prune_regrow(
            weights, mask, counts, self._segments, regrow=self.growth(fed, client, t)
        )
        return self._whole(grown)

    def growth(self, fed: Fleet, client: int, t: int) -> Tensor | int:
        """Scores for growing weights: |g(w_{k,t+1})| of a batch, or the seed of a draw."""
        if self.regrow == "random":
            return derive_seed(fed.seed, "regrow", t, client)
        return self._weights(fed.gradient(client, t))

    def drops(self, fed: Fleet, t: int) -> dict[int, list[int]]:
        """ceil(alpha_t n) of the n weights of every tensor, of every client of this rank.

        alpha_t = alpha_0 / 2 (1 + cos(pi t / T)): eq. (4) of the document.
        """
        length = self.rounds or fed.rounds
        assert length is not None, "checked in setup"
        rate = self.prune_rate / 2 * (1 + cos(pi * min(t, length) / length))
        words = [self._words(mask) for mask in self.masks.values()]
        if not words:
            return {}
        # Read once for all clients: a host that reads waits for the device.
        counts = torch.stack([count_per_tensor(w, self._segments) for w in words]).tolist()
        return {k: prune_counts(own, rate) for k, own in zip(self.masks, counts, strict=True)}

    def _weights(self, row: Tensor) -> Tensor:
        return row[: self._segments.size]

    def _words(self, mask: Tensor) -> Tensor:
        """The mask words of the parameters."""
        return mask[: len(self._segments.live)]
