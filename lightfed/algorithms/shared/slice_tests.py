"""Tests of slices of a global model: static batch normalisation, and logits of held labels.

HeteroFL (Diao, Ding, Tarokh, ICLR 2021, section 3.3). Separate modules take the weights of the
global model, or of a client's slice, and estimate batch-norm statistics for the test.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightfed.algorithms.shared.logit_masks import LogitMasks
from lightfed.api.fleet import Fleet
from lightfed.data.batches import PackBatches
from lightfed.local.hooks import Tested
from lightfed.local.packed.evaluation import Together
from lightfed.local.packed.forward import Views, graph_of, stacked
from lightfed.models.networks.scaler import Scaler
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require
from lightfed.utils.rng import Streams, derive_seed, seed_default_generators, streams


class StaticNorms:
    """A separate module for evaluations that takes its weights from rows.

    `module` is a new one, on the device; its own weights are dropped.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self._parameters = dict(module.named_parameters())
        self._norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self._scalers = [part for part in module.modules() if isinstance(part, Scaler)]
        self._device = next(module.parameters()).device
        self.graph = graph_of(module)  # of several clients' passes that estimate statistics
        for norm in self._norms:
            # The statistics of one batch at a time: `estimate` averages them in float64.
            norm.momentum = 1.0
            norm.track_running_stats = True
            if norm.running_mean is None:
                shape = norm.num_features
                norm.running_mean = torch.zeros(shape, device=self._device)
                norm.running_var = torch.ones(shape, device=self._device)
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=self._device)
        self._ready()

    @property
    def normalises(self) -> bool:
        """Whether there are statistics to estimate."""
        return bool(self._norms)

    def load(self, layout: ModelLayout, row: Row) -> None:
        """Take the parameters of a row, as views of it."""
        for name, value in layout.floats.views(row.floats).items():
            self._parameters[name].data = value

    @torch.no_grad()
    def estimate(
        self, batches: Iterable[tuple[int, Tensor]], *, sum_: Callable[[Tensor], Tensor], seed: int
    ) -> None:
        """The mean of the batches' statistics, with equal weights; variances are unbiased.

        The numbers of the batches name the draws of dropout. `sum_` turns the sum over these
        batches into the mean over all batches.
        """
        if self._norms:
            self.module.train()
            sizes = [norm.num_features for norm in self._norms for _ in range(2)]
            total = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
            for number, x in batches:
                # Dropout is on, as in training.
                drawn = derive_seed(seed, "statistics", client=number)
                seed_default_generators(drawn, self._device)
                self.module(x)
                total += torch.cat(self._statistics())
            for tensor, mean in zip(
                self._statistics(), sum_(total).float().split(sizes), strict=True
            ):
                tensor.copy_(mean)
        self._ready()

    def _ready(self) -> None:
        """Switch to evaluation."""
        self.module.eval()
        for scaler in self._scalers:
            scaler.train()  # a slice on its own is scaled as in its training

    @torch.no_grad()
    def estimate_many(
        self, layout: ModelLayout, row: Row, batches: PackBatches, *, seeds: Sequence[int]
    ) -> Views:
        """The statistics of K clients with one model, as `estimate` has them for one.

        Returns (K, C) buffers by name. Draws are seeded by client.
        """
        self.module.train()
        clients, steps = batches.sizes.shape
        buffers = {n: b for n, b in self.module.named_buffers() if "running_" in n}
        total = {
            name: torch.zeros(clients, *buffer.shape, dtype=torch.float64, device=self._device)
            for name, buffer in buffers.items()
        }
        for step in range(steps):
            sizes = batches.sizes[:, step]
            for size in np.unique(sizes[sizes > 0]):
                places = np.flatnonzero(sizes == size).tolist()
                # One matrix has other bits than several.
                found = self._pass(
                    layout, row, batches, seeds, places * (1 + (len(places) == 1)), step
                )
                for name, values in total.items():
                    values[places] += found[name][: len(places)]
        self._ready()
        counts = torch.from_numpy((batches.sizes > 0).sum(1)).to(self._device)[:, None]
        return {name: (values / counts).float() for name, values in total.items()}

    def _pass(
        self,
        layout: ModelLayout,
        row: Row,
        batches: PackBatches,
        seeds: Sequence[int],
        places: list[int],
        step: int,
    ) -> Views:
        """The statistics of one batch of each of some clients, (k, C) by name."""
        assert self.graph is not None
        count, named = len(places), self.module.named_buffers()
        buffers = {name: b.expand(count, *b.shape).clone() for name, b in named}

        @cache  # all layers draw from one stream, as in `estimate`
        def draws() -> Streams:
            own = [derive_seed(seeds[k], "statistics", client=step) for k in places]
            return streams(own, self._device)

        values = stacked(layout, row.repeated(count)) | buffers
        self.graph(batches.batch(places, step)[0], values, draws)
        return buffers

    def _statistics(self) -> list[Tensor]:
        """Mean and variance of all norms, in order."""
        return [s for n in self._norms for s in (n.running_mean, n.running_var) if s is not None]


