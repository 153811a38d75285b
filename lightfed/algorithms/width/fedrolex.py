"""FedRolex: narrow clients train a window of the global model that moves from round to round.

Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction. NeurIPS 2022. https://arxiv.org/abs/2212.01548

    S_m = {(q - step t) mod K : q = 0 .. ceil(r_m K) - 1}   units of client m in a layer of width K
    theta[e] <- mean of theta_m[e] over the clients with e in S_m

The window moves backwards, as in the released code; in the paper it moves forwards. Local training
and evaluation are HeteroFL's. A client deploys its window of round 0.

Deviations: the released server weights biases, norms and classifiers by how often they have been
covered so far, which depends on the order of the clients. Here all tensors have the paper's mean.
Random units are the same in layers of one width.

Not implemented: overlapping windows.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.algorithms.width.slices import check_masked
from lightfed.algorithms.width.units import assign, reordered
from lightfed.api.fleet import Fleet
from lightfed.utils.rng import torch_generator


class FedRolex(HeteroFL):
    """HeteroFL with rolling instead of leading slices."""

    no_late = "slices move, and an update that is under way would not"
    no_server_step = "its slices move, and the state of an optimizer would not"
    no_kept_optimizer = "slices move, and momentum would not"
    no_memory = "slices move, and what a client remembers would not"
    no_personal = "slices move, and a client's own units would not"

    def __init__(
        self, step: int = 1, window: Literal["roll", "random"] = "roll", **heterofl: Any
    ) -> None:
        """Set how the window moves.

        Args:
            step: Units by which it moves back in a round; -1 is forwards, as in the paper, and 0 is
                HeteroFL.
            window: The window rolls and is the same for all clients of a round (roll), or each
                client has random units (random).
            **heterofl: See HeteroFL.
        """
        super().__init__(**heterofl)
        self.step = step
        self.window = window
        if window == "random":
            self.no_policy = "the server takes its clients' random units one after the other"

    @override
    def round(self, fed: Fleet, t: int) -> None:
        if self.window == "random":
            self._random_round(fed, t)
            return
        # In this order of units the window is the leading slice.
        with reordered(fed, self.model, lambda width: torch.arange(width).roll(self.step * t)):
            super().round(fed, t)

    def _random_round(self, fed: Fleet, t: int) -> None:
        """Train and merge a round in which every client has units of its own."""
        clients = fed.participants(t)
        if self.assignment == "dynamic":
            assign(fed, {m: self.draw_level(fed, m, t) for m in clients})
        units_of = {m: partial(self.units, fed, m, t) for m in clients}

        # The message counts with the size of a slice; the client's own units follow.
        fed.send(self.model, clients)
        for m in fed.mine(clients):
            with reordered(fed, self.model, units_of[m]):
                fed.load(self.model, m)
        fed.train(clients, t)
        for state in fed.groups:
            check_masked(state.module)

        # theta[e] <- mean of theta_m[e] over the clients with e in S_m. One client after the other
        # is merged into a model of NaN, which stays NaN where the client has no units.
        theta = self.model.floats
        value_sum = torch.zeros_like(theta, dtype=torch.float64)
        weight_sum = torch.zeros_like(theta, dtype=torch.float64)
        of_client = fed.new_model()
        for m in clients:
            of_client.floats.fill_(torch.nan)
            with reordered(fed, of_client, units_of[m]):
                fed.merge([m], into=of_client)  # theta_m, at its units
            weight = fed.data.num_samples(m) if self.weights == "samples" else 1
            value_sum += weight * of_client.floats.nan_to_num()
            weight_sum += weight * ~of_client.floats.isnan()
        theta.copy_(torch.where(weight_sum > 0, value_sum / weight_sum, theta))

    def units(self, fed: Fleet, client: int, t: int, width: int) -> Tensor:
        """Return the units of a layer in random order, (width,); the client has the first ones."""
        generator = torch_generator(fed.seed, f"units of {width}", t, client)
        return torch.randperm(width, generator=generator)
