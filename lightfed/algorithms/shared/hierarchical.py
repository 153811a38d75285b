"""Clients as the devices of servers: the base of FedBCD and its baselines.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900
"""

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.simulation.delays import Delay, Exponential
from lightfed.simulation.hierarchy import Activation, Hierarchy, Phase, Unit


class Hierarchical(Algorithm):
    """Each server has active devices, which train for K steps or epochs."""

    def __init__(
        self,
        servers: int = 10,
        active: int = 3,
        steps: tuple[int, int] = (1, 5),
        unit: Unit = "step",
        delay: Delay | None = None,
        step_delay: Delay | None = None,
        activation: Activation = "uniform",
    ) -> None:
        """Set the servers, their devices and the length of sessions.

        Args:
            servers: N; the clients are split among them equally, in order, as devices.
            active: |Q_n|, number of devices per server that communicate with it in a phase.
            steps: Bounds of K, the length of a session, drawn for every activation.
            unit: What K counts: steps (mini-batches) or epochs.
            delay: Virtual seconds of a device's phase; Exponential(mean=1) by default.
            step_delay: Virtual seconds of each of its K units, in addition.
            activation: Random active devices, or those that wake up first (after their delay), as
                in the released code's second experiment.
        """
        super().__init__()
        self.hierarchy = Hierarchy(
            servers, active, active, (steps[0], steps[1]), unit, delay or Exponential(1.0),
            step_delay, activation,
        )  # fmt: skip

    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        """Q_n, K_i and the duration."""
        return self.hierarchy.phase(server, t, clients=fed.clients, seed=fed.seed)
