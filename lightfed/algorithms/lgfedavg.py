"""LG-FedAvg: local representations, global classifiers.

Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally:
Federated Learning with Local and Global Representations. 2020. https://arxiv.org/abs/2001.01523

A client keeps the lower layers of its network, which represent its data. The upper layers belong to
the server and are averaged. Where the paper is silent, the released code decides: the mean is
uniform over the participants, and training starts from the model of a finished FedAvg run
(`start`). Its script for CIFAR-10 shares the two convolutions and keeps the linear layers, the
opposite of the paper's text: `side: bottom, global_layers: 2`.

Architectures may differ in the local layers. Global layers are then matched one by one from the top
(or bottom) and must have the same shapes. HtFLlib's version for such clients shares the head,
averaged by samples: `global_layers: 1, weights: samples`.

Deviations: a client receives the server's layers when it takes part or is evaluated; the released
code writes them to all clients after every round, with the same result. The test of a new device by
an ensemble of all clients' networks is left out, so there is no global accuracy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lightfed_kernels import Entry
from safetensors import SafetensorError
from safetensors.torch import load_file
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.client_group import GroupState
from lightfed.state.rows import ModelKind, ModelLayout, Row, Rows
from lightfed.state.server_model import ServerModel, part_of
from lightfed.utils.bounds import Number
from lightfed.utils.errors import UserError, require

_LAYERS = "model.algorithm.init_args.global_layers"
_START = "model.algorithm.init_args.start"


class LGFedAvg(Algorithm):
    """The last layers are averaged over the participants; the others are local."""

    stateful = True  # a client keeps its representation
    holds = "its own layers with the server's"
    model: ServerModel

    def __init__(
        self,
        global_layers: Number,
        side: Literal["top", "bottom"] = "top",
        weights: Weights = "uniform",
        start: str | None = None,
    ) -> None:
        """Set what is shared and where the clients start.

        Args:
            global_layers: Number of layers of the server. A layer is a module with its own
                parameters, in the order in which the network registers them, including its
                BatchNorm statistics. With all layers this is FedAvg.
            side: Share the last layers, as in the paper, or the first (its script for CIFAR-10).
            weights: Of the participants in the mean: uniform, or by samples.
            start: Values that server and clients start from: models/server.safetensors of a FedAvg
                run. Initial values by default.
        """
        super().__init__()
        fix = "give at least 1; for none use Standalone"
        require(global_layers >= 1, _LAYERS, global_layers, fix)
        self.global_layers, self.side = global_layers, side
        self.weights: Weights = weights
        self.start = start
        self._global: frozenset[str] | None = None  # the server's tensors that are sent

    @override
    def setup(self, fed: Fleet) -> None:
        first = fed.groups[0]
        if any(state.layout != first.layout for state in fed.groups):
            self.model = new_common(fed, self._matched(fed))
            return
        self._global = self._tensors(first)
        if self.start is not None:
            values = start_values(Path(self.start), first.layout)
            for state in fed.groups:
                state.initial.copy_(values)
            for client in fed.mine(range(fed.clients)):
                fed.row(client).copy_(values)
        self.model = fed.new_model()  # only its global layers ever change

    def _matched(self, fed: Fleet) -> list[list[str]]:
        """For every group the names of its tensors of the global layers, in the same order."""
        found = f"{self.start}, but the groups have different architectures"
        require(self.start is None, _START, found, "leave it out, or give all clients one")
        chosen: list[list[Entry]] = []
        for state in fed.groups:
            names = self._tensors(state)
            chosen.append([e for e in state.layout.floats if names is None or e.name in names])
            one, other = ([e.shape for e in entries] for entries in (chosen[0], chosen[-1]))
            first = f"the global layers of group {fed.groups[0].name} are {_text(one)}"
            found = f"{first}, those of group {state.name} {_text(other)}"
            fix = "use networks with the same ones, or share fewer layers"
            require(one == other, "model.clients", found, fix)
        return [[entry.name for entry in entries] for entries in chosen]

    def _tensors(self, state: GroupState) -> frozenset[str] | None:
        """Names of the float tensors of a group's global layers; None for all tensors."""
        modules = state.module.named_modules()
        layers = [n for n, m in modules if list(m.parameters(recurse=False))]
        count = self.global_layers
        found = f"{count}, but the model has {len(layers)} layers with parameters"
        require(count <= len(layers), _LAYERS, found, f"give at most {len(layers)}")
        if count == len(layers):
            return None
        chosen = layers[-count:] if self.side == "top" else layers[:count]
        floats = state.layout.floats
        return frozenset(e.name for e in floats if e.name.rpartition(".")[0] in chosen)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        fed.send(self.model, clients, tensors=self._global)  # theta_g to every participant
        fed.train(clients, t)  # local layers and global ones together, on D_m
        # theta_g <- mean of theta_g,m
        fed.merge(clients, into=self.model, weights=self.weights, tensors=self._global)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """A client's own layers with the server's, or as its session has left them all."""
        if kind == "global" and self._global is None:  # all layers are the server's
            return super().models(fed, kind, clients)
        if kind in ("global", "local"):
            return None  # the server has no representation
        if kind == "trained":
            return fed.rows(clients)
        return fed.rows(clients, given=self.model, tensors=self._global)


def _text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def start_values(path: Path, layout: ModelLayout) -> Row:
    """The server's model of a finished run as a row, from its weights file.

    A UserError if the file cannot be read, or holds another architecture.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        fix = "give models/server.safetensors of a run"
        raise UserError(_START, f"{path} cannot be read ({error})", fix) from error
    row = Row.zeros(layout)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    for name, view in views.items():
        saved = tensors.get(name.removeprefix("net."), torch.empty(0))
        found = f"{path} has {name} as {list(saved.shape)}, not {list(view.shape)}"
        require(saved.shape == view.shape, _START, found, "start from a run of the same model")
        view.copy_(saved)
    return row


def new_common(fed: Fleet, names: Sequence[Sequence[str]]) -> ServerModel:
    """A server model of tensors that groups have by different names.

    Initial values are those of the first group.

    Args:
        fed: Of the clients.
        names: Per group; the i-th name of each group is the same tensor.

    Raises:
        UserError: A group lacks one of them, or has it in another shape.
    """
    first = fed.groups[0]
    model = part_of(first.layout, first.initial, names).to(fed.device)
    for group in range(len(fed.groups)):
        fed.check_nested(model, group)
    return model
