# ruff: noqa: F401 - to be imported is all that a class needs
"""All classes that a configuration can name by their short name.

Algorithms are found by themselves; a file of another room needs a line here.
"""

from importlib import import_module
from pkgutil import walk_packages

import lightfed.algorithms
from lightfed.data.datasets.cinic import CINIC10
from lightfed.data.datasets.docstrings import Docstrings
from lightfed.data.datasets.language import Prose, WikiText2
from lightfed.data.datasets.speech import SpeechCommands
from lightfed.data.datasets.text import AGNews
from lightfed.data.datasets.tones import Tones
from lightfed.data.datasets.vision import MNIST
from lightfed.data.partition.schemes import Iid
from lightfed.models.networks.charcnn import CharCNN
from lightfed.models.networks.cifar_resnet import CIFARResNet, ResNet18GN
from lightfed.models.networks.cnn import Conv, SimpleCNN
from lightfed.models.networks.lenet import LeNet, MoECNN
from lightfed.models.networks.mlp import MLP
from lightfed.models.networks.resnet import PreActResNet
from lightfed.models.networks.torchvision import Torchvision
from lightfed.models.networks.transformer import Transformer
from lightfed.models.networks.vdcnn import VDCNN
from lightfed.models.networks.vgg import VGG, VGG11GN
from lightfed.simulation.delays import Exponential
from lightfed.topology.topology import TimeVarying

for module in walk_packages(lightfed.algorithms.__path__, "lightfed.algorithms."):
    if "._" not in module.name:
        import_module(module.name)
