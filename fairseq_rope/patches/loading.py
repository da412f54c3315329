"""Reading checkpoints without running their code, and refusing files with one sentence that gives the reason."""

import contextlib
import copy
import functools
import logging
import math
import numbers
import os
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, open_dict

from ..checkpoints import (
    AVERAGES,
    UNKNOWN,
    CheckpointError,
    Reading,
    current_reading,
    flags_of_model,
    languages_of,
    load_checkpoint,
    no_checkpoint,
    option_value,
    options_of_task,
    part_of,
    reading_for,
    safe_load,
)
from ..errors import InputError
from .precision import narrow
from .registry import replaces
from .saving import InPlaceOf, forget_other_trainings, restore_early_stopping

logger = logging.getLogger(__name__)

# Each function returns names of options that --model-overrides has for the translation model alone, and not for the
# language model of --lm-path. A package of models adds its function.
FOR_TRANSLATION_ALONE: list[Callable[[], set[str]]] = []

_load_checkpoint = checkpoint_utils.load_checkpoint
_load_checkpoint_to_cpu = checkpoint_utils.load_checkpoint_to_cpu
_load_model_ensemble_and_task = checkpoint_utils.load_model_ensemble_and_task


class TorchWithSafeLoad(types.ModuleType):
    """``torch`` as ``fairseq.checkpoint_utils`` sees it, with ``safe_load`` as its ``load``.

    torch >= 2.6 refuses fairseq's checkpoints, so fairseq's main branch loads them with weights_only=False, which runs
    any code in the file. Here a list names the classes that checkpoints may contain.
    """

    load = staticmethod(safe_load)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TORCH = replaces(
    "fairseq.checkpoint_utils.torch",
    prevents="code execution",
    until="fairseq loads its own checkpoints with weights_only=True",
)(TorchWithSafeLoad("torch"))


@contextlib.contextmanager
def _naming_misfits(reading: Reading) -> Iterator[None]:
    """Set *reading* for this context; name the file and the reason if weights do not fit."""
    try:
        with reading_for(reading):
            yield
    except Exception as error:
        for cause in (error, error.__context__):  # the trainer's own message gives no reason
            if isinstance(cause, RuntimeError) and "Error(s) in loading state_dict" in str(cause):
                why = why_weights_do_not_fit(str(cause))
                raise CheckpointError(f"{reading.path} does not fit the model: {why}") from None
        raise


# The optimisers of fairseq that other flags than --optimizer choose.
WITH_FLAGS = {
    "FP16Optimizer": "--fp16 or --bf16",
    "MemoryEfficientFP16Optimizer": "--memory-efficient-fp16 or --memory-efficient-bf16",
    "AMPOptimizer": "--amp",
    "FairseqBMUF": "--use-bmuf",
}


@contextlib.contextmanager
def _naming_other_optimizer(reading: Reading) -> Iterator[None]:
    """Raise a CheckpointError if the optimiser's state in the checkpoint is that of another optimiser or precision."""
    instead = "give the flags of that training, or --reset-optimizer to start the optimiser again"
    try:
        yield
    except AssertionError as error:
        match = re.search(r"Optimizer does not match.* (\w+) vs (\w+)$", str(error))
        if match is None:
            raise
        before, now = (f"{name} ({WITH_FLAGS.get(name, 'float32')})" for name in match.groups())
        raise CheckpointError(f"{reading.path} was trained with {before}, and this is {now}: {instead}") from None
    except ValueError as error:
        if "doesn't match the size of optimizer's group" not in str(error):
            raise
        other = "in another type (--fp16 keeps its numbers in one tensor, --bf16 does not) or with other parameters"
        raise CheckpointError(f"{reading.path} was trained {other}: {instead}") from None


def why_weights_do_not_fit(message: str) -> str:
    """Return the first reason in *message*, the RuntimeError of ``torch.nn.Module.load_state_dict``."""
    size = re.search(
        r"size mismatch for (\S+): copying a param with shape torch.Size\((.*?)\) from checkpoint, "
        r"the shape in current model is torch.Size\((.*?)\)\.",
        message,
    )
    if size is None:
        names = re.search(r'(Missing|Unexpected) key\(s\) in state_dict: "([^"]+)"', message)
        if names is None:
            return message.replace("\n", " ")
        difference = "it lacks" if names.group(1) == "Missing" else "only it has"
        return f"{difference} {names.group(2)}; --arch or options of the model are not those it was trained with"
    name, in_file, in_model = size.groups()
    same_width = in_file.split(",")[1:] == in_model.split(",")[1:]
    if ("embed_tokens" in name or "output_projection" in name) and same_width:
        cause = "the dictionaries (dict.*.txt in the data folder) are not those it was trained with"
    else:
        cause = "--arch or the sizes of the model are not those it was trained with"
    return f"{name} has the shape {in_file} in the checkpoint and {in_model} in the model; {cause}"


