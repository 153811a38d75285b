"""Every network has the entries of its paper, or of the released code, in their order."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightfed.networks import VGG, CIFARResNet, Conv, LeNet, ResNet18GN, Transformer
from lightfed.networks.charcnn import CharCNN
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.vdcnn import VDCNN
from lightfed.state.rows import ModelLayout
from tests.small import GOLDEN

RATES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
HETEROFL: dict[str, Any] = {
    "conv_mnist_10classes": Conv,
    "resnet_cifar10_blocks_2222_released_code": PreActResNet,
    "resnet_cifar10_blocks_1112_as_in_paper_table": partial(PreActResNet, blocks=(1, 1, 1, 2)),
    "transformer_wikitext2_33278_tokens_bptt64": Transformer,
}
FLEXIFED: dict[str, tuple[str, Any]] = {
    "charcnn": ("layers", CharCNN),
    "vdcnn": ("layers", VDCNN),
    "resnet": ("depth", CIFARResNet),
    "vgg_official": ("depth", VGG),
}
DISPFL = {
    "resnet18_gn_c10": ResNet18GN,
    "resnet18_gn_c100": partial(ResNet18GN, 100),
    "cnn_cifar10": LeNet,
}
Entries = list[tuple[str, list[int]]]


def golden(path: str) -> Any:
    return json.loads((GOLDEN / path).read_text())


def published() -> Iterator[Any]:
    """Networks, their numbers of parameters, and where they are recorded their entries."""
    counts, families, erk = map(
        golden, ("heterofl/param_counts.json", "flexifed/families.json", "dispfl/erk.json")
    )
    for name, make in HETEROFL.items():
        for level, rate in RATES.items():
            yield pytest.param(partial(make, rate=rate), counts[name][level], None, id=name + level)
    for name, (key, make) in FLEXIFED.items():
        for deep, entries in families[name]["entries"].items():
            given = {key: int(re.sub(r"\D", "", deep))}
            count = families[name]["param_count"][deep]
            yield pytest.param(partial(make, **given), count, entries, id=deep)
    for name, make in DISPFL.items():
        theirs = erk[name]
        yield pytest.param(make, theirs["total"], list(theirs["params"].items()), id=name)


@pytest.mark.parametrize(("make", "count", "entries"), published())
def test_a_network_has_the_published_entries_in_their_order(
    make: Callable[[], nn.Module], count: int, entries: Entries | None
) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == count
    frozen = 71 * 70 if isinstance(model, CharCNN) else 0  # its letters
    assert ModelLayout.of(model).parameter_numel == count - frozen
    found = [(name.rpartition(".")[2], list(t.shape)) for name, t in model.state_dict().items()]
    if entries is not None:
        assert found == [(name.rpartition(".")[2], shape) for name, shape in entries]
