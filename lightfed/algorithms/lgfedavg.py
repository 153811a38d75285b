"""LG-FedAvg: local representations, global classifiers.

Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally:
Federated Learning with Local and Global Representations. 2020. https://arxiv.org/abs/2001.01523

A client keeps the lower layers of its network, which represent its data. The upper layers belong to
the server and are averaged:

    theta_g,m <- theta_g;   client m trains theta_l,m and theta_g,m on D_m
    theta_g <- mean of theta_g,m over the participants

Where the paper is silent, the released code decides: the mean is uniform over the participants, and
training starts from the model of a finished FedAvg run (`start`). Its script for CIFAR-10 shares
the two convolutions and keeps the linear layers, the opposite of the paper's text: `side: bottom,
global_layers: 2`.

Architectures may differ in the local layers. Global layers are then matched one by one from the top
(or bottom) and must have the same shapes. HtFLlib's version for such clients shares the head,
averaged by samples: `global_layers: 1, weights: samples`.

Deviation: a client receives the server's layers when it takes part or is evaluated. The released
code writes them to all clients after every round, with the same result.

Not implemented: the test of a new device by an ensemble of all clients' networks. So there is no
global accuracy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lightfed_kernels import Entry
from safetensors import SafetensorError
from safetensors.torch import load_file
from typing_extensions import override

from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import Newcomers
from lightfed.state.rows import ModelKind, ModelLayout, Row, Rows
from lightfed.state.server_model import ServerModel, part_of
from lightfed.utils.bounds import Number
from lightfed.utils.errors import UserError

_LAYERS = f"{KEY}.global_layers"
_START = f"{KEY}.start"


class LGFedAvg(Algorithm):
    """The last layers are averaged over the participants; the others are local.

    Attributes:
        global_tensors: Names of the server's float tensors that are sent. None if all are sent, or
            if the server's model has no others, because architectures differ.
    """

    stateful = True  # a client keeps its representation
    takes_late = True
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
            side: Share the last layers (top), as in the paper, or the first (bottom), as in its
                script for CIFAR-10.
            weights: Weigh all participants alike (uniform), or by their number of samples.
            start: The file of the values that server and clients start from:
                models/server.safetensors of a FedAvg run. Initial values by default.
        """
        super().__init__()
        if global_layers < 1:
            raise UserError(_LAYERS, f"{global_layers}", "give at least 1; for none use Standalone")
        self.global_layers = global_layers
        self.side = side
        self.weights: Weights = weights
        self.start = start
        self.global_tensors: frozenset[str] | None = None

    @override
    def setup(self, fed: Fleet) -> None:
        first = fed.groups[0]
        if any(state.layout != first.layout for state in fed.groups):
            # The server's model has the global layers alone.
            self.model = new_common(fed, self._matched(fed))
            return

        self.global_tensors = self._tensors(first)
        if self.start is not None:
            values = start_values(Path(self.start), first.layout)
            for state in fed.groups:
                state.initial.copy_(values)
            for client in fed.mine(range(fed.clients)):
                fed.row(client).copy_(values)
        self.model = fed.new_model()  # only its global layers ever change

    def _matched(self, fed: Fleet) -> list[list[str]]:
        """Return the names of each group's tensors of the global layers, in the same order.

        Raises:
            UserError: The global layers of two groups have different shapes, or there is a common
                start, which groups of different architectures cannot have.
        """
        if self.start is not None:
            raise UserError(
                key=_START,
                found=f"{self.start}, but the groups have different architectures",
                fix="leave it out, or give all clients one",
            )

        first = fed.groups[0]
        first_entries = self._entries(first)
        names = []
        for state in fed.groups:
            entries = self._entries(state)
            if _shapes(entries) != _shapes(first_entries):
                raise UserError(
                    key="model.clients",
                    found=f"the global layers of group {first.name} are {_text(first_entries)}, "
                    f"those of group {state.name} {_text(entries)}",
                    fix="use networks with the same ones, or share fewer layers",
                )
            names.append([entry.name for entry in entries])
        return names

    def _entries(self, state: GroupState) -> list[Entry]:
        """Return the float tensors of a group's global layers, in the order of its row."""
        names = self._tensors(state)
        if names is None:
            return list(state.layout.floats)
        return [entry for entry in state.layout.floats if entry.name in names]

    def _tensors(self, state: GroupState) -> frozenset[str] | None:
        """Return the names of the float tensors of a group's global layers; None for all tensors.

        Raises:
            UserError: The model has fewer layers.
        """
        layers = [
            name
            for name, module in state.module.named_modules()
            if list(module.parameters(recurse=False))
        ]
        count = self.global_layers
        if count > len(layers):
            raise UserError(
                key=_LAYERS,
                found=f"{count}, but the model has {len(layers)} layers with parameters",
                fix=f"give at most {len(layers)}",
            )
        if count == len(layers):
            return None

        global_layers = layers[-count:] if self.side == "top" else layers[:count]
        names = []
        for entry in state.layout.floats:
            layer, _, _ = entry.name.rpartition(".")
            if layer in global_layers:
                names.append(entry.name)
        return frozenset(names)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        sent = self.global_tensors
        clients = fed.participants(t)  # S_t
        fed.send(self.model, clients, tensors=sent)  # theta_g,m <- theta_g
        fed.train(clients, t)  # local layers and global ones together, on D_m
        # theta_g <- mean of theta_g,m
        fed.merge(clients, into=self.model, weights=self.weights, tensors=sent)

    @override
    def newcomers(self, fed: Fleet, clients: Sequence[int]) -> Newcomers | None:
        state = fed.groups[fed.home_group(clients[0])]
        of_server = self._tensors(state)
        if of_server is None:
            return super().newcomers(fed, clients)  # all layers are the server's
        parameters = [entry.name for entry in state.layout.floats][: state.layout.parameters]
        own = [name for name in parameters if name not in of_server]
        start = fed.rows(clients, given=self.model, tensors=self.global_tensors)
        return Newcomers(None, start, own)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return a client's own layers with the server's, or as its session has left them all."""
        if kind == "global" and self.global_tensors is None:  # all layers may be the server's
            return super().models(fed, kind, clients)
        if kind in ("global", "local"):
            return None  # the server has no representation
        if kind == "trained":
            return fed.rows(clients)
        return fed.rows(clients, given=self.model, tensors=self.global_tensors)


def _shapes(entries: Sequence[Entry]) -> list[tuple[int, ...]]:
    return [entry.shape for entry in entries]


def _text(entries: Sequence[Entry]) -> str:
    """Return the shapes of tensors for a user to read."""
    return ", ".join(str(list(entry.shape)) for entry in entries)


def start_values(path: Path, layout: ModelLayout) -> Row:
    """Return the server's model of a finished run as a row, from its weights file.

    Raises:
        UserError: The file cannot be read, or holds another architecture.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        fix = "give models/server.safetensors of a run"
        raise UserError(_START, f"{path} cannot be read ({error})", fix) from error

    row = Row.zeros(layout)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    nothing = torch.empty(0)
    for name, view in views.items():
        saved = tensors.get(name.removeprefix("net."), nothing)
        if saved.shape != view.shape:
            raise UserError(
                key=_START,
                found=f"{path} has {name} as {list(saved.shape)}, not {list(view.shape)}",
                fix="start from a run of the same model",
            )
        view.copy_(saved)
    return row


def new_common(fed: Fleet, names: Sequence[Sequence[str]]) -> ServerModel:
    """Return a server model of tensors that groups have under different names.

    Initial values are those of the first group.

    Args:
        fed: The clients.
        names: Names of the tensors in each group; the i-th name of every group is the same tensor.

    Raises:
        UserError: A group lacks one of them, or has it in another shape.
    """
    first = fed.groups[0]
    model = part_of(first.layout, first.initial, names).to(fed.device)
    for group in range(len(fed.groups)):
        fed.check_nested(model, group)
    return model
