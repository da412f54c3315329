"""What can go wrong when fairseq's commands meet the wrong file: checked, and said in one sentence.

Importing this module puts the checks around ``fairseq.checkpoint_utils``, for every model of the process.
What each kind of bad input says stands in COMPATIBILITY.md.
"""

import contextlib
import errno
import functools
import os
import re
import sys
import traceback
from types import TracebackType
from typing import Any, Dict, Iterator, Optional, Tuple, Type

import fairseq
from fairseq import checkpoint_utils
from omegaconf import DictConfig

from . import compat
from .compat import CheckpointError
from .errors import InputError

Pair = Tuple[Optional[str], Optional[str]]
NO_PAIR: Pair = (None, None)

_load_checkpoint = checkpoint_utils.load_checkpoint
_load_checkpoint_to_cpu = checkpoint_utils.load_checkpoint_to_cpu
_load_model_ensemble_and_task = checkpoint_utils.load_model_ensemble_and_task


class _Reading:
    """What is being read: from which file, and what has to agree with what stands in it.

    Attributes:
        path: the file
        pair: the languages of the data
        rotation: the options of the rotation that training goes on with
        trained: the languages that the file was trained for, before any override
    """

    path = "the checkpoint"
    pair = NO_PAIR
    rotation: Dict[str, Any] = {}
    trained = NO_PAIR


def _get(options: Any, name: str) -> Any:
    """An option of a namespace, a configuration or a dict; None where it has none."""
    return options.get(name) if hasattr(options, "get") else getattr(options, name, None)


def _languages(options: Any) -> Pair:
    return _get(options, "source_lang"), _get(options, "target_lang")


def _options(task: Any) -> Any:
    return getattr(task, "cfg", None) or getattr(task, "args", None)


def _part(state: Any, part: str) -> Any:
    """cfg.model or cfg.task of a checkpoint; of an old one, its args, which are both."""
    cfg = state.get("cfg")
    if not cfg:
        return state.get("args")
    # OmegaConf 2.0 raises an error where get() finds nothing.
    return cfg.get(part) if isinstance(cfg, (dict, DictConfig)) and part in cfg else None


def refuse_other_direction(path: str, trained: Pair, data: Pair) -> None:
    """Raise a CheckpointError if *path* translates the other way round than the data.

    With a joined dictionary everything fits, and the output would be the input.
    """
    if None not in trained and trained[0] != trained[1] and data == trained[::-1]:
        raise CheckpointError(
            f"{path} was trained from {trained[0]} to {trained[1]}, and the data are from {data[0]} to "
            f"{data[1]}: give data of its direction, or --source-lang {trained[0]} --target-lang {trained[1]}"
        )


def refuse_other_rotation(path: str, trained: Any, wanted: Dict[str, Any]) -> None:
    """Raise a CheckpointError if the rotary model in *path* rotates otherwise than it is to from now on.

    All weights fit, and it would be another model.
    """
    for option, value in wanted.items():
        had = _get(trained, option)
        if had is not None and value is not None and had != value:
            flag = "--" + option.replace("_", "-")
            cure = ", or turn it first: python -m fairseq_rope.layout" if option == "rope_layout" else ""
            raise CheckpointError(f"{path} was trained with {flag} {had}, not {value}; leave it so{cure}")


def why_weights_do_not_fit(message: str) -> str:
    """The first reason in the RuntimeError of ``torch.nn.Module.load_state_dict``, as half a sentence."""
    size = re.search(
        r"size mismatch for (\S+): copying a param with shape torch.Size\((.*?)\) from checkpoint, "
        r"the shape in current model is torch.Size\((.*?)\)\.",
        message,
    )
    if size is None:
        names = re.search(r'(Missing|Unexpected) key\(s\) in state_dict: "([^"]+)"', message)
        if names is None:
            return message.replace("\n", " ")
        lacks = "it lacks" if names.group(1) == "Missing" else "only it has"
        return f"{lacks} {names.group(2)}; --arch or options of the model are not those it was trained with"
    name, there, here = size.groups()
    if ("embed_tokens" in name or "output_projection" in name) and there.split(",")[1:] == here.split(",")[
        1:
    ]:
        cause = "the dictionaries (dict.*.txt in the data folder) are not those it was trained with"
    else:
        cause = "--arch or the sizes of the model are not those it was trained with"
    return f"{name} has the shape {there} in it and {here} here; {cause}"


@contextlib.contextmanager
def _reading_for(pair: Pair, rotation: Optional[Dict[str, Any]] = None) -> Iterator[None]:
    """Refuse a checkpoint of another direction or rotation; say of one that does not fit which and why."""
    _Reading.pair, _Reading.rotation = pair, rotation or {}
    try:
        yield
    except Exception as error:
        for cause in (error, error.__context__):  # the trainer says no more than that it did not fit
            if isinstance(cause, RuntimeError) and "Error(s) in loading state_dict" in str(cause):
                why = why_weights_do_not_fit(str(cause))
                raise CheckpointError(f"{_Reading.path} does not fit: {why}") from None
        raise
    finally:
        _Reading.pair, _Reading.rotation = NO_PAIR, {}


