"""A device that a machine without one can compute on: it finds tensors left on the wrong side.

A tensor on it holds one on the CPU, which does the arithmetic. As on a card, an operation on
tensors of both sides fails, a CPU's generator cannot fill a tensor there, and a value comes to the
host only by a read, which is noted. So is every copy of the host's values to the device, and
whether the host waits for it: it does unless it asks not to. Then the copy is under way until the
host next waits for the device, and the host must not write there meanwhile: a card would copy the
one or the other. Its type is `meta`, the only one that autograd allows without a driver; so what
depends on the type `cuda`, such as streams, is not covered.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only
from typing_extensions import override

DEVICE = torch.device("meta")
# They take tensors of both sides: a copy, and indices, which torch allows on the host.
_BOTH = ("_to_copy", "copy_", "index", "index_put_", "_index_put_impl_", "_unsafe_index")
# Numbers and sizes that the host needs of a tensor.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
_INDEXED = ("index", "index_put_", "_index_put_impl_", "_unsafe_index")
# Of floats a card adds these up in any order, and refuses them where `deterministic` is true.
_IN_ANY_ORDER = ("cumsum", "cumsum_", "put_", "histc")


class There(Tensor):
    """A tensor on the pretended device.

    Attributes:
        here: its values.
        reads: where values were read, of all such tensors.
        copies: where values of the host were copied to the device; they begin with "waits" if the
            host waits for the device then, else with "pinned" or "pageable", by their memory.
        under_way: what the host has not waited for: its tensor, the values that the device is to
            get, and where the copy began.
        overwritten: where copies began whose values the host then wrote over.
    """

    here: Tensor
    reads: list[str]
    copies: list[str]
    under_way: list[tuple[Tensor, Tensor, str]]
    overwritten: list[str]

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(
            cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, layout=here.layout, device=DEVICE,
        )  # type: ignore[assignment] # fmt: skip
        made.here = here
        return made

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self.here!r})"

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:  # type: ignore[override]
        return There(self.here.clone()).requires_grad_(self.requires_grad)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: "There") -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.here = value.here

    @override
    def tolist(self) -> Any:
        _note("tolist")
        return self.here.tolist()

    @override
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_index(index))

    @override
    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    @override
    def data_ptr(self) -> int:
        return self.here.data_ptr()

    @override
    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("a tensor on a device is no numpy array")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def reads_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host needs a number or a size of what an operator is given."""
    name = _name(func)
    # Where there are bools, how many are true decides the shape.
    return name in _READS or (name in _INDEXED and any(map(_is_mask, args[1])))


def _name(func: Any) -> str:
    name: str = func.name()
    return name.partition("::")[2].partition(".")[0]


def _copied(name: str, args: Sequence[Any], *, to_device: bool) -> list[Tensor]:
    """The tensors of the host that an operator copies to the device."""
    if name == "_to_copy":
        given = [args[0]] if to_device else []
    elif name == "copy_":
        given = [args[1]] if to_device else []
    elif name in _INDEXED and isinstance(args[0], There):
        given = args[1]
    else:
        given = []
    return [x for x in given if isinstance(x, Tensor) and not isinstance(x, There)]


def _is_pinned(x: Tensor) -> bool:
    """Whether a tensor, or the one that it is a view of, is in pinned memory."""
    whole = x if x._base is None else x._base
    return bool(getattr(x, "pinned", False) or getattr(whole, "pinned", False))


def _pinned(x: Tensor) -> Tensor:
    copy = x.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _index(index: Any) -> Any:
    """Lists as tensors of the host: torch would make tensors of this device, without values."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return torch.tensor(index) if isinstance(index, list) else index


class _Mode(TorchDispatchMode):
    """Makes tensors on the device, which no argument is on."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = _name(func)
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    there = any(isinstance(x, There) for x in tensors)
    assert not any(type(x) is Tensor and x.device == DEVICE for x in tensors), f"{name}: no values"
    own = func.namespace == "lightfed"  # takes tables of the host, and checks by itself
    if there and name not in _BOTH and not own:
        wrong = [x for x in tensors if not isinstance(x, There) and x.dim()]
        assert not wrong, f"{name}: tensors on the device and on the host"
    device, result = kwargs.get("device"), there
    if device is not None:
        result = device == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "copy_":
        result = isinstance(args[0], There)
    ahead = kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])
    assert result or not (there and ahead), f"{name}: the host goes on before the values are there"
    if there and (reads_host(func, args) or (name == "_to_copy" and not result)):
        _note(name)
    if there and name == "copy_" and not result:
        check_copies()  # the host waits for what it gets, and for all that the device did before
    for source in _copied(name, args, to_device=result):
        memory = "pinned" if _is_pinned(source) else "pageable"
        how = memory if ahead and name not in _INDEXED else "waits"
        There.copies.append(_where(f"{how}: {name}"))
        if how == "waits":
            check_copies()
        else:
            There.under_way.append((source, source.detach().clone(), There.copies[-1]))
    assert not (there and name == "im2col"), f"{name}: a card takes a launch for each image"
    unordered = there and name in _IN_ANY_ORDER and args[0].is_floating_point()
    assert not unordered, f"{name}: of floats, in an order that a card chooses"
    generator = kwargs.get("generator")
    assert not (result and generator is not None), f"{name}: a CPU's generator on the device"
    inner = tree_map_only(There, lambda x: x.here, (tuple(args), {**kwargs, "pin_memory": None}))
    if kwargs.get("pin_memory") is None:
        inner[1].pop("pin_memory")
    found = func(*inner[0], **inner[1])
    if not result:
        if kwargs.get("pin_memory"):
            found.pinned = True
        return found
    found = tree_map_only(Tensor, There, found)
    return found if own or not there else return_and_correct_aliasing(func, args, kwargs, found)


def _note(what: str) -> None:
    There.reads.append(_where(what))
    check_copies()


def check_copies() -> None:
    """Wait for the device, and hold what it was to get against what the host has there now."""
    under_way, There.under_way = There.under_way, []
    for source, values, where in under_way:
        if not torch.equal(source.nan_to_num(), values.nan_to_num()):
            # Not raised here: lightfed would leave out the client and go on.
            There.overwritten.append(where)


def _where(what: str) -> str:
    stack = [f for f in traceback.extract_stack() if "/lightfed/" in f.filename]
    return f"{what} in {' < '.join(f.name for f in reversed(stack))}"


@contextmanager
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tensors may be put on `DEVICE`; gives the reads of their values, and who asked for them."""
    made, autocast = torch.tensor, torch.is_autocast_enabled

    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:  # of meta it has no values
        return made(data, **more) if device is None else made(data, **more).to(device)

    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind: kind != DEVICE.type and autocast(kind)
    )
    There.reads, There.copies, There.under_way, There.overwritten = [], [], [], []
    with _Mode():
        yield There.reads
        check_copies()
    assert not There.overwritten, f"the host wrote where copies were under way: {There.overwritten}"
