"""Lightning's view of a step of a SLURM job."""

import os
from typing import Any

from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from typing_extensions import override

from lightfed.distributed.slurm import port_of, starts_ranks


class StepEnvironment(SLURMEnvironment):
    """Lets the tasks of a step be the ranks, which meet at a port of their own step.

    Lightning's own environment looks at the job alone, so two steps of one job would meet at one
    port. It also ignores the steps of a job that has the name of a shell.
    """

    @property
    @override
    def main_port(self) -> int:
        port = port_of(os.environ)
        os.environ["MASTER_PORT"] = str(port)
        return port


def with_environment(plugins: Any) -> Any:
    """Return the plugins of a Trainer, with `StepEnvironment` if SLURM starts the ranks.

    An environment that the user has given stays.

    Args:
        plugins: The plugins as a user may give them: None, one, or a list.
    """
    if not starts_ranks(os.environ):
        return plugins

    if plugins is None:
        plugin_list = []
    elif isinstance(plugins, list):
        plugin_list = plugins
    else:
        plugin_list = [plugins]

    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugin_list):
        return plugins
    return [*plugin_list, StepEnvironment(auto_requeue=False)]
