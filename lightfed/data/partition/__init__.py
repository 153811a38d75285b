"""Partitions: how samples are dealt to clients.

Imports `utils` and the data sets.
"""

from lightfed.data.partition.dirichlet import Dirichlet, DirichletClient, Quantity
from lightfed.data.partition.draw import Partition, draw_partition
from lightfed.data.partition.partitioner import Partitioner
from lightfed.data.partition.schemes import Classes, Diversity, Iid, Natural, Shards

__all__ = [
    "Classes",
    "Dirichlet",
    "DirichletClient",
    "Diversity",
    "Iid",
    "Natural",
    "Partition",
    "Partitioner",
    "Quantity",
    "Shards",
    "draw_partition",
]
