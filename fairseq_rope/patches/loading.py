"""Reading checkpoints: no code in them runs, and no model is used for data of the opposite direction or other words."""

import hashlib
import os
import re
import types
from collections.abc import Mapping
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from omegaconf import DictConfig, open_dict

from ..checkpoints import (
    UNKNOWN,
    CheckpointError,
    Reading,
    current_reading,
    flags_of_model,
    languages_of,
    option_value,
    options_of_task,
    part_of,
    reading_for,
    safe_load,
)
from .precision import narrow
from .registry import replaces

_load_checkpoint_to_cpu = checkpoint_utils.load_checkpoint_to_cpu
_load_model_ensemble_and_task = checkpoint_utils.load_model_ensemble_and_task

DICTIONARIES = "dictionaries"  # the entry of extra_state with dictionaries_of()


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


@replaces(
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
    prevents="wrong results",
    until="fairseq compares the languages and options of a checkpoint with those of the command",
    wraps=_load_checkpoint_to_cpu,
)
def load_checkpoint_to_cpu(path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the state of a checkpoint, if it is one that the calling program can use.

    With a joined dictionary, a model for the opposite direction loads without an error, and so does a model with
    another position encoding. Both are refused.
    """
    state = _load_checkpoint_to_cpu(path, arg_overrides, *args, **kwargs)
    overrides = arg_overrides or {}
    _add_overrides(part_of(state, "model"), overrides)
    reading = current_reading()
    if reading is not None and reading.is_given(path):  # else a model loads another checkpoint to start from
        _refuse_other_direction(path, reading, overrides)
        reading.check(path, state)
        reading.dictionaries[path] = (state.get("extra_state") or {}).get(DICTIONARIES, {})
    return state


def _refuse_other_direction(path: str, reading: Reading, overrides: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if the model in *path* translates in the opposite direction of the data.

    fairseq-validate and from_pretrained give the languages of the data as *overrides*, and other programs those of
    --model-overrides, with which the user says that the model translates in both directions. fairseq-validate has
    --model-overrides, as text, among its overrides.
    """
    data, trained = reading.languages, reading.trained_languages
    given = languages_of(overrides)
    if data == UNKNOWN and not re.search(r"(source|target)_lang['\"]", str(overrides.get("model_overrides"))):
        data = given
    elif given != UNKNOWN:
        trained = given
    source, target = trained
    if None not in trained and source != target and data == (target, source):
        both = f"--model-overrides \"{{'source_lang': '{target}', 'target_lang': '{source}'}}\""
        both = "" if reading.resumes else f", or {both} if it was trained in both directions"
        raise CheckpointError(
            f"{path} was trained from {source} to {target}, and the data are from {target} to {source}: give data of "
            f"its direction, or --source-lang {source} --target-lang {target}{both}"
        )


def dictionaries_of(task: Any) -> dict[str, tuple[str, str]]:
    """Return the digest and the file of each dictionary of a task, by the name of its attribute."""
    options = options_of_task(task)
    folder = str(option_value(options, "data")).split(os.pathsep)[0]
    names = zip(("src_dict", "tgt_dict", "dictionary"), (*languages_of(options), None))
    entries = {}
    for name, language in names:
        dictionary = getattr(task, name, None)
        if isinstance(dictionary, Dictionary):
            digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()[:16]
            entries[name] = digest, os.path.join(folder, f"dict.{language}.txt" if language else "dict.txt")
    return entries


def refuse_other_dictionaries(reading: Reading, task: Any) -> None:
    """Raise a CheckpointError if *task* has other words, or another order, than in the training of a file read."""
    own = dictionaries_of(task)
    for path, trained in reading.dictionaries.items():
        for name, (digest, file) in own.items():
            trained_digest, trained_file = trained.get(name, own[name])
            if digest != trained_digest:
                raise CheckpointError(
                    f"{path} was trained with the dictionary {trained_file}, and {file} has other words, or another "
                    f"order: preprocess the data with {trained_file}"
                )


@replaces(
    "fairseq.checkpoint_utils.load_model_ensemble_and_task",
    prevents="wrong results",
    until="the patch of load_checkpoint_to_cpu goes, and fairseq-validate converts models for --bf16",
    wraps=_load_model_ensemble_and_task,
)
def load_model_ensemble_and_task(
    filenames: Any,
    arg_overrides: Any = None,
    task: Any = None,
    strict: bool = True,
    suffix: str = "",
    *more: Any,
    **kw: Any,
) -> Any:
    """Load models for translation or validation.

    Gives load_checkpoint_to_cpu the languages of the data, and refuses another dictionary than that of the training:
    with one of the same size, words get the weights of others. fairseq-validate ignores --bf16; here it computes in
    bfloat16.
    """
    files = [*filenames, *(file.replace(".pt", f"{suffix}.pt") for file in filenames)]  # as fairseq does
    reading = Reading(files, languages_of(options_of_task(task)), builds_model=True)
    with reading_for(reading):
        loaded = _load_model_ensemble_and_task(filenames, arg_overrides, task, strict, suffix, *more, **kw)
    refuse_other_dictionaries(reading, loaded[2])
    if option_value(arg_overrides or {}, "bf16"):  # fairseq-validate gives its flags as overrides
        for model in loaded[0]:
            narrow(model)
    return loaded
