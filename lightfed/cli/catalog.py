"""All classes that a configuration can name by their short name."""

from lightfed.algorithms.cloudfedavg import CloudFedAvg
from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.dpsgd import DPSGD
from lightfed.algorithms.fd import FD
from lightfed.algorithms.fedapen import FedAPEN
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.fedbcdi import FedBCDI
from lightfed.algorithms.fedkd import FedKD
from lightfed.algorithms.fedproto import FedProto
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.flexifed import BasicCommon, ClusteredCommon, ClusteredFL, MaxCommon
from lightfed.algorithms.fml import FML
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.my1 import My1
from lightfed.algorithms.my2 import My2
from lightfed.algorithms.pfedmoe import PFedMoE
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
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

__all__ = [
    "ASPG",
    "CINIC10",
    "DPSGD",
    "FD",
    "FML",
    "MLP",
    "MNIST",
    "VDCNN",
    "VGG",
    "VGG11GN",
    "AGNews",
    "BasicCommon",
    "CIFARResNet",
    "CharCNN",
    "CloudFedAvg",
    "ClusteredCommon",
    "ClusteredFL",
    "Conv",
    "DisPFL",
    "Docstrings",
    "Exponential",
    "FedAPEN",
    "FedAvg",
    "FedBCD",
    "FedBCDI",
    "FedKD",
    "FedProto",
    "FedProx",
    "HeteroFL",
    "Iid",
    "LGFedAvg",
    "LeNet",
    "MaxCommon",
    "MoECNN",
    "My1",
    "My2",
    "PFedMoE",
    "PreActResNet",
    "Prose",
    "ResNet18GN",
    "SimpleCNN",
    "SpeechCommands",
    "Standalone",
    "TimeVarying",
    "Tones",
    "Torchvision",
    "Transformer",
    "WikiText2",
]
