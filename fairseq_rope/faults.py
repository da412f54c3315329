"""What can go wrong when fairseq's commands meet the wrong file: checked, and said in one sentence.

Importing this module puts the checks around ``fairseq.checkpoint_utils``, for every model of the process.
What each kind of bad input says stands in COMPATIBILITY.md.
"""

import contextlib
import functools
import os
import re
import sys
import traceback
from types import TracebackType
from typing import Any, Iterator, Optional, Tuple, Type

from fairseq import checkpoint_utils

from .compat import CheckpointError
from .errors import InputError

Pair = Tuple[Optional[str], Optional[str]]

_load_checkpoint = checkpoint_utils.load_checkpoint
_load_checkpoint_to_cpu = checkpoint_utils.load_checkpoint_to_cpu
_load_model_ensemble_and_task = checkpoint_utils.load_model_ensemble_and_task


class _Reading:
    """What is being read: for data of which languages, and from which file."""

    pair: Pair = (None, None)
    path: str = "the checkpoint"


def _languages(options: Any) -> Pair:
    """--source-lang and --target-lang in a namespace or configuration of a task, None where it has none."""
    return getattr(options, "source_lang", None), getattr(options, "target_lang", None)


def _options(task: Any) -> Any:
    return getattr(task, "cfg", None) or getattr(task, "args", None)


def refuse_other_direction(path: str, trained: Pair, data: Pair) -> None:
    """Raise a CheckpointError if *path* translates the other way round than the data.

    With a joined dictionary everything fits, and the output would be the input.
    """
    if None not in trained and trained[0] != trained[1] and data == trained[::-1]:
        raise CheckpointError(
            f"{path} was trained from {trained[0]} to {trained[1]}, and the data are from {data[0]} to "
            f"{data[1]}: give data of its direction, or --source-lang {trained[0]} --target-lang {trained[1]}"
        )


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
    if "embed_tokens" in name or "output_projection" in name:
        cause = "the dictionaries (dict.*.txt in the data folder) are not those it was trained with"
    else:
        cause = "--arch or the sizes of the model are not those it was trained with"
    return f"{name} has the shape {there} in it and {here} here; {cause}"


@contextlib.contextmanager
def _reading_for(pair: Pair) -> Iterator[None]:
    """Refuse a checkpoint of the other direction, and say of one that does not fit which and why."""
    _Reading.pair = pair
    try:
        yield
    except Exception as error:
        for cause in (error, error.__context__):  # the trainer says no more than that it did not fit
            if isinstance(cause, RuntimeError) and "Error(s) in loading state_dict" in str(cause):
                why = why_weights_do_not_fit(str(cause))
                raise CheckpointError(f"{_Reading.path} does not fit: {why}") from None
        raise
    finally:
        _Reading.pair = (None, None)


@functools.wraps(_load_checkpoint_to_cpu)
def _to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
    _Reading.path = path
    try:
        state = _load_checkpoint_to_cpu(path, *args, **kwargs)
    except KeyError as missing:
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no entry {missing}") from None
    cfg = state.get("cfg")
    refuse_other_direction(path, _languages(cfg.get("task") if cfg else state.get("args")), _Reading.pair)
    return state


@functools.wraps(_load_checkpoint)
def _to_train_on(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    pair = _languages(_options(trainer.task))
    if hasattr(trainer.cfg.task, "source_lang"):
        # Where no flag gave them, the task found them in the folder's names; checkpoints are to know them.
        trainer.cfg.task.source_lang, trainer.cfg.task.target_lang = pair
    # A model that is to learn something new may have known the other direction.
    anew = cfg.finetune_from_model is not None or cfg.reset_optimizer or cfg.reset_dataloader
    with _reading_for((None, None) if anew else pair):
        return _load_checkpoint(cfg, trainer, **kwargs)


@functools.wraps(_load_model_ensemble_and_task)
def _to_translate_with(
    filenames: Any, arg_overrides: Any = None, task: Any = None, *args: Any, **kw: Any
) -> Any:
    with _reading_for(_languages(_options(task))):
        return _load_model_ensemble_and_task(filenames, arg_overrides, task, *args, **kw)


def sentence_for(error: BaseException, trace: Optional[TracebackType]) -> Optional[str]:
    """One sentence for an *error* that its message explains, None for one whose traceback is needed.

    These are the refusals of this package, and files that the system does not give or take.
    """
    if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if isinstance(error, InputError):
        return str(error)
    raised_in = traceback.extract_tb(trace)[-1].filename if trace else ""
    if isinstance(error, ValueError) and os.path.dirname(raised_in) == os.path.dirname(__file__):
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
    checkpoint_utils.load_checkpoint = _to_train_on
    checkpoint_utils.load_checkpoint_to_cpu = _to_cpu
    checkpoint_utils.load_model_ensemble_and_task = _to_translate_with
    if os.path.basename(sys.argv[0]).startswith("fairseq-") and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_with_a_sentence


_apply()
