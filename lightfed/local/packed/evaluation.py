"""Tests of many clients at once: one model on the samples of all, or K models side by side.

A result depends neither on the ranks nor on how many clients are tested at once: a model of all
clients has the same batches of samples everywhere, and models side by side are as in a session.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.local.packed.forward import Views, graph_of, placed, stacked
from lightfed.local.packed.operators import cross_entropies
from lightfed.local.session import Autocast, Report
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.memory import sent
from lightfed.utils.rng import streams

_AT_ONCE = 4096  # samples, of a network that needs as little memory as that
_FLOPS = 1 << 27  # forward FLOPs of so many samples at most, or `eval_batch_size`
_PAIR = 2  # a product of one matrix has other bits than one of several


@dataclass(frozen=True)
class Together:
    """How clients of one group are tested at once, by their network in evaluation mode.

    `bind` points it at the model of all of them; None if each has its own of this `layout`: `rows`
    (K, P) and (K, Q), and `buffers` (K, *shape) by name that are not in rows; None without any.
    """

    module: L.LightningModule
    bind: Callable[[], object] | None = None
    layout: ModelLayout | None = None
    rows: Callable[[Sequence[int]], Row] | None = None
    buffers: Callable[[Sequence[int]], Views] | None = None


class TestData(Protocol):
    """The part of a data module that tests use."""

    eval_batch_size: int

    def test_index(self, client: int) -> np.ndarray: ...
    def test_samples(self, client: int, index: Tensor) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Items:
    """Batches of K clients, of one size B: (K, B) places among all samples.

    Batches with fewer repeat their last sample; `kept` (n,) are positions in the flattened batches
    of the others.
    """

    clients: list[int]
    places: Tensor
    kept: Tensor


class Tests:
    """Tests of some clients with models of one architecture.

    `clients` ascend; a single -1 stands for the global test set. `flops` are forward FLOPs of a
    sample, 0 if unknown. `context` is that of the Trainer's precision.

    Attributes:
        clients: as given.
    """

    __test__ = False  # pytest takes the name for a test

    def __init__(
        self,
        together: Together,
        clients: Sequence[int],
        data: TestData,
        *,
        flops: float,
        context: Autocast | None,
        device: torch.device,
    ) -> None:
        self.clients = list(clients)
        self._together, self._data = together, data
        self._context: Autocast = context or nullcontext
        parts = [data.test_index(client) for client in clients]
        self._counts = np.array([len(part) for part in parts])
        self._owner = np.repeat(np.arange(len(parts)), self._counts)
        samples, self._places = np.concatenate(parts), np.arange(len(self._owner))
        if together.rows is None and together.buffers is None:
            # Clients share samples, and one model gives a sample the same loss for each of them.
            samples, self._places = np.unique(samples, return_inverse=True)
        self._samples = torch.from_numpy(samples)
        self._found = torch.zeros(2, len(samples), device=device)  # see _results; 0: not tested
        cheap = int(_FLOPS // flops) if flops else 0
        self._at_once = max(data.eval_batch_size, min(_AT_ONCE, cheap))
        self._graph = None
        if together.rows is not None:
            self._graph = graph_of(together.module, training=False)

    def pieces(
        self, rank: int, world: int, home: Callable[[int], int] | None, most: int
    ) -> list[Any]:
        """What a rank runs; at most `most` clients' own models are tested at once.

        `home` gives the rank of a client; None if any rank can test any client.
        """
        if self._together.rows is None:
            starts = range(0, len(self._samples), self._at_once)
            return [slice(start, start + self._at_once) for start in starts][rank::world]
        if home is None:
            return list(self._items(range(len(self.clients)), most))[rank::world]
        mine = [place for place, client in enumerate(self.clients) if home(client) == rank]
        return list(self._items(mine, most))

    def _items(self, places: Sequence[int], most: int) -> Iterator[Items]:
        """The batches of some clients, those of about one size together."""
        limit, starts = self._data.eval_batch_size, np.cumsum(self._counts) - self._counts
        sizes: dict[int, list[tuple[int, int, int]]] = {}
        for place in places:
            for start in range(0, self._counts[place], limit):
                size = min(limit, int(self._counts[place]) - start)
                item = (self.clients[place], int(starts[place]) + start, size)
                sizes.setdefault(min(limit, padded(size)), []).append(item)
        for size, items in sorted(sizes.items()):
            count = max(1, min(most, self._at_once // size))
            for first in range(0, len(items), count):
                part = items[first : first + count]
                part += part[-1:] * (_PAIR - len(part))
                clients, begins, lengths = zip(*part, strict=True)
                steps, last = torch.arange(size), torch.tensor(lengths)[:, None] - 1
                yield Items(
                    list(clients),
                    torch.tensor(begins)[:, None] + steps.minimum(last),
                    (steps <= last).flatten().nonzero().squeeze(1),
                )

    def start(self) -> None:
        """Forget the last evaluation."""
        self._found.zero_()

    @torch.no_grad()
    def run(self, piece: Any) -> None:
        """Run one of `pieces`."""
        self._run_one(piece) if isinstance(piece, slice) else self._run_many(piece)

    def _run_one(self, part: slice) -> None:
        """Test one model on some samples."""
        module, bind, buffers = self._together.module, self._together.bind, self._together.buffers
        assert bind is not None
        bind()
        if module.training:
            module.eval()
        x, y = self._data.test_samples(self.clients[0], self._samples[part])
        own: Views = {}
        if buffers is not None:  # of each sample's client
            owner = self._owner[part]
            of = buffers(self.clients[owner[0] : owner[-1] + 1])
            index = sent(torch.from_numpy(owner - owner[0]), x.device)
            own = {name: value.index_select(0, index) for name, value in of.items()}
        with placed(module, own), self._context():
            self._found[:, part] = _results(module(x), y)

    def _run_many(self, items: Items) -> None:
        """Test K models, each on a batch of its client."""
        module, rows = self._together.module, self._together.rows
        assert self._together.layout is not None
        assert rows is not None
        assert self._graph is not None
        if module.training:
            module.eval()
        shape = items.places.shape
        index = self._samples[items.places.flatten()]
        x, y = (
            part.unflatten(0, shape) for part in self._data.test_samples(items.clients[0], index)
        )
        buffers = self._together.buffers
        own = buffers(items.clients) if buffers is not None else {}
        block = rows(items.clients)
        values = stacked(self._together.layout, block) | own
        hooked = {name: own[name] for name, _ in module.named_buffers() if name in own}
        with self._context():
            logits = self._graph(x, values, lambda: streams((), block.floats.device))
            with placed(module, hooked):
                network: Any = module.net
                for hook in network._forward_hooks.values():
                    logits = hook(network, (x,), logits)
            found = _results(logits.flatten(0, 1), y.flatten())
        # Positions and no bools, whose number a device would have to tell.
        places = sent(items.places.flatten()[items.kept], found.device)
        self._found[:, places] = found.index_select(1, sent(items.kept, found.device))

    def finish(self, ranks: Ranks) -> list[Report]:
        """The report of each client, the same on every rank; called by all.

        It is of the samples in pieces that were run: a limit may leave some out.
        """
        found = ranks.sum_(self._found).cpu().numpy()[:, self._places].astype(np.float64)
        rows, clients = (*found, found[1] > 0), len(self.clients)
        losses, marks, tested = (np.bincount(self._owner, row, minlength=clients) for row in rows)
        count = np.maximum(tested, 1)
        # The division of the metric object, which is in float32.
        accuracies = (marks - tested).astype(np.float32) / count.astype(np.float32)
        columns = (tested.astype(np.int64), losses / count, accuracies)
        return [
            Report(client, samples, metrics={"loss": loss, "accuracy": accuracy})
            for client, samples, loss, accuracy in zip(
                self.clients, *(column.tolist() for column in columns), strict=True
            )
        ]


def padded(size: int) -> int:
    """A size that a batch is padded to: at most an eighth more, so that few sizes differ."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def _results(logits: Tensor, labels: Tensor) -> Tensor:
    """(2, N) the loss of each sample, and 2 where it is classified correctly, or else 1."""
    losses = cross_entropies(logits, labels)
    return torch.stack((losses.float(), (logits.argmax(1) == labels).float() + 1))
