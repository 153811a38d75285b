"""Rounds of HeteroFL against the released code (golden): what is sent, and what is made of it."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, count, cycle, islice, pairwise
from typing import Any

import pytest
import torch
from lightfed_kernels import Layout
from safetensors.torch import load_file
from torch import Tensor, nn

from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.transformer import Transformer
from lightfed.state.rows import Row
from tests.algorithms.peers.dispfl_cases import Replayed
from tests.packs.federations import Windows
from tests.small import GOLDEN, Given, data_of, fleet_of, run_round


class ReplayedHeteroFL(Replayed, HeteroFL):
    pass


def images_of(labels: list[list[int]], shape: tuple[int, ...]) -> FederatedDataModule:
    """Clients that hold just these labels, and different numbers of samples."""
    held = [own * (k + 2) for k, own in enumerate(labels)]
    y = torch.tensor(list(chain(*held)))
    x = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(0))
    # torch's own format, as `image_format.guarded` has it for narrow networks
    return data_of(x, y, parts_of(held), classes=6, channels_last=False)


def windows_of(labels: list[list[int]], length: int, tokens: int) -> FederatedDataModule:
    """Clients whose windows have just these tokens."""
    held = [[list(islice(cycle(own), length))] * (k + 2) for k, own in enumerate(labels)]
    x = torch.tensor(list(chain(*held)))
    y = torch.zeros(len(x), dtype=torch.int64)
    dataset = Windows(x, y, classes=tokens, test=(x, y))
    return FederatedDataModule(dataset, Given(*parts_of(held)))


def parts_of(held: Sequence[Sequence[Any]]) -> list[range]:
    bounds = accumulate((len(own) for own in held), initial=0)
    return [range(a, b) for a, b in pairwise(bounds)]


class Golden:
    """One recorded round: what the server had, sent, got back and made of it."""

    def __init__(self, name: str, model: Callable[..., nn.Module]) -> None:
        self.meta: dict[str, Any] = json.loads((GOLDEN / f"heterofl/{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"heterofl/{name}.safetensors")
        self.clients: list[int] = sorted(self.meta["user_idx"])
        levels = self.meta["levels_by_client"]
        labels = [self.meta["label_split"][str(k)] for k in range(len(levels))]
        cfg, shapes = self.meta.get("cfg", {}), self.meta["param_shapes"]
        if "num_tokens" in cfg:
            data = windows_of(labels, cfg["bptt"], cfg["num_tokens"])
        else:
            data = images_of(labels, (next(iter(shapes.values()))[1], 8, 8))
        self.algorithm = ReplayedHeteroFL(mask_token=False)  # as in the released code
        groups = [
            ClientGroup(1, partial(model, **settings(name, self.meta)), level=x) for x in levels
        ]
        self.fed: Fleet = fleet_of(
            groups, self.algorithm, data, clients_per_round=len(self.clients)
        )
        for client in self.clients:
            layout = self.fed.state(client).layout
            floats = self.recorded(layout.floats, f"local_after/{client}")
            self.algorithm.ends[client] = Row(floats, layout.integers.new_row())

    def recorded(self, layout: Layout, prefix: str) -> Tensor:
        """A row of recorded tensors: one to one, in the order of the parameters."""
        row = layout.new_row()
        names = self.meta["param_shapes"]
        for view, name in zip(layout.views(row).values(), names, strict=True):
            view.copy_(self.tensors[f"{prefix}/{name}"])
        return row


def settings(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """The recorded model's arguments."""
    cfg, shapes = meta.get("cfg", {}), meta["param_shapes"]
    if name.startswith("conv"):
        hidden = [shapes[f"blocks.{b}.weight"][0] for b in (0, 5, 10, 15)]
        return {"hidden": hidden, "norm": "none" if name == "conv_nonorm" else "bn"}
    if name.startswith("resnet"):
        return {"hidden": cfg["hidden_size"], "blocks": cfg["blocks"], "norm": cfg["norm"]}
    return {key: cfg[key] for key in ("embedding", "heads", "hidden", "layers")}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("conv_iid_abcde", Conv),
        ("conv_noniid_abcde", Conv),
        ("conv_nonorm", Conv),
        ("resnet18_iid_aeec", PreActResNet),
        ("transformer_abcde", Transformer),
    ],
)
def test_a_round_is_the_released_codes(name: str, model: Callable[..., nn.Module]) -> None:
    golden = Golden(name, model)
    fed, server = golden.fed, golden.algorithm.model
    layout = server.layout.floats
    server.floats.copy_(golden.recorded(layout, "global_before"))
    # The first round that draws the recorded clients.
    run_round(fed, next(t for t in count() if fed.participants(t) == golden.clients))
    assert sorted(golden.algorithm.starts) == golden.clients
    for client, start in golden.algorithm.starts.items():
        sent = golden.recorded(fed.state(client).layout.floats, f"distributed/{client}")
        assert torch.equal(start, sent)
    # The released code adds in float32.
    after = golden.recorded(layout, "global_after")
    torch.testing.assert_close(server.floats, after, rtol=0, atol=1e-6)
