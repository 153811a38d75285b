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
    """Return clients that hold just these labels, and different numbers of samples."""
    labels_of_samples = [held * (k + 2) for k, held in enumerate(labels)]
    y = torch.tensor(list(chain(*labels_of_samples)))
    x = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(0))
    # torch's own format, as `image_format.guarded` has it for narrow networks
    return data_of(x, y, parts_of(labels_of_samples), classes=6, channels_last=False)


def windows_of(labels: list[list[int]], length: int, tokens: int) -> FederatedDataModule:
    """Return clients whose windows have just these tokens, and different numbers of windows."""
    windows = []
    for k, held in enumerate(labels):
        window = list(islice(cycle(held), length))
        windows.append([window] * (k + 2))
    x = torch.tensor(list(chain(*windows)))
    y = torch.zeros(len(x), dtype=torch.int64)
    dataset = Windows(x, y, classes=tokens, test=(x, y))
    return FederatedDataModule(dataset, Given(*parts_of(windows)))


def parts_of(samples: Sequence[Sequence[Any]]) -> list[range]:
    """Return the positions of each client's samples, if they are in the clients' order."""
    bounds = accumulate((len(of_client) for of_client in samples), initial=0)
    return [range(start, end) for start, end in pairwise(bounds)]


class Golden:
    """One recorded round: what the server had, sent, got back and made of it."""

    def __init__(self, name: str, model: Callable[..., nn.Module]) -> None:
        self.about: dict[str, Any] = json.loads((GOLDEN / f"heterofl/{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"heterofl/{name}.safetensors")
        self.clients: list[int] = sorted(self.about["user_idx"])
        self.algorithm = ReplayedHeteroFL(mask_token=False)  # as in the released code

        network = partial(model, **settings(name, self.about))
        groups = [ClientGroup(1, network, level=level) for level in self.about["levels_by_client"]]
        self.fed: Fleet = fleet_of(
            groups, self.algorithm, self._data(len(groups)), clients_per_round=len(self.clients)
        )
        for client in self.clients:
            layout = self.fed.state(client).layout
            floats = self.recorded(layout.floats, f"local_after/{client}")
            self.algorithm.ends[client] = Row(floats, layout.integers.new_row())

    def _data(self, clients: int) -> FederatedDataModule:
        """Return samples of the recorded labels or tokens."""
        labels = [self.about["label_split"][str(k)] for k in range(clients)]
        cfg = self.about.get("cfg", {})
        if "num_tokens" in cfg:
            return windows_of(labels, cfg["bptt"], cfg["num_tokens"])
        first_weight = next(iter(self.about["param_shapes"].values()))
        channels = first_weight[1]
        return images_of(labels, (channels, 8, 8))

    def recorded(self, layout: Layout, prefix: str) -> Tensor:
        """Return recorded tensors as a row; they are in the order of the parameters."""
        row = layout.new_row()
        names = self.about["param_shapes"]
        for view, name in zip(layout.views(row).values(), names, strict=True):
            view.copy_(self.tensors[f"{prefix}/{name}"])
        return row


def settings(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded model's arguments."""
    if name.startswith("conv"):
        weights = ("blocks.0.weight", "blocks.5.weight", "blocks.10.weight", "blocks.15.weight")
        hidden = [about["param_shapes"][weight][0] for weight in weights]
        return {"hidden": hidden, "norm": "none" if name == "conv_nonorm" else "bn"}
    cfg = about["cfg"]
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
    fed = golden.fed
    server = golden.algorithm.model
    layout = server.layout.floats
    server.floats.copy_(golden.recorded(layout, "global_before"))

    # The first round that draws the recorded clients.
    t = next(t for t in count() if fed.participants(t) == golden.clients)
    run_round(fed, t)

    assert sorted(golden.algorithm.starts) == golden.clients
    for client, start in golden.algorithm.starts.items():
        sent = golden.recorded(fed.state(client).layout.floats, f"distributed/{client}")
        assert torch.equal(start, sent)
    # The released code adds in float32.
    after = golden.recorded(layout, "global_after")
    torch.testing.assert_close(server.floats, after, rtol=0, atol=1e-6)
