"""What the models of a federation predict, outside of its rounds."""

from typing import Any

import lightning.pytorch as L

from lightfed.api.fleet import Fleet
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden


def deployed(fleet: Fleet, client: int | None) -> L.LightningModule | None:
    """The model that a client deploys, or the server's; None if another rank has the client's.

    A UserError if the algorithm has no such model.
    """
    algorithm = fleet.algorithm
    if client is None:
        which, module = "server", algorithm.evaluated_server(fleet, 0)
    elif algorithm.stateful and fleet.home(client) != fleet.ranks.rank:
        return None
    else:
        which, module = "client at rest", algorithm.evaluated(fleet, client)
    if module is None:
        found = f"{type(algorithm).__name__} has no model of the {which}"
        raise UserError("predict", found, "give another client")
    module.eval()
    return module


def outputs(module: L.LightningModule, batch: Any, *args: Any) -> Any:
    """By the module's own `predict_step`, if it has one, or its `forward` without the labels."""
    if is_overridden("predict_step", module):
        return module.predict_step(batch, *args)
    return module(batch[0] if isinstance(batch, list | tuple) else batch)
