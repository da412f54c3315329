"""The known causes of errors that fairseq raises without explaining them, each with a sentence for the user.

An error that no row describes keeps its traceback.
"""

import ast
import contextlib
import json
import re
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import flag_of
from .criteria import USUAL

Variables = Mapping[str, Any]


class Cause(NamedTuple):
    """One row of the table: an error at a place in fairseq, which together have one cause."""

    place: str  # pattern of "module.function" of a frame in the traceback
    error: str  # pattern of the beginning of "Class: message"
    # with the local variables of the frame as fields, and what the group in ``error`` matched as {0}; or a function of
    # both, which returns None if the cause is another one
    sentence: str | Callable[[Variables, str], str | None]


def _missing(_: Variables, option: str) -> str:
    return f"{flag_of(option)}: must be given"


def _unequal(local: Variables, _: str) -> str:
    sides = f"{len(local['src_dataset'])} source and {len(local['tgt_dataset'])} target sentences"
    return f"{local['data_path']}: its set {local['split']} has {sides}, and must have as many of both"


def _damaged(local: Variables, _: str) -> str:
    is_open = getattr(local["self"], "_index", None) is not None  # then the data, and not their index, are damaged
    path = local["path"] if "path" in local else local["self"]._path
    return f"{path.removesuffix('.idx')}.{'bin' if is_open else 'idx'}: {DAMAGED}"


def _unknown_word(local: Variables, _: str) -> str | None:
    task, tokens = local["self"], local["sample"]["net_input"]
    for dictionary, name in ((task.source_dictionary, "src_tokens"), (task.target_dictionary, "prev_output_tokens")):
        largest = int(tokens[name].max()) if name in tokens else 0
        if largest >= len(dictionary):
            known = f"the dictionary (dict.*.txt in the data folder) has {len(dictionary)} entries"
            return f"the data have a word with the number {largest}, and {known}: it is not that of the data"
    return None


def _metric(local: Variables, name: str) -> str | None:
    if name != local["cfg"].checkpoint.best_checkpoint_metric:
        return None
    return f"--best-checkpoint-metric {name}: must be one of {', '.join(sorted(local['stats']))}"


def _lacking_criterion(local: Variables, _: str) -> str | None:
    task = local["args"].task
    return f"--task {task}: its criterion must be {USUAL[task]}, or have the same options" if task in USUAL else None


def _not_registered(local: Variables, name: str) -> str | None:
    return f"{name}: must be one of {', '.join(sorted(local['REGISTRY']))}" if name == local["choice"] else None


def _lacking_source(local: Variables, _: str) -> str | None:
    if local["self"].model.has_encoder():
        return None
    return "--print-alignment: a language model has no attention to a source; drop the flag"


def _overrides(flag: str, value: str) -> str | None:
    with contextlib.suppress(ValueError, SyntaxError):
        ast.literal_eval(value)
        return None  # another value is not a literal
    return f"{flag} {value}: must be a Python dictionary, like {{'dropout': 0.1}}"


def _optimizer_overrides(local: Variables, _: str) -> str | None:
    return _overrides("--optimizer-overrides", local["cfg"].optimizer_overrides)


def _model_overrides(local: Variables, _: str) -> str | None:
    return _overrides("--model-overrides", local["cfg"].common_eval.model_overrides)


def _no_dictionary(local: Variables, _: str) -> str | None:
    overrides = local["cfg"].common_eval.model_overrides
    with contextlib.suppress(ValueError, SyntaxError):  # fairseq-validate takes other expressions, too
        if not isinstance(ast.literal_eval(overrides), dict):
            return f"--model-overrides {overrides}: must be a Python dictionary, like {{'dropout': 0.1}}"
    return None


def _lacking_path_to_interact(local: Variables, _: str) -> str | None:
    return None if local["cfg"].common_eval.path else "--path: must be given"


def _lacking_path(local: Variables, _: str) -> str | None:
    return None if all(local["filenames"]) else "--path: must be given, the file of the checkpoint"


def _lacking_target(local: Variables, _: str) -> str | None:
    data = [*local["self"].datasets.values()]
    for dataset in data:  # a wrapper comes before what it wraps
        if hasattr(dataset, "dataset"):
            data.append(dataset.dataset)
    if not any(getattr(dataset, "tgt", dataset) is None for dataset in data):
        return None
    return "the data have no target side, which the model needs: a file like train.en-de.de.bin is missing"


