"""Checkpoints: loading them without running their code, saving them, and reading their options.

The functions here need fairseq only when they are called, so the command-line tools start without it.
"""

import collections
import contextlib
import dataclasses
import errno
import os
import pickle
import re
import shutil
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict

from .errors import InputError
from .files import written_whole

Languages = tuple[str | None, str | None]  # source, target
UNKNOWN: Languages = (None, None)
NUMBER_TYPES = "b1 i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8".split()  # those of NumPy in a checkpoint
AVERAGES = ("ema", "ema_fp32_params")  # in extra_state: the averages of --store-ema, with the names of the weights


class CheckpointError(InputError):
    """A checkpoint cannot be used; the message names the file and says why."""


def option_value(options: Any, name: str) -> Any:
    """Return an option from a namespace, a configuration or a dict, and None if it is missing."""
    if isinstance(options, (dict, DictConfig)):
        return options[name] if name in options else None  # get() of OmegaConf 2.0 raises an error
    return getattr(options, name, None)


def set_option(options: Any, name: str, value: Any) -> None:
    """Set an option of a namespace or of a configuration, also if it has none of this *name*."""
    if isinstance(options, DictConfig):
        with open_dict(options):
            options[name] = value
    else:
        setattr(options, name, value)


def flags_of_model(name: str) -> set[str]:
    """Return the names of the options that the model or architecture *name* declares; none if fairseq has no such."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY

    model = MODEL_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    parser = ArgumentParser(add_help=False, conflict_handler="resolve")
    if model is not None:
        model.add_args(parser)
    return {action.dest for action in parser._actions}


def part_of(state: Mapping[str, Any], part: str) -> Any:
    """Return cfg.model or cfg.task of a checkpoint; for old checkpoints its args, which hold both."""
    cfg = state.get("cfg")
    return option_value(cfg, part) if cfg else state.get("args")


def options_of_task(task: Any) -> Any:
    """Return the options of a fairseq task; those that are a ``LegacyFairseqTask`` have them as ``args``."""
    return getattr(task, "cfg", None) or getattr(task, "args", None)


def languages_of(options: Any) -> Languages:
    """Return the source and target language of a task's *options*."""
    return option_value(options, "source_lang"), option_value(options, "target_lang")


@dataclasses.dataclass
class Reading:
    """The checkpoints that one call of fairseq reads, and what the call needs them for."""

    files: Sequence[str]  # the checkpoints that the call was given
    languages: Languages = UNKNOWN  # those of the data
    builds_model: bool = False  # whether the call builds the model that a checkpoint describes
    resumes: bool = False  # whether the call resumes the training of a checkpoint
    check: Callable[[str, dict[str, Any]], None] = lambda path, state: None  # refuses or reports the state of a file
    trained_languages: Languages = UNKNOWN  # those that the file was trained with, before any override
    dictionaries: dict[str, Any] = dataclasses.field(default_factory=dict)  # those of the training of each file

    def is_given(self, path: str) -> bool:
        """Return whether *path* is one of ``files``, or a part of one (``-shard0.pt``, ``_part0.pt``)."""
        names = (re.escape(file.removesuffix(".pt")) for file in self.files)
        return path in self.files or any(re.fullmatch(rf"{name}(-[\w-]*|_part\d+)\.pt", path) for name in names)


# fairseq passes no argument from the functions that patches/loading.py and starting.py replace to those that read a
# file, upgrade its state or load it into a model. Each thread has its own value.
_reading: ContextVar[Reading | None] = ContextVar("fairseq_rope_reading", default=None)


def current_reading() -> Reading | None:
    """Return what the call of fairseq that runs reads; None if no such call runs."""
    return _reading.get()


def is_resumed() -> bool:
    """Return whether a checkpoint is being read that must have all parameters of the model."""
    reading = current_reading()
    return reading is not None and (reading.builds_model or reading.resumes)


@contextlib.contextmanager
def reading_for(reading: Reading) -> Iterator[None]:
    """Let :func:`current_reading` return *reading* in this context."""
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


class _NumberType:
    """Stands for ``numpy.dtype`` in a checkpoint. NumPy trusts states of its own, in which bytes can be pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in NUMBER_TYPES:
            raise ValueError(f"it contains the NumPy type {code}, and only numbers are allowed")
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *details = state
        if order not in ("<", ">", "|") or details != [None, None, None, -1, -1, 0]:
            raise ValueError(f"it contains the NumPy type {self.code} with the state {state}, and not a plain number")
        self.code = order + self.code


def _numbers(number_type: Any, data: Any) -> np.ndarray:
    """Return *data*, bytes, as an array."""
    if not isinstance(number_type, _NumberType):
        raise ValueError(f"it contains numbers of the type {number_type}, which is no NumPy type")
    return np.frombuffer(data, number_type.code)


def _number(number_type: Any, data: Any) -> Any:
    """Build a NumPy scalar of a checkpoint."""
    return _numbers(number_type, data)[0]


class _Array(np.ndarray):
    """An array of a checkpoint, which gets its contents once; it is saved as NumPy's own."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, number_type, is_fortran, data = state
        array = _numbers(number_type, data).reshape(shape, order="F" if is_fortran else "C")
        if self.size:  # a tensor can share its memory
            raise ValueError("it contains an array with two contents")
        super().__setstate__(array.__reduce__()[2])

    def __reduce__(self) -> Any:
        return np.array(self).__reduce__()


