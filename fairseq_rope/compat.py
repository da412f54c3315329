"""What fairseq needs on today's torch and NumPy, in one place.

fairseq is archived; each mend below says what breaks without it, and when it can go. Importing this
module applies them. They are seen by every model of the process, not only by ours.
"""

import ast
import collections
import contextlib
import errno
import functools
import inspect
import os
import pickle
import re
import shutil
import sys
import types
import zipfile
from argparse import Namespace
from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.tasks import FairseqTask

from .errors import InputError


class CheckpointError(InputError):
    """A file is no checkpoint that can be used here; the message names it and says why."""


def _checkpoint_classes() -> List[Any]:
    """What fairseq's checkpoints hold beside tensors, numbers, strings and plain containers.

    None of these does anything when it is built but keep what it is given.
    """
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import meters
    from omegaconf import base, dictconfig, listconfig, nodes

    # cfg.model and cfg.task of models that are configured by flags (fairseq/dataclass/utils.py)
    classes: List[Any] = [Namespace]
    # NumPy scalars (validation scores) and arrays (the counts of --eval-bleu) in extra_state; the name of
    # the module that builds them changed in NumPy 2
    for build in (np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]):
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            classes.append((build, f"{module}.{build.__name__}"))
    classes += [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}]
    # not of checkpoints: what a state that is broadcast to other processes has in place of its tensors
    classes.append(distributed_utils._TensorPlaceholder)
    # fairseq 0.10 and 0.11 pickled cfg as an OmegaConf object
    classes += [dictconfig.DictConfig, listconfig.ListConfig, base.ContainerMetadata, base.Metadata]
    classes += [nodes.AnyNode, (Any, "typing.Any"), list, dict, int, collections.defaultdict]
    # fairseq up to 0.8 kept its meters in extra_state["train_meters"]
    old_meters = (meters.AverageMeter, meters.TimeMeter, meters.StopwatchMeter)
    classes += [(meter, f"fairseq.meters.{meter.__name__}") for meter in old_meters]
    return classes


# Older ones cannot be told which classes are harmless (< 2.4), or not under another name (< 2.6).
_CAN_ALLOW_LIST = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)


