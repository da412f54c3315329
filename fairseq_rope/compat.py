"""What fairseq needs on today's torch and NumPy, in one place.

fairseq is archived; each mend below says what breaks without it, and when it can go. Importing this
module applies them. They are seen by every model of the process, not only by ours.
"""

import ast
import collections
import functools
import os
import pickle
import re
import shutil
import types
from argparse import Namespace
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils


class CheckpointError(RuntimeError):
    """A file is no checkpoint that can be loaded; the message names it and says why."""


def _checkpoint_classes() -> List[Any]:
    """What fairseq's checkpoints hold beside tensors, numbers, strings and plain containers.

    None of these does anything when it is built but keep what it is given.
    """
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
    hold are allowed by name. Older torch loads as fairseq tells it to. Can go when fairseq loads its own
    checkpoints so.

    Raises:
        CheckpointError: the file is cut short, is no checkpoint, or holds a class that is not allowed
    """
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "checkpoint")
    if _CAN_ALLOW_LIST:
        kwargs["weights_only"] = True
    try:
        return torch.load(file, *args, **kwargs)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds {found.group(1)}" if found else "it is damaged, or holds something"
        reason = f"{what} that fairseq's checkpoints do not"
        raise CheckpointError(f"{name} was not loaded, and nothing in it was run: {reason}") from None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can end in any of them
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name} is not a whole checkpoint: {reason[:200]}") from None


def load_checkpoint(path: str) -> Dict[str, Any]:
    """The state that fairseq saved in *path*, all tensors on the CPU, as it lies on disk.

    Raises:
        CheckpointError: as ``torch.load`` here; also if what was loaded is not a fairseq checkpoint
        OSError: the file cannot be read
    """
    state = _load(path, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no entry 'model' with weights")
    for name, weight in state["model"].items():
        if not isinstance(weight, torch.Tensor):
            raise CheckpointError(f"{path} is not a fairseq checkpoint: its weight {name} is no tensor")
    return state


class _TorchWithSafeLoad(types.ModuleType):
    """``torch`` as ``fairseq.checkpoint_utils`` sees it: ``load`` is ours, all else is torch's."""

    load = staticmethod(_load)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _AtomicCopies:
    """``PathManager`` as ``fairseq.checkpoint_utils`` sees it: a copy appears whole or not at all.

    fairseq writes a checkpoint under a temporary name, but then copies it to ``checkpoint_best.pt`` and
    ``checkpoint_last.pt`` in place; killed in between, it leaves a ``checkpoint_last.pt`` from which
    training cannot go on. Can go when fairseq renames its copies too.
    """

    def __init__(self, path_manager: Any) -> None:
        self._path_manager = path_manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path_manager, name)

    def copy(self, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not (overwrite and self._path_manager.supports_rename(dst_path)):
            return self._path_manager.copy(src_path, dst_path, overwrite=overwrite)
        temporary = dst_path + ".tmp"  # fairseq's own suffix; the next copy overwrites it
        shutil.copyfile(src_path, temporary)
        os.replace(temporary, dst_path)
        return True


def _literal_list(x: Any, type: Callable[[Any], Any] = float) -> Optional[List[Any]]:
    """``utils.eval_str_list`` without its ``eval``.

    fairseq evaluates options such as ``adaptive_softmax_cutoff`` as Python, also those that it finds in a
    checkpoint: a clean pickle would be enough to run code. Can go when fairseq reads literals there.
    """
    if x is None:
        return None
    if isinstance(x, str):
        x = ast.literal_eval(x)
    try:
        return [type(item) for item in x]
    except TypeError:
        return [type(x)]


def _literal_dict(x: Any, type: Callable[[Any], Any] = dict) -> Any:
    """``utils.eval_str_dict`` without its ``eval``, for the same reason."""
    return ast.literal_eval(x) if isinstance(x, str) else x


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
    checkpoint_utils.PathManager = _AtomicCopies(checkpoint_utils.PathManager)
    data_utils.batch_by_size = _batch_by_size_whole
    utils.eval_str_list, utils.eval_str_dict = _literal_list, _literal_dict


_apply()
