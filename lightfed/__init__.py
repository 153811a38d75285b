"""lightfed: federations of heterogeneous clients on PyTorch Lightning and torch.distributed."""

__version__ = "0.1.0"
