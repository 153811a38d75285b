"""What a module's steps keep in Python: attributes of its parts, which no row holds.

A rank trains its clients in one module: a client finds there what the one before it has left.
"""

import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

_NAMES = {
    *vars(nn.Module()),  # of every module: its parameters, hooks and mode
    # Lightning's, which reading `self.hparams` creates
    "_hparams", "_hparams_name", "_hparams_initial", "_log_hyperparams",
}  # fmt: skip
_KEEP_NOTHING = ("lightfed", "torch", "torchvision")  # packages
_OUTSIDE = (nn.Module, nn.Parameter, Optimizer, L.Trainer, FunctionType, MethodType, type)


def attributes(module: nn.Module) -> dict[str, bytes]:
    """What a module's attributes hold, as comparable bytes by their names.

    Not those of metrics, which every session resets, nor of torch's and this package's classes;
    nor what cannot be pickled, and tensors with a graph, which are of no use to another step.
    """
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, Metric) or type(part).__module__.partition(".")[0] in _KEEP_NOTHING:
            continue
        for name in vars(part).keys() - _NAMES:
            value = vars(part)[name]
            if not (isinstance(value, Tensor) and value.grad_fn):
                with suppress(Exception):  # whatever a user's object raises
                    file = io.BytesIO()
                    _Pickler(file).dump(value)
                    found[f"{path}.{name}".lstrip(".")] = file.getvalue()
    return found


class _Pickler(pickle.Pickler):
    """Takes what does not belong to an attribute itself by its identity."""

    @override
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _OUTSIDE):
            return id(value)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, Tensor):
            values = value.detach().cpu().flatten()
            return tuple(value.shape), values.view(torch.uint8).numpy().tobytes()
        return None


def changed(module: nn.Module, before: Mapping[str, bytes]) -> list[str]:
    """Names of the attributes that steps have changed since `before`."""
    after = attributes(module).items()
    return sorted(name for name, value in after if value != before.get(name))
