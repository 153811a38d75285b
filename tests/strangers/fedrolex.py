"""FedRolex: narrow clients train a window of the global model that rolls over its units.

Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction. NeurIPS 2022. https://arxiv.org/abs/2212.01548

    S_m = {(q - t) mod K : q = 0 .. ceil(r_m K) - 1}    units of client m in a layer of width K
    theta[e] <- mean of theta_m[e] over the clients with e in S_m

The window moves backwards from round to round, as in the released code; in the paper it moves
forwards. Local training and evaluation are HeteroFL's. A client deploys its window of round 0.
"""

import torch
from typing_extensions import override

from lightfed import Fleet, HeteroFL
from lightfed.algorithms.width.units import reordered


class OwnFedRolex(HeteroFL):
    """HeteroFL with rolling instead of leading slices."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        with reordered(fed, self.model, lambda width: torch.arange(width).roll(t)):
            super().round(fed, t)
