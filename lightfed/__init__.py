"""lightfed: federations of heterogeneous clients on PyTorch Lightning and torch.distributed.

The public names, such as `lightfed.Algorithm` and `lightfed.HeteroFL`, are imported on first use.
"""

from importlib import import_module
from typing import Any

from lightfed.utils import __version__

_NAMES = {
    "aggregation.server_optimizers": "FedAdagrad FedAdam FedYogi",
    "api.algorithm": "Algorithm",
    "api.fleet": "Fleet",
    "data.datamodule": "FederatedDataModule",
    "engine.federation": "Federation",
    "engine.trainer": "FederatedTrainer",
    "local.client_group": "ClientGroup",
    "models.client_module": "ClientModule Regressor",
    "local.hooks": "LocalPenalty SessionContext",
    "local.local_work": "Phase",
    "local.penalties": "Contrast LinearTerm Pull",
    "state.rows": "ModelKind Rows",
    "state.server_model": "ServerModel",
    "testing": "conformance",
    "algorithms.apfl": "APFL",
    "algorithms.cloudfedavg": "CloudFedAvg",
    "algorithms.depthfl": "DepthFL",
    "algorithms.dispfl": "DisPFL",
    "algorithms.ditto": "Ditto",
    "algorithms.dpsgd": "DPSGD",
    "algorithms.fd": "FD",
    "algorithms.fedapen": "FedAPEN",
    "algorithms.fedavg": "FedAvg",
    "algorithms.fedbcd": "FedBCD",
    "algorithms.fedbcdi": "FedBCDI",
    "algorithms.fedbn": "FedBN",
    "algorithms.fedbuff": "FedBuff",
    "algorithms.feddyn": "FedDyn",
    "algorithms.fedexlora": "FedExLoRA",
    "algorithms.fedgh": "FedGH",
    "algorithms.fedkd": "FedKD",
    "algorithms.fedmrl": "FedMRL",
    "algorithms.fednova": "FedNova",
    "algorithms.fedper": "FedPer",
    "algorithms.fedproto": "FedProto",
    "algorithms.fedprox": "FedProx",
    "algorithms.fedrep": "FedRep",
    "algorithms.fedrolex": "FedRolex",
    "algorithms.fedsalora": "FedSALoRA",
    "algorithms.fedtgp": "FedTGP",
    "algorithms.ffalora": "FFALoRA",
    "algorithms.fjord": "FjORD",
    "algorithms.flexifed": "BasicCommon ClusteredCommon ClusteredFL MaxCommon",
    "algorithms.flexlora": "FlexLoRA",
    "algorithms.flora": "FLoRA",
    "algorithms.fml": "FML",
    "algorithms.heterofl": "HeteroFL",
    "algorithms.hetlora": "HetLoRA",
    "algorithms.lgfedavg": "LGFedAvg",
    "algorithms.moon": "MOON",
    "algorithms.my1": "My1",
    "algorithms.my2": "My2",
    "algorithms.pfedme": "PFedMe",
    "algorithms.pfedmoe": "PFedMoE",
    "algorithms.qffl": "QFFL",
    "algorithms.rankmean": "RankMean",
    "algorithms.scaffold": "SCAFFOLD",
    "algorithms.standalone": "Standalone",
    "algorithms.zeropadded": "ZeroPadded",
    "data.datasets.dataset": "Dataset Samples Transform",
    "data.datasets.hub": "CINIC10 Hub",
    "data.datasets.language": "Prose WikiText2",
    "data.datasets.speech": "SpeechCommands Tones",
    "data.datasets.text": "AGNews Docstrings NextCharacter",
    "data.datasets.torch_data": "FromTorch",
    "data.datasets.vision": "CIFAR10 CIFAR100 Digits FashionMNIST MNIST",
    "data.partition.schemes": (
        "Classes Dirichlet DirichletClient Diversity Iid Natural Partitioner Quantity Shards"
    ),
    "models.networks.charcnn": "CharCNN",
    "models.networks.cifar_resnet": "CIFARResNet ResNet18GN",
    "models.networks.cnn": "Conv SimpleCNN",
    "models.networks.depth": "DepthConv DepthNet",
    "models.networks.lenet": "LeNet MoECNN",
    "models.networks.mlp": "MLP",
    "models.networks.resnet": "PreActResNet",
    "models.networks.torchvision": "Torchvision",
    "models.networks.transformer": "Transformer",
    "models.networks.vdcnn": "VDCNN",
    "models.networks.vgg": "VGG",
    "models.ordered_dropout": "OrderedDropout",
    "models.peft_client": "PeftClient",
    "topology.topology": "Adjacency Full NetworkX Ring TimeVarying",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lightfed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
