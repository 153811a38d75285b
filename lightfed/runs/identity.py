"""Identifies configurations of the same run, so that one can resume the other."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# The trainer's keys that results depend on. A run may be extended, or resumed with another number
# of ranks or other callbacks.
_TRAINER = (
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)


def config_digest(options: Mapping[str, Any]) -> str:
    """Digest of a configuration: 16 hexadecimal digits.

    Args:
        options: of a sub-command, as parsed, with sections trainer, model and data.
    """
    trainer = {key: options["trainer"].get(key) for key in _TRAINER}
    relevant = {"model": options["model"], "data": _placeless(options["data"]), "trainer": trainer}
    text = json.dumps(relevant, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _placeless(data: Any) -> Any:
    """The data section without the folder of a data set: jobs copy it to local disks."""
    if isinstance(data, Mapping):
        return {key: _placeless(value) for key, value in data.items() if key != "root"}
    return data
