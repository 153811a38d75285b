"""What the models of a federation predict, outside of its rounds."""

from typing import Any

import lightning.pytorch as L

from lightfed.api.fleet import Fleet
from lightfed.state.rows import Rows
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden


def deployed(fleet: Fleet, client: int | None) -> Rows:
    """The model that a client deploys between rounds, or the server's.

    A UserError if the algorithm has no such model.
    """
    algorithm = fleet.algorithm
    kind, clients = ("global", []) if client is None else (algorithm.moments[0], [client])
    rows = algorithm.models(fleet, kind, clients)
    if rows is None:
        whose = "the server" if client is None else f"client {client}"
        found = f"{type(algorithm).__name__} gives {whose} no model"
        fix = "return one from its `models` to export, fine-tune or predict with"
        raise UserError("model.algorithm", found, fix)
    return rows


def predicted(fleet: Fleet, client: int | None, batch: Any, *args: Any) -> Any:
    """The outputs of the model that a client deploys, or the server's; None on other ranks."""
    if client is not None and fleet.algorithm.stateful and fleet.home(client) != fleet.ranks.rank:
        return None
    rows = deployed(fleet, client)
    with rows.bound(rows.clients[0]) as module:
        return _outputs(module, batch, *args)


def _outputs(module: L.LightningModule, batch: Any, *args: Any) -> Any:
    """By the module's own `predict_step`, if it has one, or its `forward` without the labels."""
    if is_overridden("predict_step", module):
        return module.predict_step(batch, *args)
    return module(batch[0] if isinstance(batch, list | tuple) else batch)
