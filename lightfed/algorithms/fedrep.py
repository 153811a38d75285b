"""FedRep: clients share a body, and each has a head of its own.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021. https://arxiv.org/abs/2102.07078

In the paper a head is private. In the released code (lgcollins/FedRep) the server averages heads
too, and a client that takes part for the first time starts from that mean: `private=False`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm, require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.local_work import Phase
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Number


class FedRep(Algorithm):
    """h_k: epochs with the body frozen; then phi: epochs with the head frozen."""

    stateful = True  # a client's row is (phi, h_k)
    holds = "its head on the server's body"
    model: ServerModel
    phases: Sequence[Phase]
    seen: Tensor  # (N,) whether a client has taken part

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
            head: Prefix of the names of its tensors, such as net.fc, or several.
            head_epochs: Local epochs of the head, which come first; 0 trains both at once.
            body_epochs: Local epochs of the body.
            final_epochs: Local epochs of all clients' heads after the last round.
            weights: Of the participants in the mean: uniform, or by samples.
            private: The server never gets a head.
        """
        super().__init__()
        self.heads = [head] if isinstance(head, str) else [*head]
        self.head_epochs, self.body_epochs = head_epochs, body_epochs
        self.final_epochs, self.weights, self.private = final_epochs, weights, private

    @override
    def setup(self, fed: Fleet) -> None:
        layout = fed.one_layout(f"{type(self).__name__} needs one for all")
        self.body = [e.name for e in layout.floats if not e.name.startswith(tuple(self.heads))]
        trained = [e.name for e in layout.floats.entries[: layout.parameters]]
        body = [name for name in trained if name in self.body]
        found, fix = f"a model without {', '.join(self.heads)}", f"it has {', '.join(trained)}"
        require_argument(body != trained, "head", found, fix)
        phases = Phase(self.heads, self.head_epochs), Phase(body, self.body_epochs)
        self.phases = phases if self.head_epochs else phases[:0]
        self.model = fed.new_model()  # with private heads only its body ever changes
        self.register_buffer("seen", torch.zeros(fed.clients, dtype=torch.bool))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        self.send(fed, clients)
        fed.train(clients, t, phases=self.phases)
        sent = self.body if self.private else None
        fed.merge(clients, into=self.model, weights=self.weights, tensors=sent)
        if self.final_epochs and t + 1 == fed.rounds:
            self.send(fed, everyone := list(range(fed.clients)))
            fed.train(everyone, t, phases=[Phase(self.heads, epochs=self.final_epochs)])

    def send(self, fed: Fleet, clients: list[int]) -> None:
        """Phi to all, and a head to those that have none yet."""
        new = [] if self.private else [k for k in clients if not self.seen[k]]
        fed.send(self.model, new)
        fed.send(self.model, [k for k in clients if k not in new], tensors=self.body)
        self.seen[clients] = True

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind in ("global", "local"):
            return None  # the server has no head
        given = None if kind == "trained" else self.model
        return fed.rows(clients, given=given, tensors=self.body)
