"""The cluster of a test session, and the folder from which jobs are submitted."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.runs import Workspace

REQUIRED = "LIGHTFED_SLURM_REQUIRED"  # set where the absence of SLURM is a failure


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM cluster for as long as the tests run."""
    if missing():
        reason = f"not installed: {', '.join(missing())} (apt-get install slurm-wlm munge)"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def workspace(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"), cluster)
