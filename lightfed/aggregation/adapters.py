"""The low-rank adapters of the groups' modules: which tensors are A and B, of what rank and scale.

A layer's update is s B A, with A (r, in) and B (out, r). A convolution's kernel is read as a matrix
(out, in k k). peft's embedding holds both factors transposed and starts the other way round, so its
`lora_embedding_B` is read as A.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightfed.utils.errors import require

PEFT = {"lora_A": "lora_B", "lora_embedding_B": "lora_embedding_A"}  # A's name -> B's
_KEY = "model.clients"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer in one module.

    Attributes:
        layer: name of the module that has it.
        a, b: names of the tensors A and B.
        base: name of the weight that the update is added to; empty if none was found.
        scale: s.
        rank, inputs, outputs: r, in and out.
        embedding: the factors are stored transposed.
        across: the base is stored as (in, out), as in GPT-2.
        obstacle: why the update cannot be added to the base; empty if it can.
    """

    layer: str
    a: str
    b: str
    base: str
    scale: float
    rank: int
    inputs: int
    outputs: int
    embedding: bool
    across: bool
    obstacle: str

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Views (r, in) of A and (out, r) of B, of tensors by name."""
        a, b = tensors[self.a], tensors[self.b]
        return (a.T, b.T) if self.embedding else (a.flatten(1), b.flatten(1))

    def weight(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A view (out, in) of the base, of tensors by name."""
        base = tensors[self.base]
        return base.T if self.across else base.flatten(1)


def adapters_of(module: nn.Module, names: Mapping[str, str]) -> list[Adapter]:
    """The adapters of a module, in the order of its parameters.

    Args:
        module: a client's.
        names: the part of a parameter's name that marks A -> the one of its B.

    Raises:
        UserError: there are none, or one is not s B A.
    """
    parameters = dict(module.named_parameters())
    uses = [id(p) for part in module.modules() for p in part._parameters.values() if p is not None]
    found = []
    for name in parameters:
        path = name.split(".")
        for place, part in enumerate(path):
            if part in names:
                b = ".".join([*path[:place], names[part], *path[place + 1 :]])
                layer, kind = ".".join(path[:place]), path[place + 1 : place + 2]
                found.append(_adapter(module, layer, name, b, kind, uses))
    marks, fix = ", ".join(names), "add adapters to the model, or name theirs in `adapters`"
    require(bool(found), _KEY, f"{type(module).__name__} has no parameter named {marks}", fix)
    return found


def _adapter(
    module: nn.Module, layer: str, a: str, b: str, kind: Sequence[str], uses: Sequence[int]
) -> Adapter:
    parameters, owner = dict(module.named_parameters()), module.get_submodule(layer)
    fix = "give every A (r, in) a B (out, r) of the same rank r, at least 1"
    require(b in parameters, _KEY, f"{a}, and no {b}", fix)
    embedding = "lora_embedding_B" in a.split(".")
    first, second = (parameters[name] for name in (a, b))
    matrices = (first.T, second.T) if embedding else (first.flatten(1), second.flatten(1))
    (rank, inputs), (outputs, other) = (tuple(matrix.shape) for matrix in matrices)
    found = f"{a} {[*first.shape]} and {b} {[*second.shape]}"
    require(rank == other > 0, _KEY, found, fix)
    magnitude = any("lora_magnitude" in name for name, _ in owner.named_parameters())
    found, fix = f"{layer} has a magnitude, so that its update is not s B A", "set use_dora: false"
    require(not magnitude, _KEY, found, fix)
    scale = getattr(owner, "scaling", 1.0)
    base, across, obstacle = _base(module, layer, uses, (outputs, inputs))
    return Adapter(
        layer,
        a,
        b,
        base,
        float(scale[kind[0]] if isinstance(scale, Mapping) else scale),
        rank,
        inputs,
        outputs,
        embedding,
        across,
        obstacle,
    )


def _base(
    module: nn.Module, layer: str, uses: Sequence[int], shape: tuple[int, int]
) -> tuple[str, bool, str]:
    """Of a layer: the name of its weight, whether it is (in, out), why it cannot be added to."""
    for name in ("base_layer", "base", ""):
        path = f"{layer}.{name}".strip(".")
        part: nn.Module | None
        try:
            part = module.get_submodule(path)
        except AttributeError:
            continue
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        across = type(part).__name__ == "Conv1D"  # transformers' linear layer
        whole = (*weight.shape[::-1],) if across else tuple(weight.flatten(1).shape)
        obstacle = ""
        if not weight.is_floating_point() or whole != shape:
            obstacle = f"{path}.weight {weight.dtype} {[*weight.shape]} takes no dense {[*shape]}"
        elif uses.count(id(weight)) > 1:
            obstacle = f"{path}.weight is the weight of another layer too"
        elif weight.requires_grad:
            obstacle = f"{path}.weight is trained"
        return f"{path}.weight", across, obstacle
    return "", False, f"{layer} has no weight"


class Adapters:
    """One layer's adapters in all groups.

    Attributes:
        each: the group's own, by group.
        rank: the greatest of a group.
    """

    def __init__(self, each: Sequence[Adapter]) -> None:
        self.each = each
        self.rank = max(own.rank for own in each)

    def shapes(self, module: nn.Module, rank: int) -> dict[str, tuple[int, ...]]:
        """Of A and B by name, in the first group's module, but with another rank."""
        own = self.each[0]
        a, b = (module.get_parameter(name).shape for name in (own.a, own.b))
        if own.embedding:
            return {own.a: (a[0], rank), own.b: (rank, b[1])}
        return {own.a: (rank, *a[1:]), own.b: (b[0], rank, *b[2:])}


def matched(groups: Sequence[tuple[str, Sequence[Adapter]]]) -> Iterator[Adapters]:
    """The adapters of named groups, by layer.

    Raises:
        UserError: groups adapt unlike layers, or their shapes differ in more than rank.
    """
    first, mine = groups[0]
    for name, theirs in groups:
        layers = [{(own.layer, own.a) for own in some} for some in (mine, theirs)]
        unlike = sorted(layer for layer, _ in layers[0] ^ layers[1])
        found = f"{unlike[:1]} has adapters in one of the groups {first} and {name}"
        require(not unlike, _KEY, found, "adapt the same layers in all groups")
    for place, own in enumerate(mine):
        each = [theirs[place] for _, theirs in groups]
        for (name, _), other in zip(groups, each, strict=True):
            sizes, others = (own.outputs, own.inputs), (other.outputs, other.inputs)
            found = f"{own.layer} is {sizes} in group {first} and {others} in {name}"
            require(sizes == others, _KEY, found, "groups may differ in rank only")
        yield Adapters(each)