def allow_checkpoint_classes() -> None:
    """Tell torch which classes ``torch.load(…, weights_only=True)`` may build.

    fairseq's checkpoints contain them besides tensors, numbers, strings and containers. Building an object of these
    classes runs no code of the checkpoint.
    """
    from fairseq.data import Dictionary
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import meters
    from omegaconf import base, dictconfig, listconfig, nodes

    # cfg.model and cfg.task of models that are configured by flags (fairseq/dataclass/utils.py), and the
    # dictionaries in the state of audio, NLU and HuBERT tasks (state.add_factory in fairseq/tasks)
    classes: list[Any] = [Namespace, Dictionary]
    # NumPy scalars (validation scores) and arrays (the counts of --eval-bleu) in extra_state. NumPy 2 renamed
    # the module of the functions that build them. An array names its class, which torch must not call.
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        classes += [(_number, f"{module}.scalar"), (_Array, f"{module}._reconstruct")]
    classes += [("ndarray", "numpy.ndarray"), (_NumberType, "numpy.dtype"), _Array]
    # the stand-in for tensors in a state that is broadcast to other processes
    classes.append(distributed_utils._TensorPlaceholder)
    # cfg as an OmegaConf object, in checkpoints of fairseq 0.10 and 0.11
    classes += [dictconfig.DictConfig, listconfig.ListConfig, base.ContainerMetadata, base.Metadata]
    classes += [nodes.AnyNode, (Any, "typing.Any"), list, dict, int, collections.defaultdict]
    # extra_state["train_meters"], in checkpoints of fairseq up to 0.8, and in those that are saved after loading them
    old_meters = (meters.AverageMeter, meters.TimeMeter, meters.StopwatchMeter)
    classes += [*old_meters, *((meter, f"fairseq.meters.{meter.__name__}") for meter in old_meters)]
    torch.serialization.add_safe_globals(classes)


def safe_load(file: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``torch.load`` returns for a fairseq checkpoint, without running code from the file.

    Raises:
        CheckpointError: the file is damaged, is not a fairseq checkpoint, or contains a class that is not allowed
        OSError: the file cannot be read
    """
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "checkpoint")
    try:
        _refuse_damage(file, name)
        state = torch.load(file, *args, **{**kwargs, "weights_only": True})
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        if isinstance(error, OSError) and error.filename:
            raise
        if not isinstance(error, pickle.UnpicklingError):
            reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
            # zipfile seeks to a negative place (EINVAL) if the file's beginning is missing.
            is_cut = isinstance(error, EOFError) or getattr(error, "errno", None) == errno.EINVAL
            if is_cut or "PytorchStreamReader" in reason:
                reason = "it is truncated or damaged; copy it again, or use another one"
            raise CheckpointError(f"{name} is not a valid checkpoint: {reason}") from None
        refused = re.search(r"GLOBAL (\S+)", str(error))
        content = f"contains {refused.group(1)}, which" if refused else "is damaged, or contains an object that"
        reason = f"it {content} no fairseq checkpoint contains"
        if refused:
            reason += "; to allow a class of yours, call torch.serialization.add_safe_globals in your --user-dir"
        raise CheckpointError(f"{name} was not loaded, and no code in it was run: {reason}") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{name} is not a fairseq checkpoint: it has no entry 'model' with weights")
    unnamed = [weight_name for weight_name in state["model"] if not isinstance(weight_name, str)]
    if unnamed:
        raise CheckpointError(f"{name} is not a fairseq checkpoint: it has a weight with the name {unnamed[0]!r}")
    reading = current_reading()
    if reading is not None:
        reading.trained_languages = languages_of(part_of(state, "task"))
    return state


def _refuse_damage(file: Any, name: Any) -> None:
    """Raise a CheckpointError if the checksum of a part of a zip file (torch >= 1.6) is wrong; torch compares none."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{name} is not a valid checkpoint: its part {damaged} is damaged")
    if hasattr(file, "seek"):
        file.seek(0)


def load_checkpoint(path: str) -> dict[str, Any]:
    """Return the state that fairseq saved in *path*, unchanged, with all tensors on the CPU.

    Raises the errors of :func:`safe_load`, and a CheckpointError if a weight is not a tensor.
    """
    allow_checkpoint_classes()
    state: dict[str, Any] = safe_load(path, map_location="cpu")
    for name, weight in state["model"].items():
        if not isinstance(weight, torch.Tensor):
            raise CheckpointError(f"{path} cannot be used here: its weight {name} is not a tensor")
    return state


def save_checkpoint(state: dict[str, Any], path: str) -> None:
    """Write *state* with ``torch.save`` to *path*; an OSError that stops this leaves an older file unchanged.

    The new file has the permissions of an older one. If *path* is a link, the file that it points to is replaced.
    """
    final = os.path.realpath(path)
    # With the process number, two processes that write at once have two temporary files.
    with naming_the_file(path), written_whole(final, suffix=f".{os.getpid()}.tmp") as (file,):
        torch.save(state, file)
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(final, file.name)


@contextlib.contextmanager
def naming_the_file(path: str, advice: str = "") -> Iterator[None]:
    """If writing *path* fails, raise an OSError with it, the reason, the free disk space if known, and *advice*."""
    try:
        yield
    except BaseException as error:
        code = _errno_of_failed_write(error)
        if code is None:
            raise
        space = ""
        with contextlib.suppress(OSError):  # the folder is gone, or is not on a disk of this machine
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free // 2**20
            space = f"; {free} MiB free on its disk"
            if code == errno.EIO and free == 0:
                code = errno.ENOSPC
        raise OSError(code, f"could not be written ({os.strerror(code)}{space}){advice}", path) from error


def _errno_of_failed_write(error: BaseException | None) -> int | None:
    """Return the errno of the failed write that led to *error*, and None if it has another cause."""
    if isinstance(error, OSError):
        return error.errno
    # torch's writer, in C++, reports positions in a file, and no errno.
    if isinstance(error, RuntimeError) and re.search("PytorchStreamWriter|inline_container|basic_ios", str(error)):
        return _errno_of_failed_write(error.__context__) or errno.EIO
    return None
