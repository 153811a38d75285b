"""Federations of one client, whose server holds what the client has trained."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import lightfed as lf
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.width.ordered_dropout import OrderedDropout
from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.data.torch_data import FromTorch
from lightfed.local.client_group import ClientGroup
from lightfed.networks import (
    MLP,
    VDCNN,
    VGG,
    CharCNN,
    CharMLP,
    CIFARResNet,
    Conv,
    LeNet,
    MoECNN,
    PreActResNet,
    ResNet18GN,
    SimpleCNN,
    Torchvision,
    Transformer,
)
from tests.algorithms.lora.low_rank import NAMES
from tests.packs.federations import Windows
from tests.promises.conformance.cases import AdapterNet
from tests.small import Given

CLASSES = 3
SAMPLES = 32
TEST = 16
_COUNT = SAMPLES + TEST


def labelled(x: Tensor) -> FederatedDataModule:
    """Samples whose classes follow from their values; the client is tested on all test samples."""
    scores = x.flatten(1).float()
    place = scores[:, : scores.shape[1] // 2].mean(1).argsort().argsort()
    y = place * CLASSES // len(x)
    split = TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])
    names = [str(label) for label in range(CLASSES)]
    return FederatedDataModule(
        FromTorch(*split, classes=names), Iid(), batch_size=8, eval_batch_size=TEST,
        personal_test="all",
    )  # fmt: skip


def vectors() -> FederatedDataModule:
    return labelled(torch.randn(_COUNT, 8, generator=torch.Generator().manual_seed(0)))


def images(channels: int = 3, size: int = 32) -> FederatedDataModule:
    draw = torch.Generator().manual_seed(0)
    return labelled(torch.randn(_COUNT, channels, size, size, generator=draw))


def letters() -> FederatedDataModule:
    draw = torch.Generator().manual_seed(0)
    return labelled(torch.randint(1, 60, (_COUNT, 136), generator=draw))


def windows() -> FederatedDataModule:
    x = torch.randint(11, (_COUNT, 6), generator=torch.Generator().manual_seed(0))
    y = torch.zeros(len(x), dtype=torch.int64)
    test = x[SAMPLES:], y[SAMPLES:]
    dataset = Windows(x[:SAMPLES], y[:SAMPLES], classes=11, test=test)
    return FederatedDataModule(
        dataset, Given(range(SAMPLES)), batch_size=8, eval_batch_size=TEST, personal_test="all"
    )


_mlp = partial(MLP, hidden=(8,))


@dataclass
class Case:
    """A method with one client.

    Attributes:
        algorithm: Makes the method.
        model: Makes the client's network.
        data: Makes its samples.
        level: Of the client, for methods with several.
        settings: Of the Federation.
    """

    algorithm: Callable[[], Algorithm] = lf.FedAvg
    model: Callable[..., nn.Module] = _mlp
    data: Callable[[], FederatedDataModule] = vectors
    level: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def federation(self) -> lf.Federation:
        """Its root module."""
        group = ClientGroup(1, self.model, level=self.level)
        settings = {"optimizer": partial(SGD, lr=0.1), "local_epochs": 2} | self.settings
        return lf.Federation(self.algorithm(), [group], evaluate=("global", "trained"), **settings)


_digits = partial(images, 1, 8)
_conv = partial(Conv, hidden=(8, 12))


def adapted(rule: Any) -> Case:
    """A rule of adapters with a network that has its own."""
    return Case(partial(rule, adapters=NAMES), AdapterNet, _digits)


METHODS: dict[str, Case] = {
    "CloudFedAvg": Case(
        partial(lf.CloudFedAvg, 1, 1, unit="epoch", steps=(2, 2)), settings={"local_epochs": 1}
    ),
    "DepthFL": Case(
        partial(lf.DepthFL, 0.0), partial(DepthConv, channels=(4, 6), pools=1), _digits, "a"
    ),
    "FedAvg": Case(),
    "FedBuff": Case(partial(lf.FedBuff, 1)),
    "FedExLoRA": adapted(lf.FedExLoRA),
    # Nothing is dropped but what rounding would decide about.
    "FedMomentum": adapted(partial(lf.FedMomentum, energy=1 - 1e-12)),
    "FedRotLoRA": adapted(lf.FedRotLoRA),
    "FedSVD": adapted(lf.FedSVD),
    "FedSB": adapted(lf.FedSB),
    "FFALoRA": adapted(lf.FFALoRA),
    "FjORD": Case(
        partial(lf.FjORD, [0.5, 1.0]),
        partial(OrderedDropout, partial(Conv, hidden=(8, 12), scaler=False)), _digits, "a",
    ),
    "FedNova": Case(lf.FedNova),
    "FedProx": Case(partial(lf.FedProx, 0.1)),
    "FedRolex": Case(lf.FedRolex, _conv, _digits, "a"),
    "FlexLoRA": adapted(lf.FlexLoRA),
    "FLoRA": adapted(lf.FLoRA),
    "HeteroFL": Case(lf.HeteroFL, _conv, _digits, "a"),
    "HetLoRA": adapted(lf.HetLoRA),
    "LoRAFAIR": adapted(lf.LoRAFAIR),
    "MOON": Case(lf.MOON),
    "QFFL": Case(partial(lf.QFFL, 0.0, 10.0)),
    "RankMean": adapted(lf.RankMean),
    "RoLoRA": adapted(lf.RoLoRA),
    "RAVAN": adapted(lf.RAVAN),
    "SCAFFOLD": Case(lf.SCAFFOLD),
    "ZeroPadded": adapted(lf.ZeroPadded),
}  # fmt: skip

_PERSONAL = "a client holds a model, or a part of one, of its own"
_NO_SERVER = "there is no server, or it holds no whole model"

# Why the law does not hold for the other methods.
OTHERS = {
    "APFL": _PERSONAL,
    "ClusteredCommon": _NO_SERVER,
    "DPSGD": _NO_SERVER,
    "DisPFL": _NO_SERVER,
    "Ditto": _PERSONAL,
    "FD": _NO_SERVER,
    "FML": _PERSONAL,
    "FedAPEN": _PERSONAL,
    "FedBCD": "the server takes a step of its own from differences of blocks",
    "FedBCDI": "the server takes a step of its own from differences of blocks",
    "FedBN": _PERSONAL,
    "FedDPA": _PERSONAL,
    "FedDyn": "the server adds the mean of all memories",
    "FedGH": _PERSONAL,
    "FedKD": _PERSONAL,
    "FedMRL": _PERSONAL,
    "FedPer": _PERSONAL,
    "FedProto": _NO_SERVER,
    "FedRep": _PERSONAL,
    "FedSALoRA": _PERSONAL,
    "FedTGP": _NO_SERVER,
    "LGFedAvg": _PERSONAL,
    "MaxCommon": _NO_SERVER,
    "BasicCommon": _NO_SERVER,
    "ClusteredFL": _NO_SERVER,
    "My1": _NO_SERVER,
    "My2": _NO_SERVER,
    "PFedMe": _PERSONAL,
    "PFedMoE": _PERSONAL,
    "Standalone": _NO_SERVER,
}

NETWORKS: dict[str, Case] = {
    "CIFARResNet": Case(model=partial(CIFARResNet, depth=20, width=0.25), data=images),
    "CharCNN": Case(model=partial(CharCNN, width=0.03, hidden=16), data=letters),
    "CharMLP": Case(model=partial(CharMLP, hidden=[16]), data=letters),
    "Conv": Case(model=_conv, data=_digits),
    "LeNet": Case(model=partial(LeNet, channels=(4, 6), hidden=(16, 8)), data=images),
    "MLP": Case(),
    "MoECNN": Case(model=partial(MoECNN, variant=5, width=0.2), data=images),
    "PreActResNet": Case(model=partial(PreActResNet, hidden=(8, 8), blocks=(1, 1)), data=_digits),
    "ResNet18GN": Case(model=partial(ResNet18GN, width=8, groups=4), data=images),
    "SimpleCNN": Case(model=partial(SimpleCNN, channels=(4, 8), hidden=16), data=images),
    "Torchvision": Case(model=partial(Torchvision, "shufflenet_v2_x0_5"), data=images),
    # Positions are masked by draws of each evaluation's own.
    "Transformer": Case(
        model=partial(
            Transformer, embedding=16, heads=2, hidden=16, layers=1, dropout=0.0, mask_rate=0.0
        ),
        data=windows,
    ),
    "VDCNN": Case(model=partial(VDCNN, width=0.1, hidden=16), data=letters),
    "VGG": Case(model=partial(VGG, depth=11, width=0.1, hidden=16), data=images),
}  # fmt: skip
