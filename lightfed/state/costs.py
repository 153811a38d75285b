"""Cost of a federation: bytes up and down and FLOPs, per client and round.

Client bytes are the encoded size of what a client sends and receives under the algorithm. They do
not depend on its rank. If an algorithm has several servers, they talk to a coordinator or to each
other; those bytes belong to no client and are summed separately. Bytes between ranks depend on the
placement and are not counted here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightfed_kernels import Layout, Segments, count_per_tensor
from torch import nn

from lightfed.models.split import evaluating
from lightfed.models.trials import on_trial

Clients = int | Sequence[int]
Amounts = float | Sequence[float]  # one for all clients, or one of each


@dataclass
class Ledger:
    """Running totals per client (clients, 3): bytes up, bytes down, FLOPs.

    Also sums these, and bytes between servers, over the current round. A clock that prices them
    sets `touched` to a list, which then gets the (K,) clients of every entry.
    """

    clients: int
    totals: np.ndarray = field(init=False)
    round: np.ndarray = field(init=False)
    servers: float = field(default=0.0, init=False)
    touched: list[np.ndarray] | None = field(default=None, init=False)

    UP, DOWN, FLOPS = 0, 1, 2

    def __post_init__(self) -> None:
        self.totals = np.zeros((self.clients, 3))
        self.round = np.zeros(3)

    def sent_down(self, clients: Clients, bytes_: Amounts) -> None:
        self._add(clients, self.DOWN, bytes_)

    def sent_up(self, clients: Clients, bytes_: Amounts) -> None:
        self._add(clients, self.UP, bytes_)

    def sent_between_servers(self, bytes_: float) -> None:
        self.servers += bytes_

    def computed(self, clients: Clients, flops: Amounts) -> None:
        self._add(clients, self.FLOPS, flops)

    def _add(self, clients: Clients, column: int, amounts: Amounts) -> None:
        index = np.array(clients, dtype=np.int64)
        np.add.at(self.totals[:, column], index, amounts)  # a client may occur twice
        if self.touched is not None:
            self.touched.append(index.reshape(-1))
        addends = np.empty(index.size + 1)
        addends[0], addends[1:] = self.round[column], amounts
        # One after the other: pairwise sums of fractions would have other bits.
        self.round[column] = np.add.accumulate(addends)[-1]

    def close_round(self) -> dict[str, float]:
        """Return the sums of the round and reset them; servers' bytes only if there were any."""
        sums = {
            "bytes_up": float(self.round[self.UP]),
            "bytes_down": float(self.round[self.DOWN]),
            "flops": float(self.round[self.FLOPS]),
        }
        if self.servers:
            sums["server_bytes"] = self.servers
        self.round[:], self.servers = 0.0, 0.0
        return sums


def forward_flops(
    module: nn.Module,
    batch: Any,
    call: Callable[[Any], object] | None = None,
    samples: int = 2,
) -> float:
    """FLOPs of the forward pass of one sample, by torch's own counter.

    A convolution counts all products of its kernels, also those with padding.

    Args:
        module: put into eval mode and back.
        batch: (2, ...) zeros, or a batch of columns; two samples, because batch statistics need
            more than one value.
        call: the pass; the module's forward by default.
        samples: in the batch.
    """
    with torch.no_grad(), _counting(module) as counter:
        (call or module)(batch)
    return counter.get_total_flops() / samples


@contextmanager
def _counting(module: nn.Module) -> Iterator[Any]:
    """A counter of FLOPs; it does not know fused attention on CPUs, so matrix products count."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    # Its tracker marks what goes into a layer, and fails on an expanded parameter.
    counter.mod_tracker = _NoTracker()  # type: ignore[assignment]
    with evaluating(module), sdpa_kernel(SDPBackend.MATH), counter:
        yield counter


class _NoTracker(nullcontext[None]):
    """In place of torch's ModuleTracker: all operations are of the whole."""

    parents = ("Global",)


def passes(
    module: nn.Module,
    batch: Any,
    forward: float,
    call: Callable[[Any], object] | None = None,
    samples: int = 2,
) -> float:
    """FLOPs of a step on a sample with frozen layers, in forward passes; 3 if they are unknown.

    A frozen layer has no gradient of its weights, and below the first trained one there is no
    backward pass. `forward` are the FLOPs of a forward pass of a sample; the rest is as of
    `forward_flops`.
    """
    with suppress(NotImplementedError), _counting(module) as counter:
        output = (call or module)(batch)
        if forward and isinstance(output, torch.Tensor) and output.requires_grad:
            trained = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(output.sum(), trained, allow_unused=True)
            return counter.get_total_flops() / samples / forward
    return 3.0


def activation_bytes(module: nn.Module, batch: torch.Tensor) -> float:
    """Bytes that the backward pass of one sample needs from the forward pass, without weights.

    Args:
        module: put into eval mode and back.
        batch: (2, ...) zeros.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with evaluating(module), hooks:
        kept = module(batch)  # until all are counted: no address is used twice
    del kept
    return sum(saved.values()) / len(batch)


def weight_uses(module: nn.Module, batch: torch.Tensor) -> dict[str, float]:
    """Multiply-adds of every element of a weight in the forward pass of one sample.

    Covers convolutions and linear layers, where masks save work; counts output positions.

    Args:
        module: called as `module(batch)`; put into eval mode and back.
        batch: (2, ...) zeros.
    """
    uses: dict[str, float] = {}
    handles = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):

            def count(layer: Any, _: object, output: torch.Tensor, name: str = name) -> None:
                channels = layer.weight.shape[0]
                positions = output.numel() / len(batch) / channels
                uses[f"{name}.weight"] = uses.get(f"{name}.weight", 0.0) + positions

            handles.append(part.register_forward_hook(count))
    try:
        with evaluating(module), torch.no_grad():
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    return uses


class MaskedFlops:
    """Forward FLOPs of a sample under the masks of a group's rows.

    Args:
        module: the group's.
        batch: (2, ...) zeros.
        layout: of the float rows.
        dense: FLOPs of the whole model.
    """

    def __init__(
        self, module: nn.Module, batch: torch.Tensor, layout: Layout, dense: float
    ) -> None:
        with on_trial(module, batch.device) as trial:
            uses = weight_uses(trial, batch)
        device = batch.device
        each = [2 * uses.get(entry.name, 0.0) for entry in layout]
        self._each = torch.tensor(each, dtype=torch.float64, device=device)
        self._least = dense - sum(n * entry.numel for n, entry in zip(each, layout, strict=True))
        self._segments = Segments.build(layout, device=device)

    def __call__(self, mask: torch.Tensor) -> torch.Tensor:
        """() float64 FLOPs under a mask, packed words (P / 32,): two per covered multiply-add."""
        return self._least + (self._each * count_per_tensor(mask, self._segments)).sum()
