"""pFedMoE: a mixture of a private and a shared expert, weighted per sample by a gate.

Yi, Yu, Ren, Zhang, Wang, Liu, Li: pFedMoE: Data-Level Personalization with Mixture of Experts for
Model-Heterogeneous Personalized Federated Learning. 2024. https://arxiv.org/abs/2402.01350

    (a_G, a_F) = H(x),  z = a_G G(x) + a_F F_ex(x),  logits = F_hd(z)
    G <- sum_k n_k / n G_k

A client has its own large extractor F_ex, head F_hd and gate H, and a small extractor G that all
clients share. Only the small extractor is sent. One backward pass of the cross-entropy updates all
parts at once. Inference uses the whole mixture.

After an evaluation the run folder contains `gate.npz`: for every client and class the mean weights
of the shared and the private expert over the client's test samples.

Choices where the paper is silent: the gate has 128 hidden units and the learning rate of the other
parts by default. There is no released code.

Three settings are not from the paper. They separate what it combines. `federate: false` has the
capacity of two experts without any exchange. `gate: half` has the exchange without weights per
sample. `gate: unnormalised` lacks the gate's last batch normalization.
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
    takes_late = True

    def __init__(
        self,
        shared: NetworkFactory,
        gate_units: Count = 128,
        gate_lr: Weight | None = None,
        weights: Weights = "samples",
        gate: Literal["paper", "unnormalised", "half"] = "paper",
        federate: bool = True,
    ) -> None:
        """Set the experts and the gate.

        Args:
            shared: The network whose extractor all clients share. If it does not define parts, the
                extractor is everything below its last linear layer.
            gate_units: Number of units of the gate's first linear layer.
            gate_lr: eta_phi, the gate's learning rate relative to that of the other parts; 1 by
                default.
            weights: Weights of the participants in the mean: by samples, or uniform.
            gate: "paper" is the paper's gate, "unnormalised" lacks its last normalization, and with
                "half" both experts always have the weight one half.
            federate: Whether the shared extractor is exchanged; if not, every client trains its
                mixture alone.
        """
        super().__init__(shared, weights)
        self.gate_units = gate_units
        self.gate_lr = gate_lr
        self.gate = gate
        self.federate = federate
        if not federate:
            self.no_late = "clients send nothing"

        # Of the last evaluation: (C, 3) sums of the gate's weights by client of this rank.
        self._gate_sums: dict[int, Tensor] = {}

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        own = split(private, batch)
        common = split(shared, batch, key=f"{KEY}.shared")

        gate: nn.Module
        if self.gate == "half":
            gate = FixedGate(0.5)
        else:
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
        if self.gate_lr is None:
            return {}
        return {"net.gate.": self.gate_lr}

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if not self.federate and kind == "aggregated":
            kind = "trained"  # the same model: nothing is aggregated
        rows = super().models(fed, kind, clients)
        if rows is None:
            return None

        shape = (fed.data.num_classes, 3)

        def new_gate_sums(tested: Sequence[int]) -> Views:
            """Return a buffer of each client into which its test adds the gate's weights."""
            sums = torch.zeros(len(tested), *shape, dtype=torch.float64, device=fed.device)
            self._gate_sums |= zip(tested, sums, strict=True)
            return {"net.gate_sums": sums}

        return replace(rows, buffers=new_gate_sums)

    @override
    def evaluation_start(self, fed: Fleet) -> None:
        self._gate_sums = {}  # clients may have left this rank

    @override
    def evaluation_end(self, fed: Fleet) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the means of a_G and a_F, (clients, C) each; NaN for classes without samples."""
        on_host = {client: sums.cpu() for client, sums in self._gate_sums.items()}
        weights = torch.full((fed.clients, fed.data.num_classes, 2), torch.nan)
        for client, sums in fed.collect(on_host).items():
            means = class_sums(sums).means()
            weights[client, means.seen] = means.values[means.seen]
        return {"gate": {"general": weights[..., 0], "personal": weights[..., 1]}}
