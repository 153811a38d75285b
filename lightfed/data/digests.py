"""Digests of a run's data and of its partition: runs of other data are other experiments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightfed.data.datasets.dataset import Samples
from lightfed.data.partition.partitioner import Partitioner
from lightfed.utils.keys import flat, key_of
from lightfed.utils.rng import numpy_generator

_ENDS = 64  # samples at each end of a split that are part of a digest


class Contents(NamedTuple):
    """Digests of loaded data: of the form of a sample, of all labels and some samples, of parts.

    `parts` are those that a scheme deals with a constant seed. It is empty for the schemes of the
    package, which are what their arguments say.
    """

    form: str
    samples: str
    parts: str = ""

    @classmethod
    def of(cls, train: Samples, test: Samples) -> "Contents":
        """Reads all labels, and the samples at both ends of the splits."""
        form = [f"{tuple(s.x.shape[1:])} {s.x.dtype} {s.y.dtype}".encode() for s in (train, test)]
        ends = [part for s in (train, test) for part in (s.y, s.groups, s.x[:_ENDS], s.x[-_ENDS:])]
        known = [_bytes(part) for part in ends if part is not None]
        return cls(_digest(*form), _digest(*form, *known))

    def dealt(
        self, scheme: Partitioner, samples: Samples, *, clients: int, classes: int
    ) -> "Contents":
        """With what a scheme makes of these samples; the run's own seed would make other parts."""
        if type(scheme).__module__.startswith("lightfed."):
            return self
        groups = None if samples.groups is None else samples.groups.numpy()
        rng = numpy_generator(0, "partition digest")
        labels = samples.y.numpy()
        parts = scheme.split(labels, clients=clients, num_classes=classes, rng=rng, groups=groups)
        return self._replace(parts=_digest(*(np.asarray(part).tobytes() for part in parts)))


def digests(config: Mapping[str, Any], contents: Contents) -> dict[str, str]:
    """Of the data set and the partition, by their keys in the data section of a configuration.

    They do not depend on seeds, nor on where the data lie. Samples of a data set with a seed among
    its arguments are other ones in every run of an experiment, so of these only the form counts.
    A scheme of the package has no digest: a report may compare what differs in its arguments alone.
    """
    found, seeded = {}, False  # parts of samples that a seed draws are drawn by it, too
    for name, whole, form in (
        ("dataset", contents.samples, contents.form),
        ("partition", contents.parts, "seeded"),
    ):
        values = dict(flat(config[name], f"data.{name}"))
        stated = {key: value for key, value in values.items() if key_of(key).role == "result"}
        seeded = seeded or any(key_of(key).role == "seed" for key in values)
        text = json.dumps(stated, sort_keys=True, default=str)
        if whole:
            found[name] = _digest(text.encode(), (form if seeded else whole).encode())
    return found


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        state.update(f"{len(part)} ".encode() + part)
    return state.hexdigest()
