"""What a configuration adds to any method, checked against what the method takes."""

from collections.abc import Sequence

import torch

from lightfed.local.client_group import GroupState
from lightfed.local.hooks import Hooks, LocalPenalty
from lightfed.models.personal import personal_tensors
from lightfed.utils.errors import require


def check_additions(
    algorithm: Hooks,
    penalties: Sequence[LocalPenalty],
    *,
    server_optimizer: bool,
    keep_optimizer: bool,
) -> None:
    """Refuse what the algorithm does not take, with its reason."""
    why, fix = algorithm.no_server_step, "leave it out, or choose a method that merges models"
    require(not (server_optimizer and why), "model.server_optimizer", why, fix)
    why, fix = algorithm.no_kept_optimizer, "leave it out"
    require(not (keep_optimizer and why), "model.keep_optimizer", f"true, but {why}", fix)
    pulls = [type(h).__name__ for h in (algorithm, *penalties) if h.overrides("proximal")]
    name = type(algorithm).__name__
    for penalty in penalties:
        kind = type(penalty).__name__
        of_the_method = algorithm.local_penalty
        twice = penalty is not of_the_method and type(of_the_method) is type(penalty)
        require(not twice, "model.local_penalty", f"{kind}, and {name} has one of its own", fix)
        why = algorithm.no_memory if penalty.stateful else ""
        require(not why, "model.local_penalty", f"{kind}, but with {name} {why}", fix)
    found = f"{''.join(pulls[-1:])}, and {name} has a pull of its own"
    require(len(pulls) < 2, "model.local_penalty", found, fix)


def personal_of(
    algorithm: Hooks, groups: Sequence[GroupState], chosen: Sequence[str], device: torch.device
) -> frozenset[str]:
    """Names of the algorithm's and the configured personal tensors; sets those of the groups."""
    why, found = algorithm.no_personal, set[str]()
    if why is None:
        why = "its clients keep models of their own" if algorithm.stateful else ""
    refused = f"{list(chosen)}, but of {type(algorithm).__name__} {why}"
    require(not (chosen and why), "model.personal", refused, "leave it out")
    for state in groups:
        found |= algorithm.personal(state.module) | personal_tensors(state.module, chosen)
    for state in groups:
        state.personal = state.layout.positions(found).to(device)
        shares = len(state.personal) < state.layout.parameter_numel
        fix = "choose fewer, or Standalone"
        require(shares, "model.personal", f"all tensors of group {state.name}", fix)
    return frozenset(found)
