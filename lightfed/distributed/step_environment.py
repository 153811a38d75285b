"""Lightning's view of a step of a SLURM job."""

import os
from typing import Any

from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from typing_extensions import override

from lightfed.distributed.slurm import port_of, starts_ranks


class StepEnvironment(SLURMEnvironment):
    """The tasks of a step are the ranks; those of another step meet at another port.

    Lightning's own looks at the job alone: two steps of one job would meet at one port. It is also
    blind to steps of jobs that have the name of a shell.
    """

    @property
    @override
    def main_port(self) -> int:
        port = port_of(os.environ)
        os.environ["MASTER_PORT"] = str(port)
        return port


def with_environment(plugins: Any) -> Any:
    """The plugins of a Trainer, with `StepEnvironment` where SLURM starts the ranks."""
    if not starts_ranks(os.environ):
        return plugins
    given = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
    if any(isinstance(plugin, ClusterEnvironment) for plugin in given):
        return plugins
    return [*given, StepEnvironment(auto_requeue=False)]
