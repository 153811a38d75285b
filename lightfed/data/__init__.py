"""Data sets, how they are dealt to clients, and the batches of a client.

All data sets and schemes are imported here, so that a config can name them without their module.
"""

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Transform
from lightfed.data.language import Prose, WikiText2
from lightfed.data.partition import (
    Classes,
    Dirichlet,
    DirichletClient,
    Diversity,
    Iid,
    Natural,
    Partition,
    Partitioner,
    Quantity,
    Shards,
    draw_partition,
)
from lightfed.data.resident import ResidentSplit
from lightfed.data.vision import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Classes",
    "Dataset",
    "Digits",
    "Dirichlet",
    "DirichletClient",
    "Diversity",
    "FashionMNIST",
    "FederatedDataModule",
    "Iid",
    "Natural",
    "Partition",
    "Partitioner",
    "Prose",
    "Quantity",
    "ResidentSplit",
    "Samples",
    "Shards",
    "Transform",
    "WikiText2",
    "draw_partition",
]
