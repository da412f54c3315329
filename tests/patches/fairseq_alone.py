"""Modules of fairseq without this project's replacements, and a translation task."""

import functools
import importlib.util
import sys
from pathlib import Path

from fairseq import checkpoint_utils, tasks
from fairseq.data import FastaDataset
from fairseq.options import get_training_parser, parse_args_and_arch


def without_replacements(path):
    """A second copy of a module of fairseq, loaded from its file."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_alone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache
def fairseq_alone():
    """fairseq/checkpoint_utils.py without replacements."""
    return without_replacements(checkpoint_utils.__file__)


@functools.lru_cache
def fasta_dataset_alone():
    """fairseq/data/fasta_dataset.py without replacements."""
    return without_replacements(sys.modules[FastaDataset.__module__].__file__)


def translation_task(data, source="en", target="de"):
    """fairseq's translation task with the binary *data*."""
    flags = [str(data), "--arch", "transformer_tiny", "-s", source, "-t", target]
    return tasks.setup_task(parse_args_and_arch(get_training_parser(), flags))
