"""Messages between servers and clients, and among clients; every byte is counted."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from lightfed.aggregation.coverage import Accumulate, Parts
from lightfed.aggregation.gossip import Exchange, Over
from lightfed.aggregation.group_mean import GroupMeans, SharedTensors
from lightfed.aggregation.weights import whole
from lightfed.api.clients import Clients, Message
from lightfed.api.failures import Outcomes
from lightfed.state.costs import Ledger
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require

Weights = Literal["samples", "uniform"]


class Messenger(Clients):
    """Clients that exchange models with servers and with each other.

    Arguments are those of `PlacedClients`, how sums over clients are held, and the bytes per rank
    for rows that clients exchange; None for what it has.
    """

    def __init__(
        self,
        *args: Any,
        accumulate: Accumulate = "float64",
        exchange_buffer: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.accumulate = accumulate
        self.ledger = Ledger(self.clients)
        self._outcomes = Outcomes()
        self._exchange_buffer = exchange_buffer
        self._exchange: Exchange | None = None

    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        size: int | None = None,
    ) -> None:
        """Copy the covered part of a server model into the clients' rows.

        A row on the device is written only when its session starts or it is read, so that the
        written values are still in the cache during training.

        Args:
            model: of the server.
            clients: receivers.
            buffers: send BatchNorm statistics and other buffers too.
            tensors: names of the tensors to send; all by default.
            size: bytes on the wire, if the model is sent in another form.
        """
        self._open(clients)
        parts = Parts.of(buffers=buffers, tensors=tensors)
        covered = self._covered(model, clients, parts)
        self.ledger.sent_down(clients, covered if size is None else size)
        mine = self.mine(clients)
        self.deliver(mine)  # an earlier message may cover more
        self._inbox |= dict.fromkeys(mine, Message(model, parts, model.floats._version))
        if self.host_rows:
            self.deliver(mine)

    def merge(
        self,
        clients: Sequence[int],
        *,
        into: ServerModel,
        weights: Weights | Mapping[int, float] = "samples",
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        sent: Collection[int] | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Coverage-weighted mean of the clients' rows; uncovered elements keep their old value.

        Args:
            clients: clients to merge.
            into: the server model that is replaced by the mean.
            weights: n_k, or 1 for all, or a weight of 0 or more per client, of any unit; fractions
                are rounded to 2^-16 of the largest.
            buffers: merge buffers too; integer ones become the largest of the clients'.
            tensors: names of the tensors to merge; all by default.
            sent: clients that send their rows; the server holds the others'. All by default.
            sizes: bytes on the wire by client, if rows are sent in another form.

        Returns:
            the clients in the mean; updates of the others were not finite.
        """
        parts = Parts.of(buffers=buffers, tensors=tensors)
        self.deliver([*self._inbox])
        valid = self._outcomes.contributing(clients)
        senders = self._outcomes.sending(clients if sent is None else sorted(sent))
        covered = self._covered(into, senders, parts)
        self.ledger.sent_up(senders, covered if sizes is None else [sizes[k] for k in senders])
        if valid:
            labels = self._coverages.coverage(into, parts).table.num_labels
            here = [i for i, k in enumerate(valid) if self._owner[k] == self.ranks.rank]
            mine = [valid[i] for i in here]
            block = self._view(mine)
            self._coverages.merge_(
                into,
                parts,
                self.groups_of(valid),
                here,
                [self.row(k) for k in mine] if block is None else block,
                weights=self._weights(weights, valid),
                labels=[self._labels(k, labels) for k in valid] if labels else None,
                accumulate=self.accumulate,
                ranks=self.ranks,
            )
        return valid

    @contextmanager
    def reordered(self, model: ServerModel, order: Callable[[int], Tensor]) -> Iterator[None]:
        """Send and merge other slices of a server model than the leading ones.

        Within the context the units of every layer are in another order, so that the leading part
        of it is a rolling window (FedRolex) or a random choice, the same for all clients. Axes that
        no group narrows stay: inputs, classes. Layers are connected unit by unit, which a
        flattened feature map is not.

        Args:
            model: of the server; in its own order again afterwards.
            order: width of a layer -> (width,) the position of each unit in the model. Layers of
                one width have one order, because residual connections add them.
        """
        self._coverages.reorder_(model, order)
        try:
            yield
        finally:
            self._coverages.reorder_(model, lambda width: order(width).argsort())

    def average(
        self,
        values: Mapping[int, Tensor],
        clients: Sequence[int],
        *,
        into: Tensor,
        weights: Weights | Mapping[int, float] = "uniform",
    ) -> list[int]:
        """The weighted mean over clients of tensors that they keep, into one of the server.

        The sum is in float64 over whole weights, so that it does not depend on placement. Bytes
        are not counted; see `charge`.

        Args:
            values: of this rank's clients, by client, such as a `Kept`.
            clients: whose tensors are in the mean; others' updates are left out as in `merge`.
            into: the server's tensor, of the same shape; unchanged if no client is left.
            weights: as in `merge`.

        Returns:
            those whose tensors are in the mean.
        """
        valid = self._outcomes.contributing(clients)
        shares = dict(zip(valid, self._weights(weights, valid), strict=True))
        total = torch.zeros_like(into, dtype=torch.float64)
        for client in self.mine(valid):
            total += shares[client] * values[client].to(total)
        self.ranks.sum_(total)
        if sum(shares.values()) > 0:
            into.copy_(total / sum(shares.values()))
        return valid

    def charge(self, clients: Sequence[int], *, up: float = 0.0, down: float = 0.0) -> None:
        """Count bytes that each of the clients sends and receives in addition to its row."""
        self.ledger.sent_up(self._outcomes.sending(clients), up)
        self.ledger.sent_down(clients, down)

    def show(self, model: ServerModel, clients: Sequence[int]) -> None:
        """Count the bytes of clients that read a server's model; their rows do not change."""
        self.ledger.sent_down(clients, self._covered(model, clients, Parts()))

    def relay(self, model: ServerModel, times: int) -> None:
        """Count the bytes of servers that send a model to or from a coordinator or each other."""
        size = 4 * model.layout.floats.numel + 8 * model.layout.integers.numel
        self.ledger.sent_between_servers(times * size)

    def exchange(
        self,
        senders: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        keep: Mapping[int, Tensor] | None = None,
        over: Over = "covered",
    ) -> None:
        """Replace every listed client's row by the mean over itself and its senders.

        All read the old rows; sums are in ascending order of the clients. Only for stateful
        algorithms with one architecture.

        Args:
            senders: receiver -> its senders, without itself; the same on every rank.
            masks: of this rank's clients: packed words (P / 32,) of a row's covered elements; None
                for all.
            keep: of this rank's receivers: elements of the mean that they keep; None for all.
            over: divide by the number of rows that cover an element, or by that of all rows.
        """
        assert self.algorithm.stateful, "only clients that keep rows can exchange them"
        if self._exchange is None:
            layout = self.groups[0].layout
            assert all(state.layout == layout for state in self.groups), "one architecture"
            buffer = self._exchange_buffer
            self._exchange = Exchange(layout, self.ranks, owner=self._owner, buffer=buffer)
        mine = self.mine(range(self.clients))
        block = self._view(mine)
        rows = dict(zip(mine, map(self.row, mine) if block is None else block.each(), strict=True))
        sizes = self._exchange.mean_(rows, senders, masks=masks, keep=keep, over=over, block=block)
        pairs = [(receiver, sender) for receiver in sorted(senders) for sender in senders[receiver]]
        spent = [sizes[sender] for _, sender in pairs]
        self.ledger.sent_up([sender for _, sender in pairs], spent)
        self.ledger.sent_down([receiver for receiver, _ in pairs], spent)

    def share(
        self,
        clients: Sequence[int],
        shared: Sequence[SharedTensors],
        *,
        weights: Weights = "uniform",
    ) -> None:
        """Replace shared tensors by their mean over the clients that have them.

        Stateful algorithms only. Clients with unusable updates receive but do not contribute.

        Args:
            clients: the participants.
            shared: disjoint sets of tensors that they share.
            weights: of the clients in the means: 1 for all, or n_k.
        """
        layouts = [state.layout for state in self.groups]
        means = GroupMeans(shared, layouts, {k: self.home_group(k) for k in clients})
        sending = self._outcomes.sending(clients)
        self.ledger.sent_up(sending, [means.bytes(client) for client in sending])
        self.ledger.sent_down(clients, [means.bytes(client) for client in clients])
        means.mean_(
            {k: self.row(k) for k in self.mine(clients)},
            weights={k: self._weight(weights, k) for k in self._outcomes.contributing(clients)},
            ranks=self.ranks,
            accumulate=self.accumulate,
        )

    def _covered(self, model: ServerModel, clients: Iterable[int], parts: Parts) -> list[float]:
        """Bytes of the parts of a server model that each client covers."""
        groups = self.groups_of(clients)
        each = {g: self._coverages.bytes(model, g, parts) for g in dict.fromkeys(groups)}
        return [each[group] for group in groups]

    def _weights(
        self, weights: Weights | Mapping[int, float], clients: Sequence[int]
    ) -> list[float]:
        """Integer weights of the clients in a sum; a UserError if one is no number of 0 or more."""
        if not isinstance(weights, Mapping):
            return [self._weight(weights, k) for k in clients]
        given: Mapping[int, float] = {k: weights[k] for k in clients}
        for client, weight in given.items():
            found = f"a weight of {weight} for client {client}"
            require(0 <= weight < math.inf, "model.algorithm", found, "give numbers of 0 or more")
        if not all(isinstance(weight, Integral) for weight in given.values()):
            given = whole(given)
        return [float(given[k]) for k in clients]

    def _weight(self, weights: Weights, client: int) -> float:
        if weights == "samples":
            return float(self.data.num_samples(client))
        fix = "give 'samples', 'uniform' or a number for each client"
        require(weights == "uniform", "model.algorithm", f"weights={weights!r}", fix)
        return 1.0

    def _labels(self, client: int, rows: int) -> list[int]:
        """The label rows that a client contributes: those of its labels, and rows beyond labels."""
        held: list[int] = self.data.labels(client).tolist()
        surplus = range(self.data.num_classes, rows) if self.algorithm.surplus_rows else ()
        return [*held, *surplus]
