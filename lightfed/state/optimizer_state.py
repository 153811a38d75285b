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

# The attributes that torch itself gives to every optimizer, and those that its schedulers add.
_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))) | {
    "step",
    "_opt_called",
    "_step_count",
}
_UNCHANGING = (int, float, str, bool, type(None))


class OptimizerState:
    """What an optimizer holds when it is new, to be put back before every session.

    Parameters, modules and functions do not belong to the state: they stay as they are. Tensors
    that were made as copies of the parameters, such as slow weights, are made again from the values
    that the parameters have at the time of `restore`. If the optimizer wraps other optimizers,
    their state is a part of its own.

    Args:
        optimizer: The optimizer as it was made, before its first step.

    Raises:
        UserError: If an attribute cannot be copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._inner = [OptimizerState(wrapped) for wrapped in _wrapped_optimizers(optimizer)]
        self._outside: dict[int, Any] = {}
        self._add_outside(self._outside)

        # Everything below is copied now, before the first step, and copied again by `restore`.
        self._groups = [_Group(group, self) for group in optimizer.param_groups]
        self._following = self._parameter_copies_in_state()
        self._state = {key: self.copied("state", value) for key, value in optimizer.state.items()}
        # Attributes with other names have been added by a session, and are removed by `restore`.
        self._names = frozenset(vars(optimizer)) | _OF_TORCH
        self._attributes = {
            name: self._recipe(name, value) for name, value in own_attributes(optimizer).items()
        }

    def _add_outside(self, outside: dict[int, Any]) -> None:
        """Add by identity what copies of the state share with it: parameters and optimizers."""
        for tensor in self._parameters:
            outside[id(tensor)] = tensor
        outside[id(self._optimizer)] = self._optimizer
        for inner in self._inner:
            inner._add_outside(outside)

    def copied(self, name: str, value: Any) -> Any:
        """Return a copy of a part of the state.

        Raises:
            UserError: If it cannot be copied.
        """
        try:
            # deepcopy takes the objects in its memo, a copy of `_outside`, as they are.
            return deepcopy(value, dict(self._outside))
        except Exception as error:  # of a user's object
            kind = type(self._optimizer).__name__
            raise UserError(
                key=_KEY,
                found=f"{kind} keeps {name}, which cannot be copied ({reason(error)})",
                fix="keep tensors, numbers, lists and dicts",
            ) from error

    def _parameter_copies_in_state(self) -> list[str]:
        """Return the names in `.state` whose values are copies of all the parameters."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        names: set[str] = set()
        for state in states:
            if isinstance(state, dict):
                names.update(state)

        copies = []
        for name in sorted(names):
            values = [state.get(name) for state in states]
            if _are_copies(values, self._parameters):
                copies.append(name)
        return copies

    def _recipe(self, name: str, value: Any) -> Any:
        """Return how an attribute is made again: a copy, or how it follows from the parameters."""
        leaves, structure = tree_flatten(value)
        if _are_copies(leaves, self._parameters):
            return _Follows(structure)
        return self.copied(name, value)

    def _made_again(self, name: str, recipe: Any) -> Any:
        """Return an attribute as it is when the optimizer is new."""
        if isinstance(recipe, _Follows):
            copies = [p.detach().clone() for p in self._parameters]
            return tree_unflatten(copies, recipe.structure)
        return self.copied(name, recipe)

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

        # A session may have added groups.
        del optimizer.param_groups[len(self._groups) :]
        for group in self._groups:
            group.restore()

        attributes = vars(optimizer)
        if not self._names.issuperset(attributes):
            for name in attributes.keys() - self._names:
                del attributes[name]
        for name, recipe in self._attributes.items():
            attributes[name] = self._made_again(name, recipe)

    def saved(self) -> Tensor:
        """Return the optimizer's present state as bytes (N,), for its client's next session.

        Raises:
            UserError: If it is made of other things than tensors, numbers, texts, lists and dicts.
        """
        optimizer = self._optimizer

        # State is saved by the number of its parameter, which is the same in the next session.
        numbers = {id(p): number for number, p in enumerate(self._parameters)}
        state = [(numbers.get(id(key), key), value) for key, value in optimizer.state.items()]
        attributes = {
            name: value
            for name, value in own_attributes(optimizer).items()
            if not _is_outside(value)
        }
        whole = {
            "state": state,
            "groups": [settings_of(group) for group in optimizer.param_groups],
            "attributes": attributes,
            "inner": [inner.saved() for inner in self._inner],
        }

        file = io.BytesIO()
        try:
            torch.save(whole, file)
            # What cannot be read back safely is refused now, not in the client's next session.
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # of a user's object
            kind = type(optimizer).__name__
            raise UserError(
                key=_KEY,
                found=f"the state of {kind} cannot be kept ({reason(error)})",
                fix="leave out model.keep_optimizer, or choose another optimizer",
            ) from error
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def load(self, saved: Tensor) -> None:
        """Put what `saved` has returned, bytes (N,), into the optimizer, after `restore`."""
        optimizer = self._optimizer
        device = self._parameters[0].device if self._parameters else torch.device("cpu")

        def place(storage: Any, location: str) -> Any:
            # What was on the host stays there, such as the number of steps.
            if location == "cpu" or device.type == "cpu":
                return storage.cpu()
            return storage.to(device)

        file = io.BytesIO(saved.cpu().numpy().tobytes())
        whole = torch.load(file, map_location=place, weights_only=True)

        optimizer.state.clear()
        for key, value in whole["state"]:
            owner = self._parameters[key] if type(key) is int else key
            optimizer.state[owner] = _on(device, value)
        for group, settings in zip(optimizer.param_groups, whole["groups"], strict=True):
            group.update(_on(device, settings))
        vars(optimizer).update(_on(device, whole["attributes"]))
        for inner, inner_saved in zip(self._inner, whole["inner"], strict=True):
            inner.load(inner_saved)


