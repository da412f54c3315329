"""From which checkpoint a training starts or resumes, and whether it has already ended."""

import logging
import math
import os
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils

from ..checkpoints import UNKNOWN, Reading, languages_of, options_of_task, part_of, reading_for
from ..errors import InputError
from .loading import refuse_other_dictionaries
from .registry import replaces
from .saving import InPlaceOf, forget_other_trainings, restore_early_stopping

logger = logging.getLogger(__name__)

_load_checkpoint = checkpoint_utils.load_checkpoint


@replaces(
    "fairseq.checkpoint_utils.load_checkpoint",
    prevents="wrong results",
    until="the patch of load_checkpoint_to_cpu goes",
    wraps=_load_checkpoint,
)
def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Load the checkpoint from which a training starts or resumes.

    Gives load_checkpoint_to_cpu the languages and options of the training, and writes languages that fairseq read from
    file names into new checkpoints. Restores the counter of --patience if the same training starts again, with the same
    metric and without a --reset-… flag. A training that has reached --max-update, or that --patience has ended, ends at
    once when it is started again, and the log says why; fairseq trains on each time. With fairseq-hydra-train
    --multirun, a training does not compare its results with those of the one before.
    """
    forget_other_trainings()
    languages = languages_of(options_of_task(trainer.task))
    if languages != UNKNOWN and all(hasattr(trainer.cfg.task, f"{side}_lang") for side in ("source", "target")):
        # Without --source-lang, the task read the languages from file names; the checkpoint must contain them.
        trainer.cfg.task.source_lang, trainer.cfg.task.target_lang = languages
    last = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    path, finetunes = _start(cfg, last, trainer.checkpoint_suffix)
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder, and must be a file: fairseq would start from the beginning")
    resets = any((cfg.reset_optimizer, cfg.reset_lr_scheduler, cfg.reset_dataloader, cfg.reset_meters))
    # A new training that starts from a model may have the opposite direction, and be another model.
    if cfg.reset_optimizer or cfg.reset_dataloader or finetunes:
        languages = UNKNOWN
    resumes = not (cfg.reset_optimizer or finetunes)
    refuse: Callable[..., None] = getattr(trainer.get_model(), "refuse_other_model", lambda *_: None)

    def check(file: str, state: dict[str, Any]) -> None:
        refuse(file, part_of(state, "model"), trainer.cfg.model, finetunes or resets)
        if resumes and not state.get("last_optimizer_state"):
            logger.warning(f"{file} has no state of the optimiser: it, the learning rate and the updates start anew")

    is_same_training = os.path.exists(last) and os.path.exists(path) and os.path.samefile(path, last)
    reading = Reading([path], languages, resumes=resumes, check=check)
    with reading_for(reading):
        extra_state, epoch_itr = _load_checkpoint(cfg, trainer, **kwargs)
    refuse_other_dictionaries(reading, trainer.task)
    if is_same_training:
        runs = 0 if resets else restore_early_stopping(extra_state, cfg)
        updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
        ended = ""
        if isinstance(most, int) and 0 < most <= updates:  # fairseq's own tests give a trainer without a number
            ended = f"it has made {updates:,} updates, and --max-update is {most}"
        elif runs and runs >= cfg.patience:
            ended = f"{runs} validations had no better {cfg.best_checkpoint_metric}, and --patience is {cfg.patience}"
        if ended:
            logger.info(f"the training in --save-dir {cfg.save_dir} has already ended: {ended}")
            epoch_itr = _NoMoreEpochs(epoch_itr)
    return extra_state, epoch_itr


def _start(cfg: Any, last: str, suffix: str) -> tuple[str, bool]:
    """Return the checkpoint from which fairseq starts, and whether this is by --finetune-from-model.

    Raises an InputError if --continue-once names no file; fairseq would start from the beginning.
    """
    if cfg.restore_file != "checkpoint_last.pt":
        return cfg.restore_file.replace(".pt", f"{suffix}.pt"), False
    if os.path.exists(last):
        return last, False
    if getattr(cfg, "continue_once", None) is not None:
        if not checkpoint_utils.PathManager.exists(cfg.continue_once):
            raise InputError(f"--continue-once {cfg.continue_once} does not exist")
        return cfg.continue_once, False
    return cfg.finetune_from_model or last, cfg.finetune_from_model is not None


class _NoMoreEpochs(InPlaceOf):
    """An epoch iterator with which fairseq-train ends before the next epoch."""

    next_epoch_idx = math.nan  # is not <= --max-epoch, whose default is infinity
