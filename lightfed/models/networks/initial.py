"""Initial values that several networks share."""

from torch import nn


def he_normal_(model: nn.Module) -> None:
    """Draw the weights of convolutions from N(0, sqrt(2 / (k^2 outputs))); set their biases to 0.

    He et al. 2015, by the outputs: section 2.2, eq. (14).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
