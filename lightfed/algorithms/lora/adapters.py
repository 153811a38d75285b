"""The low-rank adapters of a module: which tensors are A and B, of what rank and scale.

A layer's update is s B A, with A (r, in) and B (out, r). A convolution's kernel is read as a matrix
(out, in k k). peft's embedding holds both factors transposed and starts the other way round, so its
`lora_embedding_B` is read as A.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightfed.utils.errors import UserError

# The part of a name that marks A, and the part that marks its B.
PEFT = {"lora_A": "lora_B", "lora_embedding_B": "lora_embedding_A"}
_KEY = "model.clients"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer in one module.

    Attributes:
        layer: Name of the module that has it.
        a: Name of the tensor A.
        b: Name of the tensor B.
        rank: r.
        inputs: Number of columns of A.
        outputs: Number of rows of B.
        scale: s.
        embedding: Whether the factors are stored transposed.
        base: Name of the weight that the update is added to; empty if it cannot be added.
        across: Whether the base is stored as (in, out), as in GPT-2.
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

    @property
    def names(self) -> set[str]:
        """The names of the adapter's tensors."""
        return {self.a, self.b}

    @property
    def bias(self) -> str:
        """The name that a bias of B would have."""
        return self.b.removesuffix("weight") + "bias"

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return views (r, in) of A and (out, r) of B, from tensors by name."""
        return _matrices(tensors[self.a], tensors[self.b], self.embedding)

    def weight(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a view (out, in) of the base, from tensors by name."""
        base = tensors[self.base]
        return base.T if self.across else base.flatten(1)

    def shapes(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B by name, but with another rank."""
        a = tensors[self.a].shape
        b = tensors[self.b].shape
        if self.embedding:
            return {self.a: (a[0], rank), self.b: (rank, b[1])}
        return {self.a: (rank, *a[1:]), self.b: (b[0], rank, *b[2:])}


def _matrices(a: Tensor, b: Tensor, embedding: bool) -> tuple[Tensor, Tensor]:
    """Return views (r, in) of A and (out, r) of B."""
    if embedding:
        return a.T, b.T
    return a.flatten(1), b.flatten(1)


def adapters_of(module: nn.Module, names: Mapping[str, str]) -> list[Adapter]:
    """Return the adapters of a module that are trained, in the order of its parameters.

    Args:
        module: The module of a client.
        names: By the part of a parameter's name that marks A, the part that marks its B.

    Raises:
        UserError: There are none, or one of them is not s B A.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first_names = {name for name, _ in module.named_parameters()}
    adapters = []
    for name in parameters:
        path = name.split(".")
        marks = [position for position, part in enumerate(path) if part in names]
        if not marks:
            continue
        mark = marks[0]

        b = ".".join([*path[:mark], names[path[mark]], *path[mark + 1 :]])
        embedding = path[mark] == "lora_embedding_B"
        _check_pair(parameters, name, b, embedding)
        if not (parameters[name].requires_grad or parameters[b].requires_grad):
            continue  # an adapter of peft that is not active, for example

        for factor in (name, b):
            if _owners(module, parameters[factor]) != 1:
                raise UserError(
                    _KEY,
                    f"{name} or {b} belongs to several layers",
                    "give each layer factors of its own",
                )
        if name not in first_names:
            continue  # a module that is used in several places

        layer = ".".join(path[:mark])
        owner = module.get_submodule(layer)
        _check_is_product(layer, owner)
        A, B = _matrices(parameters[name], parameters[b], embedding)
        rank, inputs = A.shape
        outputs = len(B)
        across = bool(getattr(owner, "fan_in_fan_out", False))
        adapter = Adapter(
            layer=layer,
            a=name,
            b=b,
            rank=rank,
            inputs=inputs,
            outputs=outputs,
            # The part after the mark is the name of one of peft's adapters.
            scale=_scale(layer, owner, path[mark + 1 :]),
            embedding=embedding,
            base=_base(module, layer, (outputs, inputs), across),
            across=across,
        )
        adapters.append(adapter)

    if not adapters:
        raise UserError(
            _KEY,
            f"{type(module).__name__} has no parameter named {', '.join(names)}",
            "add adapters to the model, or name theirs in `adapters`",
        )
    return adapters


def _check_pair(parameters: Mapping[str, Tensor], a: str, b: str, embedding: bool) -> None:
    """Refuse an A without a B of the same rank."""
    fix = "give every A (r, in) a B (out, r)"
    if b not in parameters:
        raise UserError(_KEY, f"{a}, and no {b}", fix)

    A, B = _matrices(parameters[a], parameters[b], embedding)
    if len(A) != B.shape[1]:
        raise UserError(_KEY, f"{len(A)} ranks in {a}, not in {b}", fix)


def _check_is_product(layer: str, owner: nn.Module) -> None:
    """Refuse an adapter that applies something other than s B A."""
    has_magnitude = any("lora_magnitude" in name for name, _ in owner.named_parameters())
    has_experts = getattr(owner, "num_experts", 1) != 1
    if has_magnitude or has_experts:
        raise UserError(
            _KEY,
            f"the update of {layer} is not s B A",
            "adapt linear layers, convolutions or embeddings, without use_dora",
        )


def _scale(layer: str, owner: nn.Module, path_after_mark: Sequence[str]) -> float:
    """Return the scale s of an adapter.

    Raises:
        UserError: It is not positive.
    """
    scale = getattr(owner, "scaling", 1.0)
    if isinstance(scale, Mapping):  # by the names of peft's adapters
        scale = scale[path_after_mark[0]]
    if not scale > 0:
        raise UserError(_KEY, f"{layer} has the scale {scale}", "give an alpha above 0")
    return float(scale)


def _owners(module: nn.Module, tensor: Tensor) -> int:
    """Return the number of modules that have a tensor as a parameter."""
    count = 0
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is tensor:
                count += 1
    return count


def _base(module: nn.Module, layer: str, shape: Sequence[int], across: bool) -> str:
    """Return the name of a layer's weight; empty unless it is a frozen matrix of this layer alone.

    Args:
        module: The module of a client.
        layer: Name of the layer.
        shape: (out, in) of the update.
        across: Whether the weight is stored as (in, out).
    """
    weights = dict(module.named_parameters(remove_duplicate=False))
    first_names = {name for name, _ in module.named_parameters()}
    for name in (f"{layer}.base_layer.weight", f"{layer}.base.weight", f"{layer}.weight"):
        if name not in weights:
            continue

        weight = weights[name]
        # A layer below two adapters has one owner and two names.
        belongs_to_layer_alone = _owners(module, weight) == 1 and name in first_names
        is_frozen = weight.is_floating_point() and not weight.requires_grad
        matrix = weight.T if across else weight.flatten(1)
        if belongs_to_layer_alone and is_frozen and matrix.shape == tuple(shape):
            return name
        return ""
    return ""
