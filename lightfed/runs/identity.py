"""Which configurations are of the same run, so that one may go on where the other was stopped."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Of the trainer's keys only those that the figures depend on: a run may be made longer, go on with
# another number of ranks, or under other callbacks.
_TRAINER = (
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)


def config_digest(options: Mapping[str, Any]) -> str:
    """16 hexadecimal digits.

    Args:
        options: of a sub-command, as parsed, with sections trainer, model and data.
    """
    trainer = {key: options["trainer"].get(key) for key in _TRAINER}
    told = {"model": options["model"], "data": _placeless(options["data"]), "trainer": trainer}
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _placeless(data: Any) -> Any:
    """Without the folder of a data set: jobs copy it to disks of their nodes."""
    if isinstance(data, Mapping):
        return {key: _placeless(value) for key, value in data.items() if key != "root"}
    return data
