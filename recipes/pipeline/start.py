"""The old model from whose weights a training starts: its sizes, and whether they are those of the settings."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError, naming_what_fairseq_reads
from recipes.pipeline.settings import Settings
from recipes.run.yaml_file import SettingsError

SIDES = ("encoder", "decoder")
# The options of a fairseq model that a setting gives, for the encoder and for the decoder.
SIZES = {"layers": "layers", "width": "embed_dim", "ffn_width": "ffn_embed_dim", "heads": "attention_heads"}


def read_sharing(settings: Settings, arch: str, path: Path, dictionaries: list[Path]) -> str:
    """The flags with which the model in the checkpoint *path* shares embeddings.

    Raises a SettingsError if the *settings* or *arch* of the new model do not fit it, or if its own *dictionaries*, for
    the source and for the target, do not.
    """
    from fairseq.data import Dictionary

    from fairseq_rope.checkpoints import load_checkpoint, part_of
    from fairseq_rope.tools import load_user_dir
    from fairseq_rope.transformer.defaults import complete

    load_user_dir(settings.user_dir or None)
    try:
        state = load_checkpoint(str(path))
        options = complete(part_of(state, "model"))
    except (InputError, OSError) as error:
        raise SettingsError(f"--set start_checkpoint={path}: {error}") from None
    if options is None:
        raise SettingsError(f"--set start_checkpoint={path}: has no options of its model")
    _refuse_other_options(settings, arch, path, options)
    for side, dictionary in zip(SIDES, dictionaries, strict=True):
        with naming_what_fairseq_reads(f"--set start_data={settings.start_data}: {dictionary.name}"):
            entries = len(Dictionary.load(str(dictionary)))
        weight = state["model"].get(f"{side}.embed_tokens.weight")
        if weight is None:
            raise SettingsError(f"--set start_checkpoint={path}: is not a transformer with {side}.embed_tokens.weight")
        if len(weight) != entries:
            has = f"{dictionary.name} has {entries} entries with fairseq's own"
            raise SettingsError(f"--set start_data={settings.start_data}: {has}, and the checkpoint has {len(weight)}")
    if getattr(options, "share_all_embeddings", False):
        return "--share-all-embeddings "
    shares = getattr(options, "share_decoder_input_output_embed", False)
    return "--share-decoder-input-output-embed " if shares else ""


def _refuse_other_options(settings: Settings, arch: str, path: Path, options: Any) -> None:
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_rope.transformer.meaning import FUNCTION, OF_WEIGHTS, in_words, meaning, option_differences

    for name, option in SIZES.items():
        own = getattr(settings, name)
        for side in SIDES:
            value = getattr(options, f"{side}_{option}", None)
            if value != own:
                raise SettingsError(f"--set {name}={own}: start_checkpoint={path} has {value} in its {side}")
    if getattr(options, "adaptive_softmax_cutoff", None):
        raise SettingsError(f"--set start_checkpoint={path}: has an adaptive softmax, which recipes do not support")
    if arch not in ARCH_MODEL_REGISTRY:
        raise SettingsError(f"--arch {arch}: fairseq has no such architecture")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    flags, _ = parser.parse_known_args(shlex.split(settings.fairseq_train_flags))
    sizes = {f"{side}_{option}": getattr(settings, name) for name, option in SIZES.items() for side in SIDES}
    asked = {name: value for name, value in vars(flags).items() if value is not None}
    own = argparse.Namespace(**{**sizes, **asked, "arch": arch})
    # The position encodings may differ, and read_sharing says which embeddings are shared.
    compared = {name for name in (*FUNCTION, *OF_WEIGHTS) if "share" not in name and not name.startswith("merge_")}
    for difference in option_differences(meaning(options), meaning(own)):
        if difference.name in compared:
            words = in_words([difference])
            raise SettingsError(f"--set start_checkpoint={path}: was trained {words}; change fairseq_train_flags")
