"""What a module's steps keep in Python: attributes of its submodules, which no row holds.

A rank trains its clients in one module: a client finds there what the one before it has left.
"""

import io
import pickle
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

# The attributes of every module: its parameters, hooks and mode.
_OF_MODULES = frozenset(vars(nn.Module()))
# Lightning's attributes, which reading `self.hparams` creates.
_OF_LIGHTNING = frozenset(
    {"_hparams", "_hparams_name", "_hparams_initial", "_log_hyperparams"},
)

# The classes of these packages keep nothing from step to step in attributes.
_PACKAGES_THAT_KEEP_NOTHING = ("lightfed", "torch", "torchvision")

# What an attribute may refer to, but which does not belong to it.
_OUTSIDE = (nn.Module, nn.Parameter, Optimizer, L.Trainer, FunctionType, MethodType, type)


def attributes(module: nn.Module) -> dict[str, bytes]:
    """Return what a module's attributes hold, as comparable bytes by their names.

    Attributes of metrics, which every session resets, are not among them, nor those of torch's and
    this package's classes; nor what cannot be pickled, nor tensors with a graph, which are of no
    use to another step.
    """
    contents = {}
    for path, submodule in module.named_modules():
        package = type(submodule).__module__.partition(".")[0]
        if isinstance(submodule, Metric) or package in _PACKAGES_THAT_KEEP_NOTHING:
            continue

        for name in vars(submodule).keys() - _OF_MODULES - _OF_LIGHTNING:
            value = vars(submodule)[name]
            has_graph = isinstance(value, Tensor) and value.grad_fn is not None
            pickled = None if has_graph else _pickled(value)
            if pickled is not None:
                contents[f"{path}.{name}".lstrip(".")] = pickled
    return contents


def _pickled(value: Any) -> bytes | None:
    """Return the pickled form of a value; None if it has none."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # whatever a user's object raises
        return None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors and generators by their values, and what is outside by its identity."""

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
    """Return the names of the attributes that steps have changed or added since `before`."""
    after = attributes(module)
    return sorted(name for name, value in after.items() if value != before.get(name))
