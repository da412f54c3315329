"""Runs a function for many tasks, each in a process of its own, on this machine or as jobs of SLURM."""
