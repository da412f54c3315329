"""The fast beam search. Hypotheses of a sentence share one cache, and a step calls few modules.

The model reaches it through the functions below and nothing else. Results match fairseq's search; only the
implementation differs. The environment variable FAIRSEQ_ROPE_FAST_SEARCH turns it off (0) or on (1); by
default it is on where ``benchmarks/generate.py`` has shown it to be faster, which is on CPUs.
"""

from .interface import STATE, beams_of, begin, project, reorder, reorder_encoder_out, step

__all__ = ["STATE", "beams_of", "begin", "project", "reorder", "reorder_encoder_out", "step"]
