"""pFedMoE: a mixture of a private and a shared expert, weighted per sample by a gate.

Yi, Yu, Ren, Zhang, Wang, Liu, Li: pFedMoE: Data-Level Personalization with Mixture of Experts for
Model-Heterogeneous Personalized Federated Learning. 2024. https://arxiv.org/abs/2402.01350

A client has its own large extractor, head and gate, and a small extractor that all clients share.
Only the small extractor is sent. One backward pass of the cross-entropy updates all parts at once.
The shared extractor becomes the mean over the participants, by samples. Inference uses the whole
mixture.

After an evaluation the run folder contains `gate.npz`: for every client and class the mean weights
of the shared and the private expert over the client's test samples.

The paper does not state the gate's hidden units and learning rate. The defaults are 128 and the
rate of the other parts. There is no released code.

Three settings are not from the paper. They separate what it combines: `federate: false` has the
capacity of two experts without any exchange, `gate: half` has the exchange without weights per
sample, and `gate: unnormalised` leaves out the gate's last batch normalisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.pfedmoe.mixture import FixedGate, Gate, MixtureClient, class_sums
from lightfed.algorithms.pfedmoe.personal_shared import NetworkFactory, PersonalShared
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.state.rows import ModelKind, Rows, Views
from lightfed.utils.bounds import Count, Weight
from lightfed.utils.errors import UserError


class PFedMoE(PersonalShared):
    """(a_G, a_F) = H(x),  z = a_G G(x) + a_F F_ex(x),  logits = F_hd(z)."""

    holds = "its mixture of the private and the shared expert"

    def __init__(
        self,
        shared: NetworkFactory,
        gate_units: Count = 128,
        gate_lr: Weight | None = None,
        weights: Weights = "samples",
        gate: Literal["paper", "unnormalised", "half"] = "paper",
        federate: bool = True,
    ) -> None:
        """The experts and the gate.

        Args:
            shared: Network whose extractor all clients share. If it does not define parts, the
                extractor is all below its last linear layer.
            gate_units: Units of the gate's first linear layer.
            gate_lr: eta_phi, the gate's learning rate relative to that of the other parts; 1 by
                default.
            weights: Of the participants in the mean: by samples, or uniform.
            gate: The paper's gate; without its last normalisation; or none: both experts have
                weight one half.
            federate: Exchange the shared extractor; if not, every client trains its mixture alone.
        """
        super().__init__(shared, weights)
        self.gate_units, self.gate_lr, self.gate = gate_units, gate_lr, gate
        self.federate = federate
        self._gates: dict[int, Tensor] = {}  # sums of this rank's clients, last evaluation

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        own, common = split(private, batch), split(shared, batch, key=f"{KEY}.shared")
        gate: nn.Module = FixedGate(0.5)
        if self.gate != "half":
            last_norm = self.gate == "paper"
            gate = Gate(data.input_shape, hidden=self.gate_units, last_norm=last_norm)
        try:
            return MixtureClient(own.extractor, own.head, common.extractor, gate, batch=batch)
        except UserError as error:
            raise UserError(f"{KEY}.{error.key}", error.found, error.fix) from error

    @override
    def setup(self, fed: Fleet) -> None:
        if self.federate:
            super().setup(fed)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        if self.federate:
            super().round(fed, t)
        else:
            fed.train(fed.participants(t), t)

    @override
    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        return {} if self.gate_lr is None else {"net.gate.": self.gate_lr}

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if not self.federate and kind == "aggregated":
            kind = "trained"  # the same model: nothing is aggregated
        rows = super().models(fed, kind, clients)
        classes, device = fed.data.num_classes, fed.device

        def sums(some: Sequence[int]) -> Views:
            """Of gates by class, which a test writes."""
            new = torch.zeros(len(some), classes, 3, dtype=torch.float64, device=device)
            self._gates |= zip(some, new, strict=True)
            return {"net.gate_sums": new}

        return None if rows is None else replace(rows, buffers=sums)

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        self._gates = {}  # clients may have left this rank

    @override
    def evaluation_end(self, fed: Fleet) -> Mapping[str, Mapping[str, Tensor]]:
        """(clients, C) means of a_G and a_F; NaN for classes without test samples."""
        weights = torch.full((fed.clients, fed.data.num_classes, 2), torch.nan)
        for client, sums in fed.collect({k: s.cpu() for k, s in self._gates.items()}).items():
            mean = class_sums(sums).means()
            weights[client, mean.seen] = mean.values[mean.seen]
        return {"gate": {"general": weights[..., 0], "personal": weights[..., 1]}}