def _add_overrides(options: Any, overrides: Mapping[str, Any]) -> None:
    """Add the *overrides* to the *options* of a model that its configuration has, and an older checkpoint lacks.

    If the options are a DictConfig, fairseq overrides only the options that are in it
    (``fairseq/dataclass/utils.py::overwrite_args_by_name``).
    """
    missing = [name for name in overrides if name not in options] if isinstance(options, DictConfig) else []
    if missing:
        with open_dict(options):
            for name in flags_of_model(option_value(options, "_name")).intersection(missing):
                options[name] = overrides[name]


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# What a training that resumes reads of extra_state: the form of each entry, and whether a value has it
EXTRA_STATE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train_iterator": (
        "the number of an epoch and of its iterations",
        lambda value: (
            isinstance(value, dict)
            and _is_count(value.get("epoch"))
            and _is_count(value.get("iterations_in_epoch", 0))
            and isinstance(value.get("shuffle", True), bool)
        ),
    ),
    "early_stopping": (
        "a number and a count",
        lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"best", "num_runs"}
            and (value.get("best") is None or _is_number(value["best"]))
            and _is_count(value.get("num_runs", 0))
        ),
    ),
    "early_stopping_metric": ("text", lambda value: isinstance(value, str)),
    "best": ("a number", lambda value: value is None or _is_number(value)),
    "previous_training_time": ("a number", _is_number),
    "metrics": ("a dictionary", lambda value: isinstance(value, dict)),
}


def refuse_damaged_extra_state(path: str, extra_state: Any) -> None:
    """Raise a CheckpointError if a training cannot resume from *extra_state*, which fairseq reads without checks."""
    if not isinstance(extra_state, dict):
        raise CheckpointError(f"{path} is not a valid checkpoint: its extra_state is damaged, and must be a dictionary")
    for name, (form, has_form) in EXTRA_STATE.items():
        if name in extra_state and not has_form(extra_state[name]):
            entry = f'extra_state["{name}"]'
            raise CheckpointError(f"{path} is not a valid checkpoint: its {entry} is damaged, and must be {form}")


def _refuse_unknown(path: str, part: str, name: Any, known: Collection[str]) -> None:
    """Raise a CheckpointError if the *name* of a *part* of the checkpoint *path* is not *known*."""
    if isinstance(name, str) and name not in known:
        raise CheckpointError(f"{path}: neither fairseq nor --user-dir has its {part}, {name}")


def _refuse_unregistered(path: str, name: Any) -> None:
    """Raise a CheckpointError if the old checkpoint *path* names a part *name* that fairseq has not found."""
    try:
        options = load_checkpoint(path).get("args")
    except Exception:  # then the error of fairseq has a reason, too
        return
    for part in ("model", "task", "criterion", "optimizer", "lr_scheduler"):
        if name is not None and option_value(options, "arch" if part == "model" else part) == name:
            raise CheckpointError(f"{path}: neither fairseq nor --user-dir has its {part}, {name}")


