"""Mistakes in an algorithm of a user's own that would silently train something else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.state.rows import ModelKind
from lightfed.utils.errors import UserError
from tests.small import SGD_HALF, fit, random_data


def linear() -> nn.Module:
    return nn.Linear(4, 3)


class Mistaken(FedAvg):
    """Sends, or merges, with a wrong argument."""

    def __init__(self, *, send: dict[str, Any] | None = None, **merge: Any) -> None:
        super().__init__()
        self.arguments = send or {}, merge

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients, (send, merge) = fed.participants(t), self.arguments
        fed.send(self.model, clients, **send)
        fed.train(clients, t)
        fed.merge(clients, into=self.model, **merge)


class Returns(FedAvg):
    """The new gradient is returned instead of written into the old one."""

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        return gradient * 0  # type: ignore[return-value]


class Bare(FedAvg):
    """The constructor of its base is forgotten."""

    def __init__(self) -> None:
        self.beta = 0.9


class Weighing(FedAvg):
    """A word that `merge` does not know, which no argument of the method has."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.weights: Any = word


class Headed(FedAvg):
    """The name of a layer, as its author wrote it."""

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_part("weight")


class Untested(Standalone):
    """No model to test is named, and no session trains."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        """Nothing."""

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> None:
        """Nothing."""


def test_a_run_without_losses_or_metrics_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(Untested(), [ClientGroup(2, linear)], optimizer=SGD_HALF)
    with caplog.at_level("WARNING", logger="lightfed"):
        fit(federation, random_data([4, 4]), tmp_path, rounds=2)
    for found in ("round 0 trains nothing", "no metrics: Untested returns no model to test"):
        assert caplog.text.count(found) == 1


MISTAKES: dict[str, tuple[Callable[[], FedAvg], str]] = {
    "a weight": (lambda: Weighing("size"), "weights='size'; give 'samples'"),
    "a tensor": (
        lambda: Mistaken(send={"tensors": ["net.weight", "net.bais"]}),
        "no tensor 'net.bais'; give whole names, such as 'net.weight'",
    ),
    "a prefix": (lambda: Mistaken(tensors=["net"]), "no tensor 'net'; give whole names"),
    "a part": (Headed, "without a client's tensor; names are such as 'net.weight'"),
    "a constructor": (Bare, r"Bare does not call super\(\).__init__\(\)"),
    "a gradient": (Returns, "change the gradient in place"),
}


@pytest.mark.parametrize(("algorithm", "found"), MISTAKES.values(), ids=MISTAKES)
def test_an_argument_that_means_nothing_is_refused(
    algorithm: Callable[[], FedAvg], found: str, tmp_path: Path
) -> None:
    def run() -> None:
        federation = Federation(algorithm(), [ClientGroup(2, linear)], optimizer=SGD_HALF)
        fit(federation, random_data([4, 4]), tmp_path)

    with pytest.raises(UserError, match=rf"^model\.algorithm: .*{found}"):
        run()
