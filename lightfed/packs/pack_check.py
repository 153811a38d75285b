"""The trial of a user's module: a few clients train at once, and each alone, and are compared.

`vmap` runs a step for several clients without knowing what it does. A step that mixes clients,
keeps something in Python or reads the value of a tensor would give other models than a client alone
gets. So a module whose layers are not all known is tried before it is packed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.group_state import GroupState
from lightfed.local.model_costs import ignore
from lightfed.local.session import Autocast
from lightfed.models.attributes import attributes
from lightfed.packs import stacked
from lightfed.packs.forward import PackForward
from lightfed.packs.known_layers import shared_parts
from lightfed.state.optimizer_state import settings_of
from lightfed.state.rows import LiveModule, Row
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import python_states, seeded
from lightfed.utils.torch_private import tree_flatten

# The clients of a trial, and for each of its steps the sizes of their batches. If the samples of a
# batch are not mixed, batches may be uneven: the smaller ones are filled up.
CLIENTS = 3
_EVEN = ((4, 4, 4), (2, 2, 2), (3, 3, 3))
_UNEVEN = ((4, 4, 4), (2, 2, 2), (4, 3, 2))

# The relative difference that rounding may make, in full precision and under autocast.
_ROUNDING = 1e-4
_ROUNDING_OF_AUTOCAST = 0.05

# What a step calls to seed torch's generators.
_SEEDING_FUNCTIONS = (
    (torch, "manual_seed"),
    (torch, "seed"),
    (torch.random, "manual_seed"),
    (torch.random, "seed"),
)


def batch_sizes(*, even: bool) -> list[int]:
    """Return the sizes of the batches in a trial, ascending."""
    steps = _EVEN if even else _UNEVEN
    return sorted({size for sizes in steps for size in sizes})


def difference_in_packs(
    module: L.LightningModule,
    state: GroupState,
    data: FederatedDataModule,
    context: Autocast | None,
    *,
    even: bool,
) -> str:
    """Return how steps of a few clients at once differ from those of each alone; empty if not.

    Three batches of other sizes are trained on, in copies of the module. What is compared: every
    gradient and buffer, what the module keeps in Python, and the settings of its optimizers.

    A pack draws other numbers for each client (`randomness="different"`). So the trial has two
    parts: one with the draws that a client has alone ("same"); and, where a client alone draws
    nothing that a seed changes, one that draws as a pack does.

    Args:
        module: A copy of the group's module.
        state: The group.
        data: Has the training samples.
        context: Autocast of the Trainer's precision; None in full precision.
        even: Whether all batches of a step need the same size, as in `Packing`.
    """
    obstacle = shared_parts(module)
    if obstacle:
        return obstacle

    # The vector of padding has no gradient in a client alone. Under `vmap` it would have one.
    if any(getattr(layer, "padding_idx", None) is not None for layer in module.modules()):
        return "vmap would train the padding of an embedding"

    new_trial = partial(_Trial, module, state, data, context, even=even)
    try:
        with seeded(0, state.store.device):
            difference = new_trial().difference("same")
            if not difference and new_trial().sets_a_seed():
                difference = "its step sets the seed of a generator"
            return difference or _difference_of_draws(new_trial)
    except UserError:
        raise
    except Exception as error:  # whatever a user's step does that `vmap` cannot follow
        return reason(error)[:200]


def _difference_of_draws(new_trial: Callable[[], "_Trial"]) -> str:
    """Return how a pack with its own draws differs from a client alone that draws nothing."""
    if new_trial().draws():
        return ""

    difference = new_trial().difference("different")
    return f"it draws from a seed of its own: {difference}" if difference else ""


class _NoTrainer:
    """Stands in for `self.trainer` in a trial: a Trainer says something else to each client."""

    def __getattr__(self, name: str) -> Any:
        # Not an AttributeError: within a property it would be taken for a missing property.
        raise RuntimeError(f"its step asks the Trainer for {name}")


class _Trial:
    """A few clients with different models, and three batches of each; arguments as above."""

    def __init__(
        self,
        module: L.LightningModule,
        state: GroupState,
        data: FederatedDataModule,
        context: Autocast | None,
        *,
        even: bool,
    ) -> None:
        self._module_of_pack = _copy_for_trial(module)
        self._module_alone = _copy_for_trial(module)
        self._context = context
        self._layout = state.layout
        self._sizes = _EVEN if even else _UNEVEN
        self._rows = _different_rows(state)

        # For each step inputs and labels, (CLIENTS, B, ...). If there are too few samples, they
        # are used again.
        largest = [max(sizes) for sizes in self._sizes]
        x, y = data.train_batch(0, CLIENTS * sum(largest))
        self._batches: list[tuple[Tensor, Tensor]] = []
        first = 0
        for size in largest:
            count = CLIENTS * size
            positions = torch.arange(first, first + count, device=x.device) % len(x)
            inputs = x[positions].unflatten(0, (CLIENTS, size))
            labels = y[positions].unflatten(0, (CLIENTS, size))
            self._batches.append((inputs, labels))
            first += count

    def sets_a_seed(self) -> bool:
        """Return whether a step of a client alone sets the seed of torch's generators.

        In a pack the client would then draw what all others draw.
        """
        calls: list[str] = []

        def note_call(*_: Any) -> Any:
            calls.append("a seed")
            return torch.default_generator.manual_seed(0)

        originals = [getattr(home, name) for home, name in _SEEDING_FUNCTIONS]
        try:
            for home, name in _SEEDING_FUNCTIONS:
                setattr(home, name, note_call)
            self._losses_alone(seed=0)
        finally:
            for (home, name), original in zip(_SEEDING_FUNCTIONS, originals, strict=True):
                setattr(home, name, original)
        return bool(calls)

    def draws(self) -> bool:
        """Return whether a client's losses depend on the seed of its session."""
        return self._losses_alone(seed=0) != self._losses_alone(seed=1)

    def _losses_alone(self, seed: int) -> list[float]:
        """Return the losses of the first client alone."""
        module: Any = self._module_alone
        live = self._bound_alone(0)
        losses = []
        for index in range(len(self._batches)):
            batch = self._batch_of(0, index)
            with seeded(seed, batch[0].device), self._precision():
                loss = _loss_of(module.training_step(batch, index))
            losses.append(float(loss.detach()))
        live.unbind()
        live.restore()
        return losses

    def difference(self, randomness: str) -> str:
        """Return the first difference between the clients in a pack and each of them alone.

        Args:
            randomness: How the pack draws, as in `torch.func.vmap`.
        """
        module = self._module_of_pack
        forward = PackForward(module, self._layout, self._context)
        values = stacked.gather(self._layout, self._rows, module)
        for name, buffer in module.named_buffers():
            if name not in values:
                values[name] = torch.stack([buffer] * CLIENTS)
        leaves = [values[name].requires_grad_() for name in forward.trained]

        attributes_before = attributes(module)
        states_before = python_states()
        settings_before = _optimizer_settings(module)

        steps: list[dict[str, Tensor | None]] = []
        for index, (inputs, labels) in enumerate(self._batches):
            unequal_sizes = None
            if len(set(self._sizes[index])) > 1:
                unequal_sizes = torch.tensor(self._sizes[index], device=inputs.device)

            batch = (inputs.clone(), labels.clone())
            with seeded(index, inputs.device):
                states = python_states()
                losses, _, gradients = forward(
                    values, {}, leaves, batch, index, unequal_sizes, randomness=randomness
                )
                if python_states() != states:
                    return "its step draws from random or numpy"

            step: dict[str, Tensor | None] = {"the loss": losses}
            step |= _named_gradients(forward.trained, gradients)
            for name, value in values.items():
                if name in forward.buffers:
                    step[name] = value.detach().clone()
            steps.append(step)

        if attributes(module) != attributes_before or python_states() != states_before:
            return "its step keeps numbers or tensors in attributes that are no buffers"
        if _optimizer_settings(module) != settings_before:
            return "its step changes the settings of its optimizer"

        for client in range(CLIENTS):
            difference = self._difference_of(client, steps)
            if difference:
                return difference
        return ""

    def _difference_of(
        self, client: int, steps_of_pack: Sequence[Mapping[str, Tensor | None]]
    ) -> str:
        """Return the first tensor of a client that differs from what the pack's steps gave."""
        module: Any = self._module_alone
        initial_buffers = {
            name: buffer.clone() for name, buffer in self._module_of_pack.named_buffers()
        }
        live = self._bound_alone(client)
        in_row = {entry.name for entry in [*self._layout.floats, *self._layout.integers]}
        for name, buffer in module.named_buffers():
            if name not in in_row:
                buffer.copy_(initial_buffers[name])

        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        for index, step_of_pack in enumerate(steps_of_pack):
            batch = self._batch_of(client, index)
            with seeded(index, batch[0].device), self._precision():
                output = module.training_step(batch, index)
            loss = _loss_of(output)
            gradients = torch.autograd.grad(loss.reshape(()), live.trainable, allow_unused=True)

            step: dict[str, Tensor | None] = {"the loss": loss.detach()}
            step |= _named_gradients(trained, gradients)
            step |= {name: buffer.clone() for name, buffer in module.named_buffers()}

            largest = [float(g.abs().max()) for g in gradients if g is not None]
            scale = max(largest, default=1.0)
            for name, alone in step.items():
                of_all = step_of_pack.get(name)
                packed = None if of_all is None else of_all[client]
                if not self._are_close(alone, packed, scale):
                    return f"in a pack {name} differs from that of a client alone"

        live.unbind()
        return ""

    def _bound_alone(self, client: int) -> LiveModule:
        """Bind the module that trains alone to a copy of a client's row."""
        live = LiveModule(self._module_alone, self._layout)
        floats = self._rows.floats[client].clone()
        integers = self._rows.integers[client].clone()
        live.bind(Row(floats, integers))
        return live

    def _batch_of(self, client: int, index: int) -> tuple[Tensor, Tensor]:
        """Return a copy of a client's batch in a step."""
        inputs, labels = self._batches[index]
        size = self._sizes[index][client]
        return inputs[client, :size].clone(), labels[client, :size].clone()

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context of a step alone."""
        return torch.enable_grad() if self._context is None else self._context()

    def _are_close(self, alone: Tensor | None, packed: Tensor | None, scale: float) -> bool:
        """Return whether two tensors are equal except for rounding.

        Args:
            alone: Of a client alone; None for a gradient of a parameter that is not used.
            packed: Of the same client in a pack.
            scale: The largest gradient of any parameter. All gradients are sums, so that small
                ones are rounded as larger ones are.
        """
        if alone is None or packed is None:
            return alone is packed

        one = alone.double().flatten()
        other = packed.double().flatten()
        largest = float(one.abs().max()) if one.numel() else 0.0
        size = max(largest, scale / 100)
        limit = _ROUNDING if self._context is None else _ROUNDING_OF_AUTOCAST
        return torch.allclose(one, other, rtol=limit, atol=limit * size, equal_nan=True)


def _copy_for_trial(module: L.LightningModule) -> L.LightningModule:
    """Return a copy in training mode, which logs nothing and has no Trainer."""
    copy = deepcopy(module).train()
    copy.log = ignore  # type: ignore[method-assign]
    copy.log_dict = ignore  # type: ignore[method-assign]
    copy.trainer = _NoTrainer()  # type: ignore[assignment]
    return copy


def _different_rows(state: GroupState) -> Row:
    """Return rows of clients whose parameters differ by known factors."""
    factors = 1 + torch.arange(CLIENTS)[:, None] / 16
    floats = state.initial.floats.repeat(CLIENTS, 1)
    floats[:, : state.layout.parameter_size] *= factors
    integers = state.initial.integers.repeat(CLIENTS, 1)
    return Row(floats, integers).to(state.store.device)


def _loss_of(output: Any) -> Tensor:
    """Return the loss in what a `training_step` returns."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def _optimizer_settings(module: nn.Module) -> list[dict[str, Any]]:
    """Return the settings, such as rates, of the optimizers that a module holds in attributes."""
    held = []
    for part in module.modules():
        for value in vars(part).values():
            if not isinstance(value, nn.Module):
                held.append(value)

    # A list or dictionary of optimizers counts too.
    leaves, _ = tree_flatten(held)
    settings = []
    for leaf in leaves:
        if isinstance(leaf, Optimizer):
            for group in leaf.param_groups:
                settings.append(dict(settings_of(group)))
    return settings


def _named_gradients(
    names: Sequence[str], gradients: Sequence[Tensor | None]
) -> dict[str, Tensor | None]:
    """Return gradients by the name that a message gives them."""
    return {f"the gradient of {n}": g for n, g in zip(names, gradients, strict=True)}
