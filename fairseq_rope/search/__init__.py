"""The fast beam search. Hypotheses of a sentence share one cache, and a step calls few modules.

The model uses the functions below and the layer :class:`.projection.PackedProjection`. Results match fairseq's search;
only the implementation differs. The environment variable FAIRSEQ_ROPE_FAST_SEARCH turns the search off (0) or on (1).
By default it is on for CPUs, where ``benchmarks/generate.py`` has shown it to be faster.
"""

from .. import plugin  # noqa: F401  isort: skip
from .interface import STATE, beams_of, begin, project, reorder, reorder_encoder_out, step

__all__ = ["STATE", "beams_of", "begin", "project", "reorder", "reorder_encoder_out", "step"]
