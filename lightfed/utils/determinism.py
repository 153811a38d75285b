"""The same bits in every run on a GPU: what torch is asked for."""

import os

import torch


def ask_for_same_bits(*, choose_fastest: bool = False) -> None:
    """Have torch use operators that add up in one order, and warn of those that have none.

    Otherwise cuDNN takes convolutions whose gradients are summed by atomics, and two runs of one
    configuration differ. This holds for the process, as torch knows no other scope.

    Args:
        choose_fastest: Whether cuDNN may time its algorithms and take the fastest of those that
            repeat their bits. Which one that is may differ from run to run.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = choose_fastest

    # It finds programs that read what they have not written, by filling every new tensor. A step
    # of a small network makes fifteen of them, each of which would be another launch.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    # cuBLAS reads it at its first product. torch warns of every product without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
