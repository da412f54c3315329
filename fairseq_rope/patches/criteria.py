"""A task that is trained with another criterion than its usual one says so.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
import logging
from typing import Any

from fairseq import criterions, tasks
from fairseq.distributed import utils as distributed_utils

logger = logging.getLogger(__name__)

_build_criterion = criterions.build_criterion

# The criterion of each task that is not trained with fairseq's default one, cross_entropy.
USUAL = {
    **{"masked_lm": "masked_lm", "multilingual_masked_lm": "masked_lm", "legacy_masked_lm": "legacy_masked_lm_loss"},
    **{"sentence_prediction": "sentence_prediction", "sentence_ranking": "sentence_ranking"},
    "translation_lev": "nat_loss",
}


@functools.wraps(_build_criterion)
def build_criterion(cfg: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
    criterion = getattr(cfg, "_name", None) or getattr(cfg, "criterion", None)  # hydra's, or the flag
    for name, usual in USUAL.items():
        is_other = criterion not in (None, usual) and type(task) is tasks.TASK_REGISTRY.get(name)
        if is_other and distributed_utils.get_global_rank() == 0:
            logger.warning(
                f"--criterion {criterion} with --task {name}: its usual criterion is {usual}, with another loss"
            )
    return _build_criterion(cfg, task, *args, **kwargs)
