"""Initial values that more than one network takes."""

from torch import nn


def he_normal_(model: nn.Module) -> None:
    """Convolutions start from N(0, sqrt(2 / (k^2 outputs))), their biases from 0.

    He et al. 2015, by the outputs: section 2.2, eq. (14).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
