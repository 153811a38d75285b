"""The digest of a run's data: runs of other data are other experiments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightfed.data.dataset import Samples
from lightfed.utils.keys import flat, key_of

_ENDS = 64  # samples at each end of a split that are part of a digest


class Contents(NamedTuple):
    """Digests of loaded data: of the form of a sample, and of all labels and some samples."""

    form: str
    samples: str

    @classmethod
    def of(cls, train: Samples, test: Samples) -> "Contents":
        """Reads all labels, and the samples at both ends of the splits."""
        form = [f"{tuple(s.x.shape[1:])} {s.x.dtype} {s.y.dtype}".encode() for s in (train, test)]
        ends = [part for s in (train, test) for part in (s.y, s.groups, s.x[:_ENDS], s.x[-_ENDS:])]
        for columns in (s.columns for s in (train, test) if s.columns is not None):
            parts = columns.tensors.items()
            form += [f"{name} {t.dtype} {tuple(t.shape[2:])}".encode() for name, t in parts]
            ends += [end for _, t in parts for end in (t[:_ENDS], t[-_ENDS:])]
            ends += columns.lengths.values()
        known = [part.contiguous().numpy().tobytes() for part in ends if part is not None]
        return cls(_digest(*form), _digest(*form, *known))


def digests(config: Mapping[str, Any], contents: Contents) -> dict[str, str]:
    """Of the data set, by its key in the data section of a configuration.

    It does not depend on seeds, nor on where the data lie. Samples of a data set with a seed among
    its arguments are other ones in every run of an experiment, so of these only the form counts.
    """
    values = dict(flat(config["dataset"], "data.dataset"))
    stated = {key: value for key, value in values.items() if key_of(key).role == "result"}
    seeded = any(key_of(key).role == "seed" for key in values)
    text = json.dumps(stated, sort_keys=True, default=str)
    return {"dataset": _digest(text.encode(), contents[0 if seeded else 1].encode())}


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        state.update(f"{len(part)} ".encode() + part)
    return state.hexdigest()
