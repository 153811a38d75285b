"""FedRep: clients share a body, and each has a head of its own.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021. https://arxiv.org/abs/2102.07078. Algorithm 1:

    h_k <- head_epochs of SGD on D_k from h_k, with the body phi frozen
    phi_k <- body_epochs of SGD on D_k from phi, with h_k frozen
    phi <- mean of phi_k over the participants

In the paper a head is private. In the released code (lgcollins/FedRep) the server averages heads
too, and a client that takes part for the first time starts from that mean: `private=False`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import Newcomers
from lightfed.local.local_work import Phase
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Number
from lightfed.utils.errors import UserError


class FedRep(Algorithm):
    """h_k: epochs with the body frozen; then phi: epochs with the head frozen.

    Attributes:
        body: Names of the float tensors of phi, with its buffers.
        phases: The two parts of a session; empty if head and body train together.
        seen: (N,) bool, whether a client has taken part.
    """

    stateful = True  # a client's row is (phi, h_k)
    takes_late = True
    holds = "its head on the server's body"
    model: ServerModel
    phases: Sequence[Phase]
    seen: Tensor

    def __init__(
        self,
        head: str | list[str],
        head_epochs: Number = 10,
        body_epochs: Count = 1,
        final_epochs: Number = 0,
        weights: Weights = "uniform",
        private: bool = True,
    ) -> None:
        """Set what is a head, and how long the parts train.

        Args:
            head: Prefix of the names of the head's tensors, such as net.fc, or several prefixes.
            head_epochs: Local epochs of the head, which come first; 0 trains both at once.
            body_epochs: Local epochs of the body.
            final_epochs: Local epochs of all clients' heads after the last round.
            weights: Weigh all participants alike (uniform), or by their number of samples.
            private: The server never gets a head.
        """
        super().__init__()
        self.heads = [head] if isinstance(head, str) else list(head)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.final_epochs = final_epochs
        self.weights = weights
        self.private = private
        if not private:
            self.no_late = "the server averages heads that it has not sent"

    @override
    def setup(self, fed: Fleet) -> None:
        layout = fed.one_layout(f"{type(self).__name__} needs one for all")
        floats = [entry.name for entry in layout.floats]
        parameters = floats[: layout.parameters]
        self.body = [name for name in floats if not self._in_head(name)]
        body_parameters = [name for name in parameters if not self._in_head(name)]
        if body_parameters == parameters:
            raise UserError(
                key=f"{KEY}.head",
                found=f"a model without {', '.join(self.heads)}",
                fix=f"it has {', '.join(parameters)}",
            )

        self.phases = []
        if self.head_epochs > 0:
            head_phase = Phase(self.heads, self.head_epochs)
            body_phase = Phase(body_parameters, self.body_epochs)
            self.phases = [head_phase, body_phase]
        self.model = fed.new_model()  # with private heads only its body ever changes
        self.register_buffer("seen", torch.zeros(fed.clients, dtype=torch.bool))

    def _in_head(self, name: str) -> bool:
        return name.startswith(tuple(self.heads))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        self.send(fed, clients)
        fed.train(clients, t, phases=self.phases)
        # phi <- mean of phi_k
        merged_tensors = self.body if self.private else None
        fed.merge(clients, into=self.model, weights=self.weights, tensors=merged_tensors)

        is_last = t + 1 == fed.rounds
        if is_last and self.final_epochs > 0:
            everyone = list(fed.seen)
            self.send(fed, everyone)
            fed.train(everyone, t, phases=[Phase(self.heads, epochs=self.final_epochs)])

    def send(self, fed: Fleet, clients: list[int]) -> None:
        """Send phi to clients, and to those without a head the server's, unless it is private."""
        need_head = []
        if not self.private:
            need_head = [k for k in clients if not self.seen[k]]
        need_body = [k for k in clients if k not in need_head]
        fed.send(self.model, need_head)
        fed.send(self.model, need_body, tensors=self.body)
        self.seen[clients] = True

    @override
    def newcomers(self, fed: Fleet, clients: Sequence[int]) -> Newcomers:
        """Return the server's body, on which a client that it has not met trains a head.

        The head starts where those of all clients have: from the initial values, or from the mean
        of the heads if the server has one.
        """
        layout = fed.groups[0].layout
        parameters = [entry.name for entry in layout.floats][: layout.parameters]
        heads = [name for name in parameters if self._in_head(name)]
        if self.private:
            body = fed.rows(clients, given=self.model, tensors=self.body)
            return Newcomers(None, body, heads)
        served = fed.server_rows(self.model, clients)
        return Newcomers(served, fed.rows(clients, given=self.model), heads)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind in ("global", "local"):
            return None  # the server has no head
        if kind == "trained":
            return fed.rows(clients)
        return fed.rows(clients, given=self.model, tensors=self.body)