def _load_and_note(file: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.load`` of compat.py; notes the languages before fairseq overrides them."""
    state = compat._load(file, *args, **kwargs)
    _Reading.trained = _languages(_part(state, "task"))
    return state


@functools.wraps(_load_checkpoint_to_cpu)
def _to_cpu(path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> Any:
    _Reading.path = path
    try:
        state = _load_checkpoint_to_cpu(path, arg_overrides, *args, **kwargs)
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # in upgrading what is not fairseq's
        lacks = f"it has no entry {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
        raise CheckpointError(f"{path} is not a fairseq checkpoint: {lacks}") from None
    for part in ("model", "task"):
        if _part(state, part) is None:
            raise CheckpointError(
                f"{path} is not a fairseq checkpoint: it does not say of which {part} it is"
            )
    data, overrides = _Reading.pair, _languages(arg_overrides or {})
    # Languages in --model-overrides, beside data that have theirs, are somebody's express wish.
    if data == NO_PAIR:  # fairseq-validate and from_pretrained give their languages so
        data, overrides = overrides, NO_PAIR
    refuse_other_direction(path, _Reading.trained if overrides == NO_PAIR else overrides, data)
    refuse_other_rotation(path, _part(state, "model"), _Reading.rotation)
    return state


@functools.wraps(_load_checkpoint)
def _to_train_on(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    pair = _languages(_options(trainer.task))
    if hasattr(trainer.cfg.task, "source_lang"):
        # Where no flag gave them, the task found them in the folder's names; checkpoints are to know them.
        trainer.cfg.task.source_lang, trainer.cfg.task.target_lang = pair
    last = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    begun = os.path.exists(last)
    if cfg.restore_file != "checkpoint_last.pt":
        _Reading.path = cfg.restore_file
        if not trainer.checkpoint_suffix:
            _refuse_missing("--restore-file", cfg.restore_file)
    elif cfg.finetune_from_model is not None and not begun:
        _Reading.path = cfg.finetune_from_model
        _refuse_missing("--finetune-from-model", cfg.finetune_from_model)
    else:
        _Reading.path = last
        if os.path.isdir(last):
            raise InputError(
                f"--save-dir {cfg.save_dir}: checkpoint_last.pt is a folder, and must be a checkpoint"
            )
    # A model that is to learn something new may have known the other direction, or turned with another base.
    anew = cfg.reset_optimizer or cfg.reset_dataloader or (cfg.finetune_from_model is not None and not begun)
    names = ("rope_layout",) if anew else ("rope_layout", "rope_base", "rope_fraction")
    rotation = {name: _get(trainer.cfg.model, name) for name in names}
    with _reading_for(NO_PAIR if anew else pair, rotation):
        return _load_checkpoint(cfg, trainer, **kwargs)


def _refuse_missing(flag: str, path: str) -> None:
    if os.path.isdir(path) or not checkpoint_utils.PathManager.exists(path):
        raise InputError(f"{flag} {path}: must be a checkpoint that exists")


@functools.wraps(_load_model_ensemble_and_task)
def _to_translate_with(
    filenames: Any, arg_overrides: Any = None, task: Any = None, *args: Any, **kw: Any
) -> Any:
    with _reading_for(_languages(_options(task))):
        return _load_model_ensemble_and_task(filenames, arg_overrides, task, *args, **kw)


def sentence_for(error: BaseException, trace: Optional[TracebackType]) -> Optional[str]:
    """One sentence for an *error* that its message explains, None for one whose traceback is needed.

    These are what this package or fairseq refuse in so many words, and files that the system does not give
    or take.
    """
    if isinstance(error, InputError):
        return str(error)
    place = traceback.extract_tb(trace)[-1] if trace else None
    packages = (os.path.dirname(__file__), os.path.dirname(fairseq.__file__))
    raised = (
        place is not None and place.filename.startswith(packages) and (place.line or "").startswith("raise ")
    )
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            return f"{error.filename}: {error.strerror}"
        known = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        return str(error) if known or raised else None
    if type(error) in (Exception, ValueError) and raised and "\n" not in str(error):
        return str(error)
    return None


def _end_with_a_sentence(
    kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
) -> None:
    """``sys.excepthook`` of fairseq's programs: the sentence, where it says all; else the traceback."""
    sentence = sentence_for(error, trace)
    if sentence is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"{os.path.basename(sys.argv[0])}: error: {sentence}", file=sys.stderr)


def _apply() -> None:
    checkpoint_utils.torch.load = _load_and_note
    checkpoint_utils.load_checkpoint = _to_train_on
    checkpoint_utils.load_checkpoint_to_cpu = _to_cpu
    checkpoint_utils.load_model_ensemble_and_task = _to_translate_with
    if os.path.basename(sys.argv[0]).startswith("fairseq-") and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_with_a_sentence


_apply()
