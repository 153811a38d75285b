"""What a module's steps keep in Python: attributes of its parts, which no row holds.

A rank trains its clients in one module: a client finds there what the one before it has left.
"""

import io
import logging
import pickle
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightfed.models.client_module import NetworkClient

log = logging.getLogger(__name__)

_NAMES = vars(nn.Module()).keys()  # of every module: its parameters, hooks and mode
_KEEP_NOTHING = ("lightfed", "torch", "torchvision")  # packages
_OUTSIDE = (nn.Module, nn.Parameter, Optimizer, L.Trainer, FunctionType, MethodType, type)
_LARGE, _LONG = 2**20, 2**10  # elements of a tensor, entries of a container


def attributes(module: nn.Module) -> dict[tuple[str, Any], bytes]:
    """Numbers, tensors and objects in a module's attributes, and in lists and dicts there.

    As comparable bytes, by the attribute's name and the place in a list or dict. Not those of
    metrics, which every session resets, nor of torch's and this package's classes. What cannot be
    pickled is left out; so is a tensor with a graph, which is of no use to another step.
    """
    found = {}
    buffers = {id(buffer) for buffer in module.buffers()}
    for path, part in module.named_modules():
        if isinstance(part, Metric) or type(part).__module__.partition(".")[0] in _KEEP_NOTHING:
            continue
        for name in vars(part).keys() - _NAMES:
            for place, value in _parts(vars(part)[name]).items():
                if not (isinstance(value, Tensor) and value.grad_fn):
                    with suppress(Exception):  # whatever a user's object raises
                        found[f"{path}.{name}".lstrip("."), place] = _pickled(value, buffers)
    return found


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict | list | tuple) and len(value) <= _LONG:
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        return {**parts, len: len(parts)}
    return {None: value}


def warn_of_changed(module: nn.Module, before: Mapping[tuple[str, Any], bytes]) -> None:
    """Warn once about the attributes that steps have changed since `before`."""
    nothing = _pickled(None, set())
    after = attributes(module).items()
    names = sorted({key[0] for key, value in after if value != before.get(key, nothing)})
    if names:
        network = module.net if isinstance(module, NetworkClient) else module
        _warn(type(network).__name__, ", ".join(names))


@cache
def _warn(kind: str, names: str) -> None:
    log.warning(
        "%s: its steps change %s, and a client finds there what another has left; "
        "keep what belongs to a client in buffers (register_buffer)", kind, names,
    )  # fmt: skip


def _pickled(value: Any, buffers: set[int]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, buffers).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Takes what does not belong to an attribute itself by its identity."""

    def __init__(self, file: io.BytesIO, buffers: set[int]) -> None:
        super().__init__(file)
        self._buffers = buffers

    @override
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _OUTSIDE) or id(value) in self._buffers:
            return id(value)
        if isinstance(value, Tensor):
            if value.numel() > _LARGE:
                return id(value), value._version
            values = value.detach().cpu().flatten()
            return tuple(value.shape), values.view(torch.uint8).numpy().tobytes()
        return None
