"""Tests of several clients at once: one row on the samples of all, or K rows side by side.

What is tested at once follows from the configuration, so that results do not depend on the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.data.batches import sent
from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.local.session import Autocast, Report
from lightfed.models.client_module import ClientModule
from lightfed.packs import stacked
from lightfed.packs.packing import strange
from lightfed.state.rows import Rows
from lightfed.utils.torch_private import _BatchNorm

_AT_ONCE = 4096  # samples, of a network that needs as little memory as that
_FEW = 8  # clients; fewer at once take longer than one after the other
_ALONE = 128  # clients that are read at once, and tested one after the other
_FLOPS = 1 << 27  # forward FLOPs of so many samples at most, or `eval_batch_size`


# Places of samples for the one row of all, or clients and whether they are tested side by side.
Piece = slice | tuple[Sequence[int], bool]


def at_once(module: nn.Module) -> bool:
    """Whether all layers are known, mix no samples, and the metrics are those of `ClientModule`."""
    if type(module) is not ClientModule or hasattr(module.net, "figures") or strange(module.net):
        return False
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    return all(norm.running_mean is not None for norm in norms)


class RowTests:
    """Tests of some clients of one group.

    Args:
        rows: of the group; those of later evaluations are of the same kind.
        clients: ascending; a single GLOBAL stands for the global test set.
        data: their test splits.
        packs: clients that are tested side by side, if their rows differ.
        flops: forward FLOPs of a sample, 0 if unknown.
        context: of the Trainer's precision.
        device: of the rank.
    """

    __test__ = False  # pytest takes the name for a test

    def __init__(
        self,
        rows: Rows,
        clients: Sequence[int],
        data: FederatedDataModule,
        *,
        packs: Sequence[Sequence[int]],
        flops: float,
        context: Autocast | None,
        device: torch.device,
    ) -> None:
        self._clients, self._data, self._packs = clients, data, packs
        self._context: Autocast = context or nullcontext
        parts = [data.test_index(client) for client in clients]
        counts = np.array([len(part) for part in parts])
        self._owner = np.repeat(np.arange(len(parts)), counts)
        samples, self._places = np.concatenate(parts), np.arange(len(self._owner))
        self._one = rows.shared and rows.buffers is None
        if self._one:
            # Clients share samples, and one model gives a sample the same loss for each of them.
            samples, self._places = np.unique(samples, return_inverse=True)
        self._samples = torch.from_numpy(samples)
        ends = np.cumsum(counts)
        self._spans = dict(zip(clients, zip(ends - counts, ends, strict=True), strict=True))
        self._found = torch.zeros(2, len(samples), device=device)  # see _results; 0: not tested
        cheap = int(_FLOPS // flops) if flops else 0
        self._most = max(data.eval_batch_size, min(_AT_ONCE, cheap))

    def pieces(self, rank: int, world: int, home: Callable[[int], int] | None) -> Sequence[Piece]:
        """What a rank runs; `home` gives the rank of a client, None if any rank can test any."""
        if self._one:
            starts = range(0, len(self._samples), self._most)[rank::world]
            return [slice(start, start + self._most) for start in starts]
        packs = [pack for pack in self._packs if len(pack) >= _FEW]
        alone = [k for pack in self._packs if len(pack) < _FEW for k in pack]
        if home is None:
            packs, alone = packs[rank::world], alone[rank::world]
        else:
            packs = [pack for pack in packs if home(pack[0]) == rank]
            alone = [client for client in alone if home(client) == rank]
        parts = [alone[i : i + _ALONE] for i in range(0, len(alone), _ALONE)]
        return [(pack, True) for pack in packs] + [(part, False) for part in parts]

    def start(self) -> None:
        """Forget the last evaluation."""
        self._found.zero_()

    @torch.no_grad()
    def run(self, piece: Piece, rows: Rows) -> None:
        """Run one of `pieces`."""
        if isinstance(piece, slice):
            with rows.bound(rows.clients[0]) as module:
                self._run_one(module, piece)
            return
        clients, side_by_side = piece
        if side_by_side:
            self._run_many(clients, rows)
            return
        for client, module in zip(clients, rows.each(clients), strict=True):
            first, end = self._spans[client]
            for start in range(first, end, self._most):
                self._run_one(module, slice(start, min(start + self._most, end)))
        rows.live.forget_views()  # of copies of rows

    def _run_one(self, module: nn.Module, part: slice) -> None:
        """Test a model on some samples."""
        x, y = self._data.test_samples(self._clients[0], self._samples[part])
        with self._context():
            self._found[:, part] = _results(module(x), y)

    def _run_many(self, pack: Sequence[int], rows: Rows) -> None:
        """Test K models, each on its client's samples."""
        pack = sorted(pack, key=lambda client: -self._count(client))
        module, layout, block = rows.live.module, rows.live.layout, rows.read(pack)
        if module.training:
            module.eval()
        own, shared = {} if rows.buffers is None else rows.buffers(pack), {}
        values = stacked.gather(layout, block, module)
        if rows.shared:
            shared = {name: value[0] for name, value in values.items() if name not in own}
        else:
            own = values | own
        for active, places, kept in self._batches(pack):
            x, y = self._data.test_samples(pack[0], self._samples[places.flatten()])
            mine = {name: value[:active] for name, value in own.items()}
            with self._context():
                logits = stacked.forward(module, mine, x.unflatten(0, places.shape), shared=shared)
                found = _results(logits.flatten(0, 1), y)
            # Positions and no bools, whose number a device would have to tell.
            index = sent(kept.flatten().nonzero().squeeze(1), found.device)
            self._found[:, sent(places[kept], found.device)] = found.index_select(1, index)

    def _batches(self, pack: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of a pack by falling numbers of samples: clients in a batch, (K, B) places, which count.

        A batch ends with the samples of its median client. Those of others are filled up.
        """
        counts = torch.tensor([self._count(client) for client in pack])
        begins = torch.tensor([self._spans[client][0] for client in pack])[:, None]
        done = 0
        while active := int((counts > done).sum()):
            size = min(int(counts[active // 2]) - done, max(1, self._most // active))
            steps, last = torch.arange(done, done + size), counts[:active, None] - 1
            yield active, begins[:active] + steps.minimum(last), steps <= last
            done += size

    def _count(self, client: int) -> int:
        first, end = self._spans[client]
        return end - first

    def finish(self, ranks: Ranks) -> list[Report]:
        """The report of each client, the same on every rank; called by all.

        It is of the samples in pieces that were run: a limit may leave some out.
        """
        found = ranks.sum_(self._found).cpu().numpy()[:, self._places].astype(np.float64)
        rows, clients = (*found, found[1] > 0), len(self._clients)
        losses, marks, tested = (np.bincount(self._owner, row, minlength=clients) for row in rows)
        count = np.maximum(tested, 1)
        # The division of the metric object, which is in float32.
        accuracies = (marks - tested).astype(np.float32) / count.astype(np.float32)
        columns = (tested.astype(np.int64), losses / count, accuracies)
        return [
            Report(client, samples, metrics={"loss": loss, "accuracy": accuracy})
            for client, samples, loss, accuracy in zip(
                self._clients, *(column.tolist() for column in columns), strict=True
            )
        ]


def _results(logits: Tensor, labels: Tensor) -> Tensor:
    """(2, N) the loss of each sample, and 2 where it is classified correctly, or else 1."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack((losses.float(), (logits.argmax(1) == labels).float() + 1))
