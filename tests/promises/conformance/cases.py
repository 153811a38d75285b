"""The federations of the conformance kit. A new algorithm enters by one line in `CASES`."""

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
from typing_extensions import override

from lightfed.aggregation.server_optimizers import FedAdam, FedYogi
from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.fedbn import FedBN
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedper import FedPer
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.fedrep import FedRep
from lightfed.algorithms.flexifed.strategies import ClusteredCommon, MaxCommon
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.fedmomentum import FedMomentum
from lightfed.algorithms.lora.fedrotlora import FedRotLoRA
from lightfed.algorithms.lora.fedsalora import FedSALoRA
from lightfed.algorithms.lora.fedsb import FedSB
from lightfed.algorithms.lora.fedsvd import FedSVD
from lightfed.algorithms.lora.ffalora import FFALoRA
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.lora.flora import FLoRA
from lightfed.algorithms.lora.hetlora import HetLoRA
from lightfed.algorithms.lora.lorafair import LoRAFAIR
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.algorithms.lora.ravan import RAVAN
from lightfed.algorithms.lora.rolora import RoLoRA
from lightfed.algorithms.lora.zeropadded import ZeroPadded
from lightfed.algorithms.moon import MOON, Contrast
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.pfedme import PFedMe
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.fedmrl import FedMRL
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.prototypes.fedgh import FedGH
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.prototypes.fedtgp import FedTGP
from lightfed.algorithms.qffl import QFFL
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring, TimeVarying
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.fjord import FjORD
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.algorithms.width.ordered_dropout import OrderedDropout
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Natural
from lightfed.datasets.language import Prose
from lightfed.devices.delays import Exponential, LogNormal
from lightfed.devices.devices import Bernoulli, Devices, OnOff
from lightfed.devices.policy import LearnedDeadline, Policy
from lightfed.local.penalties import Pull
from lightfed.networks.cnn import Conv
from lightfed.networks.mlp import MLP
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.transformer import Transformer
from lightfed.testing.case import CLIENTS, ROUNDS, Case, NormNet, images
from tests.algorithms.lora.low_rank import NAMES, Adapted
from tests.promises.columns.cases import Tagger, tagged
from tests.promises.conformance.hooked import Averaged, Falling, Gan


class DeepNet(NormNet):
    """Levels below a have one convolution more."""

    def __init__(self, num_classes: int = 10, rate: float = 1.0) -> None:
        super().__init__(num_classes)
        if rate < 1:
            first, rest = list(self.layers)[:3], list(self.layers)[2:]
            deeper = [nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)]
            self.layers = nn.Sequential(*first, *deeper, *rest)


class FrozenNet(nn.Module):
    """A frozen convolution below a trained one, a frozen layer above it, and statistics."""

    def __init__(self, num_classes: int = 10, rate: float = 1.0) -> None:
        super().__init__()
        width = int(8 * rate)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3).requires_grad_(False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(4 * width, 16).requires_grad_(False), nn.Linear(16, num_classes),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class AdapterNet(nn.Module):
    """Adapters of unlike rank on a frozen kernel and a frozen matrix, which all groups share."""

    def __init__(self, num_classes: int = 10, rate: float = 1.0) -> None:
        super().__init__()
        draw, rank = torch.Generator().manual_seed(5), int(4 * rate)
        kernel, weight = (torch.randn(*s, generator=draw) / 4 for s in ((8, 1, 3, 3), (16, 32)))
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(3), Adapted(kernel, rank, 2.0), nn.Tanh(), nn.BatchNorm1d(8),
            nn.Linear(8, 32).requires_grad_(False), Adapted(weight, rank, 8 / rank), nn.ReLU(),
            nn.Linear(16, num_classes),
        )  # fmt: skip
        with torch.no_grad():
            self.layers[4].weight.copy_(torch.randn(32, 8, generator=draw) / 3)
            self.layers[4].bias.zero_()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class KnownAdapter(Adapted):
    """An adapter of which `auto` is told that it can be packed."""

    packs = True


