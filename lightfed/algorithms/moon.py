"""MOON: a client's representations stay near the received model's, and leave its previous one's.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257

    L = CE(head(z), y) - mu log [ e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau)
                                                           + sum_p e^(cos(z, z_p) / tau)) ]

z_g is the representation in the received model, z_p that in one of the client's previous models.

It is FedAvg with the penalty `Contrast`, which says what z is. The paper's networks end with two
linear layers and a ReLU in between, the projection, below the linear layer that gives the logits.

As in the released code, clients are weighted by samples. With more than one previous model a
client's last one counts again for each round that it has missed. A client that has never trained
has the initial model.

Deviation: a pool of three or more holds the last models. In the released code all but one of them
are the same.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.contrastive import Contrastive
from lightfed.algorithms.fedavg import FedAvg
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule
from lightfed.models.split import split
from lightfed.utils.bounds import Count, Positive, Weight
from lightfed.utils.errors import UserError


class Contrast(LocalPenalty):
    """A client's representations stay near its received model's, and leave its last one's (MOON).

    mu -log [ e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau) + sum_p e^(cos(z, z_p) / tau)) ]

    z_g is from the received model and z_p from the client's previous ones, all frozen and in
    evaluation mode, with their BatchNorm statistics. Sessions of the first round have no contrast.
    A client that trains later for the first time has held its initial model until then.

    z is what the network's head takes: the output of its `extractor` or, without one, the input of
    the linear layer that gives the logits. With several previous models a client's last one counts
    again for each round that it has missed.
    """

    stateful = True
    side_by_side = True

    def __init__(self, mu: Weight = 1.0, temperature: Positive = 0.5, pool: Count = 1) -> None:
        """Set the contrast.

        Args:
            mu: Its weight in a client's loss.
            temperature: tau.
            pool: Number of previous models that a client keeps.
        """
        self.mu = mu
        self.temperature = temperature
        self.pool = pool

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="a contrast")
        if hasattr(client.net, "losses") or client.net._forward_hooks:
            raise UserError(
                key="model.local_penalty",
                found="a contrast, and the method changes losses or logits too",
                fix="choose another",
            )
        network = split(client.net, blank(data, samples=2), key="model.clients")
        most = 1 + self.pool  # the received model, and previous ones
        client.net = Contrastive(network, mu=self.mu, temperature=self.temperature, most=most)

    @override
    def setup(self, fed: Any) -> None:
        self.previous = fed.keep("previous")  # (models, P), the newest last
        self.last = fed.keep("last round")  # the round of the client's last session
        for state in fed.groups:
            # The frozen models, the received one and the pool, run forward only.
            state.set_flops(state.flops * (1 + (1 + self.pool) / state.passes))
            self._make_room(state, fed.device)

    @staticmethod
    def _make_room(state: GroupState, device: torch.device) -> None:
        """Make room in a group's network for the tensors of frozen models."""
        prefix = "net.extractor."
        entries = []
        names = []
        for entry in state.layout.floats:
            if entry.name.startswith(prefix):
                entries.append(entry)
                names.append(entry.name.removeprefix(prefix))
        net: Any = state.module.net
        net.make_room(entries, names, device)

    @override
    def pack_key(self, fed: Any, client: int, t: int) -> int:
        # A client that trains a second time in a round has one model more than others, as long as
        # the pool is not full.
        return len(self._previous_models(client, t, fed.state(client)))

    @override
    def session_start(self, s: SessionContext) -> None:
        net: Any = s.module.net
        net.freeze([s.row.floats, *self._previous_models(s.client, s.round, s.group)])

    def _previous_models(self, client: int, t: int, group: GroupState) -> list[Tensor]:
        """Return the client's model after each of the last rounds before round t.

        They are at most `pool` tensors (P,), the newest last.
        """
        if client not in self.previous:
            initial = group.initial.floats.to(group.store.device)
            rounds_so_far = max(0, t)  # t is -1 in a session that only serves an evaluation
            return [initial] * min(rounds_so_far, self.pool)

        models = list(self.previous[client])
        missed_rounds = max(0, t - 1 - int(self.last[client]))
        models += [models[-1]] * min(missed_rounds, self.pool)
        return models[-self.pool :]

    @override
    def trained(self, fed: Any, clients: Sequence[int], t: int) -> None:
        for k in fed.mine(clients):
            new = fed.row(k).floats.to(fed.device)
            models = [*self._previous_models(k, t, fed.state(k)), new]
            self.previous[k] = torch.stack(models[-self.pool :])
            self.last[k] = torch.tensor(t)


class MOON(FedAvg):
    """FedAvg of clients that contrast their representations with their previous model's."""

    takes_late = True

    def __init__(self, mu: Weight = 1.0, temperature: Positive = 0.5, pool: Count = 1) -> None:
        """Set the contrast.

        Args:
            mu: Its weight in a client's loss.
            temperature: tau.
            pool: Number of previous models that a client keeps.
        """
        super().__init__()
        self.local_penalty = Contrast(mu, temperature, pool)
