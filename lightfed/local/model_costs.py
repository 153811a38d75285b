"""Tries a client's model on a batch: refuses one that cannot take the data, and counts its FLOPs.

Where the cost of a model is unknown, as of one without a `forward`, its FLOPs are 0: it trains, and
only figures about FLOPs and virtual time lack it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightfed.local.logbook import batch_size
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule, NetworkClient
from lightfed.models.split import evaluating
from lightfed.models.trials import on_trial
from lightfed.state.costs import forward_flops, passes
from lightfed.utils.errors import UserError, reason
from lightfed.utils.lightning_private import is_overridden
from lightfed.utils.rng import seeded

# A backward pass through all layers costs twice the forward pass.
_PASSES_WITHOUT_FROZEN_LAYERS = 3.0


@dataclass(frozen=True)
class ModelCosts:
    """The cost of training a model on one sample.

    Attributes:
        flops: FLOPs of a forward pass; 0 if they are unknown.
        passes: Cost of a training step in forward passes: 3, or fewer with frozen layers.
    """

    flops: float = 0.0
    passes: float = _PASSES_WITHOUT_FROZEN_LAYERS


def costs_of(
    module: L.LightningModule,
    data: DataSpec,
    *,
    key: str,
    has_frozen_layers: bool,
    has_transfer_hooks: bool,
    trainer: L.Trainer | None,
) -> ModelCosts:
    """Try a model, and count what it costs.

    Args:
        module: On the CPU; copies of it run.
        data: Shape of the samples.
        key: Of the model in the configuration, for errors.
        has_frozen_layers: Some of its parameters are not trained.
        has_transfer_hooks: Hooks that transfer batches may change their shape, so that a forward
            pass that fails here says nothing.
        trainer: What a step may ask for as `self.trainer`, unless the module has one.

    Raises:
        UserError: The model cannot take such samples, or its output has another shape than the
            labels require.
    """
    if data.task == "columns":
        return _costs_of_a_step(
            module, data, key=key, has_frozen_layers=has_frozen_layers, trainer=trainer
        )

    flops = _forward_flops(module, data, key=key, has_transfer_hooks=has_transfer_hooks)
    costs = ModelCosts(flops)
    if has_frozen_layers and flops:
        with suppress(Exception), on_trial(module) as trial:
            costs = ModelCosts(flops, passes(trial, blank(data, samples=2), flops))
    return costs


def _forward_flops(
    module: L.LightningModule, data: DataSpec, *, key: str, has_transfer_hooks: bool
) -> float:
    """Run a model on two blank samples, and return the FLOPs of one."""
    has_forward = isinstance(module, NetworkClient) or is_overridden("forward", module)
    if not has_forward:
        return 0.0
    if not module.automatic_optimization:
        # It has several networks, as a GAN has: what its forward pass takes is unknown.
        return 0.0

    samples = blank(data, samples=2)
    try:
        with on_trial(module) as trial, torch.no_grad(), evaluating(trial):
            output = trial(samples)
    except NotImplementedError:
        return 0.0
    except Exception as error:  # of the user's forward
        if has_transfer_hooks:
            return 0.0
        shape = tuple(data.input_shape)
        raise UserError(
            key,
            f"it cannot take samples of shape {shape} ({reason(error)})",
            "use a model, or init_args, that can",
        ) from error
    if isinstance(module, NetworkClient):
        _check_output(output, data, key)

    # The model takes such samples, but perhaps not where operations are counted: then its cost is
    # unknown. Losses may also need gradients, or layers that are used in training only.
    flops = 0.0
    with suppress(Exception), on_trial(module) as trial:
        flops = forward_flops(trial, samples)
    if isinstance(module, ClientModule) and hasattr(module.net, "losses"):
        # Networks that are trained but not evaluated count, too.
        labels = torch.zeros(2, dtype=torch.int64)
        with suppress(Exception), on_trial(module) as trial:
            net: Any = trial.net
            flops = forward_flops(net, samples, lambda x: net.losses(x, labels))
    return flops


def _check_output(output: Any, data: DataSpec, key: str) -> None:
    """Refuse a network whose output for two samples is no tensor of logits of the right shape."""
    if not isinstance(output, Tensor):
        found = f"its forward returns a {type(output).__name__}"
        raise UserError(key, found, "return a tensor of logits")

    positions = tuple(data.input_shape) if data.task == "masked_lm" else ()
    expected = (2, *positions, data.num_classes)
    if output.shape != expected:
        each = "target" if data.task == "regression" else "class"
        raise UserError(
            key,
            f"its output for two samples has shape {tuple(output.shape)}",
            f"it must be {expected}, a number for each {each}",
        )


def _costs_of_a_step(
    module: L.LightningModule,
    data: DataSpec,
    *,
    key: str,
    has_frozen_layers: bool,
    trainer: L.Trainer | None,
) -> ModelCosts:
    """Run the step of a model on the two longest samples of named columns, and return its cost.

    Only a step of the user's knows what to do with named columns.
    """
    batch = data.longest()
    step = partial(_step_on_trial, trainer=trainer)
    try:
        with on_trial(module) as trial, torch.no_grad(), evaluating(trial):
            step(trial, batch)
    except NotImplementedError:
        return ModelCosts()
    except Exception as error:  # of the user's step
        raise UserError(
            key,
            f"its training_step cannot take a batch of {_shapes(batch)} ({reason(error)})",
            "use a model, or init_args, that can, or a smaller max_length of the data set",
        ) from error

    # As above: the step runs, but perhaps not where operations are counted.
    with suppress(Exception), on_trial(module) as trial:
        run: Callable[[Any], Any] = partial(step, trial)
        samples = batch_size(batch)
        flops = forward_flops(trial, batch, run, samples)
        if not has_frozen_layers:
            return ModelCosts(flops)
        return ModelCosts(flops, passes(trial, batch, flops, run, samples))
    return ModelCosts()


def _step_on_trial(trial: L.LightningModule, batch: Any, *, trainer: L.Trainer | None) -> Any:
    """Return the loss of a batch, with the draws of a fixed seed; nothing is logged."""
    trial.trainer = trial._trainer or trainer
    vars(trial).update(log=ignore, log_dict=ignore)
    with seeded(0):
        output = trial.training_step(batch, 0)
    return output["loss"] if isinstance(output, dict) else output


def _shapes(batch: Any) -> str:
    """Return the names, or positions, and shapes of the parts of a batch, for an error."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return ", ".join(f"{name} {tuple(part.shape)}" for name, part in named)


def ignore(*_: Any, **__: Any) -> None:
    """Stand in for `self.log` where nothing is to be logged."""
