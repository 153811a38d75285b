"""Clients that hold slices of a global model: logits of held labels, static batch normalisation.

HeteroFL (Diao, Ding, Tarokh, ICLR 2021, section 3.3). For tests separate modules take the weights
of the global model, or of a client's slice, and estimate batch-norm statistics.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.data.batches import sent
from lightfed.models.client_module import NetworkClient
from lightfed.networks.layers import Scaler
from lightfed.state.rows import LiveModule, ModelLayout, Rows, Views
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require
from lightfed.utils.rng import derive_seed, seed_default_generators
from lightfed.utils.torch_private import _BatchNorm

_BUFFER = "absent_labels"


def mask_logits(module: L.LightningModule, num_classes: int) -> None:
    """Hook a NetworkClient's network, or a user's module, whose steps call `self(x)`.

    The hook sets the logits of labels outside a client's data to zero, and not to minus infinity:
    absent classes still add exp(0) to the softmax denominator, but get no gradient. Which labels
    are absent lies in a buffer of the module, `absent_labels` (C,).
    """
    absent = torch.zeros(num_classes, dtype=torch.bool, device=module.device)
    module.register_buffer(_BUFFER, absent, persistent=False)
    network = module.net if isinstance(module, NetworkClient) else module
    network.register_forward_hook(_Mask(module))


def check_masked(module: L.LightningModule) -> None:
    """Reject a module whose masked sessions never called the hook; a UserError names it."""
    found = f"true, but the training_step of {type(module).__name__} does not call self(x)"
    for mask in _masks(module):
        fits = mask.called or not mask.needed
        require(fits, f"{KEY}.mask", found, "call it there, or set mask: false")


def _masks(module: L.LightningModule) -> "list[_Mask]":
    network = module.net if isinstance(module, NetworkClient) else module
    return [hook for hook in network._forward_hooks.values() if isinstance(hook, _Mask)]


def absent_labels(labels: Sequence[Tensor], num_classes: int) -> Tensor:
    """(K, C) bool: those of K clients, from the labels that each holds."""
    absent = torch.ones(len(labels), num_classes, dtype=torch.bool)
    for row, held in zip(absent, labels, strict=True):
        row[held] = False
    return absent


class _Mask:
    """The hook of one module.

    If `stacked`, it takes the logits of several clients at once, (K, B, C), with a buffer (K, C).
    """

    stacked = True

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self.called = self.needed = False  # some session's client lacks a label

    def __call__(self, network: torch.nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        self.called = True
        absent: Tensor = self._module.absent_labels  # type: ignore[assignment]
        shape = (*absent.shape[:-1], *[1] * (logits.dim() - absent.dim()), absent.shape[-1])
        return logits.masked_fill(absent.view(shape), 0.0)


class StaticNorms:
    """A separate module for evaluations, whose statistics are not in rows of `layout`.

    `module` is a new one, on the device; its own weights are dropped.

    Attributes:
        live: the module, to be bound to rows.
        norms: its batch norms, by name.
    """

    def __init__(self, module: L.LightningModule, layout: ModelLayout) -> None:
        self.module, self.live = module, LiveModule(module, layout)
        parts = [*module.named_modules()]
        self.norms = {name: part for name, part in parts if isinstance(part, _BatchNorm)}
        self._scalers = [part for _, part in parts if isinstance(part, Scaler)]
        self._device = next(module.parameters()).device
        for norm in self.norms.values():
            # The statistics of one batch at a time: `estimate` averages them in float64.
            norm.momentum = 1.0
            norm.track_running_stats = True
            if norm.running_mean is None:
                shape = norm.num_features
                norm.running_mean = torch.zeros(shape, device=self._device)
                norm.running_var = torch.ones(shape, device=self._device)
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=self._device)
        self._ready()

    @torch.no_grad()
    def estimate(
        self, batches: Iterable[tuple[int, Tensor]], *, sum_: Callable[[Tensor], Tensor], seed: int
    ) -> None:
        """The mean of the batches' statistics, with equal weights; variances are unbiased.

        The numbers of the batches name the draws of dropout. `sum_` turns the sum over these
        batches into the mean over all batches.
        """
        if self.norms:
            self.module.train()
            sizes = [len(tensor) for tensor in self.statistics.values()]
            total = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
            for number, x in batches:
                # Dropout is on, as in training.
                drawn = derive_seed(seed, "statistics", client=number)
                seed_default_generators(drawn, self._device)
                self.module(x)
                total += torch.cat([*self.statistics.values()])
            means = sum_(total).float().split(sizes)
            for tensor, mean in zip(self.statistics.values(), means, strict=True):
                tensor.copy_(mean)
            for norm in self.norms.values():
                # How often a process has estimated them, and on which ranks, is no result.
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.zero_()
        self._ready()

    def _ready(self) -> None:
        """Switch to evaluation."""
        self.module.eval()
        for scaler in self._scalers:
            scaler.train()  # a slice on its own is scaled as in its training

    @property
    def statistics(self) -> Views:
        """Mean and variance of all norms, in order, by the names of the buffers."""
        parts = itertools.product(self.norms.items(), ("running_mean", "running_var"))
        return {f"{name}.{part}": norm.get_buffer(part) for (name, norm), part in parts}


def _scale_to(global_rate: float, module: L.LightningModule) -> None:
    """Scalers divide by the rate relative to the widest client's: its model is not scaled."""
    for part in module.modules():
        if isinstance(part, Scaler):
            part.rate /= global_rate


