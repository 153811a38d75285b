"""DisPFL: decentralized, sparse, personalized training, in which every client has its own mask.

Dai, Shen, He, Tian, Tao: DisPFL: Towards Communication-Efficient Personalized Federated Learning
via Decentralized Sparse Training. ICML 2022. https://arxiv.org/abs/2206.00187

There is no server. In algorithm 1 of the paper, client k in round t

    receives w_{j,t} and m_{j,t} from its neighbors j in S_{k,t}
    w_{k,t+1/2} = (sum_j w_{j,t} / sum_j m_{j,t}) * m_{k,t}        j in S_{k,t} and k     (line 7)
    trains w_{k,t+1/2} under the mask m_{k,t}, which gives w_{k,t+1}                      (8-14)
    drops the smallest weights of its mask and grows as many others: m_{k,t+1}             (15)

Where the paper is silent, the released code decides:

- The average counts the masks that the neighbors trained with; line 7 has the new ones.
- Weights that a mask drops are sent once more.
- A client that is not active in a round trains without communicating.
- Gradients are clipped (trainer.gradient_clip_val: 10) before they are masked.

Deviations: The mask search (line 15) runs at the start of the next round, from the same values, so
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
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.state.client_state import Kept
from lightfed.utils.bounds import Count, Part, Share
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, numpy_generator


class DisPFL(Peers):
    """Personal sparse masks; weights drop by magnitude and grow by gradient or at random.

    Attributes:
        masks: The mask m_k that each of this rank's clients last trained with, as packed words of
            its whole row, (P / 32,).
        segments: Where the parameters are within a row: its leading part, without buffers.
    """

    side_by_side = True
    masks: Kept
    segments: Segments

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
            topology: The graph. By default every client receives from 10 clients, redrawn every
                round.
            density: The share of its weights that a client has. With a list, client i has entry
                i mod length.
            distribution: How the density is distributed over the tensors: erk (Erdos-Renyi-Kernel)
                keeps small tensors dense, uniform treats all alike.
            prune_rate: alpha_0, the share of a mask that is dropped and grown in the first round.
                It decays to 0 along a cosine.
            regrow: Grow weights at random, as in the released scripts, or where the gradient of a
                batch is largest, as in the paper.
            static: Keep the initial masks.
            active: The probability that a client communicates in a round; all train.
            buffers: BatchNorm statistics have no mask: refuse a model that has any, or average
                them over a client and its senders.
            rounds: T of the cosine; the length of the run by default.
        """
        super().__init__(topology)
        densities = [density] if isinstance(density, int | float) else list(density)
        if not densities:
            raise UserError(
                key=f"{KEY}.density",
                found="an empty list",
                fix="give one share for all clients, or a list of them",
            )

        self.parts = densities
        self.distribution = distribution
        self.prune_rate = prune_rate
        self.regrow = regrow
        self.static = static
        self.active = active
        self.statistics = buffers
        self.rounds = rounds
        if not static:
            self.no_memory = "masks change, and what a client remembers would not"
        self._buffer_words: Tensor  # mask of a row's buffers: all ones

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self._check_buffers(fed)
        self._check_participants(fed)
        self._check_rounds(fed)

        layout = fed.groups[0].layout
        parameters = layout.floats.entries[: layout.parameters]
        shapes = [(entry.name, entry.shape) for entry in parameters]
        self.segments = Segments.build(Layout.build(shapes), device=fed.device)
        every_word = Segments.build(layout.floats).live_on(fed.device)
        self._buffer_words = every_word[len(self.segments.live) :]

        self.masks = keep_masks(fed)
        for client in fed.mine(range(fed.clients)):
            self.masks[client] = self._first_mask(fed, client)
            row = fed.row(client).floats  # w_0, the same for all
            apply_mask_(row, self.masks[client].to(row.device))

    def _check_buffers(self, fed: Fleet) -> None:
        """Refuse a model with buffers, unless the user has asked for their average."""
        layout = fed.groups[0].layout
        buffers = layout.floats.entries[layout.parameters :]
        if buffers and self.statistics == "refuse":
            raise UserError(
                key="model.clients",
                found=f"the model has buffers, such as {buffers[0].name}, which have no mask",
                fix=f"use a model without (ResNet18GN), or set {KEY}.buffers: average",
            )

    def _check_participants(self, fed: Fleet) -> None:
        """Refuse settings by which only some of the clients train in a round."""
        if fed.work.fraction == 1.0 and fed.work.clients_per_round is None:
            return
        key = "fraction" if fed.work.clients_per_round is None else "clients_per_round"
        raise UserError(
            key=f"model.{key}",
            found="a part of the clients, but all train",
            fix=f"leave it out; {KEY}.active and the topology say who communicates",
        )

    def _check_rounds(self, fed: Fleet) -> None:
        """Refuse a run of unknown length, for which there is no cosine."""
        if not self.rounds and not fed.rounds and not self.static:
            raise UserError(
                key=f"{KEY}.rounds",
                found="nothing, and trainer.max_epochs does not say how long the run is",
                fix="give the number of rounds of the cosine",
            )

    def _first_mask(self, fed: Fleet, client: int) -> Tensor:
        """Draw m_{k,0}: random weights of every tensor, at the tensor's density."""
        parameter_words = random_mask(
            self.segments,
            self.parts[client % len(self.parts)],
            erk=self.distribution == "erk",
            seed=derive_seed(fed.seed, "first-mask", client=client),
            device=fed.device,
        )
        return self.row_mask(parameter_words)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        masks = self.next_masks(fed, t)  # m_{k,t}: line 15 of the round before
        # w_{k,t+1/2} = (sum_j w_{j,t} / sum_j m_j) * m_{k,t},   j in S_{k,t} and k: line 7
        self.exchange(fed, self.all_senders(fed, t), masks=self.masks, keep=masks)
        self.masks.update(masks)
        fed.train(range(fed.clients), t)  # E local epochs under the masks: lines 8-14

    def all_senders(self, fed: Fleet, t: int) -> dict[int, list[int]]:
        """Return S_{k,t} of every client; it is empty for one that is not active."""
        active = []
        for client in range(fed.clients):
            if numpy_generator(fed.seed, "active", t, client).random() < self.active:
                active.append(client)

        senders: dict[int, list[int]] = {client: [] for client in range(fed.clients)}
        senders |= self.senders(fed, t, active)
        return senders

    def next_masks(self, fed: Fleet, t: int) -> Mapping[int, Tensor]:
        """Return the masks of round t, from the weights trained in the previous round.

        This is algorithm 2 of the paper.
        """
        if t == 0 or self.static:
            return self.masks
        drops = self.drops(fed, t - 1)
        return {client: self._search(fed, client, t - 1, drops[client]) for client in self.masks}

    def _search(self, fed: Fleet, client: int, t: int, counts: Sequence[int]) -> Tensor:
        """Drop the smallest `counts[i]` weights of each tensor and grow the same number elsewhere.

        Returns the new mask of the client's row, (P / 32,).
        """
        grown = prune_regrow(
            self.parameters_of(fed.row(client).floats.to(fed.device)),
            self.parameter_words(self.masks[client]),
            counts,
            self.segments,
            regrow=self.growth(fed, client, t),
        )
        return self.row_mask(grown)

    def growth(self, fed: Fleet, client: int, t: int) -> Tensor | int:
        """Return what decides which weights grow.

        Either the gradient g(w_{k,t+1}) of a batch, whose largest magnitudes win, or the seed of a
        random draw.
        """
        if self.regrow == "random":
            return derive_seed(fed.seed, "regrow", t, client)
        return self.parameters_of(fed.gradient(client, t))

    def drops(self, fed: Fleet, t: int) -> dict[int, list[int]]:
        """Return how many weights of every tensor each client of this rank drops after round t.

        Of n weights they are ceil(alpha_t n), alpha_t = alpha_0 / 2 (1 + cos(pi t / T)): eq. (4)
        of the document behind DisPFL's reproduction.
        """
        if not self.masks:
            return {}

        length = self.rounds or fed.rounds
        assert length is not None, "checked in setup"
        rate = self.prune_rate / 2 * (1 + cos(pi * min(t, length) / length))

        # Read the counts of all clients at once: each read makes the host wait for the device.
        counts = [
            count_per_tensor(self.parameter_words(mask), self.segments)
            for mask in self.masks.values()
        ]
        counts_on_host = torch.stack(counts).tolist()
        return {
            client: prune_counts(of_client, rate)
            for client, of_client in zip(self.masks, counts_on_host, strict=True)
        }

    def parameters_of(self, row: Tensor) -> Tensor:
        """Return the parameters of a row, its leading part without buffers; a view."""
        return row[: self.segments.size]

    def parameter_words(self, mask: Tensor) -> Tensor:
        """Return the words of a row's mask that are about parameters; a view."""
        return mask[: len(self.segments.live)]

    def row_mask(self, parameter_words: Tensor) -> Tensor:
        """Return the mask of a whole row: the given words for its parameters, ones for buffers."""
        return torch.cat([parameter_words, self._buffer_words])
