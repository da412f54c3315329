"""Runs a function for many tasks, each in a process of its own, on this machine or as jobs of SLURM."""

import os


def available_cores() -> int:
    """Return how many cores this process may use."""
    on_macos = not hasattr(os, "sched_getaffinity")
    return os.cpu_count() or 1 if on_macos else len(os.sched_getaffinity(0))
