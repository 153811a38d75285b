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
from lightfed.utils.errors import require
from lightfed.utils.torch_private import _BatchNorm


class OrderedDropout(nn.Module):
    """A network whose narrower widths are leading parts of it (FjORD): (B, ...) -> (B, C) logits.

    Horvath et al., NeurIPS 2021, https://arxiv.org/abs/2102.13451

    Args:
        network: makes a network of any width, its argument `rate`; wider ones have more units.
        num_classes: C.
        input_shape: of a sample.
        rate: the largest width.

    Attributes:
        widths: of the networks, ascending; FjORD gives them by `nest`.
        draws: widths of the next batches; the largest one when they end.
        distil: a drawn width learns from the largest one.
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
        narrows, fix = "rate" in parameters_of(network), "name one that has it, such as Conv"
        require(narrows, "network", "a network without the argument rate", fix)
        data: Any = SimpleNamespace(task="classification", num_classes=num_classes)
        data.input_shape = tuple(input_shape)
        self.rate, self._make = rate, partial(build_network, network, data, key="network")
        self.whole = self._make(rate=rate)
        self.nest([rate])

    def nest(self, widths: Sequence[float]) -> None:
        """Make the networks of the widths up to the rate, with statistics of their own."""
        self.widths = [p for p in sorted(widths) if p <= self.rate]
        self.nested = nn.ModuleList(self._make(rate=p) for p in self.widths)
        each = [dict(net.named_parameters()) for net in self.nested]
        self._parts = [{n: tuple(map(slice, w.shape)) for n, w in net.items()} for net in each]
        for part in self.nested.modules():  # their weights are parts of the whole's
            part._parameters = {n: None for n, w in part._parameters.items() if w is None}
        for part in self.whole.modules():
            part._buffers.update(dict.fromkeys(part._buffers))
            if isinstance(part, _BatchNorm):
                # Otherwise torch expects a number of batches when it loads a plain file.
                part.track_running_stats = False

    def at(self, p: float, x: Tensor) -> Tensor:
        """The logits of net_p."""
        i = self.widths.index(p)
        weights = {name: w[self._parts[i][name]] for name, w in self.whole.named_parameters()}
        return functional_call(self.nested[i], weights, (x,))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.at(self.rate, x)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of the drawn width, and of the largest one if it teaches."""
        p = next(self.draws, self.rate)
        if not self.distil:
            return {"drawn": F.cross_entropy(self.at(p, x), y)}
        z = self(x)
        soft = F.cross_entropy(self.at(p, x), z.detach().softmax(1))
        return {"largest": F.cross_entropy(z, y), "drawn": soft}