def adapted(num_classes: int = 10, rate: float = 1.0) -> nn.Module:
    """Adapters of unlike rank, which `auto` packs."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(16, 64, generator=draw) / 8
    rank = int(4 * rate)
    return nn.Sequential(
        nn.Flatten(), KnownAdapter(weight, rank, 8 / rank), nn.ReLU(), nn.Linear(16, num_classes)
    )


def dropped(num_classes: int = 10) -> nn.Module:
    """BatchNorm behind dropout: its statistics are drawn."""
    return nn.Sequential(nn.Dropout(0.2), NormNet(num_classes))


class Metered(L.LightningModule):
    """A user's module whose metrics are objects: one of its own, some together, some made late."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.net = NormNet(num_classes)
        self.classes = num_classes
        self.accuracy = MulticlassAccuracy(num_classes)
        scores = {"acc": MulticlassAccuracy(num_classes), "f1": MulticlassF1Score(num_classes)}
        self.scores = MetricCollection(scores, prefix="val/")

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("train/acc", self.accuracy)
        if batch_idx == 0:
            self.recall = MulticlassRecall(self.classes).to(y.device)
        self.recall.update(logits, y)
        self.log("train/recall", self.recall, sync_dist=True)
        return F.cross_entropy(logits, y)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.scores.update(logits, y)
        self.log_dict(self.scores)
        passing = MulticlassAccuracy(self.classes, dist_sync_on_step=True).to(y.device)
        passing.update(logits, y)
        self.log_dict({"val/loss": F.cross_entropy(logits, y), "val/batch": passing.compute()})


def joined() -> FederatedDataModule:
    """Drawn images without batches of a single sample, which batch normalisation could not take."""
    data = images()
    data.last_batch = "join"
    return data


def unseen() -> FederatedDataModule:
    """Drawn images of clients of which two or more never train, and keep validation samples."""
    data = joined()
    data.unseen = 0.25
    data.validation = 0.2
    return data


def prose() -> FederatedDataModule:
    dataset = Prose(rows=2 * CLIENTS, window=16)
    return FederatedDataModule(dataset, Natural(), batch_size=16, eval_batch_size=50)


_conv = partial(Conv, hidden=(8, 12))
_ordered = partial(OrderedDropout, partial(Conv, hidden=(8, 12), scaler=False))
_depths = partial(DepthConv, channels=(4, 4, 6, 6), pools=1)
_resnet = partial(PreActResNet, hidden=(8, 12), blocks=(1, 1))
_transformer = partial(Transformer, embedding=16, heads=2, hidden=16, layers=1)
_mlp = partial(MLP, hidden=(16,), dropout=0.3)

# All clients take part; the cosine of the masks ends with the run, also where it was stopped.
_everyone: dict[str, Any] = {"fraction": 1.0}
_adapters: dict[str, Any] = {"adapters": NAMES}
_sparse: dict[str, Any] = {"topology": TimeVarying(2), "rounds": ROUNDS}

# Modules with optimizers of their own.
_own: dict[str, Any] = {"optimizer": None}

# Servers have as many devices; K is short, and the seconds of a phase are drawn.
_clouds: dict[str, Any] = {"fraction": 1.0, "optimizer": partial(ASPG, lr=0.05)}

# Bytes and FLOPs take seconds, of which some are drawn.
_slow = Devices(flops=LogNormal(14.0, 1.0), up=9000.0, latency=0.1, delay=Exponential(0.5))
_gone = replace(_slow, availability=Bernoulli(0.8), server_down=20000.0)
_timed: dict[str, Any] = {"devices": _slow, "fraction": 1.0}

# Their devices spend energy, of which a FLOP takes another amount on each.
_spending = replace(_gone, joules_per_flop=LogNormal(-18.0, 1.0), joules_per_byte=1e-6)

# Of seven clients two are awaited, so that the others' updates are under way when a run stops.
_late: dict[str, Any] = _timed | {"policy": Policy(quorum=2, late="keep")}

