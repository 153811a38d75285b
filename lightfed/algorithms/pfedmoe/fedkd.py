"""FedKD: adaptive mutual distillation, with low-rank updates.

Wu, Wu, Lyu, Huang, Xie: Communication-efficient federated learning via knowledge distillation.
Nature Communications 2022. https://arxiv.org/abs/2108.13323

A private teacher and a shared student teach each other, more strongly the better they are. The
student's updates are sent both ways as the largest singular values of their matrices, and the
student is averaged without weights. The energy that is kept grows over the rounds.

    r_k <- r_k + C(theta - r_k)          sent down; theta itself to a new participant
    w_k <- r_k, trained
    theta <- mean of r_k + C(w_k - r_k)  sent up

C compresses. An update is a difference from r_k, the student that client k received last, which the
server knows too. Between rounds a client keeps r_k, not w_k, however many rounds it misses. With
all clients in every round, r_k is the same for all, and C(theta - r) is C of their mean update, as
in the paper.

HtFLlib compresses the student's parameters instead of updates: with `compress: parameters` clients
keep the student that they have sent.

Deviations: the paper exchanges the gradient of every step, which equals the update of a round of
one step. The rank may be full (the released code never tries that). The target of a network's
distillation is a constant (`form: htfllib` is that library's code).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.pfedmoe import low_rank as svd
from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.personal_shared import PREFIX, NetworkFactory, PersonalShared
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.state.rows import Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Part
from lightfed.utils.errors import UserError


class FedKD(PersonalShared):
    """L_F = CE(F) + (KL(G || F) + MSE(z_F, W z_G)) / (CE(F) + CE(G)), and likewise L_G."""

    holds = "its private network"
    side_by_side = True
    takes_late = True
    received: Tensor  # (clients,) bool: which clients have received the student

    def __init__(
        self,
        shared: NetworkFactory,
        energy: tuple[Part, Part] = (0.95, 0.98),
        weights: Weights = "uniform",
        form: mutual.Form = "separate",
        rounds: Count | None = None,
        compress: Literal["update", "parameters"] = "update",
    ) -> None:
        """Set the distillation and the compression.

        Args:
            shared: G, the student, which is sent.
            energy: Share of the squared singular values to keep, before the first round and in the
                last one; it grows by the same amount in each. 1 sends everything.
            weights: Weights of the participants in the mean: uniform, or by samples.
            form: Form of mutual learning: separate losses, or htfllib's.
            rounds: Rounds until the energy has grown; the length of the run by default.
            compress: What is compressed: the update of a round, as in the paper, or the student's
                parameters, as in HtFLlib.
        """
        super().__init__(shared, weights)
        self.energy = (energy[0], energy[1])
        self.form: mutual.Form = form
        self.rounds = rounds
        self.compress = compress

        # No state of the algorithm, but of a round: the student as it is sent, r_k of this rank's
        # participants, and the energy that is kept.
        self._sent: list[ServerModel] = []
        self._references: dict[int, dict[str, Tensor]] = {}
        self._energy = 1.0

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        common = split(shared, batch, key=f"{KEY}.shared")
        return mutual.FedKD(split(private, batch), common, form=self.form)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        if not (self.rounds or fed.rounds):
            raise UserError(
                f"{KEY}.rounds",
                "nothing, and trainer.max_epochs does not say how long the run is",
                "give their number",
            )
        self._sent = [fed.new_part(PREFIX)]
        self._bytes = fed.keep("bytes", durable=False)  # sent by the participants
        self.register_buffer("received", torch.zeros(fed.clients, dtype=torch.bool))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        rounds = self.rounds or fed.rounds or 1
        start, end = self.energy
        self._energy = svd.energy_of_round(min(t, rounds - 1), rounds, start=start, end=end)

        self._references = {}
        if self.compress == "update":
            self._send_updates(fed, clients)
        else:
            self._send_parameters(fed, clients)

        fed.train(clients, t)

        # theta <- sum_k (r_k + C(w_k - r_k)) / K
        sizes = fed.collect({client: int(size) for client, size in self._bytes.items()})
        fed.merge(clients, into=self.model, weights=self.weights, sizes=sizes)

        # Between rounds a client keeps r_k.
        for client, reference in self._references.items():
            _copy_into(self._student(fed, client, fed.row(client)), reference)

    def _send_updates(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Set r_k <- r_k + C(theta - r_k), or theta for a new client."""
        has_received = self.received.tolist()
        fed.send(self.model, [client for client in clients if not has_received[client]])

        theta = self.model.layout.floats.views(self.model.floats)
        sizes = {}
        for client in fed.mine(clients):
            student = self._student(fed, client, fed.row(client))
            if has_received[client]:
                arrived, size = self._compressed(theta, student)
                fed.load(self.model, client)  # integer buffers are not compressed
                _copy_into(student, arrived)
                sizes[client] = size
            self._references[client] = {name: view.clone() for name, view in student.items()}

        for client, size in fed.collect(sizes).items():
            fed.ledger.sent_down(client, size)
        self.received[clients] = True

    def _send_parameters(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Set w_k <- C(theta)."""
        sent = self._sent[0]
        sent.row.copy_(self.model.row)
        views = sent.layout.floats.views(sent.floats)
        arrived, size = self._compressed(views, {})
        _copy_into(views, arrived)
        fed.send(sent, clients, size=size)

    @override
    def session_end(self, s: SessionContext) -> None:
        """Replace the student w_k by what the server receives: r_k + C(w_k - r_k)."""
        student = self._student(s.fed, s.client, s.row)
        arrived, size = self._compressed(student, self._references.get(s.client, {}))
        self._bytes[s.client] = torch.tensor(size)
        _copy_into(student, arrived)

    def _compressed(
        self, tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        """Return r + C(x - r) for tensors x by name, and the number of bytes sent.

        Args:
            tensors: x.
            references: r, which the receiver has; empty to compress x itself.
        """
        size_of_counters = 8 * self.model.layout.integers.numel
        is_finite = all(bool(torch.isfinite(x).all()) for x in tensors.values())

        # What is not finite has no singular values. The merge leaves it out.
        if self._energy == 1 or not is_finite:
            return tensors, size_of_counters + sum(x.nbytes for x in tensors.values())

        base: dict[str, Tensor | int] = {}
        differences = {}
        for name, x in tensors.items():
            base[name] = references[name].to(x.device) if references else 0
            differences[name] = x - base[name]

        packages = svd.compress(differences, self._energy)
        arrived = {name: base[name] + package.tensor() for name, package in packages.items()}
        return arrived, size_of_counters + sum(package.bytes for package in packages.values())

    def _student(self, fed: Fleet, client: int, row: Row) -> dict[str, Tensor]:
        """Return the student's tensors by name, as views of a client's row."""
        views = fed.state(client).layout.floats.views(row.floats)
        return {name: view for name, view in views.items() if name.startswith(PREFIX)}


def _copy_into(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into views of the same names."""
    for name, view in views.items():
        view.copy_(values[name])
