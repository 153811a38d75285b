"""Partitions: how samples are dealt to clients."""

# ruff: noqa: F401 - imported for others

from lightfed.data.partition.dirichlet import Dirichlet, DirichletClient, Quantity
from lightfed.data.partition.draw import Partition, draw_partition
from lightfed.data.partition.partitioner import Partitioner
from lightfed.data.partition.schemes import Classes, Diversity, Iid, Natural, Shards
