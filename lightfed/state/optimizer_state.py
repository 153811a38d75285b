"""The whole state of an optimizer: taken once, put back for every session, or kept by a client.

An optimizer may keep what it counts anywhere: in `.state`, as settings of its groups (timm's Adan
and Lamb add `step` in their first step), or as attributes of its own (a counter, slow weights).
"""

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightfed.utils.errors import UserError, reason
from lightfed.utils.torch_private import tree_flatten, tree_unflatten

_KEY = "model.optimizer"
# What torch itself puts into every optimizer, and what its schedulers add.
_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))) | {
    "step",
    "_opt_called",
    "_step_count",
}
_UNCHANGING = (int, float, str, bool, type(None))


class OptimizerState:
    """What an optimizer holds when it is new, to be put back before every session.

    Parameters, modules and functions do not belong to the state: they stay as they are. Tensors
    that were made as copies of the parameters, such as slow weights, are made again from the
    parameters' values at the time of `restore`. The optimizers that another one wraps are a part of
    its state.

    Args:
        optimizer: as it was made, before its first step.

    Raises:
        UserError: an attribute cannot be copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._inner = [OptimizerState(other) for other in _wrapped(optimizer)]
        self._outside = dict[int, Any]()
        self._add_outside(self._outside)
        self._groups = [_Group(group, self) for group in optimizer.param_groups]
        self._following = self._copies_in_state()
        self._state = {key: self.copied("state", value) for key, value in optimizer.state.items()}
        self._names = frozenset(vars(optimizer)) | _OF_TORCH
        self._attributes = {
            name: self._taken(name, value) for name, value in own_attributes(optimizer).items()
        }

    def _add_outside(self, outside: dict[int, Any]) -> None:
        """Note what copies of the state share with it: parameters and optimizers."""
        for tensor in self._parameters:
            outside[id(tensor)] = tensor
        outside[id(self._optimizer)] = self._optimizer
        for inner in self._inner:
            inner._add_outside(outside)

    def copied(self, name: str, value: Any) -> Any:
        """A copy of a part of the state; a UserError names what cannot be copied."""
        try:
            return deepcopy(value, dict(self._outside))
        except Exception as error:  # of a user's object
            kind = type(self._optimizer).__name__
            found = f"{kind} keeps {name}, which cannot be copied ({reason(error)})"
            raise UserError(_KEY, found, "keep tensors, numbers, lists and dicts") from error

    def _copies_in_state(self) -> list[str]:
        """The parts of `.state` that are copies of their parameters, such as slow weights."""
        state, parameters = self._optimizer.state, self._parameters
        held = [state.get(p, {}) for p in parameters]
        names = {name for part in held if isinstance(part, dict) for name in part}
        found = []
        for name in names:
            if _are_copies([part.get(name) for part in held], parameters):
                found.append(name)
        return sorted(found)

    def _taken(self, name: str, value: Any) -> Any:
        """A part of the state as it is kept: a copy, or how it follows from the parameters."""
        leaves, structure = tree_flatten(value)
        if _are_copies(leaves, self._parameters):
            return _Follows(structure)
        return self.copied(name, value)

    def _given(self, name: str, value: Any) -> Any:
        """A part of the state as it is put back."""
        if isinstance(value, _Follows):
            return tree_unflatten([p.detach().clone() for p in self._parameters], value.structure)
        return self.copied(name, value)

    def restore(self) -> None:
        """Make the optimizer as it was when it was new."""
        optimizer = self._optimizer
        for inner in self._inner:
            inner.restore()
        optimizer.state.clear()
        for key, value in self._state.items():
            optimizer.state[key] = self.copied("state", value)
        for name in self._following:
            for p in self._parameters:
                optimizer.state[p][name] = p.detach().clone()
        del optimizer.param_groups[len(self._groups) :]
        for group in self._groups:
            group.restore()
        held = vars(optimizer)
        if not self._names.issuperset(held):
            for name in held.keys() - self._names:
                del held[name]
        for name, value in self._attributes.items():
            held[name] = self._given(name, value)

    def saved(self) -> Tensor:
        """(N,) bytes: the optimizer's present state, for its client's next session.

        Raises:
            UserError: it is made of other things than tensors, numbers, texts, lists and dicts.
        """
        places = {id(p): i for i, p in enumerate(self._parameters)}
        kind, optimizer = type(self._optimizer).__name__, self._optimizer
        whole = {
            "state": [(places.get(id(key), key), value) for key, value in optimizer.state.items()],
            "groups": [settings_of(group) for group in optimizer.param_groups],
            "attributes": {
                name: value
                for name, value in own_attributes(optimizer).items()
                if not _is_outside(value)
            },
            "inner": [inner.saved() for inner in self._inner],
        }
        file = io.BytesIO()
        try:
            torch.save(whole, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # of a user's object
            found = f"the state of {kind} cannot be kept ({reason(error)})"
            fix = "leave out model.keep_optimizer, or choose another optimizer"
            raise UserError(_KEY, found, fix) from error
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def load(self, saved: Tensor) -> None:
        """Put a state of `saved` into the optimizer, after `restore`."""
        optimizer = self._optimizer
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        file = io.BytesIO(saved.cpu().numpy().tobytes())

        def place(storage: Any, location: str) -> Any:
            return storage.cpu() if "cpu" in (location, device.type) else storage.to(device)

        whole = torch.load(file, map_location=place, weights_only=True)
        optimizer.state.clear()
        for key, value in whole["state"]:
            owner = self._parameters[key] if type(key) is int else key
            optimizer.state[owner] = _on(device, value)
        for group, settings in zip(optimizer.param_groups, whole["groups"], strict=True):
            group.update(_on(device, settings))
        vars(optimizer).update(_on(device, whole["attributes"]))
        for inner, part in zip(self._inner, whole["inner"], strict=True):
            inner.load(part)


class _Group:
    """The settings of a group of parameters, as they were."""

    def __init__(self, group: dict[str, Any], state: OptimizerState) -> None:
        self._group, self._state = group, state
        self._parameters = list(group["params"])
        settings = settings_of(group)
        self._plain = {k: v for k, v in settings.items() if _is_unchanging(v)}
        self._others = {k: state.copied(k, v) for k, v in settings.items() if k not in self._plain}
        self._size = len(group)

    def restore(self) -> None:
        group = self._group
        if len(group["params"]) != len(self._parameters):
            group["params"] = list(self._parameters)
        group.update(self._plain)
        for name, value in self._others.items():
            group[name] = self._state.copied(name, value)
        if len(group) > self._size:
            known = {"params", *self._plain, *self._others}
            for name in group.keys() - known:
                del group[name]


class _Follows:
    """Stands for copies of all parameters, in containers of this structure."""

    def __init__(self, structure: Any) -> None:
        self.structure = structure


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in attributes that torch does not give it; no modules."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_TORCH and not isinstance(value, nn.Module)
    }


def flat_slots(optimizer: Optimizer) -> dict[str, bool] | None:
    """The parts of an optimizer's state that are numbers of its parameters' elements.

    By name, and whether a part has the shape of its parameter; other parts are one number. Found by
    a step of a copy of the optimizer, on copies of its own parameters: an optimizer may refuse
    others. Empty if it keeps nothing.

    Returns:
        None if it keeps anything else, such as factors of other shapes, settings that its steps
        change, or attributes of its own.
    """
    twin = _twin(optimizer)
    if twin is None or _wrapped(optimizer):
        return None
    before = [settings_of(group) for group in twin.param_groups]
    names: list[dict[str, bool]] = []
    try:
        for p in parameters_of(twin):
            if p.requires_grad:
                p.grad = torch.ones_like(p)
        twin.step()
        if own_attributes(twin) or before != [settings_of(group) for group in twin.param_groups]:
            return None
    except Exception:  # it needs more than gradients: nothing is known
        return None
    for p in parameters_of(twin):
        if not p.requires_grad:
            continue
        parts: dict[str, bool] = {}
        for name, value in twin.state.get(p, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.dtype != torch.float32:
                return None
            if value.dim() and value.shape != p.shape:
                return None
            parts[name] = value.dim() > 0
        names.append(parts)
    if any(key not in set(parameters_of(twin)) for key in twin.state):
        return None
    found: dict[str, bool] = {}
    for parts in names:
        for name, shaped in parts.items():
            found[name] = found.get(name, False) or shaped
    # SGD takes a buffer of zeros for none, also in a group without momentum.
    alike = all(parts.keys() == found.keys() for parts in names)
    if not alike and type(optimizer) is not torch.optim.SGD:
        return None
    return dict(sorted(found.items()))


def _twin(optimizer: Optimizer) -> Optimizer | None:
    """A copy of an optimizer with copies of its parameters; None if it cannot be copied."""
    twin = object.__new__(type(optimizer))
    held = {name: value for name, value in vars(optimizer).items() if name != "step"}
    try:
        vars(twin).update(deepcopy(held, {id(optimizer): twin}))
    except Exception:  # of a user's object
        return None
    return twin


def _wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers in an optimizer's attributes, as of Lookahead's base."""
    leaves, _ = tree_flatten([*own_attributes(optimizer).values()])
    return [x for x in leaves if isinstance(x, Optimizer) and x is not optimizer]


def _are_copies(leaves: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
    """Whether tensors have the parameters' values, which are more than constants."""
    if len(leaves) != len(parameters):
        return False
    varied = False
    for leaf, p in zip(leaves, parameters, strict=True):
        if leaf is p or not isinstance(leaf, Tensor) or leaf.shape != p.shape:
            return False
        if leaf.dtype != p.dtype or not torch.equal(leaf, p):
            return False
        varied |= bool(p.numel() > 1 and (p != p.flatten()[0]).any())
    return varied


def _is_unchanging(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_unchanging, value))
    return isinstance(value, _UNCHANGING)


def _is_outside(value: Any) -> bool:
    """Whether an attribute holds optimizers or functions, which are no values."""
    leaves, _ = tree_flatten(value)
    return any(isinstance(leaf, Optimizer) or callable(leaf) for leaf in leaves)


def _on(device: torch.device, value: Any) -> Any:
    """Tensors with an axis go to the parameters' device; single numbers stay where they are."""
    leaves, structure = tree_flatten(value)
    moved = [x.to(device) if isinstance(x, Tensor) and x.dim() else x for x in leaves]
    return tree_unflatten(moved, structure)
