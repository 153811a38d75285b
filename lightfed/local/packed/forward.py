"""The training step of K clients at once."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from typing_extensions import override

from lightfed.local.client_module import ClientModule
from lightfed.local.logbook import check_mean
from lightfed.local.packed.functions import PackedFunctions
from lightfed.local.packed.graph import NetworkGraph, cross_entropy
from lightfed.local.packed.tracing import Unknown
from lightfed.local.session import Autocast
from lightfed.local.steppers.sgd import run_backward
from lightfed.models.image_format import channels_first
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.rng import Draws

log = logging.getLogger(__name__)

Views = dict[str, Tensor]
_STEP = "module."
OWN = 1 << 16  # elements of a buffer outside of rows that each client may have its own values of


class _TrainingStep(nn.Module):
    """`training_step` as a forward pass; returns the loss and what the step logged."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, batch: Any, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        logged: dict[str, Tensor] = {}
        own = self.module.log, self.module.log_dict
        self.module.log = partial(_note, logged)  # type: ignore[method-assign]
        self.module.log_dict = partial(_note_all, logged)  # type: ignore[method-assign]
        try:
            output = self.module.training_step(batch, index)
        finally:
            self.module.log, self.module.log_dict = own  # type: ignore[method-assign]
        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise NotImplementedError("a training_step that skips batches")
        return loss.reshape(()), logged


def _note(logged: dict[str, Tensor], name: str, value: Any, *_: Any, **options: Any) -> None:
    """`self.log` of a step of K clients: plain numbers only."""
    check_mean(name, options)
    if options.get("batch_size") is not None:
        raise NotImplementedError("self.log with a batch_size")
    if not isinstance(value, Tensor | int | float):
        raise NotImplementedError(f"self.log of a {type(value).__name__}")
    if name in logged:
        raise NotImplementedError(f"self.log of {name} twice in a step")
    logged[name] = torch.as_tensor(value).detach().reshape(())


def _note_all(
    logged: dict[str, Tensor], values: Mapping[str, Any], *_: Any, **options: Any
) -> None:
    for name, value in values.items():
        _note(logged, name, value, **options)


@dataclass
class Losses:
    """The (K,) losses of one batch of each client, what the module logged, and gradients.

    These are (K, *shape) of each trainable parameter; None where the loss does not use it, and
    where it is frozen.
    """

    values: Tensor
    logged: dict[str, Tensor]
    gradients: tuple[Tensor | None, ...]


