"""Networks that a cohort can name: `class_path: lightfed.models.MLP`."""

from lightfed.models.cnn import Conv, SimpleCNN
from lightfed.models.mlp import MLP
from lightfed.models.resnet import PreActResNet
from lightfed.models.torchvision import Torchvision
from lightfed.models.transformer import Transformer

__all__ = ["MLP", "Conv", "PreActResNet", "SimpleCNN", "Torchvision", "Transformer"]
