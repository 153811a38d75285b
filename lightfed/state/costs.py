"""The cost of a federation: bytes up and down and FLOPs, for each client and round.

A client's bytes are the encoded size of what it sends and receives under the algorithm. They do not
depend on its rank. If an algorithm has several servers, they talk to a coordinator or to each
other; those bytes belong to no client and are summed separately. Bytes between ranks depend on
where clients are placed, and are not counted here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from lightfed_kernels import Layout, Segments, count_per_tensor
from torch import nn

from lightfed.models.split import evaluating
from lightfed.models.trials import on_trial
from lightfed.utils.tensor_parts import parts

Clients = int | Sequence[int]
Amounts = float | Sequence[float]  # one for all clients, or one for each

# A training step is a forward pass and a backward pass, which costs twice as much.
_PASSES_OF_A_STEP = 3.0


class Ledger:
    """Running totals for each client, of bytes up and down, which are exact, and of FLOPs.

    It also sums these, and the bytes between servers, over the current round.

    Args:
        clients: The number of clients N.

    Attributes:
        bytes: The bytes up and down, (N, 2) int64. A float64 would stop counting bytes at 2^53.
        flops: The FLOPs, (N,) float64. Those of a masked model are no whole number.
        touched: A clock that prices costs sets this to a list. Each entry of the ledger then adds
            its clients to the list, as an array (K,). None if nobody reads them.
    """

    # The columns of `totals`. The first two are those of `bytes`.
    UP = 0
    DOWN = 1
    FLOPS = 2

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.bytes = np.zeros((clients, 2), dtype=np.int64)
        self.flops = np.zeros(clients)
        self.touched: list[np.ndarray] | None = None
        self._clear_round()

    def _clear_round(self) -> None:
        # Python's whole numbers, which have no largest one.
        self._round_bytes = [0, 0]
        self._round_server_bytes = 0
        self._round_flops = 0.0

    @property
    def totals(self) -> np.ndarray:
        """A copy of the bytes up and down, rounded, and of the FLOPs, as (N, 3) float64."""
        return np.column_stack([self.bytes, self.flops])

    def sent_down(self, clients: Clients, bytes_: Amounts) -> None:
        """Count what the server has sent to each of some clients."""
        self._send(clients, self.DOWN, bytes_)

    def sent_up(self, clients: Clients, bytes_: Amounts) -> None:
        """Count what each of some clients has sent to the server."""
        self._send(clients, self.UP, bytes_)

    def sent_between_servers(self, bytes_: float) -> None:
        """Count a message between two servers."""
        self._round_server_bytes += math.ceil(bytes_)

    def computed(self, clients: Clients, flops: Amounts) -> None:
        """Count FLOPs of each of some clients."""
        index = self._touch(clients)
        # Not `self.flops[index] += flops`: a client may occur twice.
        np.add.at(self.flops, index, flops)

        # The sum goes one after the other. numpy's `sum` adds in pairs, which gives other bits if
        # the FLOPs are fractions.
        addends = np.empty(index.size + 1)
        addends[0] = self._round_flops
        addends[1:] = flops
        self._round_flops = float(np.add.accumulate(addends)[-1])

    def _send(self, clients: Clients, column: int, amounts: Amounts) -> None:
        """Count messages. A fraction of a byte counts as a whole byte."""
        index = self._touch(clients)
        whole_bytes = np.asarray(amounts)
        is_whole = whole_bytes.dtype.kind in "iu"
        if not is_whole:
            whole_bytes = np.ceil(whole_bytes)
        whole_bytes = whole_bytes.astype(np.int64)

        np.add.at(self.bytes[:, column], index, whole_bytes)
        bytes_of_each = np.broadcast_to(whole_bytes, index.shape)
        self._round_bytes[column] += int(bytes_of_each.sum(dtype=np.int64))

    def _touch(self, clients: Clients) -> np.ndarray:
        """Return the clients of an entry as an array, after noting them for a clock."""
        index = np.array(clients, dtype=np.int64)
        if self.touched is not None:
            self.touched.append(index.reshape(-1))
        return index

    def close_round(self) -> dict[str, float]:
        """Return the sums of the round by name, and begin the next round.

        Bytes between servers are among them only if there were any.
        """
        sums = {
            "bytes_up": self._round_bytes[self.UP],
            "bytes_down": self._round_bytes[self.DOWN],
            "flops": self._round_flops,
        }
        if self._round_server_bytes:
            sums["server_bytes"] = self._round_server_bytes
        self._clear_round()
        return sums


def forward_flops(
    module: nn.Module,
    batch: Any,
    call: Callable[[Any], object] | None = None,
    samples: int = 2,
) -> float:
    """Return the FLOPs of the forward pass of one sample, by torch's own counter.

    For a convolution all products of its kernels count, also those with padding.

    Args:
        module: The module. It is put into eval mode and back.
        batch: A batch of zeros (2, ...), or a batch of columns. It has two samples, because batch
            statistics need more than one value.
        call: The pass; None for the module's forward.
        samples: The number of samples in the batch.
    """
    with torch.no_grad(), _counting(module) as counter:
        (call or module)(batch)
    return counter.get_total_flops() / samples


@contextmanager
def _counting(module: nn.Module) -> Iterator[Any]:
    """Give a counter of the FLOPs of what the context computes, with the module in eval mode."""
    # These are imported here because most processes never count.
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    # Its tracker marks what goes into a layer, and fails on an expanded parameter.
    counter.mod_tracker = _NoTracker()  # type: ignore[assignment]

    # The counter does not know the fused attention of CPUs. As matrix products it is counted.
    with evaluating(module), sdpa_kernel(SDPBackend.MATH), counter:
        yield counter


class _NoTracker(nullcontext[None]):
    """Stands in for torch's ModuleTracker: every operation belongs to the whole module."""

    parents = ("Global",)