def _load(file: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.load`` that takes a fairseq checkpoint and runs none of its code.

    torch >= 2.6 refuses a fairseq checkpoint (``weights_only=True`` is its default there, and does not
    know ``argparse.Namespace``); fairseq's git main answers with ``weights_only=False``, which runs
    whatever code a pickle holds. Here ``weights_only`` is always on, and the classes that checkpoints
    hold are allowed by name. Older torch loads as fairseq tells it to, so code is run there; what is no
    checkpoint is still refused in one sentence. Can go when fairseq loads its own checkpoints so.

    Raises:
        CheckpointError: the file is cut short, holds a class that is not allowed, or is no checkpoint of
            fairseq's
    """
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "checkpoint")
    if _CAN_ALLOW_LIST:
        kwargs["weights_only"] = True
    try:
        _refuse_damage(file, name)
        state = torch.load(file, *args, **kwargs)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can end in any of them
        if not (_CAN_ALLOW_LIST and isinstance(error, pickle.UnpicklingError)):
            reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
            raise CheckpointError(f"{name} is not a whole checkpoint: {reason}") from None
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds {found.group(1)}" if found else "it is damaged, or holds something"
        reason = f"{what} that fairseq's checkpoints do not"
        raise CheckpointError(f"{name} was not loaded, and nothing in it was run: {reason}") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{name} is not a fairseq checkpoint: it has no entry 'model' with weights")
    for weight_name, weight in state["model"].items():
        if not (isinstance(weight_name, str) and isinstance(weight, torch.Tensor)):
            raise CheckpointError(
                f"{name} is not a fairseq checkpoint: its weight {weight_name} is no tensor"
            )
    return state


def _refuse_damage(file: Any, name: Any) -> None:
    """Raise a CheckpointError if bytes in the middle of a checkpoint are not those that were written.

    torch does not compare the checksums in its zip files. (Checkpoints of torch < 1.6 are no zip files, and
    have none.)
    """
    damaged = None
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    if hasattr(file, "seek"):
        file.seek(0)
    if damaged is not None:
        raise CheckpointError(f"{name} is not a whole checkpoint: its part {damaged} is damaged")


def load_checkpoint(path: str) -> Dict[str, Any]:
    """The state that fairseq saved in *path*, all tensors on the CPU, as it lies on disk.

    Raises:
        CheckpointError: as ``torch.load`` here
        OSError: the file cannot be read
    """
    return _load(path, map_location="cpu")


class _TorchWithSafeLoad(types.ModuleType):
    """``torch`` as ``fairseq.checkpoint_utils`` sees it: ``load`` is ours, all else is torch's."""

    load = staticmethod(_load)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _WholeFiles:
    """``PathManager`` as ``fairseq.checkpoint_utils`` sees it: a file appears whole or not at all.

    fairseq writes a checkpoint under a temporary name, but then copies it to ``checkpoint_best.pt`` and
    ``checkpoint_last.pt`` in place; killed in between, it leaves a ``checkpoint_last.pt`` from which
    training cannot go on. And a file that was renamed before it reached the disk can be empty after a
    power cut. Can go when fairseq renames its copies too, and syncs before.
    """

    def __init__(self, path_manager: Any) -> None:
        self._path_manager = path_manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path_manager, name)

    def rename(self, src: str, dst: str) -> Any:
        with open(src, "rb") as file:
            os.fsync(file.fileno())
        return self._path_manager.rename(src, dst)

    def copy(self, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not (overwrite and self._path_manager.supports_rename(dst_path)):
            return self._path_manager.copy(src_path, dst_path, overwrite=overwrite)
        temporary = dst_path + ".tmp"  # fairseq's own suffix; the next copy overwrites it
        with naming_what_was_not_written(dst_path, temporary):
            shutil.copyfile(src_path, temporary)
            self.rename(temporary, dst_path)
        return True


@contextlib.contextmanager
def naming_what_was_not_written(path: str, temporary: str) -> Iterator[None]:
    """Around the writing of *temporary*, to be renamed to *path*: if it fails, the former is removed.

    Raises:
        OSError: *path* was not written; its ``strerror`` says why and how much room is left. torch reports
            that the system refused a write as a RuntimeError about positions in a file.
    """
    try:
        yield
    except BaseException as error:
        left = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free // 2**20
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        code = _refused_write(error)
        if code is None:
            raise
        if code == errno.EIO and left == 0:
            code = errno.ENOSPC
        reason = f"could not be written whole ({os.strerror(code)}; {left} MiB left on its disk)"
        raise OSError(code, reason, path) from error


def save_whole(state: Dict[str, Any], path: str) -> None:
    """``torch.save`` under a temporary name beside *path*, then rename.

    Raises:
        OSError: the folder cannot be written or is full; *path* is as it was before
    """
    temporary = f"{path}.{os.getpid()}.tmp"  # two that write at once do not mix
    with naming_what_was_not_written(path, temporary):
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _refused_write(error: Optional[BaseException]) -> Optional[int]:
    """The errno of the system's refusal to write that led to *error*; None if something else did."""
    if isinstance(error, OSError):
        return error.errno
    # torch's own writer, in C++, tells of no errno
    if isinstance(error, RuntimeError) and re.search(
        "PytorchStreamWriter|inline_container|basic_ios", str(error)
    ):
        return _refused_write(error.__context__) or errno.EIO
    return None


_torch_persistent_save = checkpoint_utils.torch_persistent_save


@functools.wraps(_torch_persistent_save)
def _save_or_say_why(obj: Any, filename: str, async_write: bool = False) -> None:
    """``checkpoint_utils.torch_persistent_save`` whose failure names the checkpoint and the reason."""
    with naming_what_was_not_written(filename, filename + ".tmp"):
        _torch_persistent_save(obj, filename, async_write=async_write)


def _save_once(obj: Any, f: Any) -> None:
    """``torch.save``, once.

    When a write fails, fairseq tries twice more, into the same open file and behind what is there: if the
    disk has room again by then, a file with half a checkpoint before the whole one gets the final name.
    Can go when fairseq tries again in a new file.
    """
    torch.save(obj, f)


class _MidEpoch:
    """An epoch iterator that says it has not reached the end of its epoch."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def end_of_epoch(self) -> bool:
        return False


_save_checkpoint = checkpoint_utils.save_checkpoint


@functools.wraps(_save_checkpoint)
def _save_every_interval(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
    """``checkpoint_utils.save_checkpoint`` that leaves no checkpoint of ``--save-interval-updates`` out.

    fairseq skips those that fall on the end of an epoch, also where no checkpoint of the epoch is written
    instead (``--no-epoch-checkpoints``, ``--save-interval``), and removes no old ones then: the last five
    are not the last five. Can go when fairseq asks for the number of updates alone.
    """
    every = cfg.save_interval_updates
    of_epoch = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    if every > 0 and trainer.get_num_updates() % every == 0 and not of_epoch:
        epoch_itr = _MidEpoch(epoch_itr)
    return _save_checkpoint(cfg, trainer, epoch_itr, val_loss)


_get_batch_iterator = FairseqTask.get_batch_iterator
_iterator_arguments = inspect.signature(_get_batch_iterator)


@functools.wraps(_get_batch_iterator)
def _same_batches_whenever_begun(*args: Any, **kwargs: Any) -> Any:
    """``FairseqTask.get_batch_iterator`` that composes the same batches in a resumed training.

    fairseq shuffles with ``seed + epoch`` before it sorts by length and cuts batches, once a process: begun
    in epoch 7, a process gets other batches than one that comes there from epoch 1, and a training
    resumed in the middle of an epoch leaves sentences out and sees others twice. Here batches are those
    of a start in epoch 1; the order in which an epoch takes them was always its own. Can go when fairseq
    composes batches by the seed alone.
    """
    given = _iterator_arguments.bind(*args, **kwargs)
    given.apply_defaults()
    task, dataset, epoch = (given.arguments[name] for name in ("self", "dataset", "epoch"))
    once = task.can_reuse_epoch_itr(dataset) and dataset not in task.dataset_to_epoch_iter
    anew = given.arguments.get("disable_iterator_cache") or given.arguments.get("update_epoch_batch_itr")
    if anew or not once:  # not composed now, or composed for every epoch, by its number
        return _get_batch_iterator(*args, **kwargs)
    given.arguments["epoch"] = 1
    iterator = _get_batch_iterator(*given.args, **given.kwargs)
    dataset.set_epoch(epoch)
    iterator.epoch = max(epoch, 1)
    return iterator


def _literal(x: str, *_: Any) -> Any:
    """``eval`` as fairseq's modules see it: literals, and their sums and products.

    fairseq evaluates options such as ``adaptive_softmax_cutoff`` and, of convolutional models,
    ``encoder_layers`` (by default ``[(512, 3)] * 20``) as Python, also those that it finds in a checkpoint: a
    clean pickle would be enough to run code. Can go when fairseq reads literals there.

    Raises:
        TypeError: *x* is no text, as ``eval`` raises
        ValueError: *x* is anything else
    """
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is no text")

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        return ast.literal_eval(node)

    return value(ast.parse(x.strip(), mode="eval").body)


_batch_by_size = data_utils.batch_by_size


@functools.wraps(_batch_by_size)
def _batch_by_size_whole(indices: Any, *args: Any, **kwargs: Any) -> List[Any]:
    """``data_utils.batch_by_size`` that leaves no sentence out.

    Since December 2022 fairseq drops the last batch when its size is no multiple of
    ``--required-batch-size-multiple`` (8 unless told): up to 7 sentences are neither validated nor, by
    ``fairseq-generate``, translated (fairseq #5036, #5094, #5351). What the flag promises is a size that
    is "either less than N or a multiple of N". Can go when fairseq keeps that promise.
    """
    if len(indices) == 0:
        return []
    batches = list(_batch_by_size(indices, *args, **kwargs))
    rest = indices[sum(len(batch) for batch in batches) :]
    return [*batches, np.asarray(rest, dtype=np.int64)] if len(rest) else batches


def _apply() -> None:
    if _CAN_ALLOW_LIST:
        torch.serialization.add_safe_globals(_checkpoint_classes())
    checkpoint_utils.torch = _TorchWithSafeLoad("torch")
    checkpoint_utils.PathManager = _WholeFiles(checkpoint_utils.PathManager)
    checkpoint_utils.torch_persistent_save = _save_or_say_why
    checkpoint_utils._torch_persistent_save = _save_once
    checkpoint_utils.save_checkpoint = _save_every_interval
    FairseqTask.get_batch_iterator = _same_batches_whenever_begun
    data_utils.batch_by_size = _batch_by_size_whole
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and not name.startswith("fairseq.examples."):
            vars(module)["eval"] = _literal  # seen before the builtin


_apply()
