"""What a module and its callbacks keep in Python attributes, which no row holds.

A rank trains its clients in one module. What a client leaves there belongs to it: the next client
finds the attributes as they were before the first session, and so does the client itself in its
next session, unless the run keeps its optimizers (`model.keep_optimizer`).
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

Values = dict[str, dict[str, Any]]  # attributes by owner and name

# Of every module: its parameters, hooks, mode and Trainer.
_NAMES = vars(L.LightningModule()).keys() | {"log", "log_dict", "prepare_data_per_node"}
_KEEP_NOTHING = ("lightfed", "torch", "torchvision", "torchmetrics")  # packages
_OUTSIDE = (Optimizer, L.Trainer, L.LightningDataModule, Logger, FunctionType, MethodType, type)


class Attributes:
    """Where a client's attributes are between its sessions.

    Args:
        store: By client, (N,) uint8; None if they are as new in every session.
        client: Whose they are.
    """

    def __init__(self, store: Any, client: int) -> None:
        self.store, self.client = store, client


class PythonState:
    """Gives every session of a group the attributes that belong to its client.

    Args:
        module: Of the group.
        callbacks: That act on its steps.
        key: Of the group's model in the configuration.
        always: Sessions are watched from the first on. Otherwise only if the first one has changed
            an attribute: a copy takes as long as some steps of a small network.
    """

    def __init__(
        self,
        module: L.LightningModule,
        callbacks: Sequence[Callback],
        key: str,
        *,
        always: bool,
    ) -> None:
        self._module, self._callbacks, self._key = module, callbacks, key
        self._always = always
        self._new: Values | None = None  # as they were before the first session
        self._before: Mapping[str, bytes] | None = None  # until the first session has ended
        self._uncopied: set[str] = set()
        self.active = True

    def begin(self, kept: Attributes | None) -> None:
        """A session begins: give it what belongs to its client."""
        if not self.active:
            return
        if self._new is None:
            self._before = attributes(self._module)
            self._new = self._copied()
        if kept is not None and kept.store is not None and kept.client in kept.store:
            self._put(from_bytes(kept.store[kept.client]))

    def end(self, kept: Attributes | None) -> None:
        """A session has ended: keep what belongs to its client, and leave nothing of it."""
        if not self.active:
            return
        if self._before is not None:
            names, self._before = changed(self._module, self._before), None
            others = kept is not None and bool(kept.store)  # clients have kept some before a stop
            self.active = self._always or bool(names) or others
            self._warn(names)
            if not self.active:
                self._new = None
                return
        if kept is not None and kept.store is not None:
            kept.store[kept.client] = to_bytes(self._read(to_keep=True), self._key, self._names)
        assert self._new is not None
        self._put(self._new)

    def _warn(self, names: Sequence[str]) -> None:
        """Say what steps change and no copy can be made of: the next client finds it."""
        left = [name for name in names if name in self._uncopied]
        if left:
            log.warning(
                "%s: its steps change %s, and a client finds there what another has left; "
                "keep what belongs to a client in buffers (register_buffer)",
                type(self._module).__name__, ", ".join(left),
            )  # fmt: skip

    def _owners(self) -> dict[str, Any]:
        """What has attributes, by its name: parts of the module, and callbacks."""
        owners: dict[str, Any] = {}
        for path, part in self._module.named_modules():
            package = type(part).__module__.partition(".")[0]
            if not isinstance(part, Metric) and package not in _KEEP_NOTHING:
                owners[path or "the module"] = part
        for position, callback in enumerate(self._callbacks):
            owners[f"callback {position}"] = callback
        return owners

    def _read(self, *, to_keep: bool = False) -> Values:
        """The attributes of all owners; `to_keep` takes a callback's `state_dict` if it has one."""
        found: Values = {}
        for name, owner in self._owners().items():
            own_state = isinstance(owner, Callback) and is_overridden("state_dict", owner, Callback)
            if to_keep and own_state:
                found[name] = {"state_dict": owner.state_dict()}
                continue
            own = {key: vars(owner)[key] for key in vars(owner).keys() - _NAMES}
            kept = {key: own[key] for key in sorted(own) if not self._stays(own[key])}
            if kept:
                found[name] = kept
        return found

    def _stays(self, value: Any) -> bool:
        """Whether a value belongs to no client: a part of the live module, or of the run."""
        if isinstance(value, nn.Module):
            return any(value is part for part in self._module.modules())
        if isinstance(value, nn.Parameter):
            return any(value is p for p in self._module.parameters())
        return isinstance(value, _OUTSIDE) or (isinstance(value, Tensor) and bool(value.grad_fn))

    def _copied(self) -> Values:
        """Copies of the attributes; those that cannot be copied are refused, or stay."""
        found: Values = {}
        for name, values in self._read().items():
            found[name] = {}
            for key, value in values.items():
                try:
                    found[name][key] = deepcopy(value, self._memo())
                except Exception as error:
                    if not self._always:
                        self._uncopied.add(_full(name, key))
                        continue
                    owner = self._owners()[name]
                    text = f"{key} of {type(owner).__name__}, a {type(value).__name__}, which "
                    text += "cannot be copied for each client"
                    fix = "make it where it is used, or keep it outside of the class"
                    raise UserError(self._key, text, fix) from error
        return found

    def _memo(self) -> dict[int, Any]:
        """For `deepcopy`: parts of the live module are not copied."""
        parts: list[Any] = [*self._module.modules(), *self._callbacks]
        parts += [*self._module.parameters(), *self._module.buffers()]
        trainer: Any = self._module._trainer
        parts += [] if trainer is None else [trainer, trainer.datamodule, *trainer.loggers]
        return {id(part): part for part in parts if part is not None}

    def _put(self, values: Values) -> None:
        """Give all owners copies of these attributes, and no others."""
        owners = self._owners()
        for name, owner in owners.items():
            own = values.get(name, {})
            if "state_dict" in own and isinstance(owner, Callback):
                owner.load_state_dict(deepcopy(own["state_dict"], self._memo()))
                continue
            for key in sorted(vars(owner).keys() - _NAMES - own.keys()):
                added = self._new is not None and key not in self._new.get(name, {})
                added = added and _full(name, key) not in self._uncopied
                if added and not self._stays(vars(owner)[key]):
                    del vars(owner)[key]
            for key, value in own.items():
                vars(owner)[key] = deepcopy(value, self._memo())

    def _names(self) -> str:
        """The attributes, for an error."""
        names = [f"{owner}.{key}" for owner, own in self._read().items() for key in own]
        return ", ".join(names)[:200]


def _full(owner: str, key: str) -> str:
    """The name of an attribute, as of `attributes`."""
    return key if owner == "the module" else f"{owner}.{key}"
