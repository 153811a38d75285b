"""What a module and its callbacks keep in Python attributes, which no row holds.

A rank trains its clients in one module. What a client leaves there belongs to it: the next client
finds the attributes as they were before the first session. So does the client itself in its next
session, unless the run keeps the optimizers of clients (`model.keep_optimizer`).
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightfed.lightning_fits.optimizer_states import from_bytes, to_bytes
from lightfed.models.attributes import attributes, changed
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden

log = logging.getLogger(__name__)

Values = dict[str, dict[str, Any]]  # the values of attributes, by their owner and their name

# What every module has: its parameters, hooks, mode and Trainer.
_OF_EVERY_MODULE = vars(L.LightningModule()).keys() | {"log", "log_dict", "prepare_data_per_node"}
# Packages whose modules keep nothing in attributes from step to step.
_KEEP_NOTHING = ("lightfed", "torch", "torchvision", "torchmetrics")
# Classes of values that belong to the run or to the code, and not to a client.
_OUTSIDE = (Optimizer, L.Trainer, L.LightningDataModule, Logger, FunctionType, MethodType, type)


class Attributes:
    """Where a client's attributes are kept between its sessions.

    Args:
        store: The saved attributes by client, (N,) of uint8. None if a client begins each of its
            sessions with new ones.
        client: The client.
    """

    def __init__(self, store: Any, client: int) -> None:
        self.store = store
        self.client = client


class PythonState:
    """Gives every session of a group the attributes that belong to its client.

    Args:
        module: The module of the group.
        callbacks: Callbacks that act on its steps.
        key: The configuration key of the group's model, for errors.
        always: Whether sessions are watched from the first on. Otherwise they are watched only if
            the first one has changed an attribute: a copy takes as long as some steps of a small
            network.

    Attributes:
        active: Whether sessions are watched.
    """

    def __init__(
        self,
        module: L.LightningModule,
        callbacks: Sequence[Callback],
        key: str,
        *,
        always: bool,
    ) -> None:
        self._module = module
        self._callbacks = callbacks
        self._key = key
        self._always = always
        self._new: Values | None = None  # the attributes as they were before the first session
        self._before: Mapping[str, bytes] | None = None  # to compare, until the first one has ended
        self._uncopied: set[str] = set()  # full names of attributes that cannot be copied
        self.active = True

    def begin(self, kept: Attributes | None) -> None:
        """Give the session that begins what belongs to its client."""
        if not self.active:
            return
        if self._new is None:
            self._before = attributes(self._module)
            self._new = self._copied()
        if kept is not None and kept.store is not None and kept.client in kept.store:
            self._put(from_bytes(kept.store[kept.client]))

    def end(self, kept: Attributes | None) -> None:
        """Keep what belongs to the client of a session that has ended, and leave nothing of it."""
        if not self.active:
            return

        if self._before is not None:
            changed_names = changed(self._module, self._before)
            self._before = None
            self._warn_of_uncopied(changed_names)

            # A run that was stopped and goes on may have kept some, although this first session of
            # the process changes none.
            some_are_kept = kept is not None and bool(kept.store)
            self.active = self._always or bool(changed_names) or some_are_kept
            if not self.active:
                self._new = None
                return

        if kept is not None and kept.store is not None:
            values = self._read(to_keep=True)
            kept.store[kept.client] = to_bytes(values, self._key, self._describe)
        assert self._new is not None
        self._put(self._new)

    def _warn_of_uncopied(self, changed_names: Sequence[str]) -> None:
        """Warn of attributes that steps change and that cannot be copied for each client."""
        shared = [name for name in changed_names if name in self._uncopied]
        if shared:
            log.warning(
                "%s: its steps change %s, which the next client then sees; "
                "keep what belongs to a client in buffers (register_buffer)",
                type(self._module).__name__, ", ".join(shared),
            )  # fmt: skip

    def _owners(self) -> dict[str, Any]:
        """Return what has attributes, by a name: parts of the module, and callbacks."""
        owners: dict[str, Any] = {}
        for path, part in self._module.named_modules():
            package = type(part).__module__.partition(".")[0]
            if not isinstance(part, Metric) and package not in _KEEP_NOTHING:
                owners[path or "the module"] = part
        for position, callback in enumerate(self._callbacks):
            owners[f"callback {position}"] = callback
        return owners

    def _read(self, *, to_keep: bool = False) -> Values:
        """Return the attributes of all owners.

        Args:
            to_keep: Whether a client will keep them. Then a callback with a `state_dict` gives that
                instead.
        """
        values_of: Values = {}
        for owner_name, owner in self._owners().items():
            is_callback = isinstance(owner, Callback)
            if to_keep and is_callback and is_overridden("state_dict", owner, Callback):
                values_of[owner_name] = {"state_dict": owner.state_dict()}
                continue

            values = {}
            for name in sorted(vars(owner).keys() - _OF_EVERY_MODULE):
                value = vars(owner)[name]
                if not self._belongs_to_no_client(value):
                    values[name] = value
            if values:
                values_of[owner_name] = values
        return values_of

    def _belongs_to_no_client(self, value: Any) -> bool:
        """Whether a value is a part of the live module, or of the run."""
        if isinstance(value, nn.Module):
            return any(value is part for part in self._module.modules())
        if isinstance(value, nn.Parameter):
            return any(value is parameter for parameter in self._module.parameters())
        if isinstance(value, Tensor) and value.grad_fn:
            return True  # with the graph of a step that is over, it is of no use to another
        return isinstance(value, _OUTSIDE)

    def _copied(self) -> Values:
        """Return copies of the attributes.

        Raises:
            UserError: An attribute cannot be copied, and sessions are always watched. Otherwise it
                is noted, and all clients share it.
        """
        copies_of: Values = {}
        for owner_name, values in self._read().items():
            copies_of[owner_name] = {}
            for name, value in values.items():
                try:
                    copies_of[owner_name][name] = deepcopy(value, self._memo())
                except Exception as error:  # raised by a user's object
                    if not self._always:
                        self._uncopied.add(_full_name(owner_name, name))
                        continue
                    owner = self._owners()[owner_name]
                    found = (
                        f"{name} of {type(owner).__name__}, a {type(value).__name__}, which "
                        "cannot be copied for each client"
                    )
                    fix = "make it where it is used, or keep it outside of the class"
                    raise UserError(self._key, found, fix) from error
        return copies_of

    def _memo(self) -> dict[int, Any]:
        """Return the memo with which `deepcopy` does not copy the live module and the run."""
        shared: list[Any] = [
            *self._module.modules(),
            *self._callbacks,
            *self._module.parameters(),
            *self._module.buffers(),
        ]
        trainer: Any = self._module._trainer
        if trainer is not None:
            shared += [trainer, trainer.datamodule, *trainer.loggers]
        return {id(thing): thing for thing in shared if thing is not None}

    def _put(self, values_of: Values) -> None:
        """Give all owners copies of these attributes, and take from them those that were added."""
        for owner_name, owner in self._owners().items():
            values = values_of.get(owner_name, {})
            if "state_dict" in values and isinstance(owner, Callback):
                owner.load_state_dict(deepcopy(values["state_dict"], self._memo()))
                continue

            for name in sorted(vars(owner).keys() - _OF_EVERY_MODULE - values.keys()):
                is_added = self._is_added(owner_name, name)
                if is_added and not self._belongs_to_no_client(vars(owner)[name]):
                    del vars(owner)[name]
            for name, value in values.items():
                vars(owner)[name] = deepcopy(value, self._memo())

    def _is_added(self, owner_name: str, name: str) -> bool:
        """Whether an owner did not have an attribute before the first session."""
        if self._new is None or _full_name(owner_name, name) in self._uncopied:
            return False
        return name not in self._new.get(owner_name, {})

    def _describe(self) -> str:
        """Return the names of the attributes, for an error."""
        names = []
        for owner_name, values in self._read().items():
            names += [f"{owner_name}.{name}" for name in values]
        return ", ".join(names)[:200]


def _full_name(owner: str, name: str) -> str:
    """Return the name of an attribute as `lightfed.models.attributes` gives it."""
    return name if owner == "the module" else f"{owner}.{name}"