def passes(
    module: nn.Module,
    batch: Any,
    forward: float,
    call: Callable[[Any], object] | None = None,
    samples: int = 2,
) -> float:
    """Return the FLOPs of a training step on one sample, as a number of forward passes.

    It is for modules with frozen layers: a frozen layer has no gradient of its weights, and below
    the first trained layer there is no backward pass. For others, and where the passes cannot be
    counted, lightfed takes 3.

    Args:
        module: The module. It is put into eval mode and back.
        batch: A batch as for `forward_flops`.
        forward: The FLOPs of the forward pass of one sample.
        call: The pass; None for the module's forward.
        samples: The number of samples in the batch.
    """
    # torch has no derivative of some operations.
    with suppress(NotImplementedError), _counting(module) as counter:
        output = (call or module)(batch)
        if forward and isinstance(output, torch.Tensor) and output.requires_grad:
            trained = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(output.sum(), trained, allow_unused=True)
            return counter.get_total_flops() / samples / forward
    return _PASSES_OF_A_STEP


def activation_bytes(module: nn.Module, batch: torch.Tensor) -> float:
    """Return the bytes that the backward pass of one sample needs from the forward pass.

    Weights are not among them.

    Args:
        module: The module. It is put into eval mode and back.
        batch: Zeros, (2, ...).
    """
    weights = set()
    for tensor in module.state_dict().values():
        weights |= {part.untyped_storage().data_ptr() for part in parts(tensor).values()}
    bytes_at: dict[int, int] = {}  # by address, because several operations may save one tensor

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for part in parts(tensor).values():
            storage = part.untyped_storage()
            if storage.data_ptr() not in weights:
                bytes_at[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unchanged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with evaluating(module), torch.autograd.graph.saved_tensors_hooks(note, unchanged):
        # The output keeps all saved tensors alive, so that no address is used twice.
        output = module(batch)
    del output
    return sum(bytes_at.values()) / len(batch)


def weight_uses(module: nn.Module, batch: torch.Tensor) -> dict[str, float]:
    """Return how many multiply-adds each element of a weight has in one sample's forward pass.

    They are those of convolutions and linear layers, where masks save work: an element is used once
    for every output position.

    Args:
        module: The module, called as `module(batch)`. It is put into eval mode and back.
        batch: Zeros, (2, ...).

    Returns:
        The number of uses, by the name of the weight.
    """
    uses: dict[str, float] = {}

    def count(name: str, layer: Any, output: torch.Tensor) -> None:
        channels = layer.weight.shape[0]
        positions = output.numel() / len(batch) / channels
        uses[name] = uses.get(name, 0.0) + positions

    def hook_of(name: str) -> Callable[..., None]:
        return lambda layer, inputs, output: count(name, layer, output)

    handles = []
    try:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                handles.append(layer.register_forward_hook(hook_of(f"{name}.weight")))
        with evaluating(module), torch.no_grad():
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    return uses


class MaskedFlops:
    """The FLOPs of one sample's forward pass under the masks of a group's rows.

    Args:
        module: The group's module.
        batch: Zeros, (2, ...).
        layout: The layout of the group's float rows.
        dense: The FLOPs of the whole model.
    """

    def __init__(
        self, module: nn.Module, batch: torch.Tensor, layout: Layout, dense: float
    ) -> None:
        with on_trial(module, batch.device) as trial:
            uses = weight_uses(trial, batch)

        # A multiply-add is two FLOPs.
        flops_of_elements = [2 * uses.get(entry.name, 0.0) for entry in layout]
        flops_of_weights = sum(
            flops * entry.numel for flops, entry in zip(flops_of_elements, layout, strict=True)
        )
        # What masks do not change, such as activations and normalization.
        self._flops_of_rest = dense - flops_of_weights

        device = batch.device
        self._flops_of_elements = torch.tensor(
            flops_of_elements, dtype=torch.float64, device=device
        )
        self._segments = Segments.build(layout, device=device)

    def __call__(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the FLOPs under a mask, as a float64 scalar.

        Args:
            mask: Packed words, (P / 32,).
        """
        num_covered = count_per_tensor(mask, self._segments)
        return self._flops_of_rest + (self._flops_of_elements * num_covered).sum()