def _no_scores(local: Variables, _: str) -> str | None:
    if local["constraints"] is not None or local["cand_scores"].isfinite().any(dim=1).all():
        return None  # with constraints, the search itself can leave no word
    why = "because the model overflows in 16 bits or its weights are not numbers"
    return f"the scores of all hypotheses of a sentence are not numbers, {why}: drop --fp16, or give another checkpoint"


def _bleu_arguments(local: Variables, _: str) -> str | None:
    cfg = local["self"].cfg
    given = (cfg.eval_bleu_args, cfg.eval_bleu_detok_args)
    with contextlib.suppress(ValueError):
        if not cfg.eval_bleu or all(isinstance(json.loads(text or "{}"), dict) for text in given):
            return None
    return f"--eval-bleu-args {given[0]}, --eval-bleu-detok-args {given[1]}: must be JSON, like '{{\"beam\": 4}}'"


DAMAGED = "is damaged, or has another --dataset-impl; copy it again, or repeat fairseq-preprocess"
OF_DATA = r"(?:ValueError|AssertionError|KeyError|error):"
IN_WORKER = r'ValueError: Caught ValueError in DataLoader worker .*indexed_dataset\.py", line \d+, in __getitem__'
NOT_LITERAL = "(?:ValueError: malformed node|SyntaxError)"
TEXT = "must be text in UTF-8"
CAUSES = [
    # values that are missing
    Cause("fairseq.options.parse_args_and_arch", "RuntimeError: $", "--arch: must be given"),
    Cause("fairseq.options.parse_args_and_arch", "KeyError: None", "--task: must be given, like --task translation"),
    Cause(
        "fairseq.checkpoint_utils.load_model_ensemble_and_task",
        "AttributeError: 'NoneType' object has no attribute 'replace'",
        _lacking_path,
    ),
    Cause("fairseq_cli.interactive.main", "TypeError: argument of type 'NoneType'", _lacking_path_to_interact),
    Cause(".*", r"ConfigCompositionException: Error merging override (?:\w+\.)*(\w+)=null", _missing),
    Cause(".*", r"MissingMandatoryValue: Missing mandatory value: (\w+)", _missing),
    # data
    Cause(
        "fairseq.data.dictionary.add_from_file",
        r"RuntimeError: Duplicate word found .*?'(.*?)'\.",
        "{f.name}: has the word {0} twice; remove one of the lines, or end the second with #fairseq:overwrite",
    ),
    Cause(
        "fairseq.data.dictionary.add_from_file",
        r"ValueError: Incorrect dictionary format.*?: \"(.*?) ?\"$",
        "{f.name}: the line {0} must be a word and its count",
    ),
    Cause("fairseq.data.indexed_dataset.(__init__|read_index|_do_init|__getitem__)", OF_DATA, _damaged),
    Cause("torch._utils.reraise", IN_WORKER, f"a .bin file of the data {DAMAGED}"),
    Cause("fairseq.tasks.translation.load_langpair_dataset", "AssertionError: Source and target must", _unequal),
    Cause(
        "fairseq.tasks.fairseq_task.(train|valid)_step",
        "TypeError: .* missing 1 required positional argument: 'prev_output_tokens'",
        _lacking_target,
    ),
    Cause("fairseq.tasks.fairseq_task.(train|valid|inference)_step", "IndexError: index out of range", _unknown_word),
    Cause("fairseq.file_chunker_utils.find_offsets", "ZeroDivisionError", "--workers 0: must be at least 1"),
    Cause("fairseq.file_chunker_utils._safe_readline", "ValueError: negative seek", f"{{fd.name}}: {TEXT}"),
    Cause("fairseq.(binarizer|data.dictionary)..*", "UnicodeDecodeError", f"{{filename}}: {TEXT}"),
    Cause("fairseq_cli.interactive.buffered_read", "UnicodeDecodeError", f"--input {{input}}: {TEXT}"),
    # values that are not allowed
    Cause(
        "fairseq.tasks.language_modeling.build_model",
        r"AttributeError: '(\w+)' object has no attribute 'supported_targets'",
        "--task language_modeling: needs a language model, such as transformer_lm_rope, and this is a {0}",
    ),
    Cause(
        "fairseq.sequence_generator._generate",
        "TypeError: .* missing 2 required positional arguments: 'src_lengths' and 'prev_output_tokens'",
        "--lm-path: must be the checkpoint of a language model",
    ),
    Cause(
        "fairseq.sequence_generator._generate",
        "AssertionError: min_len cannot be larger",
        "--min-len {self.min_len}: must not be above {max_len}, the longest output by --max-len-a and --max-len-b",
    ),
    Cause("fairseq.sequence_generator.generate", "IndexError: Dimension out of range", _lacking_source),
    Cause(
        "fairseq.data.token_block_dataset._build_slice_indices",
        "(?:ZeroDivisionError|ValueError: negative dimensions)",
        "--tokens-per-sample: must be at least 1, and above --context-window",
    ),
    Cause("fairseq_cli.train.(validate|get_valid_stats)", "KeyError: (.*)", _metric),
    Cause("fairseq.registry.build_x", "KeyError: (.*)", _not_registered),
    Cause(
        "fairseq.dataclass.utils.convert_namespace_to_omegaconf",
        "InterpolationKeyError: Interpolation key 'criterion",
        _lacking_criterion,
    ),
    Cause(
        "fairseq.optim.lr_scheduler.inverse_square_root_schedule.__init__",
        "ZeroDivisionError",
        "--warmup-updates 0: must be at least 1 with --lr-scheduler inverse_sqrt",
    ),
    Cause(
        "fairseq.modules.multihead_attention.__init__",
        "AssertionError: embed_dim must be divisible by num_heads",
        "the width {embed_dim} (--encoder-embed-dim, --decoder-embed-dim) must be divisible by the number of attention "
        "heads, {num_heads} (--encoder-attention-heads, --decoder-attention-heads)",
    ),
    Cause(
        "fairseq.data.encoders.sentencepiece_bpe.__init__",
        "RuntimeError: .*could not parse ModelProto",
        "--sentencepiece-model {cfg.sentencepiece_model}: is not a model of SentencePiece",
    ),
    Cause(
        "fairseq.tasks.translation.build_model", "(?:JSONDecodeError:|TypeError: argparse.Namespace)", _bleu_arguments
    ),
    Cause(
        "fairseq.optim.lr_scheduler.manual_lr_scheduler.parse_manuallr_args",
        f"{NOT_LITERAL}|ValueError: (?:epoch2lr/update2lr|invalid literal|could not convert)|TypeError: argument of",
        "--epoch2lr or --update2lr {lr_args_str}: must be a Python dictionary with text as keys, like {{'1-3': 0.001}}",
    ),
    Cause("fairseq.checkpoint_utils.load_checkpoint", NOT_LITERAL, _optimizer_overrides),
    Cause("fairseq_cli.(generate|interactive|eval_lm|validate).(_main|main)", NOT_LITERAL, _model_overrides),
    Cause(
        "fairseq_cli.validate.main",
        "ValueError: dictionary update sequence|TypeError: '\\w+' object is not iterable",
        _no_dictionary,
    ),
    Cause("fairseq.sequence_generator._generate", r"AssertionError: \d+ < \d+$", _no_scores),
    Cause(
        "fairseq_cli.train.train",
        ".*local variable 'valid_losses'",
        "--skip-remainder-batch: an epoch has fewer batches than one update needs (--update-freq, --max-tokens)",
    ),
]


def sentence_of_cause(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the sentence of the first row of ``CAUSES`` that describes *error*, and None if none does."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = f"{type(error).__name__}: {' '.join(str(message).split())}"
    frames = [frame for frame, _ in traceback.walk_tb(trace)][::-1]
    for place, pattern, sentence in CAUSES:
        described = re.match(pattern, text)
        for frame in frames if described else ():
            if described and re.fullmatch(place, f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"):
                group = described[1] if described.re.groups else ""
                with contextlib.suppress(KeyError, AttributeError, TypeError):  # another version of fairseq
                    if callable(sentence):
                        return sentence(frame.f_locals, group)
                    return sentence.format(group, **frame.f_locals)
    return None
