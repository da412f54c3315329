"""The fast beam search. Hypotheses of a sentence share one cache, and a step calls few modules.

Results match fairseq's search; only the implementation differs. The model knows nothing of it: a ``SequenceGenerator``
calls its models through :class:`.ensemble.FastEnsemble`. The environment variable FAIRSEQ_ROPE_FAST_SEARCH turns the
search off (0) or on (1). By default it is on for CPUs and CUDA GPUs, where benchmarks have shown it to be
faster.
"""

from .. import patches  # noqa: F401  isort: skip
