"""Checks that adding an adapter's update to its layer's weight gives the same model.

It does not if the weight is also read without the adapter: by a second name of the layer, by
`x @ layer.weight`, or as the logits of an embedding. Nor does it if the adapter computes something
other than the layer does, as the adapter of a dilated convolution.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightfed.algorithms.lora.adapters import Adapter
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.group_state import GroupState
from lightfed.local.model_costs import ignore
from lightfed.utils.errors import UserError
from lightfed.utils.rng import seeded, torch_generator

# Samples of the batch that is tried.
_SAMPLES = 8
# The size of the updates that are tried, relative to the weights that they are added to.
_UPDATE = 0.1
# What the other trained tensors move by: a head that starts at 0 would hide every difference.
_NOISE = 0.02
# A difference in the loss is allowed up to this share of what the updates change in it, plus this
# number of rounding errors of the loss.
_WRONG = 1e-3
_ROUNDING = 64


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Have products of float32 on a GPU computed without TF32.

    The rounding of TF32 would look like a difference. torch has two sets of switches, and refuses
    to compute if they contradict each other. The older switches set both.
    """
    cudnn: Any = torch.backends.cudnn
    backends: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    newer = [backend.fp32_precision for backend in backends]
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # only the newer ones have been used
        older = None

    def set_newer(values: Sequence[str]) -> None:
        for backend, value in zip(backends, values, strict=True):
            backend.fp32_precision = value

    def set_older(products: str, tf32: bool) -> None:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32 = tf32

    try:
        if older is None:
            set_newer(["ieee"] * len(backends))
        else:
            set_older("highest", False)
        yield
    finally:
        if older is not None:
            set_older(*older)
        set_newer(newer)


class MergeCheck:
    """Runs a batch through a group's module, with adapters and with their updates in the weights.

    The updates are drawn, so that the check needs no training. The module has its old values again
    afterwards.

    Args:
        state: The group.
        adapters: The adapters of its module; all have a base.
        data: Has the training samples, on the device.
    """

    def __init__(
        self, state: GroupState, adapters: Sequence[Adapter], data: FederatedDataModule
    ) -> None:
        self._state = state
        self._adapters = adapters
        self._batch = data.train_batch(0, _SAMPLES)
        self._row = state.borrow(state.initial)
        state.bind(self._row)
        generator = torch_generator(0, "merge check")

        # Drawn on the host, so that the check is the same on every device.
        noise = torch.randn(state.layout.parameter_size, generator=generator) * _NOISE
        self._row.floats[: len(noise)] += noise.to(self._row.floats.device)

        trained = state.layout.floats.views(self._row.floats)
        tensors: dict[str, Tensor] = {**trained, **state.live.frozen}
        self._weights = [adapter.weight(tensors).detach() for adapter in adapters]
        self._factors = [adapter.factors(tensors) for adapter in adapters]
        self._originals = [weight.clone() for weight in self._weights]
        self._drawn = [torch.randn(B.shape, generator=generator) for _, B in self._factors]
        coarsest = max(torch.finfo(weight.dtype).eps for weight in self._weights)
        self._rounding = _ROUNDING * coarsest

    def run(self, method: str) -> None:
        """Compare the two models, and refuse the adapters if they differ.

        Args:
            method: Name of the method, for the message.

        Raises:
            UserError: It names the first layer that differs.
            Exception: What the module's step raises.
        """
        module = self._state.module
        module.trainer = self._state.trainer  # a step may ask it
        vars(module).update(log=ignore, log_dict=ignore)
        module.eval()
        try:
            with torch.no_grad(), _ieee_products():
                layers = range(len(self._adapters))
                if self._are_equal(layers):
                    return

                # If no layer differs alone, all that can be named is the first one.
                different = [layer for layer in layers if not self._are_equal([layer])]
                first = different[0] if different else 0
        finally:
            del module.log, module.log_dict
            module.trainer = None
            module.train()
            self._state.live.unbind()
            self._state.live.restore()

        layer = self._adapters[first].layer
        found = (
            f"{layer} is another model with its update in the weight, where {method} adds it, than "
            "with its adapter"
        )
        fix = (
            "the weight may be read in a second place, or the adapter lack an option of its layer: "
            "do not adapt it, or choose a rule that leaves the base, such as RankMean"
        )
        raise UserError("model.clients", found, fix)

    def _are_equal(self, layers: Collection[int]) -> bool:
        """Return whether the updates of these layers act the same in adapters and in weights."""
        updates = {layer: self._new_update(layer) for layer in layers}
        plain = self._loss()

        for layer, update in updates.items():
            _, B = self._factors[layer]
            B.copy_(update)
        adapted = self._loss()

        for layer in updates:
            A, B = self._factors[layer]
            weight = self._weights[layer]
            weight.add_((self._adapters[layer].scale * (B @ A)).to(weight.dtype))
            B.zero_()
        merged = self._loss()

        for weight, original in zip(self._weights, self._originals, strict=True):
            weight.copy_(original)

        difference = abs(merged - adapted)
        limit = _WRONG * abs(adapted - plain) + self._rounding * max(abs(adapted), abs(plain))
        return not difference > limit  # a loss that is NaN shows nothing

    def _new_update(self, layer: int) -> Tensor:
        """Return a B (out, r) whose update is small beside the weight; the adapter has B = 0."""
        A, B = self._factors[layer]
        B.zero_()
        drawn = self._drawn[layer].to(B.device, B.dtype)
        size_of_update = self._adapters[layer].scale * float((drawn @ A).norm())
        size_of_weight = float(self._originals[layer].norm())
        if size_of_weight == 0:
            size_of_weight = 1.0
        return drawn * (_UPDATE * size_of_weight / max(size_of_update, 1e-12))

    def _loss(self) -> float:
        """Return the loss of the batch; 0 if the module skips it."""
        device = self._row.floats.device
        with seeded(0, device):
            output: Any = self._state.module.training_step(self._batch, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        return 0.0 if loss is None else float(loss)