@replaces(
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
    prevents="wrong results",
    until="fairseq compares the languages and options of a checkpoint with those of the command",
    wraps=_load_checkpoint_to_cpu,
)
def load_checkpoint_to_cpu(path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the state of a checkpoint, if it is one that the calling program can use.

    With a joined dictionary, a model for the opposite direction loads without an error, and so does a model with
    another position encoding. Both are refused with one sentence that names the file. A training with --store-ema that
    starts from a checkpoint without an average ends in a KeyError; here the average begins with the weights. If the
    model keeps only some layers (--encoder-layers-to-keep), fairseq puts others into the average. A training that
    resumes without a state of the optimiser gets a warning.
    """
    reading = current_reading()
    if reading is None or not reading.is_given(path):  # a model loads another checkpoint to start from
        with _naming_misfits(Reading([path])):
            return load_checkpoint_to_cpu(path, arg_overrides, *args, **kwargs)
    reading.path = path
    try:
        state = _load_checkpoint_to_cpu(path, arg_overrides, *args, **kwargs)
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # fairseq cannot upgrade this state
        if isinstance(error, KeyError) and error.args:
            _refuse_unregistered(path, error.args[0])
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
        raise no_checkpoint(path, reason) from None
    if reading.resumes:
        refuse_damaged_extra_state(path, state.get("extra_state"))
    _add_overrides(part_of(state, "model"), arg_overrides or {})
    for part in ("model", "task"):
        if reading.builds_model and part_of(state, part) is None:
            raise no_checkpoint(path, f"it has no options of its {part}")
    if reading.builds_model:  # the names that fairseq's build_model and setup_task look for
        model, task = part_of(state, "model"), part_of(state, "task")
        name = option_value(model, "_name") or option_value(model, "arch")
        _refuse_unknown(path, "model", name, {*ARCH_MODEL_REGISTRY, *MODEL_DATACLASS_REGISTRY})
        if reading.builds_task:
            _refuse_unknown(path, "task", option_value(task, "task") or option_value(task, "_name"), TASK_REGISTRY)
            reading.builds_task = False  # the models of the next files have the same one
    data, overrides = reading.languages, languages_of(arg_overrides or {})
    # If the data have languages, languages in --model-overrides are the user's decision.
    # fairseq-validate and from_pretrained give the languages of the data as overrides. fairseq-validate has
    # --model-overrides among them, whose languages have replaced those of the data.
    decided = re.search(r"(source|target)_lang['\"]", str(option_value(arg_overrides or {}, "model_overrides")))
    if data == UNKNOWN and not decided:
        data, overrides = overrides, UNKNOWN
    source, target = reading.trained_languages if overrides == UNKNOWN else overrides
    # With a joined dictionary the weights load without an error, and the output would be a copy of the input.
    if None not in (source, target) and source != target and data == (target, source):
        both = f"--model-overrides \"{{'source_lang': '{target}', 'target_lang': '{source}'}}\""
        both = "" if reading.resumes else f", or {both} if it was trained in both directions"
        raise CheckpointError(
            f"{path} was trained from {source} to {target}, and the data are from {target} to {source}: give data of "
            f"its direction, or --source-lang {source} --target-lang {target}{both}"
        )
    reading.check(path, part_of(state, "model"))
    extra_state = state.get("extra_state")
    if reading.resumes and not state.get("last_optimizer_state"):
        logger.warning(f"{path} has no state of the optimiser: it, the learning rate and the updates start anew")
    if reading.averages is not None and isinstance(extra_state, dict):
        if "ema" not in extra_state:
            logger.warning(f"--store-ema: {path} has no average of the weights; it begins with the weights")
            extra_state["ema"] = dict(state["model"])  # fairseq would look for them after it has deleted the entry
        for name in filter(extra_state.get, AVERAGES):
            extra_state[name] = reading.averages(extra_state[name])
    return state


def _pruned(trainer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """The *weights* of the layers that the model of *trainer* keeps, renumbered. fairseq prunes the model alone."""
    options = copy.deepcopy(trainer.cfg.model)  # the original loses the layers to keep when fairseq loads the model
    getattr(trainer.get_model(), "complete_layers_to_keep", lambda *_: None)(weights, options)
    return checkpoint_utils.prune_state_dict(weights, options)


@replaces(
    "fairseq.checkpoint_utils.load_checkpoint",
    prevents="wrong results",
    until="the patch of load_checkpoint_to_cpu goes",
    wraps=_load_checkpoint,
)
def load_checkpoint_to_train(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Load the checkpoint from which a training starts or resumes.

    Gives load_checkpoint_to_cpu the languages and options of the training, and writes languages that fairseq read from
    file names into new checkpoints. Names the file and the reason if weights do not fit, and warns if --restore-file
    does not exist. Restores the counter of --patience if the same training starts again, with the same metric and
    without a --reset-… flag. A training that has reached --max-update, or that --patience has ended, ends at once when
    it is started again, and the log says why; fairseq trains on each time. With fairseq-hydra-train --multirun, a
    training does not compare its results with those of the one before.
    """
    forget_other_trainings()
    languages = languages_of(options_of_task(trainer.task))
    if languages != UNKNOWN and all(hasattr(trainer.cfg.task, f"{side}_lang") for side in ("source", "target")):
        # Without --source-lang, the task read the languages from file names; the checkpoint must contain them.
        trainer.cfg.task.source_lang, trainer.cfg.task.target_lang = languages
    last = path = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    is_first_launch = not os.path.exists(last)
    once = getattr(cfg, "continue_once", None) if is_first_launch else None  # before --finetune-from-model, in fairseq
    finetunes = cfg.finetune_from_model is not None and is_first_launch and once is None
    places = {last: f"--save-dir {cfg.save_dir}: checkpoint_last.pt"}
    if cfg.restore_file != "checkpoint_last.pt":
        path = cfg.restore_file.replace(".pt", f"{trainer.checkpoint_suffix}.pt")
        places[path] = f"--restore-file {path}:"
        if not checkpoint_utils.PathManager.exists(path):
            logger.warning(f"--restore-file {path} does not exist: training starts from the beginning")
    elif once is not None:
        if not checkpoint_utils.PathManager.exists(once):
            raise InputError(f"--continue-once {once} does not exist")
        path = once
        places[path] = f"--continue-once {path}:"
    elif finetunes:
        path = cfg.finetune_from_model
        places[path] = f"--finetune-from-model {path}:"
    for place, name in places.items():
        if os.path.isdir(place):
            raise InputError(f"{name} is a folder, and must be a file")
    # A new training that starts from a model may have the opposite direction, and be another model.
    if cfg.reset_optimizer or cfg.reset_dataloader or finetunes:
        languages = UNKNOWN
    resets = (cfg.reset_optimizer, cfg.reset_lr_scheduler, cfg.reset_dataloader, cfg.reset_meters)
    refuse: Callable[..., None] = getattr(trainer.get_model(), "refuse_other_model", lambda *_: None)
    stores = option_value(getattr(trainer.cfg, "ema", None), "store_ema")
    reading = Reading(
        [path],
        languages,
        resumes=not (cfg.reset_optimizer or finetunes),
        path=path,
        averages=functools.partial(_pruned, trainer) if stores else None,
        check=lambda file, options: refuse(file, options, trainer.cfg.model, finetunes or any(resets)),
    )
    with _naming_misfits(reading), _naming_other_optimizer(reading):
        extra_state, epoch_itr = _load_checkpoint(cfg, trainer, **kwargs)
    updates, runs = trainer.get_num_updates(), 0
    if path == last or (not is_first_launch and os.path.exists(path) and os.path.samefile(path, last)):
        # This training is started again, and not another one that starts from its checkpoint.
        if not any(resets):
            runs = restore_early_stopping(extra_state, cfg)
        if trainer.cfg.optimization.max_update in range(1, updates + 1):
            ended = f"it has made {updates:,} updates, and --max-update is {trainer.cfg.optimization.max_update}"
        elif runs and runs >= cfg.patience:
            ended = f"{runs} validations had no better {cfg.best_checkpoint_metric}, and --patience is {cfg.patience}"
        else:
            return extra_state, epoch_itr
        logger.info(f"the training in --save-dir {cfg.save_dir} has already ended: {ended}")
        epoch_itr = _NoMoreEpochs(epoch_itr)
    return extra_state, epoch_itr


class _NoMoreEpochs(InPlaceOf):
    """An epoch iterator with which fairseq-train ends before the next epoch."""

    next_epoch_idx = math.nan  # is not <= --max-epoch, whose default is infinity


def _is_language_model_of_generate() -> bool:
    """Whether fairseq-generate loads the model of ``--lm-path``, for which alone it gives no task."""
    files = (Path(frame.f_code.co_filename).parts[-2:] for frame, _ in traceback.walk_stack(None))
    return ("fairseq_cli", "generate.py") in files


@replaces(
    "fairseq.checkpoint_utils.load_model_ensemble_and_task",
    prevents="wrong results",
    until="the patch of load_checkpoint_to_cpu goes, and fairseq-validate converts models for --bf16",
    wraps=_load_model_ensemble_and_task,
)
def load_model_ensemble_and_task(
    filenames: Any, arg_overrides: Any = None, task: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Load models for translation or validation.

    Gives load_checkpoint_to_cpu the languages of the data. Names the file if weights do not fit. fairseq-validate
    ignores --bf16; here its models compute in bfloat16. fairseq-generate gives --model-overrides to the language model
    of --lm-path, too; here the options of FOR_TRANSLATION_ALONE, such as a scaling of RoPE, are for the translation
    model alone, with a warning.
    """
    if not isinstance({} if arg_overrides is None else arg_overrides, Mapping):
        raise InputError(f"--model-overrides {arg_overrides}: must be a Python dictionary, like {{'dropout': 0.1}}")
    if task is None and _is_language_model_of_generate():
        own = set().union(*(names() for names in FOR_TRANSLATION_ALONE))
        if others := sorted(own.intersection(arg_overrides or {})):
            names = ", ".join(others)
            logger.warning(
                f"--lm-path: --model-overrides of {names} are for the translation model, and not for this one"
            )
            arg_overrides = {name: value for name, value in arg_overrides.items() if name not in own}
    data = languages_of(options_of_task(task))
    filenames = [*filenames]  # an iterator, too
    suffix = kwargs.get("suffix", args[1] if len(args) > 1 else "")
    files = [*filenames, *(file.replace(".pt", f"{suffix}.pt") for file in filenames if file)]  # as fairseq does
    with _naming_misfits(Reading(files, data, builds_model=True, builds_task=task is None)):
        loaded = _load_model_ensemble_and_task(filenames, arg_overrides, task, *args, **kwargs)
    if option_value(arg_overrides or {}, "bf16"):  # fairseq-validate gives its flags as overrides
        for model in loaded[0]:
            narrow(model)
    return loaded
