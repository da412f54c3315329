"""A task that is trained with another criterion than its usual one says so."""

import logging
from typing import Any

from fairseq import criterions, tasks
from fairseq.distributed import utils as distributed_utils

from ..registry import replaces

logger = logging.getLogger(__name__)

_build_criterion = criterions.build_criterion

# The criterion of each task that is not trained with fairseq's default one, cross_entropy.
USUAL = {
    **{"masked_lm": "masked_lm", "multilingual_masked_lm": "masked_lm", "legacy_masked_lm": "legacy_masked_lm_loss"},
    **{"sentence_prediction": "sentence_prediction", "sentence_ranking": "sentence_ranking"},
    "translation_lev": "nat_loss",
}


@replaces(
    "fairseq.criterions.build_criterion",
    prevents="wrong results",
    until="the tasks of fairseq choose their criterion",
    wraps=_build_criterion,
)
def build_criterion(cfg: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the criterion, and warn if it is not the usual one of the task.

    Without --criterion, fairseq-train takes cross_entropy for every task. With --task masked_lm, that is the loss at
    all positions, also those without a masked word. Here a warning names the usual criterion.
    """
    criterion = getattr(cfg, "_name", None) or getattr(cfg, "criterion", None)  # hydra's, or the flag
    for name, usual in USUAL.items():
        is_other = criterion not in (None, usual) and type(task) is tasks.TASK_REGISTRY.get(name)
        if is_other and distributed_utils.get_global_rank() == 0:
            logger.warning(
                f"--criterion {criterion} with --task {name}: its usual criterion is {usual}, with another loss"
            )
    return _build_criterion(cfg, task, *args, **kwargs)
