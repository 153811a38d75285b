"""What a configuration adds to a method, checked against what the method takes."""

from collections.abc import Sequence

import torch

from lightfed.local.group_state import GroupState
from lightfed.local.hooks import Hooks, LocalPenalty
from lightfed.models.personal import personal_tensors
from lightfed.utils.errors import UserError

_LEAVE_OUT = "leave it out"


def check_additions(
    algorithm: Hooks,
    penalties: Sequence[LocalPenalty],
    *,
    server_optimizer: bool,
    keep_optimizer: bool,
) -> None:
    """Refuse settings that the algorithm does not take, with its reason.

    Args:
        algorithm: The algorithm.
        penalties: Its own penalty, if it has one, and the configured one.
        server_optimizer: Whether a server optimizer is configured.
        keep_optimizer: Whether clients are to keep the state of their optimizer.

    Raises:
        UserError: A setting does not fit; it names the key.
    """
    if server_optimizer and algorithm.no_server_step:
        raise UserError(
            "model.server_optimizer",
            algorithm.no_server_step,
            "leave it out, or choose a method that merges models",
        )
    if keep_optimizer and algorithm.no_kept_optimizer:
        found = f"true, but {algorithm.no_kept_optimizer}"
        raise UserError("model.keep_optimizer", found, _LEAVE_OUT)
    for penalty in penalties:
        _check_penalty(penalty, algorithm)
    _check_pulls(algorithm, penalties)


def _check_penalty(penalty: LocalPenalty, algorithm: Hooks) -> None:
    """Refuse a second penalty of one kind, and one whose memory the method does not allow."""
    key = "model.local_penalty"
    kind = type(penalty).__name__
    method = type(algorithm).__name__
    own = algorithm.local_penalty
    if penalty is not own and type(penalty) is type(own):
        raise UserError(key, f"{kind}, and {method} has one of its own", _LEAVE_OUT)
    if penalty.stateful and algorithm.no_memory:
        raise UserError(key, f"{kind}, but with {method} {algorithm.no_memory}", _LEAVE_OUT)


def _check_pulls(algorithm: Hooks, penalties: Sequence[LocalPenalty]) -> None:
    """Refuse a second pull: a session is pulled towards one model at most."""
    pulling = [hooks for hooks in (algorithm, *penalties) if hooks.overrides("proximal")]
    if len(pulling) > 1:
        last = type(pulling[-1]).__name__
        found = f"{last}, and {type(algorithm).__name__} has a pull of its own"
        raise UserError("model.local_penalty", found, _LEAVE_OUT)


def personal_names(
    algorithm: Hooks, groups: Sequence[GroupState], chosen: Sequence[str]
) -> frozenset[str]:
    """Return the names of the tensors that stay with their client, in any group.

    Args:
        algorithm: The algorithm, which may name some itself.
        groups: The groups with their modules.
        chosen: The configured prefixes of names, or `norms`.

    Raises:
        UserError: The algorithm does not allow personal tensors.
    """
    if chosen:
        why_not = algorithm.no_personal
        if why_not is None:
            why_not = "its clients keep models of their own" if algorithm.stateful else ""
        if why_not:
            found = f"{list(chosen)}, but of {type(algorithm).__name__} {why_not}"
            raise UserError("model.personal", found, _LEAVE_OUT)

    names: set[str] = set()
    for state in groups:
        names |= algorithm.personal(state.module)
        names |= personal_tensors(state.module, chosen)
    return frozenset(names)


def personal_positions(
    state: GroupState, names: frozenset[str], device: torch.device
) -> torch.Tensor:
    """Return the positions in a group's rows, of shape (N,), of parameters with these names.

    Raises:
        UserError: They are all parameters of the group, so that nothing would be merged.
    """
    positions = state.layout.positions(names).to(device)
    if len(positions) == state.layout.parameter_numel:
        raise UserError(
            "model.personal",
            f"all tensors of group {state.name}",
            "choose fewer, or Standalone",
        )
    return positions
