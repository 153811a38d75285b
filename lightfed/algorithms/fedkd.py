"""FedKD: adaptive mutual distillation, and low-rank factors on the wire.

Wu, Wu, Lyu, Huang, Xie: Communication-efficient federated learning via knowledge distillation.
Nature Communications 2022. https://arxiv.org/abs/2108.13323

A private teacher and a shared student teach each other, all the more the better they are; the
student travels as the largest singular values of its matrices, both ways, and is averaged without
weights. The energy that is kept grows over the rounds.

Deviations: the rank goes up to the full one (the released code never tries it), and what a network
learns from is a constant (`form: htfllib` is that library's code). Clients keep the student as they
have sent it.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.core.algorithm import ServerModel
from lightfed.core.beside import PREFIX, Beside, NetworkFactory
from lightfed.core.cohort import DataSpec, blank
from lightfed.core.fleet import Fleet, Weights
from lightfed.core.store import Row
from lightfed.models import mutual
from lightfed.models.split import split
from lightfed.models.svd import compress, decompress, energy_of_round, total_bytes
from lightfed.utils.errors import UserError

_KEY = "model.algorithm.init_args"


class FedKD(Beside):
    """L_F = CE(F) + (KL(G || F) + MSE(z_F, W z_G)) / (CE(F) + CE(G)), and likewise L_G."""

    moments = ("trained", "aggregated")  # which are one: the private network is never averaged
    holds = "its private network"

    def __init__(
        self,
        shared: NetworkFactory,
        energy: tuple[float, float] = (0.95, 0.98),
        weights: Weights = "uniform",
        form: mutual.Form = "separate",
        rounds: int | None = None,
    ) -> None:
        """Distillation and compression.

        Args:
            shared: G, the student, which travels.
            energy: Share of the squares of singular values that is kept, at the start and in the
                last round; 1 sends everything.
            weights: Of the participants in the mean: uniform, or by samples.
            form: Of mutual learning: separate losses, or htfllib's.
            rounds: Until the energy has grown; the length of the run by default.
        """
        super().__init__(shared, weights)
        if not all(0 <= share <= 1 for share in energy):
            raise UserError(f"{_KEY}.energy", str(list(energy)), "give two shares in [0, 1]")
        self.energy = (energy[0], energy[1])
        self.form: mutual.Form = form
        self.rounds = rounds
        self._sent: list[ServerModel] = []  # what the student is on the wire; not state
        self._bytes: dict[int, int] = {}  # of this rank's participants
        self._share = 1.0

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        return mutual.FedKD(split(private, batch), split(shared, batch), form=self.form)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        if self.rounds is None and fed.rounds is None:
            found = "nothing, and trainer.max_epochs does not say how long the run is"
            raise UserError(f"{_KEY}.rounds", found, "give the number of rounds")
        self._sent = [fed.new_part(PREFIX)]

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        length = self.rounds or fed.rounds or 1
        start, end = self.energy
        self._share = energy_of_round(min(t, length - 1), length, start=start, end=end)
        sent = self._sent[0]
        sent.row.copy_(self.model.row)
        size = self._squeeze(dict(sent.layout.floats.views(sent.floats)))
        fed.send(sent, clients, size=size)
        self._bytes = {}
        fed.train(clients, t)
        fed.merge(clients, into=self.model, weights=self.weights, sizes=fed.collect(self._bytes))

    @override
    def session_end(self, fed: Fleet, client: int, row: Row) -> None:
        """The student, as the server gets it."""
        views = fed.state(client).layout.floats.views(row.floats)
        shared = {name: view for name, view in views.items() if name.startswith(PREFIX)}
        self._bytes[client] = self._squeeze(shared)

    @override
    def session_result(self, fed: Fleet, client: int) -> dict[str, Tensor]:
        return {"bytes": torch.tensor(self._bytes[client])}

    @override
    def load_session_result(self, fed: Fleet, client: int, result: dict[str, Tensor]) -> None:
        self._bytes[client] = int(result["bytes"])

    def _squeeze(self, tensors: dict[str, Tensor]) -> int:
        """Tensors become what is left of them on the wire; the bytes of that."""
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        if self._share == 1 or not finite:  # what is not finite is left out of the merge
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        packages = compress(tensors, self._share)
        for name, tensor in decompress(packages).items():
            tensors[name].copy_(tensor)
        return total_bytes(packages)
