"""All classes that a configuration can name by their short name."""

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.data.language import Prose, WikiText2
from lightfed.data.schemes import Iid
from lightfed.data.vision import MNIST
from lightfed.models.cnn import Conv, SimpleCNN
from lightfed.models.mlp import MLP
from lightfed.models.resnet import PreActResNet
from lightfed.models.torchvision import Torchvision
from lightfed.models.transformer import Transformer

__all__ = [
    "MLP",
    "MNIST",
    "Conv",
    "FedAvg",
    "FedProx",
    "HeteroFL",
    "Iid",
    "LGFedAvg",
    "PreActResNet",
    "Prose",
    "SimpleCNN",
    "Standalone",
    "Torchvision",
    "Transformer",
    "WikiText2",
]
