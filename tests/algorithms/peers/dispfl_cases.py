"""The network and the federation of the vectors in golden/dispfl."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightfed_kernels import pack_mask
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import Topology
from lightfed.api.fleet import Fleet
from lightfed.data.batches import Plan
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.state.rows import ModelLayout, Row
from tests.small import GOLDEN, data_of, fleet_of

CLIENTS = 5


class Net(nn.Module):
    """299 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.gn = nn.GroupNorm(2, 6)
        self.fc = nn.Linear(24, 5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.avg_pool2d(F.relu(self.gn(self.conv(x))), 4).flatten(1))


class Recorded(Topology):
    """The neighbors of a recorded run."""

    def __init__(self, choices: list[dict[str, Any]]) -> None:
        self.heard: dict[tuple[int, int], list[int]] = {}
        for choice in choices:
            self.heard[choice["round"], choice["client"]] = sorted(choice["neighbours"])

    @override
    def senders(self, client: int, t: int, *, clients: int, seed: int) -> list[int]:
        return self.heard[t, client]


def vectors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"dispfl/{name}.safetensors")


def in_order(data: FederatedDataModule) -> FederatedDataModule:
    """Return the data module; its batches are now in the order of the samples."""

    def train_plan(client: int, *, limit: int | None, **_: Any) -> Plan:
        mine = torch.from_numpy(data.partition_.train(client))
        sizes = [len(batch) for batch in mine.split(data.batch_size)][:limit]
        return Plan(mine[: sum(sizes)], sizes, None)

    data.train_plan = train_plan  # type: ignore[method-assign,assignment]
    return data


def data_in_order(vectors: dict[str, Tensor], about: dict[str, Any]) -> FederatedDataModule:
    """Return the recorded clients' samples, in batches in their order."""
    x = torch.cat([vectors[f"data/{k}/x"] for k in range(CLIENTS)])
    y = torch.cat([vectors[f"data/{k}/y"] for k in range(CLIENTS)])
    samples_each = len(y) // CLIENTS
    parts = [range(k * samples_each, (k + 1) * samples_each) for k in range(CLIENTS)]
    return in_order(data_of(x, y, parts, classes=5, batch_size=about["batch"]))


def plant(algorithm: DisPFL, fleet: Fleet, vectors: dict[str, Tensor]) -> None:
    """Give the clients their recorded initial weights and masks."""
    layout = fleet.groups[0].layout
    for client in range(CLIENTS):
        mask = row_of(vectors, f"init_mask/{client}", layout)
        fleet.row(client).floats.copy_(row_of(vectors, "init_dense", layout) * mask)
        algorithm.masks[client] = pack_mask(mask != 0)


def federation(algorithm: DisPFL, vectors: dict[str, Tensor], about: dict[str, Any]) -> Fleet:
    """Return the recorded clients with their data, initial weights and masks."""
    fleet = fleet_of(
        [ClientGroup(CLIENTS, Net)],
        algorithm,
        data_in_order(vectors, about),
        optimizer=partial(SGD, lr=1.0, weight_decay=about["wd"]),
        clip=about["clip"],
        epochs=about["epochs"],
    )
    plant(algorithm, fleet, vectors)
    return fleet


def row_of(vectors: dict[str, Tensor], prefix: str, layout: ModelLayout) -> Tensor:
    """Return recorded tensors as a row (P,)."""
    row = layout.floats.new_row()
    for name, view in layout.floats.views(row).items():
        view.copy_(vectors[f"{prefix}/{name.removeprefix('net.')}"])
    return row


class Starts:
    """A mix-in that keeps the rows that sessions start from."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.starts: dict[int, Tensor] = {}

    def session_start(self, s: SessionContext) -> None:
        super().session_start(s)  # type: ignore[misc]
        self.starts[s.client] = s.row.floats.clone()


class Replayed(Starts):
    """A mix-in whose sessions end with recorded rows, whatever they have trained."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ends: dict[int, Row] = {}

    def session_end(self, s: SessionContext) -> None:
        super().session_end(s)  # type: ignore[misc]
        s.row.copy_(self.ends[s.client])
