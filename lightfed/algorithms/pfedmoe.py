"""pFedMoE: a mixture of a private and a shared expert, weighed for every sample by a gate.

Yi, Yu, Ren, Zhang, Wang, Liu, Li: pFedMoE: Data-Level Personalization with Mixture of Experts for
Model-Heterogeneous Personalized Federated Learning. 2024. https://arxiv.org/abs/2402.01350

A client has a large extractor and head of its own, a small extractor that all share and that alone
travels, and a gate of its own. One backward pass of the cross-entropy moves all of them at once;
the shared extractor becomes the mean over the participants, by samples. Inference takes the whole
mixture, as it was trained.

The paper leaves the gate's hidden units and its learning rate open; 128, and that of the other
parts by default. There is no released code.
"""

from collections.abc import Mapping

import lightning.pytorch as L
from torch import nn
from typing_extensions import override

from lightfed.core.beside import Beside, NetworkFactory
from lightfed.core.cohort import DataSpec, blank
from lightfed.core.fleet import Weights
from lightfed.models.moe import Gate, MixtureClient
from lightfed.models.split import split
from lightfed.utils.errors import UserError

_KEY = "model.algorithm.init_args"


class PFedMoE(Beside):
    """(a_G, a_F) = H(x),  z = a_G G(x) + a_F F_ex(x),  logits = F_hd(z)."""

    def __init__(
        self,
        shared: NetworkFactory,
        gate_units: int = 128,
        gate_lr: float | None = None,
        weights: Weights = "samples",
    ) -> None:
        """The experts and the gate.

        Args:
            shared: Network whose extractor all clients share; of a network without parts of its
                own, all below its last linear layer.
            gate_units: Of the gate's first linear layer.
            gate_lr: eta_phi, the gate's learning rate relative to that of the other parts; 1 by
                default.
            weights: Of the participants in the mean: by samples, or uniform.
        """
        super().__init__(shared, weights)
        if gate_units < 1:
            raise UserError(f"{_KEY}.gate_units", str(gate_units), "give at least 1")
        if gate_lr is not None and not 0 <= gate_lr < float("inf"):
            raise UserError(f"{_KEY}.gate_lr", str(gate_lr), "give a factor of 0 or more")
        self.gate_units = gate_units
        self.gate_lr = gate_lr

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        own, common = split(private, batch), split(shared, batch)
        gate = Gate(data.input_shape, hidden=self.gate_units)
        try:
            return MixtureClient(own.extractor, own.head, common.extractor, gate, batch=batch)
        except UserError as error:
            raise UserError(f"{_KEY}.{error.key}", error.found, error.fix) from error

    @override
    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        return {} if self.gate_lr is None else {"net.gate.": self.gate_lr}
