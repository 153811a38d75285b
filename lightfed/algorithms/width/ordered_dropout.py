"""Ordered dropout: networks of many widths in the weights of one."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightfed.models.build import build_network, parameters_of
from lightfed.utils.errors import UserError
from lightfed.utils.torch_private import _BatchNorm


class OrderedDropout(nn.Module):
    """A network whose narrower widths are leading parts of it (FjORD): (B, ...) -> (B, C) logits.

    Horvath et al., NeurIPS 2021, https://arxiv.org/abs/2102.13451

    Args:
        network: Makes a network of any width, its argument `rate`; wider ones have more units.
        num_classes: C.
        input_shape: The shape of a sample.
        rate: The largest width.

    Attributes:
        whole: The network of the largest width, whose weights all widths share. It has no
            statistics.
        nested: The network of every width. They have statistics of their own, and no weights.
        widths: The widths of the networks, ascending; FjORD gives them by `nest`.
        draws: The widths of the next batches; the largest one when they end.
        distil: Whether a drawn width learns from the largest one.

    Raises:
        UserError: The network has no argument `rate`.
    """

    draws: Iterator[float] = iter(())
    distil: bool = False

    def __init__(
        self,
        network: Callable[[], nn.Module],
        num_classes: int = 10,
        input_shape: Sequence[int] = (1, 28, 28),
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        if "rate" not in parameters_of(network):
            raise UserError(
                key="network",
                found="a network without the argument rate",
                fix="name one that has it, such as Conv",
            )
        data: Any = SimpleNamespace(
            task="classification", num_classes=num_classes, input_shape=tuple(input_shape)
        )
        self.rate = rate
        self._make = partial(build_network, network, data, key="network")
        self.whole = self._make(rate=rate)
        self.nest([rate])

    def nest(self, widths: Sequence[float]) -> None:
        """Make the networks of the widths up to the rate, with statistics of their own."""
        self.widths = [p for p in sorted(widths) if p <= self.rate]
        self.nested = nn.ModuleList(self._make(rate=p) for p in self.widths)

        # Of each width, where its weights are within the whole's.
        self._slices: list[dict[str, tuple[slice, ...]]] = []
        for net in self.nested:
            slices = {}
            for name, weight in net.named_parameters():
                slices[name] = tuple(slice(size) for size in weight.shape)
            self._slices.append(slices)

        # Weights belong to the whole, and statistics to the nested networks.
        for layer in self.nested.modules():
            weights = [name for name, weight in layer._parameters.items() if weight is not None]
            for name in weights:
                del layer._parameters[name]
        for layer in self.whole.modules():
            layer._buffers.update(dict.fromkeys(layer._buffers))
            if isinstance(layer, _BatchNorm):
                # Otherwise torch expects a number of batches when it loads a plain file.
                layer.track_running_stats = False

    def at(self, p: float, x: Tensor) -> Tensor:
        """Return the logits (B, C) of net_p."""
        position = self.widths.index(p)
        slices = self._slices[position]
        weights = {name: w[slices[name]] for name, w in self.whole.named_parameters()}
        return functional_call(self.nested[position], weights, (x,))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map samples (B, ...) to logits (B, C) of the largest width."""
        return self.at(self.rate, x)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss of the drawn width, and of the largest one if it teaches.

        Args:
            x: Samples (B, ...).
            y: Labels (B,).
        """
        p = next(self.draws, self.rate)
        if not self.distil:
            return {"drawn": F.cross_entropy(self.at(p, x), y)}
        teacher = self(x)
        soft_targets = teacher.detach().softmax(1)
        drawn = F.cross_entropy(self.at(p, x), soft_targets)
        return {"largest": F.cross_entropy(teacher, y), "drawn": drawn}
