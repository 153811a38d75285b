"""Networks that a cohort can name: `class_path: lightfed.models.MLP`."""

from lightfed.models.cnn import Conv, SimpleCNN
from lightfed.models.mlp import MLP
from lightfed.models.torchvision import Torchvision

__all__ = ["MLP", "Conv", "SimpleCNN", "Torchvision"]
