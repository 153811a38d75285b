"""All classes that a configuration can name by their short name."""

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.standalone import Standalone
from lightfed.data.schemes import Iid
from lightfed.data.vision import MNIST
from lightfed.models.cnn import Conv, SimpleCNN
from lightfed.models.mlp import MLP
from lightfed.models.torchvision import Torchvision

__all__ = [
    "MLP",
    "MNIST",
    "Conv",
    "FedAvg",
    "FedProx",
    "HeteroFL",
    "Iid",
    "SimpleCNN",
    "Standalone",
    "Torchvision",
]
