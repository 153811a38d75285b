"""The digest of a run's data: runs on other data are other experiments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightfed.data.dataset import Samples
from lightfed.utils.keys import flat, key_of

# The samples at each end of a split that are a part of its digest. To read all would take as long
# as an epoch.
_ENDS = 64


class Contents(NamedTuple):
    """Digests of loaded data.

    Attributes:
        form: The digest of the form of a sample.
        samples: The digest of the form, of all labels, and of some samples.
    """

    form: str
    samples: str

    @classmethod
    def of(cls, train: Samples, test: Samples) -> "Contents":
        """Return the digests of two splits: of all labels, and of the samples at both ends."""
        forms: list[str] = []
        values: list[Tensor | None] = []
        for split in (train, test):
            forms.append(f"{tuple(split.x.shape[1:])} {split.x.dtype} {split.y.dtype}")
            values += [split.y, split.groups, split.x[:_ENDS], split.x[-_ENDS:]]
        for split in (train, test):
            if split.columns is None:
                continue
            for name, column in split.columns.tensors.items():
                forms.append(f"{name} {column.dtype} {tuple(column.shape[2:])}")
                values += [column[:_ENDS], column[-_ENDS:]]
            values += split.columns.lengths.values()

        form_bytes = [form.encode() for form in forms]
        value_bytes = [
            tensor.contiguous().numpy().tobytes() for tensor in values if tensor is not None
        ]
        return cls(form=_digest(*form_bytes), samples=_digest(*form_bytes, *value_bytes))


def digests(config: Mapping[str, Any], contents: Contents) -> dict[str, str]:
    """Return the digest of the data set, by its key in the data section of a configuration.

    It does not depend on seeds, nor on where the data lie. If a data set has a seed among its
    arguments, its samples are other ones in every run of an experiment, so only their form counts.

    Args:
        config: The data section of the configuration.
        contents: The digests of what was loaded.
    """
    settings = dict(flat(config["dataset"], "data.dataset"))
    that_change_results = {
        key: value for key, value in settings.items() if key_of(key).role == "result"
    }
    is_seeded = any(key_of(key).role == "seed" for key in settings)

    text = json.dumps(that_change_results, sort_keys=True, default=str)
    samples = contents.form if is_seeded else contents.samples
    return {"dataset": _digest(text.encode(), samples.encode())}


def _digest(*parts: bytes) -> str:
    """Return 12 hexadecimal digits that stand for these parts."""
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        # With its length, so that the ends of two parts cannot move.
        state.update(f"{len(part)} ".encode() + part)
    return state.hexdigest()
