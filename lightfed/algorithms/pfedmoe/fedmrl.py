"""FedMRL: a client's features and those of a small shared network become one nested representation.

Yi, Yu, Ren, Wang, Liu, Li: Federated Model Heterogeneous Matryoshka Representation Learning.
NeurIPS 2024. https://arxiv.org/abs/2406.00488

    z = W_k (G(x), F_k(x)) + b_k,   L = CE(head_F(z), y) + CE(head_G(z[:d]), y)
    G <- sum_k n_k / n G_k

G has d features. A client keeps its network F_k and its projection W_k, b_k. The equations were
read in the released code (LipingYi/FedMRL 5a5309a), where both losses have weight 1.

Deviations: in that code all entries of the mean are the same network, that of the last participant,
and momentum outlives sessions. In HtFLlib (TsingZ0/HtFLlib c45f68e) the mean is uniform, and a
trained projection is not saved.
"""

from torch import nn
from typing_extensions import override

from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.personal_shared import PersonalShared
from lightfed.api.algorithm import KEY
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.utils.errors import UserError


class FedMRL(PersonalShared):
    """Both networks learn from the labels on one representation; the small one is sent."""

    holds = "its network with the shared one's features"
    takes_late = True

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        large = split(private, batch)
        small = split(shared, batch, key=f"{KEY}.shared")
        if small.feature_dim > large.feature_dim:
            raise UserError(
                f"{KEY}.shared",
                f"it has {small.feature_dim} features, and a client's network {large.feature_dim}",
                "use a smaller one",
            )
        return mutual.FedMRL(large, small)
