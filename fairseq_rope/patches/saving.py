"""Writing checkpoints: files get their names when they are complete, and errors name the file and the reason."""

import contextlib
import os
import shutil
import sys
import time
from typing import Any

import torch
from fairseq import checkpoint_utils

from ..checkpoints import naming_the_file
from ..files import written_whole
from .loading import DICTIONARIES, dictionaries_of
from .registry import replaces

_torch_persistent_save = checkpoint_utils.torch_persistent_save
_save_checkpoint = checkpoint_utils.save_checkpoint

TRIES = 3  # as in fairseq
PAUSE = 2.5  # seconds between them


class InPlaceOf:
    """Stands for an object of fairseq; subclasses replace some of its methods."""

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced, name)


class WholeFiles(InPlaceOf):
    """fairseq's ``PathManager``, whose copies and renames never leave an incomplete file under the new name.

    fairseq copies a checkpoint to checkpoint_best.pt and checkpoint_last.pt in place. If it is killed meanwhile, or
    after a power cut, they can be incomplete. Here each copy is written under a temporary name, synced and renamed. So
    a hard link keeps the old contents, and a symbolic link leads to the new file.
    """

    def rename(self, src: str, dst: str) -> Any:
        """Rename *src* after its data have reached the disk; otherwise a power cut can leave an empty file."""
        with open(src, "rb") as file:
            os.fsync(file.fileno())
        return self._replaced.rename(src, dst)

    def copy(self, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        """Copy to a temporary file and rename it. If *dst_path* is a link, the file that it points to is replaced.

        A device, and a file in a folder without write permission, are written in place, as in fairseq.
        """
        final = os.path.realpath(dst_path)
        by_rename = overwrite and self._replaced.supports_rename(dst_path)
        can_be_replaced = os.path.isfile(final) and os.access(os.path.dirname(final), os.W_OK | os.X_OK)
        if not by_rename or (os.path.exists(final) and not can_be_replaced):
            return self._replaced.copy(src_path, dst_path, overwrite=overwrite)
        advice = f"; {src_path} is complete, and --restore-file {src_path} continues from it"
        with naming_the_file(dst_path, advice), open(src_path, "rb") as source, written_whole(final) as (target,):
            shutil.copyfileobj(source, target, 2**24)
            if os.path.exists(final):
                shutil.copymode(final, target.name)
        return True


PATH_MANAGER = replaces(
    "fairseq.checkpoint_utils.PathManager",
    prevents="lost data",
    until="fairseq renames its copies and syncs before it renames",
)(WholeFiles(checkpoint_utils.PathManager))


@replaces(
    "fairseq.checkpoint_utils.torch_persistent_save",
    prevents="an unreadable error",
    until="fairseq names the checkpoint and the reason",
    wraps=_torch_persistent_save,
)
def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
    """Write a checkpoint; an error names it, and leaves no temporary file.

    torch reports a full disk as an unexpected position in a file. Here the error names the checkpoint, the reason and
    the free space, and the temporary file is removed.
    """
    with naming_the_file(filename):
        try:
            _torch_persistent_save(obj, filename, async_write=async_write)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(filename + ".tmp")
            raise


@replaces(
    "fairseq.checkpoint_utils._torch_persistent_save",
    prevents="lost data",
    until="fairseq retries from the start of the file",
)
def _save_with_retries(obj: Any, f: Any) -> None:
    """Call ``torch.save`` with fairseq's retries; each retry starts at the beginning of the file.

    When a write fails, fairseq tries twice more and appends to what is already in the file. Then the file with the
    final name begins with half a checkpoint. Here each attempt starts at the beginning of the file.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return torch.save(obj, f)
        except Exception:
            if attempt == TRIES or not f.seekable():
                raise
            time.sleep(PAUSE)
            f.seek(0)
            f.truncate()


class _MidEpoch(InPlaceOf):
    """An epoch iterator that reports that its epoch has not ended."""

    def end_of_epoch(self) -> bool:
        return False


@replaces(
    "fairseq.checkpoint_utils.save_checkpoint",
    prevents="lost data",
    until="fairseq writes a checkpoint at every interval, with the counter",
    wraps=_save_checkpoint,
)
def save_checkpoint(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
    """Write the checkpoints of this moment, with the counter of --patience and digests of the dictionaries.

    fairseq skips a checkpoint of --save-interval-updates at the end of an epoch, even if it writes no checkpoint for
    that epoch (--no-epoch-checkpoints, --save-interval). An average of the last five checkpoints then uses an older one
    in its place. It also does not save the counter of --patience, so a training that resumes ends later than one that
    is not interrupted.
    """
    every = cfg.save_interval_updates
    if every > 0 and trainer.get_num_updates() % every == 0 and epoch_itr.end_of_epoch():
        if cfg.no_epoch_checkpoints or epoch_itr.epoch % cfg.save_interval != 0:  # no checkpoint for this epoch
            epoch_itr = _MidEpoch(epoch_itr)
    return _save_checkpoint(cfg, _WithMoreState(trainer, cfg), epoch_itr, val_loss)


class _WithMoreState(InPlaceOf):
    """A trainer that also writes the digests of dictionaries and the counter of ``--patience`` into its checkpoints."""

    def __init__(self, trainer: Any, cfg: Any) -> None:
        super().__init__(trainer)
        self._cfg = cfg

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> Any:
        extra_state = {**extra_state, DICTIONARIES: dictionaries_of(self.task)}
        counters = {name: value for function in _stops_early() for name, value in vars(function).items()}
        if "best" in counters:
            extra_state |= {"early_stopping": counters, "early_stopping_metric": _metric(self._cfg)}
        return self._replaced.save_checkpoint(filename, extra_state)


def _metric(cfg: Any) -> str:
    """The name of what ``--patience`` compares, after "-" if higher is better."""
    return "-" * cfg.maximize_best_checkpoint_metric + cfg.best_checkpoint_metric


def restore_early_stopping(extra_state: dict[str, Any] | None, cfg: Any) -> int:
    """Continue to count the validations without a better result, as in the training that wrote *extra_state*.

    Returns their number: 0 without ``--patience``, or if *cfg*, the options of checkpoints, has another metric.
    """
    extra_state = extra_state or {}
    counters: dict[str, Any] = extra_state.get("early_stopping", {})
    if getattr(cfg, "patience", -1) <= 0 or not counters:  # fairseq's own tests have no such key
        return 0
    if extra_state.get("early_stopping_metric", _metric(cfg)) != _metric(cfg):
        return 0
    for function in _stops_early():
        vars(function).update(counters)
    return counters.get("num_runs", 0)


def forget_other_trainings() -> None:
    """Forget the best result, and the counter of ``--patience``, of a training that this process made before.

    fairseq-hydra-train with ``--multirun`` makes all its trainings in one process.
    """
    for function in (checkpoint_utils.save_checkpoint, *_stops_early()):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)


def _stops_early() -> list[Any]:
    """Return the functions of fairseq's training program that count, with attributes ``best`` and ``num_runs``."""
    # "__main__" if fairseq's file is run as a script; torch's processes, one for each GPU, call it "__mp_main__"
    names = ("fairseq_cli.train", "__main__", "__mp_main__")
    functions = (getattr(sys.modules.get(name), "should_stop_early", None) for name in names)
    return [function for function in functions if getattr(function, "__module__", None) in names]
