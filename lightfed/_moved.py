"""Where modules of version 0.1 are now. Their old names go on working until version 0.3.

`import lightfed.core.store` imports `lightfed.state.rows`, with a DeprecationWarning.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

# By their room: old names, with the new one where the last part of it has changed.
_ROOMS = {
    "utils": """
        core._lightning=lightning_private core.archive=atomic_io
    """,
    "data.datasets": """
        data.cinic data.docstrings data.language data.speech data.text data.tones
        data.vision data.official data.cache data.characters=text
        data.vocabulary=language data.recording=logmel data.logmel data.dataset
    """,
    "data.partition": """
        data.partitioner data.dirichlet data.matching data.schemes
    """,
    "models.networks": """
        models.charcnn models.cifar_resnet models.cnn models.initial models.lenet models.mlp
        models.resnet models.scaler models.sizes models.torchvision models.transformer
        models.vdcnn models.vgg
    """,
    "models.composites": """
        models.moe=mixture models.mutual models.prototypes=prototype models.split
        models.classmeans=class_means models.svd=low_rank models.switchnorm=switch_norm
    """,
    "distributed": """
        comm.collectives comm.watch=liveness comm.interface core.placement utils.slurm
        core.allocation=slurm core.requeue
    """,
    "topology": """
        comm.graphs comm.topology comm.adjacency=matrices comm.mixing=matrices
        comm.facts=graph_summary
    """,
    "state": """
        core.store=rows core.staging core.ledger=costs core.parts
    """,
    "aggregation": """
        core.coverage=client_slices core.nesting=slice_cache core.sharing=group_mean
        core.exchange=gossip
    """,
    "local": """
        core.cohort=client_group core.client=client_module core.logbook core.optimizer
        core.session core.local=session_setup core.training=rank_sessions
        core.work=local_work
    """,
    "api": """
        core.algorithm core.fleet core.clients core.failures
    """,
    "simulation": """
        core.clock core.delays core.hierarchy
    """,
    "runs": """
        core.runfolder=run_folder core.fence=run_lock core.runlog=run_logger core.checkpoint
        core.lastcheckpoint=last_checkpoint core.journal core.export
        identity=federation_state
    """,
    "algorithms.shared": """
        core.beside=personal_shared core.classes=prototypes core.aspg core.signature
        core.trie=prefix_trie core.sparsity core.logitmasks=slice_tests
        core.staticnorm=slice_tests
    """,
    "engine": """
        core.trainer core.federation core.loop core.strategy core.evaluation
        core.figures=evaluation core.checks core.flags=checks core.progress
    """,
    "previews": """
        core.plan core.rehearsal=dry_run core.previews=trainer
        core.groups=layer_groups
    """,
    "studies.fedbcd": """
        latency
    """,
    "cli": """
        latency_command catalog control control_config control_string
    """,
}
_PACKAGES = ("lightfed.core", "lightfed.comm")


def _moved() -> dict[str, str]:
    found = {}
    for room, names in _ROOMS.items():
        for name in names.split():
            old, _, new = name.partition("=")
            found[f"lightfed.{old}"] = f"lightfed.{room}.{new or old.rpartition('.')[2]}"
    return found


MOVED = _moved()
"""New dotted names, by the old ones."""


class _Forwarder(MetaPathFinder, Loader):
    """Finds what no longer is where it was."""

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MOVED or name in _PACKAGES:
            return ModuleSpec(name, self, is_package=name in _PACKAGES)
        return None

    @override
    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in MOVED:
            new = MOVED[old]
            warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=2)
            sys.modules[old] = import_module(new)


def forward() -> None:
    """Let old names be imported; the last resort of an import."""
    sys.meta_path.append(_Forwarder())
