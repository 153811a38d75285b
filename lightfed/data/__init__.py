"""Data sets, partitions, and the batches of each client.

Importing this package registers every data set and scheme, so that a configuration can name them
without a module.
"""

# ruff: noqa: F401 - imported for others

from lightfed.data.batches import ResidentSplit
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.datasets.dataset import Dataset, Samples, Transform
from lightfed.data.datasets.hub import CINIC10, Hub
from lightfed.data.datasets.language import Prose, WikiText2
from lightfed.data.datasets.speech import SpeechCommands, Tones
from lightfed.data.datasets.text import AGNews, Docstrings, NextCharacter
from lightfed.data.datasets.torch_data import FromTorch
from lightfed.data.datasets.vision import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from lightfed.data.partition.draw import Partition, draw_partition
from lightfed.data.partition.schemes import (
    Classes,
    Dirichlet,
    DirichletClient,
    Diversity,
    Iid,
    Natural,
    Partitioner,
    Quantity,
    Shards,
)