class _Group:
    """The settings of a group of parameters, as they were when the optimizer was new."""

    def __init__(self, group: dict[str, Any], state: OptimizerState) -> None:
        self._group = group
        self._state = state
        self._size = len(group)
        self._parameters = list(group["params"])

        # Numbers and texts need no copy, which most groups are spared by this.
        self._plain: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        for name, value in settings_of(group).items():
            if _is_unchanging(value):
                self._plain[name] = value
            else:
                self._others[name] = state.copied(name, value)

    def restore(self) -> None:
        """Give the group its first parameters and settings; settings added since are removed."""
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
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, which are all but its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps in attributes that torch does not give it; no modules."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_TORCH and not isinstance(value, nn.Module)
    }


def flat_slots(optimizer: Optimizer) -> dict[str, bool] | None:
    """Return which parts of an optimizer's state are numbers for its parameters' elements.

    This is found by one step of a copy of the optimizer, on copies of its own parameters: an
    optimizer may refuse others.

    Returns:
        For each part by name, whether it has the shape of its parameter; otherwise it is a single
        number. Empty if the optimizer keeps nothing. None if it keeps anything else, such as
        factors of other shapes, settings that its steps change, or attributes of its own.
    """
    twin = _twin(optimizer)
    if twin is None or _wrapped_optimizers(optimizer):
        return None

    if not _steps_change_state_alone(twin):
        return None

    parameters = parameters_of(twin)
    if not set(parameters).issuperset(twin.state):
        return None

    parts_of_parameters = []
    for p in parameters:
        if p.requires_grad:
            parts = _flat_parts(twin.state.get(p, {}), p)
            if parts is None:
                return None
            parts_of_parameters.append(parts)

    slots: dict[str, bool] = {}
    for parts in parts_of_parameters:
        for name, is_shaped in parts.items():
            slots[name] = slots.get(name, False) or is_shaped

    # Every parameter must have every part, because rows have room for all or none. SGD is an
    # exception: in a group without momentum, it takes a buffer of zeros for none.
    all_have_the_same = all(parts.keys() == slots.keys() for parts in parts_of_parameters)
    if not all_have_the_same and type(optimizer) is not torch.optim.SGD:
        return None
    return dict(sorted(slots.items()))


def _steps_change_state_alone(twin: Optimizer) -> bool:
    """Let an optimizer step; whether it has changed no settings and keeps no attributes."""
    before = [settings_of(group) for group in twin.param_groups]
    try:
        for p in parameters_of(twin):
            if p.requires_grad:
                p.grad = torch.ones_like(p)
        twin.step()
        after = [settings_of(group) for group in twin.param_groups]
        return not own_attributes(twin) and before == after
    except Exception:
        # It needs more than gradients, so nothing is known about it.
        return False


def _flat_parts(state: Mapping[str, Any], p: Tensor) -> dict[str, bool] | None:
    """Return the parts of a parameter's state, and whether each has the parameter's shape.

    None if a part is neither a float32 tensor of that shape nor a single float32 number.
    """
    parts: dict[str, bool] = {}
    for name, value in state.items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return None
        is_shaped = value.dim() > 0
        if is_shaped and value.shape != p.shape:
            return None
        parts[name] = is_shaped
    return parts


def _twin(optimizer: Optimizer) -> Optimizer | None:
    """Return a copy of an optimizer with copies of its parameters; None if it cannot be copied."""
    # Not deepcopy(optimizer): torch leaves an optimizer's own attributes out of that. And without
    # `step`, which a scheduler replaces: its copy would mark the original as having stepped.
    twin = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    try:
        vars(twin).update(deepcopy(attributes, {id(optimizer): twin}))
    except Exception:  # of a user's object
        return None
    return twin


def _wrapped_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in an optimizer's attributes, such as the one that Lookahead wraps."""
    leaves, _ = tree_flatten(list(own_attributes(optimizer).values()))
    return [leaf for leaf in leaves if isinstance(leaf, Optimizer) and leaf is not optimizer]


def _are_copies(leaves: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether tensors are copies of all parameters.

    If all parameters are constants, equal values are no evidence: an average that begins with zeros
    is no copy of biases that begin with zeros.
    """
    if len(leaves) != len(parameters):
        return False

    any_varied = False
    for leaf, p in zip(leaves, parameters, strict=True):
        if leaf is p or not isinstance(leaf, Tensor):
            return False
        if leaf.shape != p.shape or leaf.dtype != p.dtype or not torch.equal(leaf, p):
            return False
        if p.numel() > 1 and (p != p.flatten()[0]).any():
            any_varied = True
    return any_varied


def _is_unchanging(value: Any) -> bool:
    """Return whether a value cannot be changed in place, so that it needs no copy."""
    if isinstance(value, tuple):
        return all(_is_unchanging(item) for item in value)
    return isinstance(value, _UNCHANGING)


def _is_outside(value: Any) -> bool:
    """Return whether an attribute holds optimizers or functions, which are no values."""
    leaves, _ = tree_flatten(value)
    return any(isinstance(leaf, Optimizer) or callable(leaf) for leaf in leaves)


def _on(device: torch.device, value: Any) -> Any:
    """Move tensors to the parameters' device, in any containers.

    Single numbers stay where they are: most optimizers keep theirs on the host.
    """
    leaves, structure = tree_flatten(value)
    moved = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            leaf = leaf.to(device)
        moved.append(leaf)
    return tree_unflatten(moved, structure)
