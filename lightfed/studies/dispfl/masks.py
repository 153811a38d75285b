"""The masks of sparse clients: in how many elements each pair differs.

A run of sparse clients writes masks/client<k>.safetensors, each with one tensor `mask` of packed
words: bit i of word w is element 32 w + i of the client's row, 1 if the client keeps it. Tensors
of a row begin at multiples of 32. Padding bits between them are 0 in every mask.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightfed.drawing.marks import evenly_spaced
from lightfed.results.csvfile import damaged
from lightfed.results.run import Floats, Integers, Run, whole_number

CLIENTS_READ = 100
BLOCK = 1024  # bytes of every mask to unpack at a time, small enough to stay in cache
FILE = re.compile(r"client(\d+)\.safetensors")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MaskPairs:
    """Some K of `total` clients, ascending, whose masks have the same length, and their distances.

    `differing` (K, K) counts elements that only one of two clients keeps, `sparse` those that at
    least one of all does not keep.
    """

    client: Integers
    differing: Integers
    sparse: int
    total: int

    @property
    def distance(self) -> Floats:
        """(K, K) the Hamming distance as a share of the elements that may differ."""
        return self.differing / max(1, self.sparse)


def mask_pairs(run: Run) -> MaskPairs | None:
    """Read the masks of a run; None if it has none.

    At most 100 clients, evenly spaced by id, are read. If models have several sizes, only clients
    of the most frequent size are compared. A UserError if a file of masks/ is damaged.
    """
    names = {p: FILE.fullmatch(p.name) for p in run.folder.glob("masks/client*.safetensors")}
    paths = {int(name.group(1)): path for path, name in names.items() if name}
    ids = sorted(paths)
    if not ids:
        return None
    shown = [ids[place] for place in evenly_spaced(len(ids), most=CLIENTS_READ)]
    read = {client: _read(paths[client]) for client in shown}
    ((length, _),) = Counter(len(mask) for mask in read.values()).most_common(1)
    alike = {client: mask for client, mask in read.items() if len(mask) == length}
    masks = np.stack(list(alike.values()))
    return MaskPairs(
        client=np.array(list(alike), dtype=np.int64),
        differing=_differing(masks),
        sparse=_sparse(masks, elements=_parameters(run)),
        total=len(ids),
    )


def _read(path: Path) -> Bytes:
    """(4 W,) the words of one mask as bytes; their order does not matter for counting bits."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        words = load_file(path)["mask"]
    except KeyError as error:
        raise damaged(path, "it holds no tensor mask") from error
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error
    if words.dtype != np.int32 or words.ndim != 1:
        raise damaged(path, f"a mask of type {words.dtype} and shape {words.shape}")
    return words.view(np.uint8)


def _differing(masks: Bytes) -> Integers:
    """(K, K) Hamming distances of masks (K, B), by |x xor y| = |x| + |y| - 2 |x y|."""
    both = np.zeros((len(masks), len(masks)), dtype=np.int64)
    for start in range(0, masks.shape[1], BLOCK):
        bits = np.unpackbits(masks[:, start : start + BLOCK], axis=1).astype(np.float32)
        both += (bits @ bits.T).astype(np.int64)  # exact: float32 holds counts below 2^24
    kept = np.diag(both)
    return kept[:, None] + kept[None, :] - 2 * both


def _sparse(masks: Bytes, *, elements: int | None) -> int:
    """Number of elements that at least one mask (K, B) leaves out; the rest is padding."""
    kept_by_all = _ones(np.bitwise_and.reduce(masks))
    kept_by_some = _ones(np.bitwise_or.reduce(masks))
    bits = 8 * masks.shape[1]
    padding = bits - elements if elements is not None else 0
    return kept_by_some - kept_by_all + max(0, bits - kept_by_some - padding)


def _ones(mask: Bytes) -> int:
    return int(np.unpackbits(mask).sum(dtype=np.int64))


def _parameters(run: Run) -> int | None:
    """Elements of a client's model; None unless they are the same for all client groups."""
    stated = run.environment.get("parameters")
    found = set(stated.values()) if isinstance(stated, dict) else set()
    return whole_number(found.pop()) if len(found) == 1 else None
