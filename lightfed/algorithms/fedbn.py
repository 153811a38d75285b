"""FedBN: all but the normalisation layers is averaged; these stay with their client.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021. https://arxiv.org/abs/2102.07623

Layers are chosen by their type. The released code takes names with "bn" in them, which leaves out
a normalisation within a shortcut. Deviation: layers of the other kinds stay with the client too.
"""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from lightfed.algorithms.fedper import FedPer
from lightfed.api.fleet import Fleet, Weights

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


class FedBN(FedPer):
    """A client's row is the server's weights, and its own scales, shifts and statistics."""

    holds = "the server's layers and normalisations of its own"
    personal = "normalisation layers"

    def __init__(self, weights: Weights = "uniform") -> None:
        """Set the weights of clients.

        Args:
            weights: Of the participants in the mean: uniform, as in the paper, or by samples.
        """
        super().__init__(head="", weights=weights)

    @override
    def shares(self, fed: Fleet, name: str) -> bool:
        layer = fed.groups[0].module.get_submodule(name.rpartition(".")[0])
        return not isinstance(layer, _NORMS)
