"""Networks for clients: `class_path: lightfed.models.MLP`."""

# ruff: noqa: F401 - imported for others

from lightfed.models.networks.charcnn import CharCNN
from lightfed.models.networks.cifar_resnet import CIFARResNet, ResNet18GN
from lightfed.models.networks.cnn import Conv, SimpleCNN
from lightfed.models.networks.lenet import LeNet, MoECNN
from lightfed.models.networks.mlp import MLP
from lightfed.models.networks.resnet import PreActResNet
from lightfed.models.networks.torchvision import Torchvision
from lightfed.models.networks.transformer import Transformer
from lightfed.models.networks.vdcnn import VDCNN
from lightfed.models.networks.vgg import VGG
