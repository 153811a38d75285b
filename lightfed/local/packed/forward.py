"""The network of several clients' models as a graph."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as L
from torch import Tensor, nn

from lightfed.local.client_module import ClientModule
from lightfed.local.packed.graph import NetworkGraph
from lightfed.local.packed.tracing import Unknown
from lightfed.models.image_format import channels_first
from lightfed.state.rows import ModelLayout, Row

log = logging.getLogger(__name__)

Views = dict[str, Tensor]


def stacked(layout: ModelLayout, rows: Row) -> Views:
    """The tensors of K rows as (K, *shape) views, by name."""
    return {
        e.name: row[:, e.offset : e.offset + e.numel].unflatten(1, e.shape)
        if e.shape
        else row[:, e.offset]
        for row, entries in ((rows.floats, layout.floats), (rows.integers, layout.integers))
        for e in entries
    }


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
