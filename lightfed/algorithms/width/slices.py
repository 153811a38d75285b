"""Clients that hold slices of a global model: logits of held labels, static batch normalization.

HeteroFL (Diao, Ding, Tarokh, ICLR 2021, section 3.3). Models are tested in modules of their own,
apart from those that train: they take the weights of the global model, or of a client's slice, and
estimate batch-norm statistics.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.data.batches import sent
from lightfed.models.client_module import NetworkClient
from lightfed.networks.layers import Scaler
from lightfed.state.rows import LiveModule, ModelLayout, Rows, Views
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, seed_default_generators
from lightfed.utils.torch_private import _BatchNorm

_BUFFER = "absent_labels"


def mask_logits(module: L.LightningModule, num_classes: int) -> None:
    """Set the logits of labels that a client does not hold to zero, in every forward pass.

    Zero, and not minus infinity: absent classes still add exp(0) to the softmax denominator, but
    get no gradient. Which labels are absent is in a new buffer of the module, `absent_labels`, (C,)
    bool.

    Args:
        module: A NetworkClient, whose network is hooked, or a user's module, whose steps have to
            call `self(x)`.
        num_classes: C.
    """
    absent = torch.zeros(num_classes, dtype=torch.bool, device=module.device)
    module.register_buffer(_BUFFER, absent, persistent=False)
    _hooked(module).register_forward_hook(_Mask(module))


def check_masked(module: L.LightningModule) -> None:
    """Refuse a module if its sessions had labels to mask, but have never called the hook.

    Raises:
        UserError: Names the module.
    """
    for mask in _masks(module):
        if mask.needed and not mask.called:
            name = type(module).__name__
            raise UserError(
                key=f"{KEY}.mask",
                found=f"true, but the training_step of {name} does not call self(x)",
                fix="call it there, or set mask: false",
            )


def _hooked(module: L.LightningModule) -> nn.Module:
    """Return the module whose outputs are logits."""
    return module.net if isinstance(module, NetworkClient) else module


def _masks(module: L.LightningModule) -> "list[_Mask]":
    """Return the hooks of `mask_logits`: one, or none."""
    hooks = _hooked(module)._forward_hooks.values()
    return [hook for hook in hooks if isinstance(hook, _Mask)]


def absent_labels(labels: Sequence[Tensor], num_classes: int) -> Tensor:
    """Return which labels clients do not hold, (K, C) bool, from the labels that each holds."""
    absent = torch.ones(len(labels), num_classes, dtype=torch.bool)
    for row, held in zip(absent, labels, strict=True):
        row[held] = False
    return absent


class _Mask:
    """The forward hook of one module.

    Attributes:
        stacked: That it can take the logits of several clients at once, with a buffer (K, C).
        called: Whether a forward pass has called it.
        needed: Whether some session's client lacked a label.
    """

    stacked = True

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self.called = False
        self.needed = False

    def __call__(self, network: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        self.called = True
        absent: Tensor = self._module.absent_labels  # type: ignore[assignment]
        # absent: (C,) for one client, (K, C) for a pack. logits: (B, C), (B, L, C), (K, B, C).
        # Insert axes of size 1 before the classes, so that `absent` broadcasts.
        while absent.dim() < logits.dim():
            absent = absent.unsqueeze(-2)
        return logits.masked_fill(absent, 0.0)


class StaticNorms:
    """A separate module for evaluations, whose batch-norm statistics are estimated on data.

    Args:
        module: A new module, on the device. Its own weights are dropped.
        layout: The layout of the rows that it is bound to. They have no statistics.

    Attributes:
        live: The module, to be bound to rows.
        norms: Its batch-norm layers, by name.
    """

    def __init__(self, module: L.LightningModule, layout: ModelLayout) -> None:
        self.module = module
        self.live = LiveModule(module, layout)
        self.norms: dict[str, _BatchNorm] = {}
        self._scalers: list[Scaler] = []
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                self.norms[name] = layer
            if isinstance(layer, Scaler):
                self._scalers.append(layer)

        self._device = next(module.parameters()).device
        for norm in self.norms.values():
            # The statistics of one batch at a time: `estimate` averages them in float64.
            norm.momentum = 1.0
            norm.track_running_stats = True
            if norm.running_mean is None:
                size = norm.num_features
                norm.running_mean = torch.zeros(size, device=self._device)
                norm.running_var = torch.ones(size, device=self._device)
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=self._device)
        self._evaluate()

    @torch.no_grad()
    def estimate(
        self, batches: Iterable[tuple[int, Tensor]], *, sum_: Callable[[Tensor], Tensor], seed: int
    ) -> None:
        """Set the statistics to the mean of the batches', with equal weights.

        Variances are unbiased.

        Args:
            batches: Numbered batches of samples. A batch's number names its draws of dropout.
            sum_: Turns the sum over these batches into the mean over all batches.
            seed: The seed of the draws.
        """
        if self.norms:
            self.module.train()
            sizes = [len(tensor) for tensor in self.statistics.values()]
            total = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
            for number, x in batches:
                # Dropout is on, as in training.
                batch_seed = derive_seed(seed, "statistics", client=number)
                seed_default_generators(batch_seed, self._device)
                self.module(x)
                total += torch.cat(list(self.statistics.values()))

            means = sum_(total).float().split(sizes)
            for tensor, mean in zip(self.statistics.values(), means, strict=True):
                tensor.copy_(mean)
            for norm in self.norms.values():
                # How often a process has estimated them, and on which ranks, is no result.
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.zero_()
        self._evaluate()

    def _evaluate(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()
        for scaler in self._scalers:
            scaler.train()  # a slice on its own is scaled as in its training

    @property
    def statistics(self) -> Views:
        """The mean and the variance of all norms, in order, by the names of the buffers."""
        statistics = {}
        for name, norm in self.norms.items():
            for buffer in ("running_mean", "running_var"):
                statistics[f"{name}.{buffer}"] = norm.get_buffer(buffer)
        return statistics


def _scale_to(global_rate: float, module: L.LightningModule) -> None:
    """Let Scalers divide by the rate relative to the widest client's, whose model is not scaled."""
    for layer in module.modules():
        if isinstance(layer, Scaler):
            layer.rate /= global_rate