class PackedForward:
    """The losses of K clients and their gradients, by one set of operators.

    `trainable` names the parameters to differentiate. Losses are in the `context` of the Trainer's
    precision, and gradients are taken outside of it.

    Attributes:
        buffers: types of the buffers that lie in a row, by name.
        by_graph: the network runs by its graph, which writes into buffers alone.
    """

    def __init__(
        self,
        module: L.LightningModule,
        layout: ModelLayout,
        trainable: set[str],
        *,
        context: Autocast | None = None,
    ) -> None:
        self._context: Autocast = context or nullcontext
        self._step = _TrainingStep(module)
        self._places = _places(self._step)
        self._layout = layout
        self._trainable = [e.name for e in layout.floats if e.name in trainable]
        self._trained = self._trainable  # in this phase
        self._graph = graph_of(module)
        self.by_graph = self._graph is not None
        self._module = module
        self._network: Any = getattr(module, "net", module)
        self._network_hooks = [*self._network._forward_hooks.values()] if self._graph else []
        in_row = {e.name for e in [*layout.floats.entries[layout.parameters :], *layout.integers]}
        self.buffers = {n: b.dtype for n, b in module.named_buffers() if n in in_row}
        self._own = {n for n, _ in module.named_buffers()} - in_row

    def views(self, floats: Tensor, integers: Tensor) -> Views:
        """The tensors of K rows as (K, *shape) views, by name."""
        return stacked(self._layout, Row(floats, integers))

    def trainable(self, views: Views) -> list[Tensor]:
        """The views of the parameters that are trained, in the order of the row."""
        return [views[name] for name in self._trainable]

    def train_only(self, parameters: Sequence[Tensor] | None) -> None:
        """Differentiate some parameters of the module only, until the next call; None for all."""
        if parameters is None:
            self._trained = self._trainable
        else:
            chosen = {id(p) for p in parameters}
            named = dict(self._module.named_parameters())
            self._trained = [name for name in self._trainable if id(named[name]) in chosen]

    def losses(
        self,
        views: Views,
        batch: Sequence[Tensor],
        index: int,
        *,
        shared: Views,
        draws: Draws,
        real: int | None = None,
    ) -> Losses:
        """One batch for each client; buffers are updated in place.

        `views` are (K, *shape) parameters, buffers of the rows, and further buffers by client;
        `batch` is (K, B, ...) each, and `index` its number in the session. `shared` buffers are the
        same for all clients. `draws` are for dropout. After the first `real` clients (None: all)
        the others are padding.
        """
        leaves = {name: views[name].detach().requires_grad_() for name in self._trained}
        with self._context():
            if self._graph is None:
                values, logged = self._by_vmap(views | leaves, batch, index, shared, draws)
            else:
                values, logged = self._by_graph(views | leaves, batch, shared, draws), {}
        by_name = dict(zip(leaves, _gradients(values, list(leaves.values())), strict=True))
        found = tuple(by_name.get(name) for name in self._trainable)
        if real is None:
            return Losses(values.detach(), logged, found)
        return Losses(
            values.detach()[:real],
            {name: value[:real] for name, value in logged.items()},
            tuple(None if grad is None else grad[:real] for grad in found),
        )

    def one(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """The loss of one batch of the client that the module is bound to."""
        with self._context():
            loss, _ = self._step(tuple(batch), index)
        return loss

    def _by_vmap(
        self, views: Views, batch: Sequence[Tensor], index: int, shared: Views, draws: Draws
    ) -> tuple[Tensor, Views]:
        """(K,) losses of any module that `vmap` can run, and what it logged."""
        given, same = (
            {
                place: value
                for name, value in values.items()
                for place in self._places.get(_STEP + name, [_STEP + name])
            }
            for values in (views, shared)
        )

        def step(mine: Views, x: Sequence[Tensor]) -> tuple[Tensor, Views, Views]:
            before = {**mine, **same}
            after = dict(before)  # gets what the module puts in the place of a buffer
            loss, logged = functional_call(self._step, after, (tuple(x), index), tie_weights=False)
            return loss, logged, {n: value for n, value in after.items() if value is not before[n]}

        with PackedFunctions(draws):
            values, logged, replaced = vmap(step, randomness="error")(given, tuple(batch))
        for name, value in replaced.items():
            name = name.removeprefix(_STEP)
            if name not in self.buffers:
                raise NotImplementedError(f"a training_step that replaces {name}")
            views[name].copy_(value.detach())
        return values, logged

    def _by_graph(
        self, views: Views, batch: Sequence[Tensor], shared: Views, draws: Draws
    ) -> Tensor:
        """(K,) losses of a classifier of known layers."""
        assert self._graph is not None
        x, labels = batch
        logits = self._graph(x, views | shared, draws)
        with placed(self._module, {name: views[name] for name in self._own & views.keys()}):
            for hook in self._network_hooks:
                logits = hook(self._network, (x,), logits)
        return cross_entropy(logits, labels)


def stacked(layout: ModelLayout, rows: Row) -> Views:
    """The tensors of K rows as (K, *shape) views, by name."""
    return {
        e.name: row[:, e.offset : e.offset + e.numel].unflatten(1, e.shape)
        if e.shape
        else row[:, e.offset]
        for row, entries in ((rows.floats, layout.floats), (rows.integers, layout.integers))
        for e in entries
    }


def _places(module: nn.Module) -> dict[str, list[str]]:
    """Where a module has each tensor, by its first name: once for each layer, whatever its names.

    torch's own search for tied tensors writes to a layer under all its names, and puts what it
    replaced back in any order: a layer of two names may then keep a tensor of the call.
    """
    places: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                places.setdefault(id(tensor), []).append(f"{path}.{name}")
    return {names[0]: names for names in places.values()}


def graph_of(module: L.LightningModule, *, training: bool = True) -> NetworkGraph | None:
    """The graph of a `ClientModule` whose layers are known, and which does nothing of its own.

    It is in training mode, or in the mode in which it is evaluated, for a validation step.
    """
    if type(module) is not ClientModule or hasattr(module.net, "losses" if training else "figures"):
        return None
    net = module.net
    hooked = {part for part in module.modules() if part._forward_hooks or part._forward_pre_hooks}
    before, after = net._forward_pre_hooks.values(), net._forward_hooks.values()
    if hooked - {net} or not all(getattr(hook, "stacked", False) for hook in after):
        return None
    own = any("forward" in vars(part) for part in module.modules())
    own |= type(net).__call__ is not nn.Module.__call__
    if own or any(hook is not channels_first for hook in before):
        return None  # the graph is that of the classes' `forward`
    if training:
        module.train()
    try:
        return NetworkGraph(module.net, "net.", _names(module), training=training)
    except Unknown as found:
        log.debug("no graph: %s", found)
        return None


def _names(module: nn.Module) -> set[str]:
    """Tensors under their first name: a second name of a tied one is not among them."""
    return {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}


@contextmanager
def placed(module: nn.Module, values: Views) -> Iterator[None]:
    """Put values of K clients in the place of some buffers."""
    before = {name: module.get_buffer(name) for name in values}
    try:
        _place(module, values)
        yield
    finally:
        _place(module, before)


def _place(module: nn.Module, values: Views) -> None:
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = value


def _gradients(values: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of the sum of (K,) losses, which no two clients share."""
    ones = torch.ones_like(values)
    found: tuple[Tensor | None, ...] = run_backward(
        (values,), (ones,), False, False, tuple(leaves), True, accumulate_grad=False
    )
    return found
