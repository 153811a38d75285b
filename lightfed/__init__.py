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
    "federation": "Federation",
    "trainer": "FederatedTrainer",
    "local.client_group": "ClientGroup",
    "models.client_module": "ClientModule Regressor",
    "local.hooks": "LocalPenalty SessionContext",
    "local.local_work": "Phase",
    "local.penalties": "LinearTerm Pull",
    "state.rows": "ModelKind Rows",
    "state.server_model": "ServerModel",
    "testing": "conformance",
    "algorithms.apfl": "APFL",
    "algorithms.fedbcd.cloudfedavg": "CloudFedAvg",
    "algorithms.depth.depthfl": "DepthFL",
    "algorithms.peers.dispfl": "DisPFL",
    "algorithms.ditto": "Ditto",
    "algorithms.peers.dpsgd": "DPSGD",
    "algorithms.prototypes.fd": "FD",
    "algorithms.pfedmoe.fedapen": "FedAPEN",
    "algorithms.fedavg": "FedAvg",
    "algorithms.fedbcd.fedbcd": "FedBCD",
    "algorithms.fedbcd.fedbcdi": "FedBCDI",
    "algorithms.fedbn": "FedBN",
    "algorithms.fedbuff": "FedBuff",
    "algorithms.lora.feddpa": "FedDPA",
    "algorithms.feddyn": "FedDyn",
    "algorithms.lora.fedexlora": "FedExLoRA",
    "algorithms.lora.fedmomentum": "FedMomentum",
    "algorithms.prototypes.fedgh": "FedGH",
    "algorithms.pfedmoe.fedkd": "FedKD",
    "algorithms.pfedmoe.fedmrl": "FedMRL",
    "algorithms.fednova": "FedNova",
    "algorithms.fedper": "FedPer",
    "algorithms.prototypes.fedproto": "FedProto",
    "algorithms.fedprox": "FedProx",
    "algorithms.fedrep": "FedRep",
    "algorithms.width.fedrolex": "FedRolex",
    "algorithms.lora.fedrotlora": "FedRotLoRA",
    "algorithms.lora.fedsalora": "FedSALoRA",
    "algorithms.lora.fedsb": "FedSB",
    "algorithms.lora.fedsvd": "FedSVD",
    "algorithms.prototypes.fedtgp": "FedTGP",
    "algorithms.lora.ffalora": "FFALoRA",
    "algorithms.width.fjord": "FjORD",
    "algorithms.flexifed.strategies": "BasicCommon ClusteredCommon ClusteredFL MaxCommon",
    "algorithms.lora.flexlora": "FlexLoRA",
    "algorithms.lora.flora": "FLoRA",
    "algorithms.pfedmoe.fml": "FML",
    "algorithms.width.heterofl": "HeteroFL",
    "algorithms.lora.hetlora": "HetLoRA",
    "algorithms.lgfedavg": "LGFedAvg",
    "algorithms.lora.lorafair": "LoRAFAIR",
    "algorithms.moon": "Contrast MOON",
    "algorithms.peers.my1": "My1",
    "algorithms.peers.my2": "My2",
    "algorithms.pfedme": "PFedMe",
    "algorithms.pfedmoe.pfedmoe": "PFedMoE",
    "algorithms.qffl": "QFFL",
    "algorithms.lora.rankmean": "RankMean",
    "algorithms.lora.ravan": "RAVAN",
    "algorithms.lora.rolora": "RoLoRA",
    "algorithms.scaffold": "SCAFFOLD",
    "algorithms.standalone": "Standalone",
    "algorithms.lora.zeropadded": "ZeroPadded",
    "data.dataset": "Dataset Samples Transform",
    "datasets.hub": "CINIC10 Hub",
    "datasets.language": "Prose WikiText2",
    "datasets.speech": "SpeechCommands Tones",
    "datasets.text": "AGNews Docstrings NextCharacter OwnedText",
    "data.torch_data": "FromTorch",
    "datasets.vision": "CIFAR10 CIFAR100 Digits FashionMNIST MNIST",
    "data.partition.schemes": (
        "Classes Dirichlet DirichletClient Diversity Iid Natural Partitioner Quantity Shards"
    ),
    "networks.char_mlp": "CharMLP",
    "networks.charcnn": "CharCNN",
    "networks.cifar_resnet": "CIFARResNet ResNet18GN",
    "networks.cnn": "Conv SimpleCNN",
    "algorithms.depth.networks": "DepthConv DepthNet",
    "networks.lenet": "LeNet MoECNN",
    "networks.mlp": "MLP",
    "networks.resnet": "PreActResNet",
    "networks.torchvision": "Torchvision",
    "networks.transformer": "Transformer",
    "networks.vdcnn": "VDCNN",
    "networks.vgg": "VGG",
    "algorithms.width.ordered_dropout": "OrderedDropout",
    "algorithms.lora.peft_client": "PeftClient",
    "algorithms.topology.topology": "Adjacency Full NetworkX Ring TimeVarying",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lightfed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
