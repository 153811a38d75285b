"""The low-rank adapters of a module: which tensors are A and B, of what rank and scale.

A layer's update is s B A, with A (r, in) and B (out, r). A convolution's kernel is read as a matrix
(out, in k k). peft's embedding holds both factors transposed and starts the other way round, so its
`lora_embedding_B` is read as A.
"""

from collections.abc import Mapping, Sequence
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
        rank, inputs, outputs: r, in and out.
        scale: s.
        embedding: the factors are stored transposed.
        base: name of the weight that the update is added to; empty if it cannot be added.
        across: the base is stored as (in, out), as in GPT-2.
    """

    layer: str
    a: str
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    embedding: bool
    base: str
    across: bool

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Views (r, in) of A and (out, r) of B, of tensors by name."""
        return _matrices(tensors[self.a], tensors[self.b], self.embedding)

    def weight(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A view (out, in) of the base, of tensors by name."""
        base = tensors[self.base]
        return base.T if self.across else base.flatten(1)

    def shapes(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[int, ...]]:
        """Of A and B by name, but with another rank."""
        a, b = tensors[self.a].shape, tensors[self.b].shape
        if self.embedding:
            return {self.a: (a[0], rank), self.b: (rank, b[1])}
        return {self.a: (rank, *a[1:]), self.b: (b[0], rank, *b[2:])}


def _matrices(a: Tensor, b: Tensor, embedding: bool) -> tuple[Tensor, Tensor]:
    return (a.T, b.T) if embedding else (a.flatten(1), b.flatten(1))


def adapters_of(module: nn.Module, names: Mapping[str, str]) -> list[Adapter]:
    """The adapters of a module that are trained, in the order of its parameters.

    Args:
        module: a client's.
        names: the part of a parameter's name that marks A -> the one of its B.

    Raises:
        UserError: there are none, or one is not s B A.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first = {name for name, _ in module.named_parameters()}
    found = []
    for name in parameters:
        path = name.split(".")
        place = next((i for i, part in enumerate(path) if part in names), None)
        if place is None:
            continue
        b = ".".join([*path[:place], names[path[place]], *path[place + 1 :]])
        embedding, fix = path[place] == "lora_embedding_B", "give every A (r, in) a B (out, r)"
        require(b in parameters, _KEY, f"{name}, and no {b}", fix)
        A, B = _matrices(parameters[name], parameters[b], embedding)
        require(len(A) == B.shape[1], _KEY, f"{len(A)} ranks in {name}, not in {b}", fix)
        if not (parameters[name].requires_grad or parameters[b].requires_grad):
            continue  # such as adapters of peft that are not active
        alone = all(_owners(module, parameters[own]) == 1 for own in (name, b))
        fix = "give each layer factors of its own"
        require(alone, _KEY, f"{name} or {b} belongs to several layers", fix)
        if name not in first:
            continue  # a module that is used in several places
        layer = ".".join(path[:place])
        owner = module.get_submodule(layer)
        magnitude = any("lora_magnitude" in own for own, _ in owner.named_parameters())
        plain = not magnitude and getattr(owner, "num_experts", 1) == 1
        fix = "adapt linear layers, convolutions or embeddings, without use_dora"
        require(plain, _KEY, f"the update of {layer} is not s B A", fix)
        scale = getattr(owner, "scaling", 1.0)
        if isinstance(scale, Mapping):  # by the names of peft's adapters
            scale = scale[path[place + 1]]
        require(scale > 0, _KEY, f"{layer} has the scale {scale}", "give an alpha above 0")
        across = bool(getattr(owner, "fan_in_fan_out", False))
        base = _base(module, layer, (len(B), A.shape[1]), across)
        rank, inputs = A.shape
        sizes = rank, inputs, len(B)
        found.append(Adapter(layer, name, b, *sizes, float(scale), embedding, base, across))
    marks, fix = ", ".join(names), "add adapters to the model, or name theirs in `adapters`"
    require(bool(found), _KEY, f"{type(module).__name__} has no parameter named {marks}", fix)
    return found


def _owners(module: nn.Module, tensor: Tensor) -> int:
    """Number of modules that have a tensor as a parameter."""
    return sum(own is tensor for part in module.modules() for own in part._parameters.values())


def _base(module: nn.Module, layer: str, shape: Sequence[int], across: bool) -> str:
    """The name of a layer's weight; empty unless it is a frozen matrix of this layer alone."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    first = {name for name, _ in module.named_parameters()}
    for name in (f"{layer}.base_layer.weight", f"{layer}.base.weight", f"{layer}.weight"):
        if name in weights:
            weight = weights[name]
            # A layer below two adapters has one owner and two names.
            alone = _owners(module, weight) == 1 and name in first
            plain = weight.is_floating_point() and not weight.requires_grad
            matrix = weight.T if across else weight.flatten(1)
            return name if alone and plain and matrix.shape == (*shape,) else ""
    return ""
