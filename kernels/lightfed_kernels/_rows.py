"""The `rows` argument of all operations: checks, addresses for kernels, and where they run.

`rows` is a matrix (clients, P), a sequence of rows (P,), or a sequence of both. The elements of a
row are contiguous. For a kernel a row starts at a multiple of 16 bytes, so that it can move 16
bytes at a time. Triton runs on CUDA tensors, torch elsewhere; only `backend` decides.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels.layout import ALIGNMENT

Rows = Tensor | Sequence[Tensor]
Backend = Literal["triton", "torch"]

DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# CUDA's limit of a grid's first dimension.
MAX_PROGRAMS = 2**31 - 1


def as_list(rows: Rows) -> list[Tensor]:
    """Return matrices and rows as a list, the form that operators take."""
    return [rows] if isinstance(rows, Tensor) else list(rows)


def each_row(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the single rows (P,) of matrices and rows."""
    rows: list[Tensor] = []
    for tensor in tensors:
        if tensor.dim() == 2:
            rows.extend(tensor.unbind(0))
        else:
            rows.append(tensor)
    return rows


def count_rows(tensors: Sequence[Tensor]) -> int:
    """Return the number of rows in matrices and rows."""
    return sum(tensor.shape[0] if tensor.dim() == 2 else 1 for tensor in tensors)


def check_row(
    name: str, row: Tensor, *, size: int | None = None, like: Tensor | None = None
) -> None:
    """Check a row (P,) or a matrix of rows (clients, P).

    Args:
        name: The name of the argument, for errors.
        row: The row or matrix.
        size: P, if it is known.
        like: A tensor of the dtype that it must have, if there is one.

    Raises:
        ValueError: It does not fit; names the argument, what was found and what is allowed.
        TypeError: Its dtype is not supported, or is another one.
    """
    if row.dtype not in DTYPES:
        raise TypeError(
            f"{name}: {short(row.dtype)} rows; {', '.join(map(short, DTYPES))} are supported"
        )
    if like is not None and row.dtype != like.dtype:
        raise TypeError(
            f"{name}: {short(row.dtype)} after {short(like.dtype)}; "
            "the rows of a call have one dtype"
        )
    if row.dim() not in (1, 2) or not row.is_contiguous():
        check_elements(name, row)
    if size is not None and row.shape[-1] != size:
        raise ValueError(f"{name}: rows of {row.shape[-1]} elements; {size} are needed")
    if row.shape[-1] % ALIGNMENT:
        raise ValueError(
            f"{name}: rows of {row.shape[-1]} elements; the length of a row is a multiple of "
            f"{ALIGNMENT} (Layout pads it)"
        )


def check_single(name: str, tensor: Tensor) -> None:
    """Refuse a matrix where one row is needed."""
    if tensor.dim() != 1:
        raise ValueError(f"{name}: of shape {list(tensor.shape)}; one row at a time")


def check_vector(
    name: str, row: Tensor, *, size: int | None = None, dtype: torch.dtype | None = None
) -> None:
    """Check one row (P,), and its length and dtype if they are known."""
    check_single(name, row)
    check_row(name, row, size=size)
    if dtype is not None and row.dtype != dtype:
        raise TypeError(f"{name}: {row.dtype} for rows of {dtype}")


def check_elements(name: str, tensor: Tensor) -> None:
    """Check for one or two dimensions and contiguous rows."""
    if tensor.dim() not in (1, 2):
        raise ValueError(f"{name}: {tensor.dim()} dimensions; a row has 1, a matrix of rows 2")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: elements of a row lie {tensor.stride(-1)} apart; rows are contiguous"
        )


def check_rows(name: str, tensors: Sequence[Tensor], *, size: int | None = None) -> None:
    """Check every row or matrix as `check_row` does, and that all have one dtype."""
    for position, tensor in enumerate(tensors):
        name_of_tensor = name if len(tensors) == 1 else f"{name}[{position}]"
        check_row(name_of_tensor, tensor, size=size, like=tensors[0])


def check_words(name: str, words: Tensor, *, size: int) -> None:
    """Check packed masks (W,) or (clients, W) of rows of `size` elements."""
    if words.dtype != torch.int32:
        raise TypeError(f"{name}: {short(words.dtype)}; packed masks are int32 words")
    check_elements(name, words)
    if words.shape[-1] * ALIGNMENT != size:
        raise ValueError(
            f"{name}: {words.shape[-1]} words; {size // ALIGNMENT} are needed for rows of {size}"
        )


def check_one_device(**tensors: Tensor | Sequence[Tensor] | None) -> torch.device:
    """Return the device of all arguments, after checking that it is the same one.

    Args:
        **tensors: The arguments by name; None for one that is not given.

    Raises:
        ValueError: Two are on different devices; names both.
    """
    first_name = ""
    device: torch.device | None = None
    for name, argument in tensors.items():
        if argument is None:
            continue
        for tensor in [argument] if isinstance(argument, Tensor) else argument:
            if device is None:
                first_name = name
                device = tensor.device
            elif tensor.device != device:
                raise ValueError(
                    f"{name}: on {tensor.device}, but {first_name} is on {device}; "
                    "the tensors of a call lie on one device"
                )
    assert device is not None
    return device


