"""FedKD: adaptive mutual distillation, with low-rank updates.

Wu, Wu, Lyu, Huang, Xie: Communication-efficient federated learning via knowledge distillation.
Nature Communications 2022. https://arxiv.org/abs/2108.13323

A private teacher and a shared student teach each other, more strongly the better they are. The
student's updates are sent both ways as the largest singular values of their matrices, and the
student is averaged without weights. The energy that is kept grows over the rounds.

An update is a difference from r_k, the student that client k received last. The server knows r_k,
too. The server sends C(theta - r_k). The client trains w_k from the new r_k and sends C(w_k - r_k).
A new participant receives the uncompressed student. Between rounds a client keeps r_k, not w_k,
however many rounds it misses. With all clients in every round, r_k is the same for all and
C(theta - r) is C of their mean update, as in the paper.

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
from lightfed.api.algorithm import KEY, require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.state.rows import Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Part


class FedKD(PersonalShared):
    """L_F = CE(F) + (KL(G || F) + MSE(z_F, W z_G)) / (CE(F) + CE(G)), and likewise L_G."""

    holds = "its private network"
    side_by_side = True
    received: Tensor  # (clients,) bool: clients that have received the student

    def __init__(
        self,
        shared: NetworkFactory,
        energy: tuple[Part, Part] = (0.95, 0.98),
        weights: Weights = "uniform",
        form: mutual.Form = "separate",
        rounds: Count | None = None,
        compress: Literal["update", "parameters"] = "update",
    ) -> None:
        """Distillation and compression.

        Args:
            shared: G, the student, which is sent.
            energy: Share of the squared singular values to keep, before the first and in the last
                round; it grows by as much in each. 1 sends everything.
            weights: Of the participants in the mean: uniform, or by samples.
            form: Of mutual learning: separate losses, or htfllib's.
            rounds: Rounds until the energy has grown; the length of the run by default.
            compress: Compress the update of a round, as in the paper, or the student's parameters,
                as in HtFLlib.
        """
        super().__init__(shared, weights)
        self.energy = (energy[0], energy[1])
        self.form: mutual.Form = form
        self.rounds, self.compress = rounds, compress
        self._sent: list[ServerModel] = []  # the student as sent; not state
        self._held: dict[int, dict[str, Tensor]] = {}  # r_k of this rank's participants
        self._share = 1.0

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        batch = blank(data, samples=2)
        common = split(shared, batch, key=f"{KEY}.shared")
        return mutual.FedKD(split(private, batch), common, form=self.form)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        found = "nothing, and trainer.max_epochs does not say how long the run is"
        require_argument(bool(self.rounds or fed.rounds), "rounds", found, "give their number")
        self._sent = [fed.new_part(PREFIX)]
        self._bytes = fed.keep("bytes", durable=False)  # sent by the participants
        self.register_buffer("received", torch.zeros(fed.clients, dtype=torch.bool))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        length = self.rounds or fed.rounds or 1
        start, end = self.energy
        self._share = svd.energy_of_round(min(t, length - 1), length, start=start, end=end)
        self._held = {}
        if self.compress == "update":
            self._send_updates(fed, clients)
        else:
            self._send_parameters(fed, clients)
        fed.train(clients, t)
        # theta <- sum_k (r_k + C(w_k - r_k)) / K
        fed.merge(
            clients,
            into=self.model,
            weights=self.weights,
            sizes=fed.collect({k: int(size) for k, size in self._bytes.items()}),
        )
        for client, held in self._held.items():
            _put(self._student(fed, client, fed.row(client)), held)

    def _send_updates(self, fed: Fleet, clients: Sequence[int]) -> None:
        """r_k <- r_k + C(theta - r_k), or theta for a new client."""
        received = self.received.tolist()
        fed.send(self.model, [k for k in clients if not received[k]])
        theta = self.model.layout.floats.views(self.model.floats)
        sizes = {}
        for client in fed.mine(clients):
            student = self._student(fed, client, fed.row(client))
            if received[client]:
                arrived, sizes[client] = self._travel(theta, student)
                fed.load(self.model, client)  # integer buffers are not compressed
                _put(student, arrived)
            self._held[client] = {name: view.clone() for name, view in student.items()}
        for client, size in fed.collect(sizes).items():
            fed.ledger.sent_down(client, size)
        self.received[clients] = True

    def _send_parameters(self, fed: Fleet, clients: Sequence[int]) -> None:
        """w_k <- C(theta)."""
        sent = self._sent[0]
        sent.row.copy_(self.model.row)
        views = sent.layout.floats.views(sent.floats)
        arrived, size = self._travel(views, {})
        _put(views, arrived)
        fed.send(sent, clients, size=size)

    @override
    def session_end(self, s: SessionContext) -> None:
        """The student as the server receives it."""
        student = self._student(s.fed, s.client, s.row)
        arrived, size = self._travel(student, self._held.get(s.client, {}))
        self._bytes[s.client] = torch.tensor(size)
        _put(student, arrived)

    def _travel(
        self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        """The tensors received, given those held (if any), and the bytes sent."""
        counters = 8 * self.model.layout.integers.numel
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        if self._share == 1 or not finite:  # the merge leaves out non-finite updates
            return tensors, counters + sum(tensor.nbytes for tensor in tensors.values())
        base = {name: held[name].to(x.device) if held else 0 for name, x in tensors.items()}
        packages = svd.compress({n: x - base[n] for n, x in tensors.items()}, self._share)
        arrived = {name: base[name] + package.tensor() for name, package in packages.items()}
        return arrived, counters + sum(package.bytes for package in packages.values())

    def _student(self, fed: Fleet, client: int, row: Row) -> dict[str, Tensor]:
        """Views of a client's row."""
        views = fed.state(client).layout.floats.views(row.floats)
        return {name: view for name, view in views.items() if name.startswith(PREFIX)}


def _put(views: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, view in views.items():
        view.copy_(values[name])