class SliceTests:
    """Modules to test with: one for the global model, and one for the slices of every group.

    The global model is that of the first group. The Scalers of all groups, also of those that
    train, are set to rates relative to the first group's.

    Args:
        fed: The clients.
        batch_size: Batch size of the passes that estimate statistics.
        samples: About how many training samples estimate those of the global model; None for all.
        masks: Whether logits of absent labels are zero, HeteroFL's `mask`.

    Raises:
        UserError: Another group is wider than the first.
    """

    def __init__(
        self, fed: Fleet, *, batch_size: int, samples: int | None = None, masks: bool
    ) -> None:
        self._fed = fed
        self._batch_size = batch_size
        self._samples = samples
        self._masks = masks
        self._classes = fed.data.num_classes

        first = fed.groups[0].group.width
        widest = max(state.group.width for state in fed.groups)
        if first != widest:
            raise UserError(
                key="model.clients.0.rate",
                found=f"{first}, while another group has {widest}",
                fix="put the widest group first: its model is the global one",
            )

        for state in fed.groups:
            _scale_to(widest, state.module)
        self._global = self._module(0, widest)
        self._slices = [self._module(group, widest) for group in range(len(fed.groups))]

    def _module(self, group: int, widest: float) -> StaticNorms:
        """Build a module of a group, scaled and masked as in training."""
        fed = self._fed
        module = fed.groups[group].group.build(fed.data, position=group, seed=fed.seed)
        for penalty in fed.penalties:
            penalty.prepare_module(module, fed.data)
        _scale_to(widest, module.to(fed.device))
        if self._masks:
            mask_logits(module, self._classes)

        static = StaticNorms(module, fed.groups[group].layout)
        fed.base.share(static.live, group)  # frozen tensors are in memory once
        return static

    def estimate_global(self, model: ServerModel) -> None:
        """Estimate the global model's statistics on training data; called on every rank."""
        fed = self._fed
        size = self._batch_size
        numbers = self._batches_to_estimate_on(fed.data.train_batches(size))
        numbers_on_this_rank = numbers[fed.ranks.rank :: fed.ranks.world]
        # Made one by one, because all of them may not fit into memory.
        batches = ((i, fed.data.train_batch(i, size)[0]) for i in numbers_on_this_rank)

        self._global.live.bind(model.row)
        self._global.estimate(
            batches,
            sum_=lambda total: fed.ranks.sum_(total) / len(numbers),
            seed=fed.seed,
        )

    def _batches_to_estimate_on(self, num_batches: int) -> Sequence[int]:
        """Return the numbers of the batches that estimate the global model's statistics."""
        if self._samples is None:
            return range(num_batches)
        wanted = min(ceil(self._samples / self._batch_size), num_batches)
        # Evenly spaced, because samples may be in the order of their labels.
        return [i * num_batches // wanted for i in range(wanted)]

    def of_global(self, model: ServerModel, clients: Sequence[int]) -> Rows | None:
        """Return the global model, to be tested for the labels that each of some clients holds.

        Args:
            model: The global model.
            clients: The clients; none to test the model for all labels.

        Returns:
            None if there is no whole model, because clients have personal tensors.
        """
        rows = self._fed.server_rows(model, [])
        if rows is None:
            return None
        rows = replace(rows, live=self._global.live)
        if not clients:
            return rows
        return replace(rows, clients=clients, buffers=self._absent)

    def of_slices(self, rows: Rows) -> Rows:
        """Return rows of a group, to be tested with statistics of each client's training data."""
        groups = self._fed.groups
        group = next(i for i, state in enumerate(groups) if state.live is rows.live)
        static = self._slices[group]

        def buffers(clients: Sequence[int]) -> Views:
            of_clients = [self._statistics(static, rows, client) for client in clients]
            stacked = {}
            for name in of_clients[0]:
                stacked[name] = torch.stack([statistics[name] for statistics in of_clients])
            return stacked | self._absent(clients)

        has_buffers = bool(static.norms) or self._masks
        return replace(rows, live=static.live, buffers=buffers if has_buffers else None)

    @torch.inference_mode(False)  # the module is reused in later evaluations
    def _statistics(self, static: StaticNorms, rows: Rows, client: int) -> Views:
        """Return statistics of a client's training data, by the names of the buffers."""
        if static.norms:
            data = self._fed.data
            static.live.bind(rows.row(client))
            batches = [x for x, _ in data.batches(data.client_plan(client, self._batch_size))]
            static.estimate(
                enumerate(batches),
                sum_=lambda total: total / len(batches),
                seed=derive_seed(self._fed.seed, "own-statistics", client=client),
            )
        return {name: tensor.clone() for name, tensor in static.statistics.items()}

    def _absent(self, clients: Sequence[int]) -> Views:
        """Return which labels each client does not hold, (K, C), as a buffer; {} without masks."""
        if not self._masks:
            return {}
        labels = [self._fed.data.labels(client) for client in clients]
        return {_BUFFER: sent(absent_labels(labels, self._classes), self._fed.device)}

    def mask_session(self, module: L.LightningModule, client: int) -> None:
        """Set the logits of labels that a client does not hold to zero in its session."""
        if not self._masks:
            return
        absent = self._absent([client])[_BUFFER]
        module.get_buffer(_BUFFER).copy_(absent[0])
        lacks_labels = len(self._fed.data.labels(client)) < self._classes
        for mask in _masks(module):
            mask.needed |= lacks_labels
