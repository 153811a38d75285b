"""An estimate of the memory that training a client takes, for packs and for fitting models."""

import lightning.pytorch as L

from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.group_state import GroupState
from lightfed.models.build import blank
from lightfed.models.trials import on_trial
from lightfed.state.costs import activation_bytes
from lightfed.utils.torch_private import _ConvNd

# Rows in work at once: the values, copies of them, gradients, and two moments.
_ROWS = 6

# Bytes kept for the backward pass, with gradients, by byte of activations. Convolutions also keep
# their columns.
_KEPT = 1.5
_KEPT_WITH_COLUMNS = 5.0

_FLOAT_BYTES = 4


def client_bytes(module: L.LightningModule, state: GroupState, data: FederatedDataModule) -> float:
    """Estimate the bytes that a client takes in a session, in a pack or on a device of its own.

    Args:
        module: A module of the group; a copy of it runs on two blank samples.
        state: The group of the client.
        data: Gives the number of samples in the largest batch.
    """
    sample = blank(data, samples=2).to(state.store.device)
    try:
        with on_trial(module, sample.device) as trial:
            batch_bytes = data.largest_batch * activation_bytes(trial, sample)
    except NotImplementedError:  # a module without a forward: only its rows are known
        batch_bytes = 0.0

    convolves = any(isinstance(part, _ConvNd) for part in module.modules())
    kept = _KEPT_WITH_COLUMNS if convolves else _KEPT
    return _FLOAT_BYTES * state.layout.size * _ROWS + kept * batch_bytes
