"""The only file that imports private names of torch.

They are those of torch 2.11 to 2.15. A missing name fails here, at import; what the names do, and
which private attributes of modules, tensors and optimizers are read elsewhere, is in
`tests/core/utils/test_torch_private.py`.
"""

# ruff: noqa: F401 - imported for others

# What `torch.func.vmap` is made of. Its calls take twice as long as the steps of a small network.
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    get_unwrapped,
    maybe_get_bdim,
    maybe_get_level,
)

# What `torch.compile` puts around a module, which Lightning imports as well; what it compiles where
# a function is torch's own; and whether it is.
from torch._dynamo import OptimizedModule
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.trace_rules import check as is_of_torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting

# Classes that the layers of a kind have in common.
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

# Hooks that a program has registered for the steps of all optimizers.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Nested structures of tensors.
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