def _scale_to(global_rate: float, module: L.LightningModule) -> None:
    """Scalers divide by the rate relative to the widest client's: its model is not scaled."""
    for part in module.modules():
        if isinstance(part, Scaler):
            part.rate /= global_rate


class SliceTests:
    """A module for the global model, of the first group, and one for the slices of every group.

    The Scalers are set to rates relative to the first; a UserError if another group is wider.
    `batch_size` is that of the passes that estimate statistics.
    """

    def __init__(self, fed: Fleet, *, batch_size: int, masks: LogitMasks | None) -> None:
        self._fed, self._batch_size, self._masks = fed, batch_size, masks
        widest, first = max(state.rate for state in fed.groups), fed.groups[0].rate
        found = f"{first}, while another group has {widest}"
        fix = "put the widest group first: its model is the global one"
        require(first == widest, "model.clients.0.rate", found, fix)
        for state in fed.groups:
            _scale_to(widest, state.module)
        self._global = self._module(0, widest)
        self._slices = [self._module(c, widest) for c in range(len(fed.groups))]
        self._own: dict[int, Views] = {}  # statistics of clients' data, in this evaluation

    def _module(self, group: int, widest: float) -> StaticNorms:
        """A group's model, scaled and masked as in training."""
        fed = self._fed
        module = fed.groups[group].group.build(fed.data, position=group, seed=fed.seed)
        _scale_to(widest, module.to(fed.device))
        if self._masks is not None:
            self._masks.attach(module, fed.data.num_classes)
        return StaticNorms(module)

    def together(self, model: ServerModel, kind: Tested, group: int, first: int) -> Together | None:
        """How the clients of a group, of which `first` is the first, are tested at once."""
        fed, static = self._fed, self._slices[group]
        absent = None if self._masks is None or kind == "global" else self._absent
        if kind != "personal":
            bind = partial(self.of_global, None)
            return Together(self._global.module, bind=bind, buffers=absent)
        layout = fed.groups[group].layout
        if not static.normalises:

            def load() -> None:
                static.load(layout, fed.covered_row(model, first))

            return Together(static.module, bind=load, buffers=absent)
        if static.graph is None:
            return None

        def rows(clients: Sequence[int]) -> Row:
            return fed.covered_row(model, first).repeated(len(clients))

        def buffers(clients: Sequence[int]) -> Views:
            own = self._own_statistics(static, layout, rows([first]), clients)
            return own if absent is None else own | absent(clients)

        return Together(static.module, layout=layout, rows=rows, buffers=buffers)

    def _own_statistics(
        self, static: StaticNorms, layout: ModelLayout, rows: Row, clients: Sequence[int]
    ) -> Views:
        """Statistics of the training data of each client, (K, C) by name."""
        data, (row,) = self._fed.data, rows.each()
        new = [k for k in dict.fromkeys(clients) if k not in self._own]
        if new:
            batches = data.pack_batches([[data.client_plan(k, self._batch_size)] for k in new])
            seeds = [self._seed(k) for k in new]
            found = static.estimate_many(layout, row, batches, seeds=seeds)
            for place, client in enumerate(new):
                self._own[client] = {name: values[place] for name, values in found.items()}
        names = self._own[clients[0]]
        return {name: torch.stack([self._own[k][name] for k in clients]) for name in names}

    def _absent(self, clients: Sequence[int]) -> Views:
        """The labels that each client does not hold, (K, C)."""
        assert self._masks is not None
        data, device = self._fed.data, self._fed.device
        absent = self._masks.absent([data.labels(k) for k in clients], data.num_classes)
        return {name: rows.to(device) for name, rows in absent.items()}

    def _seed(self, client: int) -> int:
        return derive_seed(self._fed.seed, "own-statistics", client=client)

    def estimate_global(self, model: ServerModel) -> None:
        """Take the global model's weights, and statistics of all training data; on every rank."""
        self._own.clear()
        fed, size = self._fed, self._batch_size
        batches = fed.data.train_batches(size)
        own = range(fed.ranks.rank, batches, fed.ranks.world)
        self._global.load(model.layout, model.row)
        self._global.estimate(
            ((i, fed.data.train_batch(i, size)[0]) for i in own),
            sum_=lambda total: fed.ranks.sum_(total) / batches,
            seed=fed.seed,
        )

    def of_global(self, client: int | None) -> L.LightningModule:
        """The global model, for the labels that a client holds, or for all."""
        return self.masked(self._global.module, client)

    @torch.inference_mode(False)  # it is reused in later evaluations
    def of_slice(self, client: int, group: int, row: Row) -> L.LightningModule:
        """A row of a group's layout, with statistics of the client's training data."""
        static = self._slices[group]
        static.load(self._fed.groups[group].layout, row)
        data = self._fed.data
        batches = [x for x, _ in data.batches(data.client_plan(client, self._batch_size))]
        static.estimate(
            enumerate(batches), sum_=lambda total: total / len(batches), seed=self._seed(client)
        )
        return self.masked(static.module, client)

    def masked(self, module: L.LightningModule, client: int | None) -> L.LightningModule:
        """Set a module's logits of labels that a client does not hold to zero."""
        if self._masks is not None:
            labels = None if client is None else self._fed.data.labels(client)
            self._masks.hold(module, labels)
        return module
