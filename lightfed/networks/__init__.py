"""The catalogue of networks, a family a file: `class_path: lightfed.networks.MLP`."""

# ruff: noqa: F401 - imported for others

from lightfed.networks.char_mlp import CharMLP
from lightfed.networks.charcnn import CharCNN
from lightfed.networks.cifar_resnet import CIFARResNet, ResNet18GN
from lightfed.networks.cnn import Conv, SimpleCNN
from lightfed.networks.lenet import LeNet, MoECNN
from lightfed.networks.mlp import MLP
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.torchvision import Torchvision
from lightfed.networks.transformer import Transformer
from lightfed.networks.vdcnn import VDCNN
from lightfed.networks.vgg import VGG
