"""Networks that a cohort can name: `class_path: lightfed.models.MLP`."""

from lightfed.models.charcnn import CharCNN
from lightfed.models.cifar_resnet import CIFARResNet, ResNet18GN
from lightfed.models.cnn import Conv, SimpleCNN
from lightfed.models.lenet import LeNet, MoECNN
from lightfed.models.mlp import MLP
from lightfed.models.resnet import PreActResNet
from lightfed.models.torchvision import Torchvision
from lightfed.models.transformer import Transformer
from lightfed.models.vdcnn import VDCNN
from lightfed.models.vgg import VGG, VGG11GN

__all__ = [
    "MLP",
    "VDCNN",
    "VGG",
    "VGG11GN",
    "CIFARResNet",
    "CharCNN",
    "Conv",
    "LeNet",
    "MoECNN",
    "PreActResNet",
    "ResNet18GN",
    "SimpleCNN",
    "Torchvision",
    "Transformer",
]