def addresses(name: str, tensors: Iterable[Tensor], *, multiple: int = 16) -> np.ndarray:
    """Return where every row begins in memory, as (rows,) of int64.

    Args:
        name: The name of the argument, for errors.
        tensors: Matrices and rows.
        multiple: The number of bytes at a multiple of which every row must begin.

    Raises:
        ValueError: A row begins elsewhere.
    """
    begins: list[int] = []
    remainders = 0  # all of them in one number, because this is called for every row of a merge
    for tensor in tensors:
        first = tensor.data_ptr()
        remainders |= first % multiple
        if tensor.dim() == 1:
            begins.append(first)
            continue
        count = tensor.shape[0]
        step = tensor.stride(0) * tensor.element_size()
        if step:
            begins += range(first, first + step * count, step)
        else:
            begins += [first] * count  # one row that is expanded to several
        if count > 1:
            remainders |= step % multiple

    table = np.array(begins, np.int64)
    if remainders and (table % multiple).any():
        row = int(np.flatnonzero(table % multiple)[0])
        raise ValueError(
            f"{name}: row {row} starts {table[row] % multiple} bytes past a multiple of "
            f"{multiple}; cut rows at multiples of {ALIGNMENT} elements"
        )
    return table


def to_device(table: np.ndarray, device: torch.device) -> Tensor:
    """Copy a small table to the device; the host does not wait for the copy."""
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type == "cuda":
        # From memory that is not pinned the driver copies before it returns.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_device_together(tables: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy several small tables to the device in one copy; the host does not wait for it.

    Each begins at a multiple of 64 bytes, so that kernels see what they see in tables apart.
    """
    begins = []
    size = 0
    for table in tables:
        begins.append(size)
        size += -(-table.nbytes // 64) * 64

    together = np.zeros(size, np.uint8)
    for begin, table in zip(begins, tables, strict=True):
        together[begin : begin + table.nbytes] = np.ascontiguousarray(table).ravel().view(np.uint8)
    on_device = to_device(together, device)

    parts = []
    for begin, table in zip(begins, tables, strict=True):
        dtype = torch.from_numpy(np.empty(0, table.dtype)).dtype
        part = on_device[begin : begin + table.nbytes].view(dtype)
        parts.append(part.view(table.shape))
    return parts


# The largest table, in bytes, that is worth keeping on the device. Larger ones are those of many
# receivers, whose neighbors change from round to round.
_KEPT_BYTES = 2**16


def resident(table: np.ndarray, device: torch.device) -> Tensor:
    """Return a table of int64 on the device, copied only once.

    Tables hold addresses of rows, which mostly stay where they are.
    """
    if table.nbytes > _KEPT_BYTES:
        return to_device(table, device)
    return _resident(table.tobytes(), device)


@lru_cache(maxsize=256)
def _resident(table: bytes, device: torch.device) -> Tensor:
    return to_device(np.frombuffer(table, np.int64).copy(), device)


def check_grid(name: str, programs: int) -> None:
    """Refuse a launch of more programs than CUDA can start at once."""
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"{name}: {programs} programs in one launch; {MAX_PROGRAMS} are possible: "
            "split the columns or the receivers"
        )


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, for errors."""
    return str(dtype).removeprefix("torch.")


def backend(*tensors: Tensor) -> Backend:
    """Choose the implementation for these tensors.

    The variable `LIGHTFED_KERNELS` overrides the choice. `torch` runs the torch path on any device.
    `triton` runs the kernels on CPU tensors too, where Triton interprets them; for this
    `TRITON_INTERPRET=1` must be set before Triton is imported.

    Raises:
        ValueError: The variable has an unknown value, or is `triton` and the kernels cannot run.
    """
    choice = os.environ.get("LIGHTFED_KERNELS", "auto")
    on_cuda = all(map(attrgetter("is_cuda"), tensors))  # faster than a generator, for many rows
    if choice == "auto":
        return "triton" if on_cuda and _triton_is_there() else "torch"
    if choice == "torch":
        return "torch"
    if choice != "triton":
        raise ValueError(f"LIGHTFED_KERNELS: {choice!r} is not one of auto, triton, torch")
    if not _triton_is_there():
        raise ValueError("LIGHTFED_KERNELS=triton: Triton is not installed; use torch")
    if on_cuda:
        return "triton"

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "LIGHTFED_KERNELS=triton: these tensors are not on a CUDA device; set "
            "TRITON_INTERPRET=1 to interpret the kernels, or use auto"
        )
    fault = interpreter_fault()
    if fault:
        raise ValueError(f"LIGHTFED_KERNELS=triton: {fault}")
    return "triton"


@cache
def interpreter_fault() -> str:
    """Say why Triton's interpreter cannot run the kernels here; empty if it can.

    Loops whose bound is known only at run time end in a TypeError in triton 3.6 beside numpy 2.4
    and later.
    """
    if not _triton_is_there():
        return ""
    triton_version = tuple(int(part) for part in version("triton").split(".")[:2])
    numpy_version = tuple(int(part) for part in np.__version__.split(".")[:2])
    if triton_version >= (3, 7) or numpy_version < (2, 4):
        return ""
    return (
        f"the interpreter of triton {version('triton')} does not run beside numpy "
        f"{np.__version__}; use triton 3.7 or numpy 2.3"
    )


def checking() -> bool:
    """Whether inputs are also checked on the device, which synchronizes with it."""
    return os.environ.get("LIGHTFED_KERNELS_CHECK") == "1"


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None
