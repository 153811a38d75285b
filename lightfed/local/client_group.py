"""Client groups as they are configured: the clients of one architecture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as L
from torch import nn

from lightfed.lightning_fits.hook_table import check_module
from lightfed.models.build import DataSpec, build_network, class_of, parameters_of
from lightfed.models.client_module import ClientModule, MaskedLanguageClient, Regressor
from lightfed.models.tensors import check_layers, check_memory, expand_buffers
from lightfed.utils.errors import UserError
from lightfed.utils.keys import LEVELS
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import derive_seed, seeded

_OUR_NETWORKS = "lightfed.networks."


@dataclass
class ClientGroup:
    """The clients that share one architecture.

    Attributes:
        count: Number of clients in the group.
        model: Network, or LightningModule, of these clients. `num_classes`, `input_shape` and
            `rate` are passed if its constructor accepts them.
        rate: Width of the model relative to the full one, in (0, 1]; passed to the model's
            constructor as `rate`. 1 if neither rate nor level is set.
        level: a to e for the rates 1, 1/2, 1/4, 1/8, 1/16; also the group's name in reports.
        name: Name in metrics and reports; by default the level, or the model's class with a width
            below 1, or the argument `rank`, appended.
    """

    count: int
    model: Callable[[], nn.Module]
    rate: float | None = None
    level: Literal["a", "b", "c", "d", "e"] | None = None
    name: str | None = None

    @property
    def width(self) -> float:
        """The width of the model relative to the full one, from `rate` or `level`."""
        if self.rate is not None:
            return self.rate
        if self.level is not None:
            return LEVELS[self.level]
        return 1.0

    @property
    def is_ours(self) -> bool:
        """Whether the network is one of this package, whose draws are seeded."""
        module = getattr(class_of(self.model), "__module__", "")
        return str(module).startswith(_OUR_NETWORKS)

    def check(self, position: int, *, least: int = 1) -> None:
        """Check the values.

        Args:
            position: Position among the groups, for errors.
            least: The smallest number of clients: 0 where clients are dealt to the groups later.

        Raises:
            UserError: A value cannot be used; it names the key of this group.
        """
        key = f"model.clients.{position}"
        if self.count < least:
            raise UserError(f"{key}.count", f"{self.count} clients", f"give at least {least}")
        if self.rate is not None and not 0 < self.rate <= 1:
            found = f"{self.rate} is outside (0, 1]"
            raise UserError(f"{key}.rate", found, "give a width ratio such as 0.5")
        if self.rate is not None and self.level is not None:
            found = f"both rate {self.rate} and level {self.level} are given"
            raise UserError(f"{key}.rate", found, "keep one")
        if isinstance(self.model, nn.Module):
            network = getattr(self.model, "_orig_mod", self.model)  # of torch.compile's wrapper
            raise UserError(
                f"{key}.model",
                f"a built {type(network).__name__}",
                "name a class (class_path and init_args), so that every rank builds its own; "
                "for torchvision's models: class_path: Torchvision, init_args: {name: resnet18}",
            )
        if self.width != 1.0 and "rate" not in parameters_of(self.model):
            of_width = "rate" if self.level is None else "level"
            raise UserError(
                f"{key}.{of_width}",
                f"a width of {self.width:g}, and {class_of(self.model).__name__} takes no rate",
                "give its constructor the argument rate, or each group init_args of its own",
            )

    def build(self, data: DataSpec, *, position: int, seed: int) -> L.LightningModule:
        """Build the group's module on the CPU.

        Its initial values are a function of (seed, position).

        Raises:
            UserError: The constructor of the model refuses its arguments, or the module is none
                that clients can train.
        """
        key = f"model.clients.{position}.model"
        with seeded(derive_seed(seed, "init", client=position)):
            network = build_network(self.model, data, rate=self.width, key=key)
        check_layers(network, key)
        check_memory(network, key)
        expand_buffers(network)

        if isinstance(network, L.LightningModule):
            _check_user_module(network, key)
            return network
        if data.task == "columns":
            raise UserError(
                key,
                f"{type(network).__name__} is a plain network, but the samples have named columns",
                "name a LightningModule whose training_step takes such batches",
            )
        if data.task == "masked_lm":
            return MaskedLanguageClient(network)
        if data.task == "regression":
            return Regressor(network)
        return ClientModule(network, num_classes=data.num_classes)


def group_names(groups: Sequence[ClientGroup]) -> list[str]:
    """Return the names of groups; a repeated name gets its position appended."""
    names: list[str] = []
    for position, group in enumerate(groups):
        name = group.name or group.level or _name_of_model(group) or str(position)
        if name in names:
            name = f"{name}-{position}"
        names.append(name)
    return names


def _name_of_model(group: ClientGroup) -> str:
    """Return the class of a group's model with its width or rank; "" if it has no name."""
    name = str(getattr(class_of(group.model), "__name__", ""))
    if not name.isidentifier():
        return ""  # such as a lambda
    if group.width != 1.0:
        name += f"-{group.width:g}"
    rank = getattr(group.model, "keywords", {}).get("rank")
    if rank is not None:
        name += f"-r{rank}"
    return name


def _check_user_module(module: L.LightningModule, key: str) -> None:
    """Refuse a LightningModule that cannot be trained, or that overrides a hook nobody calls."""
    if not is_overridden("training_step", module):
        found = f"{type(module).__name__} has no training_step"
        raise UserError(key, found, "define one that returns a batch's loss")
    check_module(module, key)
