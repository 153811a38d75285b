"""Tests of several clients at once.

If all clients are tested with one row, their samples go through the model together. If each client
has its own row, K rows are tested side by side. What is tested at once follows from the
configuration, so that results do not depend on the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.data.batches import sent
from lightfed.data.tested_samples import TestedSamples, TestSplit
from lightfed.distributed.collectives import Ranks
from lightfed.local.session import Autocast, Report
from lightfed.models.client_module import ClientModule
from lightfed.packs import stacked
from lightfed.packs.known_layers import has_mixing_layers, unknown_layer
from lightfed.state.rows import Rows
from lightfed.utils.torch_private import _BatchNorm

# A pack of fewer clients takes longer than its clients one after the other.
SMALLEST_PACK = 8

# The largest batch of a network that is cheap enough: its forward FLOPs stay below _CHEAP_FLOPS.
_MOST_SAMPLES = 4096
_CHEAP_FLOPS = 1 << 27

# The number of rows that are read together, to be tested one after the other.
_ROWS_READ_AT_ONCE = 128

# A part of the tests that one rank runs. A slice of the samples, if all clients have one row. Else
# some clients, and whether they are tested side by side.
Piece = slice | tuple[Sequence[int], bool]


def can_test_at_once(module: nn.Module) -> bool:
    """Return whether several clients of a module can be tested in one forward pass.

    All layers have to be known and must not mix samples, and the metrics must be those of
    `ClientModule`.
    """
    if type(module) is not ClientModule or hasattr(module.net, "figures"):
        return False
    if unknown_layer(module.net) or has_mixing_layers(module.net):
        return False

    # Batch normalization without running statistics mixes samples also in evaluation.
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            return False
    return True


class RowTests:
    """Tests of some clients of one group.

    Args:
        rows: The models of the group. Later evaluations bring rows of the same kind.
        clients: Ascending; a single GLOBAL stands for the samples of all together.
        tested: The samples to test on.
        split: The name of these samples.
        batch_size: The samples of a batch of an expensive network.
        packs: Clients that are tested side by side, if their rows differ.
        flops: Forward FLOPs of a sample; 0 if unknown.
        context: Autocast of the Trainer's precision; None in full precision.
        device: Of the rank.
    """

    __test__ = False  # pytest takes the name for a test

    def __init__(
        self,
        rows: Rows,
        clients: Sequence[int],
        tested: TestedSamples,
        *,
        split: TestSplit,
        batch_size: int,
        packs: Sequence[Sequence[int]],
        flops: float,
        context: Autocast | None,
        device: torch.device,
    ) -> None:
        self._clients = clients
        self._tested = tested
        self._split = split
        self._packs = packs
        self._context: Autocast = context or nullcontext

        # The test samples of all clients, one client after the other.
        indices = [tested.index(client) for client in clients]
        counts = np.array([len(index) for index in indices])
        samples = np.concatenate(indices)
        self._owners = np.repeat(np.arange(len(clients)), counts)  # position of a sample's client
        ends = np.cumsum(counts)
        starts = ends - counts
        self._spans: dict[int, tuple[int, int]] = {}
        for client, start, end in zip(clients, starts, ends, strict=True):
            self._spans[client] = (start, end)

        # Clients may share samples. One model gives a sample the same loss for each of them, so it
        # is tested once: `_tested_as` says where each client's sample lies among those tested.
        self._one_row = rows.shared and rows.buffers is None
        if self._one_row:
            samples, self._tested_as = np.unique(samples, return_inverse=True)
        else:
            self._tested_as = np.arange(len(samples))
        self._samples = torch.from_numpy(samples)

        # As `_sample_results`; 0 for samples that are not tested.
        self._results = torch.zeros(2, len(samples), device=device)

        affordable = int(_CHEAP_FLOPS // flops) if flops else 0
        self._batch_size = max(batch_size, min(_MOST_SAMPLES, affordable))

    def pieces(self, rank: int, world: int, home: Callable[[int], int] | None) -> Sequence[Piece]:
        """Return the parts of the tests that a rank runs.

        Args:
            rank: Number of the rank.
            world: Number of ranks.
            home: Gives the rank of a client; None if any rank can test any client.
        """
        size = self._batch_size
        if self._one_row:
            starts = range(0, len(self._samples), size)
            return [slice(start, start + size) for start in starts[rank::world]]

        packs: list[Sequence[int]] = []
        single_clients: list[int] = []
        for pack in self._packs:
            if len(pack) >= SMALLEST_PACK:
                packs.append(pack)
            else:
                single_clients.extend(pack)

        if home is None:
            packs = packs[rank::world]
            single_clients = single_clients[rank::world]
        else:
            packs = [pack for pack in packs if home(pack[0]) == rank]
            single_clients = [client for client in single_clients if home(client) == rank]

        pieces: list[Piece] = [(pack, True) for pack in packs]
        for start in range(0, len(single_clients), _ROWS_READ_AT_ONCE):
            pieces.append((single_clients[start : start + _ROWS_READ_AT_ONCE], False))
        return pieces

    def start(self) -> None:
        """Forget the last evaluation."""
        self._results.zero_()

    @torch.no_grad()
    def run(self, piece: Piece, rows: Rows) -> None:
        """Run one of `pieces`."""
        if isinstance(piece, slice):
            with rows.bound(rows.clients[0]) as module:
                self._test_samples(module, piece)
            return

        clients, side_by_side = piece
        if side_by_side:
            self._test_pack(clients, rows)
        else:
            self._test_one_by_one(clients, rows)

    def _test_samples(self, module: nn.Module, part: slice) -> None:
        """Test a model on some of the samples."""
        x, y = self._tested.samples(self._clients[0], self._samples[part])
        with self._context():
            self._results[:, part] = _sample_results(module(x), y)

    def _test_one_by_one(self, clients: Sequence[int], rows: Rows) -> None:
        """Test clients one after the other, each on its own samples."""
        for client, module in zip(clients, rows.each(clients), strict=True):
            first, end = self._spans[client]
            for start in range(first, end, self._batch_size):
                self._test_samples(module, slice(start, min(start + self._batch_size, end)))

        # `each` has bound the module to copies of rows, which would stay in memory.
        rows.live.forget_views()

    def _test_pack(self, pack: Sequence[int], rows: Rows) -> None:
        """Test K models side by side, each on its client's samples."""
        pack = sorted(pack, key=lambda client: -self._count(client))
        module = rows.live.module
        tensors = stacked.gather(rows.live.layout, rows.read(pack), module)
        if module.training:
            module.eval()

        own: stacked.Views = {}
        shared: stacked.Views = {}
        if rows.buffers is not None:
            own = rows.buffers(pack)
        if rows.shared:
            for name, value in tensors.items():
                if name not in own:
                    shared[name] = value[0]
        else:
            own = tensors | own

        for active, positions, is_real in self._batches(pack):
            x, y = self._tested.samples(pack[0], self._samples[positions.flatten()])
            inputs = x.unflatten(0, positions.shape)
            active_own = {name: value[:active] for name, value in own.items()}
            with self._context():
                logits = stacked.forward(module, active_own, inputs, shared=shared)
                results = _sample_results(logits.flatten(0, 1), y)

            # Index with positions: a boolean mask would make the host wait for the GPU to count
            # its entries.
            real = sent(is_real.flatten().nonzero().squeeze(1), results.device)
            targets = sent(positions[is_real], results.device)
            self._results[:, targets] = results.index_select(1, real)

    def _batches(self, pack: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the batches of a pack whose clients are sorted by size, largest first.

        A batch ends with the samples of its median client. Clients with fewer samples repeat their
        last one.

        Yields:
            The number of active clients; the positions of their samples, (active, B); and which of
            these are real, (active, B).
        """
        counts = torch.tensor([self._count(client) for client in pack])
        first = torch.tensor([self._spans[client][0] for client in pack])[:, None]
        done = 0
        while True:
            active = int((counts > done).sum())
            if active == 0:
                return

            median = int(counts[active // 2])
            size = min(median - done, max(1, self._batch_size // active))
            steps = torch.arange(done, done + size)
            last = counts[:active, None] - 1
            yield active, first[:active] + steps.minimum(last), steps <= last
            done += size

    def _count(self, client: int) -> int:
        """Return the number of a client's test samples."""
        first, end = self._spans[client]
        return end - first

    def finish(self, ranks: Ranks) -> list[Report]:
        """Return the report of each client, the same on every rank; all ranks must call this.

        Reports are about the samples in the pieces that were run: a limit may skip some.
        """
        results = ranks.sum_(self._results).cpu().numpy()
        results = results[:, self._tested_as].astype(np.float64)
        losses, marks = results

        clients = len(self._clients)
        loss_sums = np.bincount(self._owners, losses, minlength=clients)
        mark_sums = np.bincount(self._owners, marks, minlength=clients)
        tested = np.bincount(self._owners, marks > 0, minlength=clients)
        divisors = np.maximum(tested, 1)
        mean_losses = loss_sums / divisors

        # Divided in float32, as the metric object does when clients are tested one at a time.
        accuracies = (mark_sums - tested).astype(np.float32) / divisors.astype(np.float32)

        reports = []
        columns = (tested.astype(np.int64).tolist(), mean_losses.tolist(), accuracies.tolist())
        for client, samples, loss, accuracy in zip(self._clients, *columns, strict=True):
            metrics = {"loss": loss, "accuracy": accuracy}
            reports.append(Report(client, samples, metrics=metrics, split=self._split))
        return reports


def _sample_results(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss and the mark of each sample, of shape (2, N).

    The mark is 2 if the sample is classified correctly, else 1: so it says that it was tested.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    marks = (logits.argmax(1) == labels).float() + 1
    return torch.stack((losses.float(), marks))