class SliceTests:
    """A module for the global model, of the first group, and one for the slices of every group.

    The Scalers are set to rates relative to the first; a UserError if another group is wider.
    `batch_size` is that of the passes that estimate statistics; `masks` as of HeteroFL's `mask`.
    """

    def __init__(self, fed: Fleet, *, batch_size: int, masks: bool) -> None:
        self._fed, self._batch_size, self._masks = fed, batch_size, masks
        self._classes = fed.data.num_classes
        widest, first = max(s.group.width for s in fed.groups), fed.groups[0].group.width
        found = f"{first}, while another group has {widest}"
        fix = "put the widest group first: its model is the global one"
        require(first == widest, "model.clients.0.rate", found, fix)
        for state in fed.groups:
            _scale_to(widest, state.module)
        self._global = self._module(0, widest)
        self._slices = [self._module(c, widest) for c in range(len(fed.groups))]

    def _module(self, group: int, widest: float) -> StaticNorms:
        """A group's model, scaled and masked as in training."""
        fed = self._fed
        module = fed.groups[group].group.build(fed.data, position=group, seed=fed.seed)
        for penalty in fed.penalties:
            penalty.prepare_module(module, fed.data)
        _scale_to(widest, module.to(fed.device))
        if self._masks:
            mask_logits(module, self._classes)
        found = StaticNorms(module, fed.groups[group].layout)
        fed.base.share(found.live, group)
        return found

    def estimate_global(self, model: ServerModel) -> None:
        """The global model's statistics of all training data; called on every rank."""
        fed, size = self._fed, self._batch_size
        batches = fed.data.train_batches(size)
        own = range(fed.ranks.rank, batches, fed.ranks.world)
        self._global.live.bind(model.row)
        self._global.estimate(
            ((i, fed.data.train_batch(i, size)[0]) for i in own),
            sum_=lambda total: fed.ranks.sum_(total) / batches,
            seed=fed.seed,
        )

    def of_global(self, model: ServerModel, clients: Sequence[int]) -> Rows | None:
        """The global model, for the labels that each client holds, or without clients for all."""
        whole = self._fed.server_rows(model, [])
        if whole is None:
            return None
        rows = replace(whole, live=self._global.live)
        return replace(rows, clients=clients, buffers=self._absent) if clients else rows

    def of_slices(self, rows: Rows) -> Rows:
        """Rows of a group, with statistics of each client's training data."""
        places = [state.live is rows.live for state in self._fed.groups]
        static = self._slices[places.index(True)]

        def buffers(clients: Sequence[int]) -> Views:
            own = [self._statistics(static, rows, client) for client in clients]
            statistics = {name: torch.stack([one[name] for one in own]) for name in own[0]}
            return statistics | self._absent(clients)

        own = buffers if static.norms or self._masks else None
        return replace(rows, live=static.live, buffers=own)

    @torch.inference_mode(False)  # the module is reused in later evaluations
    def _statistics(self, static: StaticNorms, rows: Rows, client: int) -> Views:
        """Of a client's training data, by the names of the buffers."""
        if static.norms:
            data = self._fed.data
            static.live.bind(rows.row(client))
            batches = [x for x, _ in data.batches(data.client_plan(client, self._batch_size))]
            seed = derive_seed(self._fed.seed, "own-statistics", client=client)
            static.estimate(enumerate(batches), sum_=lambda total: total / len(batches), seed=seed)
        return {name: tensor.clone() for name, tensor in static.statistics.items()}

    def _absent(self, clients: Sequence[int]) -> Views:
        """The labels that each client does not hold, (K, C); nothing without masks."""
        if not self._masks:
            return {}
        labels = [self._fed.data.labels(client) for client in clients]
        return {_BUFFER: sent(absent_labels(labels, self._classes), self._fed.device)}

    def hold(self, module: L.LightningModule, client: int) -> None:
        """Set the logits of labels that a client does not hold to zero in its session."""
        for name, absent in self._absent([client]).items():
            module.get_buffer(name).copy_(absent[0])
            for mask in _masks(module):
                mask.needed |= len(self._fed.data.labels(client)) < self._classes