CASES = {
    "apfl": Case(APFL, _mlp),
    "apfl_adaptive": Case(partial(APFL, adaptive=True)),
    "cloud_fedprox": Case(
        partial(CloudFedAvg, 4, 1, mu=0.5, unit="epoch", steps=(1, 2)), clients=8,
        federation=_clouds,
    ),
    "devices_deadline": Case(
        HeteroFL, _conv, "abc", federation={
            "devices": _gone, "policy": Policy(deadline=3.0, over_select=0.5), "fraction": 0.5,
        },
    ),
    "devices_deadline_learned": Case(
        FedAvg, federation=_timed | {
            "policy": Policy(deadline=LearnedDeadline(0.5), over_select=0.5), "fraction": 0.5,
        },
    ),
    "devices_dropout": Case(FedNova, federation=_timed | {"policy": Policy(dropout=0.4)}),
    "devices_dropout_partial": Case(
        partial(FedAvg, "uniform"), federation=_timed | {
            "policy": Policy(dropout=0.4, partial="keep", deadline=4.0),
            "devices": replace(_slow, availability=OnOff(0.3, 0.6)),
        },
    ),
    "devices_energy": Case(
        FedAvg, federation=_timed | {
            "devices": _spending, "policy": Policy(deadline=LearnedDeadline(0.6), late="keep"),
        },
    ),
    "devices_late": Case(
        HeteroFL, _conv, "abc", federation=_timed | {"policy": Policy(quorum=3, late="keep")}
    ),
    "devices_late_host": Case(
        FedAvg, federation=_timed | {
            "policy": Policy(quorum=2, grace=0.5, late="keep"), "store": "host",
        },
    ),
    "devices_seconds": Case(
        FedNova, federation=_timed | {"local_epochs": 1, "local_seconds": 2.0},
    ),
    "devices_peers": Case(partial(DPSGD, Ring()), federation=_timed),
    "devices_quorum": Case(
        MaxCommon, DeepNet, "ab", federation=_timed | {"policy": Policy(quorum=4, grace=0.2)}
    ),
    "depthfl": Case(DepthFL, _depths, "abc"),
    "depthfl_stateless": Case(partial(DepthFL, 0.0), _depths, "ab"),
    "dispfl": Case(
        partial(DisPFL, **_sparse, density=[0.3, 0.6]), _mlp, federation=_everyone,
        trainer={"gradient_clip_val": 10.0},
    ),
    "dispfl_frozen": Case(
        partial(DisPFL, **_sparse, density=0.5, buffers="average"), FrozenNet, federation=_everyone
    ),
    "dispfl_statistics": Case(
        partial(DisPFL, **_sparse, regrow="gradient", active=0.7, buffers="average"),
        federation=_everyone | {"store": "host"},
    ),
    "ditto": Case(partial(Ditto, 0.5)),
    "dpsgd": Case(partial(DPSGD, Ring()), federation={"eval_clients": 3}),
    "fedapen": Case(
        partial(FedAPEN, NormNet, share_lr=0.5), _mlp, data=joined, federation={"store": "host"}
    ),
    "fedapen_aggregated": Case(
        partial(FedAPEN, NormNet, share_lr=0.5, learn="aggregated"), _mlp, data=joined
    ),
    "fedavg": Case(FedAvg),
    "fedavg_packed_norms": Case(
        FedAvg, partial(Conv, hidden=(8, 12), scaler=False), data=joined, clients=12,
        federation={"fraction": 1.0},
    ),
    "fedavg_frozen": Case(FedAvg, FrozenNet),
    "fedavg_uniform": Case(partial(FedAvg, "uniform")),
    "fedavg_local_statistics": Case(partial(FedAvg, buffers="local")),
    "fedavg_drop_statistics": Case(partial(FedAvg, buffers="drop")),
    "fedavg_host_rows": Case(FedAvg, federation={"store": "host"}),
    "fd": Case(FD, federation={"fraction": 0.6}),
    "fedbcd": Case(
        partial(FedBCD, 4, 1, gamma=[0.3, 1.0]), clients=8, federation=_clouds | {"store": "host"}
    ),
    "fedbcd_async": Case(partial(FedBCD, 4, 1, wait=2), clients=8, federation=_clouds),
    "fedbcd_released": Case(
        partial(FedBCD, 4, 1, compatibility=True), clients=8,
        federation=_everyone | {"optimizer": partial(SGD, lr=0.05, momentum=0.9)},
    ),
    "fedbcdi": Case(
        partial(FedBCDI, 2, 2, 4, gamma=[0.3, 0.1, 0.7], patience=1), clients=8,
        federation=_clouds | {"store": "host"},
        trainer={"gradient_clip_val": 0.5},
    ),
    "fedbcdi_async": Case(
        partial(FedBCDI, 4, 1, 2, wait=2, patience=1), clients=8, federation=_clouds
    ),
    "fedbuff": Case(partial(FedBuff, 3, beta=0.5)),
    "fedbuff_at_once": Case(partial(FedBuff, 3, weights="samples", at_once=True)),
    "fedbn": Case(FedBN, data=joined),
    "fedper": Case(partial(FedPer, "net.layers.6")),
    "feddyn": Case(partial(FedDyn, 0.1), federation={"optimizer": partial(SGD, lr=0.1)}),
    "fedgh": Case(FedGH, DeepNet, "ab", data=joined),
    "fedkd": Case(partial(FedKD, _mlp, rounds=ROUNDS), federation={"store": "host"}),
    "fedmrl": Case(partial(FedMRL, _mlp), data=joined, federation={"store": "host"}),
    "fednova": Case(partial(FedNova, 0.1, (1, 3))),
    "fednova_momentum": Case(
        FedNova, _mlp, federation={"server_optimizer": partial(SGD, lr=1.0, momentum=0.5)}
    ),
    "fedproto": Case(FedProto, _mlp, federation={"fraction": 0.6}),
    "fedtgp": Case(partial(FedTGP, epochs=3), _mlp, federation={"fraction": 0.6}),
    "feddpa": Case(partial(FedDPA, 0.3, **_adapters), AdapterNet, "abc", data=joined),
    "feddpa_host": Case(
        partial(FedDPA, **_adapters), adapted, "ab", clients=12,
        federation={"store": "host", "fraction": 1.0},
    ),
    "fedexlora": Case(partial(FedExLoRA, **_adapters), AdapterNet, "abc", data=joined),
    "fedmomentum": Case(partial(FedMomentum, **_adapters), AdapterNet, "abc", data=joined),
    "fedrotlora": Case(
        partial(FedRotLoRA, **_adapters), AdapterNet, "abc", data=joined,
        federation={"store": "host"},
    ),
    "fedsalora": Case(partial(FedSALoRA, **_adapters), AdapterNet, "abc", data=joined),
    "fedsvd": Case(partial(FedSVD, 2, **_adapters), AdapterNet, "abc", data=joined),
    "fedsb": Case(
        partial(FedSB, **_adapters), AdapterNet, "abc", data=joined, federation={"store": "host"}
    ),
    "fedsb_packed": Case(
        partial(FedSB, **_adapters), adapted, "ab", clients=12, federation={"fraction": 1.0}
    ),
    "ffalora": Case(partial(FFALoRA, **_adapters), AdapterNet, "abc", data=joined),
    "flexlora": Case(partial(FlexLoRA, **_adapters), AdapterNet, "abc", data=joined),
    "flexlora_energy": Case(
        partial(FlexLoRA, energy=0.9, **_adapters), AdapterNet, "abc", data=joined
    ),
    "flora": Case(partial(FLoRA, **_adapters), AdapterNet, "abc", data=joined),
    "hetlora": Case(
        partial(HetLoRA, gamma=0.5, decay=0.1, **_adapters), AdapterNet, "abc", data=joined
    ),
    "lorafair": Case(partial(LoRAFAIR, **_adapters), AdapterNet, "abc", data=joined),
    "lorafair_cosine": Case(
        partial(LoRAFAIR, "cosine", steps=20, **_adapters), AdapterNet, "abc", data=joined
    ),
    "ravan": Case(
        partial(RAVAN, 2, **_adapters), AdapterNet, "ab", data=joined,
        federation={"server_optimizer": partial(SGD, lr=0.7, momentum=0.9)},
    ),
    "rankmean": Case(
        partial(RankMean, **_adapters), AdapterNet, "abc", data=joined,
        federation={"store": "host"},
    ),
    "rankmean_packed": Case(
        partial(RankMean, **_adapters), adapted, "ab", clients=12, federation={"fraction": 1.0}
    ),
    "rankmean_momentum": Case(
        partial(RankMean, **_adapters), AdapterNet, "abc", data=joined,
        federation={"server_optimizer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True)},
    ),
    "rolora": Case(
        partial(RoLoRA, **_adapters), AdapterNet, "abc", data=joined,
        federation={"server_optimizer": partial(SGD, lr=0.7, momentum=0.9)},
    ),
    "zeropadded": Case(partial(ZeroPadded, "uniform", **_adapters), AdapterNet, "abc", data=joined),
    "fedprox": Case(partial(FedProx, mu=0.1), _mlp, trainer={"gradient_clip_val": 1.0}),
    "fedrep": Case(partial(FedRep, "net.layers.6.", 2, final_epochs=1)),
    "fedrolex": Case(FedRolex, _conv, "abd"),
    "fedrolex_random": Case(
        partial(FedRolex, window="random", assignment="dynamic"), _conv, "abd"
    ),
    "fjord": Case(partial(FjORD, [0.25, 0.5, 1.0], True), _ordered, "abc"),
    "flexifed_clustered": Case(
        ClusteredCommon, DeepNet, "ab",
        federation={"store": "host", "fraction": 0.7},
    ),
    "flexifed_max": Case(
        partial(MaxCommon, share_classifier=True), DeepNet, "abc", federation={"fraction": 0.9}
    ),
    "fml": Case(partial(FML, NormNet), _mlp),
    "heterofl": Case(HeteroFL, _conv, "abcde", federation={"fraction": 0.7}),
    "heterofl_dynamic": Case(
        partial(HeteroFL, "dynamic", statistics_batch_size=4, statistics_samples=20), _conv, "ace"
    ),
    "heterofl_dropout": Case(HeteroFL, _mlp, "ace"),
    "heterofl_drawn_statistics": Case(HeteroFL, dropped),
    "heterofl_fedadam": Case(
        HeteroFL, _conv, "abc", federation={"server_optimizer": partial(FedAdam, lr=0.02)}
    ),
    "heterofl_frozen": Case(HeteroFL, FrozenNet, "ab"),
    "heterofl_resnet": Case(HeteroFL, _resnet, "abd"),
    "heterofl_transformer": Case(
        HeteroFL, _transformer, "abd", data=prose, trainer={"limit_train_batches": 2}
    ),
    "late_depthfl": Case(DepthFL, _depths, "abc", federation=_late),
    "late_ditto": Case(partial(Ditto, 0.5), federation=_late | {"store": "host"}),
    "late_fedapen": Case(
        partial(FedAPEN, NormNet, share_lr=0.5, learn="aggregated"), _mlp, data=joined,
        federation=_late,
    ),
    "late_feddyn": Case(
        partial(FedDyn, 0.1), federation=_late | {"optimizer": partial(SGD, lr=0.1)}
    ),
    "late_fedkd": Case(partial(FedKD, _mlp, rounds=ROUNDS), federation=_late),
    "late_fednova": Case(
        FedNova, _mlp, federation=_late | {"server_optimizer": partial(SGD, lr=1.0, momentum=0.5)}
    ),
    "late_fedper": Case(partial(FedPer, "net.layers.6"), federation=_late),
    "late_moon": Case(partial(MOON, pool=2), federation=_late),
    "late_qffl": Case(partial(QFFL, 1.0, 10.0), federation=_late),
    "late_rankmean": Case(
        partial(RankMean, **_adapters), AdapterNet, "abc", data=joined, federation=_late
    ),
    "late_scaffold": Case(
        partial(SCAFFOLD, 0.5), _mlp, federation=_late | {"local_penalty": Pull(0.1)}
    ),
    "lgfedavg": Case(partial(LGFedAvg, 2), federation={"local_epochs": 2}),
    "lgfedavg_heads": Case(partial(LGFedAvg, 1, weights="samples"), DeepNet, "ab"),
    "lgfedavg_bottom": Case(partial(LGFedAvg, 2, "bottom"), federation={"store": "host"}),
    "metric_objects": Case(FedAvg, Metered),
    "moon": Case(partial(MOON, pool=2)),
    "moon_packed": Case(
        partial(MOON, pool=2), _mlp, clients=12, federation={"fraction": 0.75, "store": "host"}
    ),
    "my1": Case(partial(My1, **_sparse), _mlp, federation=_everyone),
    "my2": Case(
        partial(My2, **_sparse, buffers="average"), federation=_everyone
    ),
    "pfedme": Case(partial(PFedMe, 2.0, 2, 0.1)),
    "pfedmoe": Case(
        partial(PFedMoE, _mlp, gate_units=8, gate_lr=0.5), _mlp, data=joined,
        federation={"optimizer": partial(SGD, lr=0.1)},
        trainer={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "network"},
    ),
    "qffl": Case(partial(QFFL, 1.0, 10.0)),
    "scaffold": Case(partial(SCAFFOLD, 0.5)),
    "standalone_frozen": Case(Standalone, FrozenNet),
    "standalone": Case(Standalone, _mlp, federation={"local_steps": 3}),
}  # fmt: skip


# Arguments of any method on others, and data of another kind.
def validated() -> FederatedDataModule:
    """Return the kit's images, of which clients keep some for validation."""
    data = images()
    data.validation = 0.25
    return data


COMBINATIONS = {
    "ditto_unseen": Case(
        partial(Ditto, 0.5), data=unseen, clients=9,
        federation={"unseen_epochs": 2, "fraction": 0.6, "store": "host"},
    ),
    "fedavg_unseen": Case(FedAvg, data=unseen, clients=9),
    "fedper_unseen": Case(partial(FedPer, "net.layers.6"), data=unseen, clients=9),
    "scaffold_unseen": Case(partial(SCAFFOLD, 0.5), data=unseen, clients=9),
    "devices_unseen": Case(
        HeteroFL, _conv, "abc", data=unseen, clients=9, federation={
            "devices": _gone, "policy": Policy(deadline=3.0, over_select=0.5), "fraction": 0.5,
        },
    ),
    "lgfedavg_validation": Case(
        partial(LGFedAvg, 1), data=validated,
        federation={"evaluate": ["global", "personal", "trained"]},
    ),
    "fedavg_columns": Case(FedAvg, Tagger, data=tagged),
    "fedavg_contrast_momentum": Case(
        FedAvg,
        federation={
            "local_penalty": Contrast(2.0),
            "server_optimizer": partial(SGD, lr=1.0, momentum=0.5),
        },
    ),
    "fedavg_kept_adam": Case(
        FedAvg, data=joined,
        federation={"keep_optimizer": True, "optimizer": partial(Adam, lr=0.01)},
    ),
    "fedavg_kept_gan": Case(FedAvg, Gan, federation=_own | {"keep_optimizer": True}),
    "fedavg_kept_callback": Case(FedAvg, Averaged, data=joined,
                                 federation=_own | {"keep_optimizer": True}),
    "fedavg_step_schedule": Case(FedAvg, Falling, federation=_own),
    "standalone_gan": Case(Standalone, Gan, federation=_own | {"local_epochs": 2}),
    "feddyn_norms": Case(
        partial(FedDyn, 0.1), data=joined,
        federation={"personal": "norms", "optimizer": partial(SGD, lr=0.1)},
    ),
    "fednova_pull": Case(
        partial(FedNova, epochs=(1, 3)), _mlp, federation={"local_penalty": Pull(0.2)}
    ),
    "fedprox_yogi_head": Case(
        partial(FedProx, 0.1),
        federation={"personal": ["net.layers.6"], "server_optimizer": partial(FedYogi, lr=0.02)},
    ),
    "heterofl_norms": Case(HeteroFL, _conv, "abc", federation={"personal": "norms"}),
    "heterofl_pull": Case(HeteroFL, _conv, "abc", federation={"local_penalty": Pull(0.5)}),
    "pfedmoe_pull": Case(
        partial(PFedMoE, _mlp, gate_units=8, gate_lr=0.5), _mlp, data=joined,
        federation={"local_penalty": Pull(0.5)},
    ),
    "rankmean_head": Case(
        partial(RankMean, **_adapters), AdapterNet, "abc", data=joined,
        federation={"personal": ["net.layers.7"], "local_penalty": Pull(0.1)},
    ),
    "scaffold_kept_momentum": Case(
        SCAFFOLD, _mlp, federation={"keep_optimizer": True, "local_penalty": Pull(0.1)}
    ),
    "scaffold_norms": Case(SCAFFOLD, data=joined, federation={"personal": "norms"}),
}  # fmt: skip
