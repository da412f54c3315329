"""Convert a checkpoint to CTranslate2, to translate without fairseq: ``fairseq-rope export``.

Converts ``transformer_rope``, which CTranslate2's own converters do not support, and fairseq's
``transformer``. The exported model gets its name only after a check: it must score sample sentences as the
checkpoint does. The check is necessary because a model with wrong positions loads without an error and
translates badly.
"""

import argparse
import contextlib
import copy
import ctypes
import fcntl
import itertools
import json
import logging
import math
import os
import random
import shutil
import statistics
from functools import cached_property
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from .. import __version__
from ..errors import InputError, ending_in_one_sentence
from ..files import naming
from ..lines import lines_of
from ..segments import FILE as SEGMENTS
from ..segments import SEPARATOR, divided, joined
from . import FILE, INTEGER, NUMBER, REQUIRED, SWITCH, add_flags, command_parser, shortlist
from .translate import ALLOWED, SETTINGS, SHORTLIST, SUBWORDS, Text, Translator, checksum, refuse_numbers

if TYPE_CHECKING:
    from fairseq.data import Dictionary

QUANTIZATIONS = ("int8", "int8_float32", "int16", "float16", "bfloat16")
# The allowed difference between the log-probabilities of a word in the exported model and in the checkpoint (see
# check()). In int8, trained models differed by 0.01 to 0.12, most with oneDNN (docs/compatibility.md), and a tiny
# model with random weights by 0.25.
BOUNDS = {None: 1e-4, "int16": 0.02, "float16": 0.02, "bfloat16": 0.1, "int8": 0.3, "int8_float32": 0.3}
SAMPLES = 64
SHORTLIST_SAMPLES = 1000
SHORTLIST_LOSS = 0.2  # sacreBLEU that a shortlist may cost
ALONE = 200  # of the samples, those that are also translated one at a time
LONGEST_SAMPLE = 128  # random words
LONGEST_SCALED_SAMPLE = 512  # with RoPE scaling, which is for long sentences
# The share of validation sentences that must have the same tokens when they are tokenised from plain text, and
# the share that a quantised model must translate as the checkpoint does.
SAME_SOURCES, SAME_TRANSLATIONS = 58 / 64, 32 / 64
MAX_LEN_B = 50  # an output may have this many tokens more than its source, as in the recipes
# Tokens, with the end, for which sinusoids and biases of distances are exported: CTranslate2 reads them from tables.
# In models without tables, fairseq-rope translate has a similar limit (LONGEST).
POSITIONS = 4096
NO_ROTATION = 1e30  # a frequency that is divided by this number is 0
# fairseq's names of activation functions, and CTranslate2's
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_accurate": "GELUTanh", "gelu_fast": "GELUTanh", "swish": "SWISH"}
SUBWORD_FLAGS = {"--bpe-codes": "subword_nmt", "--sentencepiece-model": "sentencepiece"}
# attributes of the layers of NormFormer, and fairseq's flags for them
NORMFORMER = {"attn_ln": "scale-attn", "c_attn": "scale-heads", "ffn_layernorm": "scale-fc", "w_resid": "scale-resids"}


class ExportError(InputError):
    """CTranslate2 does not support the checkpoint, or a flag cannot be used; the message says which."""


# -- what can be exported --------------------------------------------------------------------------


def position_of(layer: Any) -> Any:
    """Return the position encoding of a layer's self-attention; None in fairseq's own layers."""
    return getattr(layer.self_attn, "position", None)


def is_bias_of_distance(position: Any) -> bool:
    """Return whether *position* adds a bias that depends on the distance alone, and that all layers share."""
    return hasattr(position, "by_distance") and position.shared and not position.absolute


def is_supported(position: Any) -> bool:
    """Return whether CTranslate2 supports the encoding *position*."""
    from ..positions import ENCODINGS

    supported = [ENCODINGS[name] for name in ("none", "sinusoidal", "learned", "rope", "shaw")]
    return position is None or type(position) in supported or is_bias_of_distance(position)


def scaling_of(position: Any) -> Any:
    """Return the RopeScaling of *position*; None if it has none, or if its frequencies are the usual ones."""
    from ..positions.rotary import RotaryEmbedding

    scaling = position.scaling if isinstance(position, RotaryEmbedding) else None
    return None if scaling is None or scaling.rope_type == "default" else scaling


def has_frequency_factors(position: Any) -> bool:
    """Return whether CTranslate2 needs a factor for each frequency of *position*, as in its "Su" scaling."""
    scaling = scaling_of(position)
    return scaling is not None and scaling.rope_type in ("yarn", "llama3", "proportional")


def name_of(position: Any) -> str:
    """Return the name of *position* in ``--position-encoding``, or that of its class if it has none there."""
    from ..positions import ENCODINGS

    names = (name for name, encoding in ENCODINGS.items() if encoding is type(position))
    return next(names, type(position).__name__)


def linear_of(fc1: Any) -> List[Any]:
    """Return the linear layers of the first part of a feed-forward layer: two of a gated one, else *fc1* itself."""
    from ..feed_forward import GatedLinear

    return [fc1.gate, fc1.up] if isinstance(fc1, GatedLinear) else [fc1]


def attentions_of(layer: Any) -> List[Any]:
    """Return the self-attention of *layer*, and its cross-attention if it has one."""
    cross_attn = getattr(layer, "encoder_attn", None)
    return [layer.self_attn] if cross_attn is None else [layer.self_attn, cross_attn]


def key_value_heads(attention: Any) -> int:
    """Return the number of heads of keys and values of *attention*."""
    return int(attention.k_proj.out_features // attention.head_dim)


def refuse_unsupported(model: Any, path: str, quantization: str = "float32") -> None:
    """Raise an ExportError that names the first option of *model* that CTranslate2 does not support."""
    from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase, TransformerModelBase
    from torch import nn

    from ..linear_attention import LinearSelfAttention

    def refuse(what: str) -> None:
        raise ExportError(f"--path {path}: {what}, which CTranslate2 does not support")

    def refuse_flags(flags: Dict[str, Any]) -> None:
        for flag, is_set in flags.items():
            if is_set:
                refuse(f"it was trained with --{flag}")

    if not isinstance(model, TransformerModelBase):
        refuse(f"it is a {type(model).__name__}, not a transformer_rope or transformer")
    encoder, decoder, cfg = model.encoder, model.decoder, model.cfg
    if not isinstance(encoder, TransformerEncoderBase) or not isinstance(decoder, TransformerDecoderBase):
        refuse(f"its encoder is a {type(encoder).__name__}, its decoder a {type(decoder).__name__}")
    if not len(encoder.layers) or not len(decoder.layers):
        refuse("its encoder or decoder has no layers")
    flags = {
        "adaptive-softmax-cutoff": decoder.adaptive_softmax is not None,
        "no-cross-attention": cfg.no_cross_attention,
        "cross-self-attention": cfg.cross_self_attention,
        "base-layers": cfg.base_layers,
        "attention-length-scaling": getattr(cfg, "attention_length_scaling", 0.0),
        f"activation-fn {cfg.activation_fn}": cfg.activation_fn not in ACTIVATIONS,
    }
    refuse_flags(flags)
    for side, name in ((encoder, "encoder"), (decoder, "decoder")):
        flags = {
            "quant-noise-pq": side.quant_noise is not None,  # an additional layer after the embeddings
            f"{name}-xformers-att-config": getattr(getattr(cfg, name), "xformers_att_config", None),
        }
        for part, flag in NORMFORMER.items():
            flags[flag] = any(getattr(layer, part, None) is not None for layer in side.layers)
        refuse_flags(flags)
        for layer in side.layers:
            attentions = attentions_of(layer)
            linear = [*linear_of(layer.fc1), layer.fc2]
            for attention in attentions:
                linear += [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
            if not all(type(module) is nn.Linear for module in linear):
                refuse(f"layers of its {name} are quantised")
            if any(attention.bias_k is not None or attention.add_zero_attn for attention in attentions):
                refuse("its attention has extra keys")
            if isinstance(layer.self_attn, LinearSelfAttention):
                refuse(f"its {name} has --attention-type linear")
            if not is_supported(position_of(layer)):
                refuse(f"its {name} has the position encoding {name_of(position_of(layer))}")
            if type(position_of(layer)) is not type(position_of(side.layers[0])):
                refuse(f"layers of its {name} have different position encodings")
            scaling = scaling_of(position_of(layer))
            if scaling is not None and scaling.depends_on_length:
                refuse(f"its {name} has --rope-scaling of the type {scaling.rope_type}")
            if has_frequency_factors(position_of(layer)) and quantization in ("float16", "bfloat16"):
                # It stores the factors of the frequencies in 16 bits and reads them as 32 bits.
                refuse(
                    f"its {name} has --rope-scaling of the type {scaling.rope_type} with --quantization {quantization}"
                )


# -- the model in CTranslate2's terms --------------------------------------------------------------


def to_spec(model: Any, source: "Dictionary", target: "Dictionary") -> Any:
    """Return CTranslate2's ``TransformerSpec`` of *model*, with copies of its weights.

    Args:
        model: in eval mode, float32, on the CPU
        source, target: its dictionaries
    """
    from ctranslate2.converters import fairseq as fairseq_converter
    from ctranslate2.specs import attention_spec, common_spec, transformer_spec

    from ..norms import RMSNorm
    from ..positions.rotary import RotaryEmbedding
    from ..positions.shaw import Shaw

    model = copy.deepcopy(model).requires_grad_(False)  # quantisation changes weights in place
    encoder, decoder = model.encoder, model.decoder
    activation = getattr(common_spec.Activation, ACTIVATIONS[model.cfg.activation_fn])

    def options(side: Any, cfg: Any) -> Dict[str, Any]:
        layer = side.layers[0]
        arguments = {
            "rms_norm": isinstance(layer.final_layer_norm, RMSNorm),
            "ffn_glu": len(linear_of(layer.fc1)) == 2,
            "qk_norm": getattr(layer.self_attn, "q_norm", None) is not None,
            "num_layers": len(side.layers),
            "num_heads": cfg.attention_heads,
            "pre_norm": cfg.normalize_before,
            "no_final_norm": side.layer_norm is None,
            "activation": activation,
            "layernorm_embedding": side.layernorm_embedding is not None,
        }
        if any(key_value_heads(attention) != attention.num_heads for attention in attentions_of(layer)):
            arguments["num_heads_kv"] = key_value_heads(layer.self_attn)  # _set_layer sets that of each attention
        position = position_of(layer)
        if is_bias_of_distance(position):
            arguments["relative_attention_bias"] = True
        elif isinstance(position, Shaw):
            arguments["relative_position"] = True
        elif isinstance(position, RotaryEmbedding):
            arguments.update(rotary_dim=position.dim, rotary_interleave=position.interleaved, rotary_base=position.base)
            scaling = scaling_of(position)
            if has_frequency_factors(position):
                arguments["rotary_scaling_type"] = attention_spec.RotaryScalingType.Su
            elif scaling is not None and scaling.rope_type == "linear":
                linear = attention_spec.RotaryScalingType.Linear
                arguments.update(rotary_scaling_type=linear, rotary_scaling_factor=scaling.values["factor"])
            elif scaling is not None:  # ntk
                dim = position.dim
                arguments["rotary_base"] = position.base * scaling.values["factor"] ** (dim / (dim - 2))
        elif side.embed_positions is None:
            # CTranslate2 adds sinusoids to a model without positions, but not if it rotates, here by angles of 0.
            linear = attention_spec.RotaryScalingType.Linear
            arguments.update(rotary_dim=2, rotary_scaling_type=linear, rotary_scaling_factor=NO_ROTATION)
        return arguments

    encoder_spec = transformer_spec.TransformerEncoderSpec(**options(encoder, model.cfg.encoder))
    projects = decoder.project_in_dim is not None or decoder.project_out_dim is not None
    of_decoder = {**options(decoder, model.cfg.decoder), "project_in_out": projects}
    decoder_spec = transformer_spec.TransformerDecoderSpec(**of_decoder)
    for spec, side in ((encoder_spec, encoder), (decoder_spec, decoder)):
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        fairseq_converter.set_embeddings(embeddings, side.embed_tokens)
        spec.scale_embeddings = side.embed_scale
        if side.embed_positions is not None:
            spec.position_encodings.encodings = _positions(side.embed_positions)
        for name in ("layer_norm", "layernorm_embedding"):
            if getattr(side, name) is not None:
                _set_norm(getattr(spec, name), getattr(side, name))
        for layer_spec, layer in zip(spec.layer, side.layers):
            _set_position(layer_spec.self_attention, position_of(layer), bidirectional=side is encoder)
    for layer in (*encoder.layers, *decoder.layers):
        _scale_queries(layer)
    for spec, side in ((encoder_spec, encoder), (decoder_spec, decoder)):
        for layer_spec, layer in zip(spec.layer, side.layers):
            _set_layer(layer_spec, layer)
    fairseq_converter.set_linear(decoder_spec.projection, decoder.output_projection)
    if projects:
        for name in ("project_in", "project_out"):
            module = getattr(decoder, f"{name}_dim")
            if module is None:  # the specification has both or neither
                delattr(decoder_spec, name)
            else:
                fairseq_converter.set_linear(getattr(decoder_spec, name), module)
    spec = transformer_spec.TransformerSpec(encoder_spec, decoder_spec)
    spec.register_source_vocabulary(words(source))
    spec.register_target_vocabulary(words(target))
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = True
    # Without a number, CTranslate2 uses those of the modules: 1e-5 in layer norms, 1e-6 in RMSNorms.
    spec.config.layer_norm_epsilon = None
    return spec


def _set_layer(spec: Any, layer: Any) -> None:
    """Set the weights of *layer* in CTranslate2's specification of a layer."""
    import numpy as np
    from ctranslate2.converters import fairseq as fairseq_converter

    names = (("self_attention", "self_attn_layer_norm"), ("attention", "encoder_attn_layer_norm"))
    for attention, (spec_name, norm_name) in zip(attentions_of(layer), names):
        attention_spec, norm = getattr(spec, spec_name), getattr(layer, norm_name)
        is_self = attention is layer.self_attn
        fairseq_converter.set_multi_head_attention(attention_spec, attention, self_attention=is_self)
        _set_norm(attention_spec.layer_norm, norm)
        if hasattr(attention_spec, "num_heads_kv"):
            attention_spec.num_heads_kv = np.int32(key_value_heads(attention))
        for name in ("q_norm", "k_norm"):
            head_norm = getattr(attention, name, None)
            if head_norm is not None:
                _set_norm(getattr(attention_spec, name), head_norm)
            elif hasattr(attention_spec, name):  # of cross-attention, which has none
                delattr(attention_spec, name)
    first, *gated = linear_of(layer.fc1)
    fairseq_converter.set_linear(spec.ffn.linear_0, first)
    if gated:
        fairseq_converter.set_linear(spec.ffn.linear_0_noact, *gated)
    fairseq_converter.set_linear(spec.ffn.linear_1, layer.fc2)
    _set_norm(spec.ffn.layer_norm, layer.final_layer_norm)


def _set_norm(spec: Any, norm: Any) -> None:
    """Set the weights of *norm*, a LayerNorm or RMSNorm, in CTranslate2's specification of a norm."""
    spec.gamma = norm.weight.numpy()
    if getattr(norm, "bias", None) is not None:
        spec.beta = norm.bias.numpy()


def _set_position(spec: Any, position: Any, bidirectional: bool) -> None:
    """Set the parameters of *position* in CTranslate2's specification of a self-attention."""
    import numpy as np

    from ..positions.rotary import frequencies
    from ..positions.shaw import Shaw

    if is_bias_of_distance(position):
        spec.relative_attention_bias = _bias_table(position, bidirectional)
        spec.relative_attention_max_distance = np.int32(2 * POSITIONS)
    elif isinstance(position, Shaw):
        spec.relative_position_keys = position.relative_position_keys.numpy()
        spec.relative_position_values = position.relative_position_values.numpy()
    elif has_frequency_factors(position):
        factors = frequencies(position.dim, position.base) / position.theta
        factors = factors.clamp(max=NO_ROTATION).float().numpy()
        # CTranslate2 uses one of the two, by the length of the input.
        spec.rotary_scaling_short_factor = spec.rotary_scaling_long_factor = factors


def _scale_queries(layer: Any) -> None:
    """Multiply the query projection of *layer* by the square of the attention factor of its RoPE scaling.

    RoPE multiplies rotated queries and rotated keys by this factor, which CTranslate2 does not do. If a norm follows
    the projection, its weight is multiplied instead.
    """
    attention, position = layer.self_attn, position_of(layer)
    if scaling_of(position) is not None and position.attention_factor != 1.0:
        scaled = attention.q_proj if attention.q_norm is None else attention.q_norm
        for parameter in scaled.parameters():
            heads = parameter.unflatten(0, (-1, attention.head_dim))
            heads[:, : position.dim] *= position.attention_factor**2


def _bias_table(position: Any, bidirectional: bool) -> Any:
    """Return the bias at each distance below POSITIONS, as a table of T5's buckets: (buckets, heads).

    If a direction has 2 * POSITIONS buckets, then CTranslate2 gives each distance below POSITIONS a bucket of its own.
    The other buckets are for larger distances; they have the bias of the largest of these distances.
    """
    import torch

    past = -torch.arange(2 * POSITIONS).clamp(max=POSITIONS - 1)
    distance = torch.cat([past, -past]) if bidirectional else past
    return position.by_distance(distance).t().contiguous().numpy()


def _positions(embedding: Any) -> Any:
    """Return the vectors of all learnt positions, or of POSITIONS or more sinusoidal positions."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    first = embedding.padding_idx + 1
    if isinstance(embedding, SinusoidalPositionalEmbedding):
        count = max(first + POSITIONS, len(embedding.weights))
        return embedding.get_embedding(count, embedding.embedding_dim, embedding.padding_idx)[first:].numpy()
    return embedding.weight.detach()[first:].numpy()


def words(dictionary: "Dictionary") -> List[str]:
    """Return the entries of *dictionary* under CTranslate2's names.

    Raises:
        ExportError: two entries have the same name, and CTranslate2 would use only the first
    """
    names = ["<blank>" if word == dictionary.pad_word else word for word in dictionary.symbols]
    repeated = next((word for word in names if names.count(word) > 1), None) if len(set(names)) < len(names) else None
    if repeated is not None:
        raise ExportError(
            f"its dictionary has the word {repeated} twice (CTranslate2 calls padding <blank>), and CTranslate2 would "
            "use only one of them"
        )
    return names


# -- comparing the exported model with the checkpoint ----------------------------------------------


Pairs = List[Tuple[List[int], List[int]]]


def random_pairs(task: Any, longest: int) -> Pairs:
    """Return SAMPLES pairs of sentences to score: 1 to *longest* random words, as numbers, without the end.

    Random words need no data, and their scores depend on every part of the model.
    """
    draw = random.Random(1)

    def sentence(dictionary: "Dictionary", length: int) -> List[int]:
        return [draw.randrange(dictionary.nspecial, len(dictionary)) for _ in range(length)]

    pairs = []
    for n in range(SAMPLES):
        length = 1 + longest * n * n // SAMPLES**2  # more short than long
        target = min(max(1, length + n % 5 - 2), longest)
        pairs.append((sentence(task.source_dictionary, length), sentence(task.target_dictionary, target)))
    return pairs


def validation_pairs(task: Any, count: int = SAMPLES) -> Pairs:
    """Return up to *count* pairs from all parts of the validation set; none if the data have no such set.

    Raises:
        ExportError: the validation set is damaged
    """
    from fairseq.tasks.translation import TranslationTask

    if not isinstance(task, TranslationTask):
        return []
    try:
        if "valid" not in task.datasets:
            task.load_dataset("valid")
        data = task.dataset("valid")
        short = [n for n, size in enumerate(data.src_sizes) if 1 < size <= 201] if data.tgt is not None else []
        chosen = short[:: max(1, len(short) // count)]
        pairs = [(data.src[n].tolist()[:-1], data.tgt[n].tolist()[:-1]) for n in chosen]
    except FileNotFoundError:
        return []
    except Exception as error:  # fairseq does not check its files; struct, NumPy and mmap raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        damage = f"--data {task.cfg.data}: its validation set is damaged and cannot be read ({reason})"
        raise ExportError(damage) from error
    return [(source, target) for source, target in pairs if target][:count]


def torch_scores(model: Any, task: Any, pairs: Pairs) -> List[List[float]]:
    """Return, for each target, the log-probability of each word and of the end in the checkpoint's model."""
    import torch

    end = task.target_dictionary.eos()
    scores = []
    with torch.no_grad():
        for source, target in pairs:
            src_tokens = torch.tensor([[*source, task.source_dictionary.eos()]])
            expected = torch.tensor([[*target, end]])
            out = model(src_tokens, torch.tensor([src_tokens.size(1)]), torch.tensor([[end, *target]]))
            lprobs = model.get_normalized_probs(out, log_probs=True)
            scores.append(lprobs.gather(2, expected.unsqueeze(2)).flatten().tolist())
    return scores


def exported_scores(translator: Any, task: Any, pairs: Pairs) -> List[List[float]]:
    """Return the log-probabilities of :func:`torch_scores` in CTranslate2's model."""
    names = [words(task.source_dictionary), words(task.target_dictionary)]
    sides = [[[names[n][word] for word in pair[n]] for pair in pairs] for n in (0, 1)]
    results = translator.score_batch(*sides, max_input_length=0, max_batch_size=1024, batch_type="tokens")
    return [list(result.log_probs) for result in results]


def positions(side: Any) -> Optional[int]:
    """Return how many tokens, including the end, *side* has positions for in CTranslate2; None: any number."""
    if side.embed_positions is not None:
        return len(_positions(side.embed_positions))
    return POSITIONS if is_bias_of_distance(position_of(side.layers[0])) else None


def counts_padding(side: Any) -> bool:
    """Return whether the positions of *side* count a ``<pad>`` after a word; absolute positions skip it."""
    from ..positions import ENCODINGS

    return side.embed_positions is None and not isinstance(position_of(side.layers[0]), (type(None), ENCODINGS["none"]))


class Reference:
    """The checkpoint's scores and translations of sample sentences, each computed when it is first needed.

    Args:
        model: in eval mode, float32, on the CPU
        task: its task, with the dictionaries and perhaps a validation set
        search: beam, lenpen and max_len_b
    """

    def __init__(self, model: Any, task: Any, **search: Any) -> None:
        self.model, self.task, self.search = model, task, search
        most = [positions(side) for side in (model.encoder, model.decoder)]
        is_scaled = any(scaling_of(position_of(side.layers[0])) is not None for side in (model.encoder, model.decoder))
        limit = LONGEST_SCALED_SAMPLE if is_scaled else LONGEST_SAMPLE
        longest = min([limit, *(count - 1 for count in most if count is not None)])
        fits_all = longest == limit
        self.real = [pair for pair in validation_pairs(task) if fits_all or max(map(len, pair)) <= longest]
        self.pairs = [*random_pairs(task, longest), *self.real]

    @cached_property
    def scores(self) -> List[List[float]]:
        """:func:`torch_scores` of ``pairs``."""
        return torch_scores(self.model, self.task, self.pairs)

    @cached_property
    def translations(self) -> List[Tuple[List[str], List[str]]]:
        """The sources of ``real``, sorted by length, with their translations by fairseq's search."""
        import torch
        from fairseq.sequence_generator import SequenceGenerator

        of_source, of_target, search = self.task.source_dictionary, self.task.target_dictionary, self.search
        options = {"beam_size": search["beam"], "len_penalty": search["lenpen"], "max_len_a": 1}
        generator = SequenceGenerator([self.model], of_target, max_len_b=search["max_len_b"], **options)
        translations = []
        # In batches of one length, because fairseq has one output limit for a whole batch.
        for _, batch in itertools.groupby(sorted((source for source, _ in self.real), key=len), key=len):
            sources = list(batch)
            tokens = torch.tensor([[*source, of_source.eos()] for source in sources])
            net_input = {"src_tokens": tokens, "src_lengths": torch.full((len(sources),), tokens.size(1))}
            with torch.no_grad():
                hypotheses = generator.generate([self.model], {"net_input": net_input})
            for source, nbest in zip(sources, hypotheses):
                best = [of_target[word] for word in nbest[0]["tokens"][:-1].tolist()]
                translations.append(([of_source[word] for word in source], best))
        return translations


def agreeing(folder: str, reference: Reference) -> int:
    """Return how many sources of the validation set :mod:`.translate` translates into the same words as fairseq."""
    results = Translator(folder, shortlist=False).search([source for source, _ in reference.translations])
    return sum(best == expected for ((best, _),), (_, expected) in zip(results, reference.translations))


def refuse_below(share: float, same: int, count: int, report: str, force: bool) -> None:
    """Raise an ExportError that begins with *report* if *same* is below *share* of *count*, unless *force*."""
    needed = math.ceil(share * count)
    if same < needed and not force:
        raise ExportError(f"{report}, and {needed} are needed: nothing was written (--force writes it anyway)")


def check(folder: str, reference: Reference, quantization: Optional[str], force: bool = False) -> str:
    """Compare the model in *folder* with the checkpoint, and return sentences that report the differences.

    The score of a sentence is the mean log-probability of its words and its end.

    Raises:
        ExportError: in float32, the difference of a sentence is above BOUNDS; quantised, the mean difference is,
            or without *force* too few translations are the same (SAME_TRANSLATIONS)
    """
    import ctranslate2

    ctranslate2.set_log_level(logging.ERROR)  # it warns if the CPU has no 16-bit arithmetic
    translator = ctranslate2.Translator(folder, device="cpu", compute_type="default")
    expected, exported = reference.scores, exported_scores(translator, reference.task, reference.pairs)
    if [len(scores) for scores in exported] != [len(scores) for scores in expected]:
        raise ExportError("CTranslate2 does not score every word: nothing was written")
    if quantization:
        differences = [[abs(a - b) for a, b in zip(one, other)] for one, other in zip(expected, exported)]
        measured, what = statistics.mean(map(statistics.mean, differences)), "on average"
    else:
        measured, what = max(abs(sum(a) - sum(b)) / len(a) for a, b in zip(expected, exported)), "at most"
    bound, called, computed = BOUNDS[quantization], quantization or "float32", translator.compute_type
    if computed not in (called, f"{called}_float32"):  # this CPU does not support the type
        bound = max(bound, BOUNDS.get(computed, 0.0))
        called += f" (computed in {computed} on this machine)"
    if not measured <= bound:  # also true for NaN
        raise ExportError(
            f"the exported model's scores differ from the checkpoint's by {measured:.2g} per word {what}, and "
            f"{bound:g} is allowed: nothing was written"
        )
    report = f"{called}: the scores of {len(expected)} sentences differ from the checkpoint's by {measured:.1e} per "
    report += f"word {what} ({bound:g} is allowed)"
    if reference.real:
        same, count = agreeing(folder, reference), len(reference.real)
        compared = f"{called}: {same} of {count} sentences of the validation set are translated into the same words"
        compared += " as by the checkpoint"
        if quantization:
            refuse_below(SAME_TRANSLATIONS, same, count, compared, force)
        report += f"\n{compared}"
    return report


def check_text(folder: str, settings: Dict[str, Any], task: Any, force: bool = False) -> List[str]:
    """Return how many sources of the validation set are tokenised from plain text as in the data, as a sentence.

    Returns:
        a list with the sentence, or an empty list without a validation set

    Raises:
        ExportError: without *force*, too few sources have the same tokens (SAME_SOURCES)
    """
    # The set contains only tokens. Moses' detokeniser for the source language converts them to plain text.
    source = settings["source"]
    back = Text(folder, {**settings, "moses": {"source": source, "target": source, "dash_splits": False}})
    text = Text(folder, settings)
    symbols, unknown = task.source_dictionary.symbols, task.source_dictionary.unk()
    separator = (settings.get("segments") or {}).get("separator", "")

    def from_plain_text(line: List[str]) -> List[str]:
        sentences, _ = divided(line, line.count(separator) + 1, separator)
        return joined([text.tokens(back.plain(sentence)) for sentence in sentences], separator)

    lines = [[symbols[n] for n in source] for source, _ in validation_pairs(task) if unknown not in source]
    if not lines:
        return []
    same = sum(from_plain_text(line) == line for line in lines)
    report = f"{same} of {len(lines)} sources of the validation set are tokenised from plain text as in the data"
    cause = "--tokenizer or the subwords are not those of the data"
    refuse_below(SAME_SOURCES, same, len(lines), f"{report} ({cause})", force)
    return [report]


# -- the shortlist ---------------------------------------------------------------------------------


def build_shortlist(args: argparse.Namespace, settings: Dict[str, Any], task: Any) -> shortlist.Shortlist:
    """Return the shortlist of the corpus that ``--shortlist`` names, or of the training set in ``--data``.

    Raises:
        InputError: the corpus cannot be read or aligned
    """
    if args.shortlist:
        moses = settings["moses"] and {**settings["moses"], "source": settings["target"]}
        tokens = [Text("", {**settings, "moses": of_side}).tokens for of_side in (settings["moses"], moses)]
        lines = zip(*(lines_of(path) for path in args.shortlist))
        pairs: Iterator[shortlist.Pair] = ((tokens[0](one), tokens[1](other)) for one, other in lines)
    else:
        training = f"--shortlist: --data {args.data}: its training set"
        try:
            task.load_dataset("train")
            data = task.dataset("train")
        except FileNotFoundError:
            raise ExportError(f"{training} is missing; name two files of parallel text") from None
        except Exception as error:  # as in validation_pairs
            raise ExportError(f"{training} cannot be read ({error})") from error
        if data.tgt is None:
            raise ExportError(f"{training} has no target side; name two files of parallel text")
        pairs = in_words(task, ((data.src[n].tolist()[:-1], data.tgt[n].tolist()[:-1]) for n in range(len(data))))
    built = shortlist.build(pairs, args.shortlist_candidates, args.shortlist_frequent)
    if settings["segments"]:
        built.frequent.append(settings["segments"]["separator"])
    return built


def in_words(task: Any, pairs: Iterable[Tuple[List[int], List[int]]]) -> Iterator[shortlist.Pair]:
    """Yield *pairs* of numbers of words as words."""
    source, target = task.source_dictionary.symbols, task.target_dictionary.symbols
    for one, other in pairs:
        yield [source[n] for n in one], [target[n] for n in other]


def shortlist_samples(settings: Dict[str, Any], task: Any, force: bool) -> List[shortlist.Pair]:
    """Return the pairs of the validation set that :func:`check_shortlist` translates: those that the model can.

    Raises:
        ExportError: without *force*, there is no validation set
    """
    limits = [settings["positions"][side] or math.inf for side in ("source", "target")]
    numbers = validation_pairs(task, SHORTLIST_SAMPLES)
    pairs = in_words(task, (pair for pair in numbers if all(len(line) < most for line, most in zip(pair, limits))))
    samples = list(pairs)
    if not samples and not force:
        raise ExportError("--shortlist: cannot be checked without a validation set (--force writes it anyway)")
    return samples


def check_shortlist(
    folder: str, settings: Dict[str, Any], pairs: Sequence[shortlist.Pair], built: shortlist.Shortlist, force: bool
) -> str:
    """Compare the translations of *pairs* with and without the shortlist, and return sentences about them.

    Raises:
        ExportError: without *force*, BLEU is lower by more than SHORTLIST_LOSS
    """
    import sacrebleu

    from .score import default_tokenize

    if not pairs:
        return "the shortlist was not checked: the data have no validation set"
    text, tokenize = Text(folder, settings), default_tokenize(settings["target"])
    sources, references = [source for source, _ in pairs], [text.plain(target) for _, target in pairs]
    translators = [Translator(folder, shortlist=use) for use in (False, True)]

    def best(translator: Any, sentences: Sequence[List[str]]) -> List[List[str]]:
        return [hypotheses[0][0] for hypotheses in translator.search(sentences)]

    def same(one: List[List[str]], other: List[List[str]]) -> str:
        return f"{100.0 * sum(a == b for a, b in zip(one, other)) / len(other):.1f}%"

    without, with_it = (best(translator, sources) for translator in translators)
    scores = [
        sacrebleu.corpus_bleu([text.plain(line) for line in lines], [references], tokenize=tokenize, force=True).score
        for lines in (without, with_it)
    ]
    few = sources[:ALONE]
    alone = [[best(translator, [source])[0] for source in few] for translator in translators]
    size = statistics.mean(len(built.of(source)) for source in sources)
    report = (
        f"shortlist: sacreBLEU {scores[1]:.2f}, and {scores[0]:.2f} without it, on {len(pairs)} sentences of the "
        f"validation set; {same(with_it, without)} of the translations are the same in batches, "
        f"{same(alone[1], alone[0])} of {len(few)} one at a time\n"
        f"shortlist: {size:.0f} target subwords are possible for a sentence, on average; they have "
        f"{shortlist.coverage(built, pairs):.1f}% of the references' subwords"
    )
    if scores[1] < scores[0] - SHORTLIST_LOSS and not force:
        allowed = f"sacreBLEU may be {SHORTLIST_LOSS} lower: nothing was written (--force writes it anyway)"
        raise ExportError(f"{report}; {allowed}")
    return report


# -- the folder ------------------------------------------------------------------------------------


def subwords(args: argparse.Namespace, dictionary: "Dictionary") -> Tuple[Optional[str], Optional[str]]:
    """Return the kind and the file of the subword model that the flags name or the data folder holds.

    Returns:
        a key of SUBWORDS and a path, or None and None

    Raises:
        ExportError: the file does not exist, or there is none although the dictionary has subwords
    """
    for flag, kind in SUBWORD_FLAGS.items():
        path = getattr(args, flag[2:].replace("-", "_"))
        if path is not None:
            if not os.path.isfile(path):
                raise ExportError(f"{flag} {path}: must be a file that exists")
            return kind, path
    for kind, name in SUBWORDS.items():
        if os.path.isfile(os.path.join(args.data, name)):
            return kind, os.path.join(args.data, name)
    if any(word.endswith("@@") or word.startswith("\u2581") for word in dictionary.symbols):
        raise ExportError(
            f"--data {args.data}: its dictionary has subwords, and it has neither "
            f"{' nor '.join(SUBWORDS.values())}; name the file with --bpe-codes or --sentencepiece-model"
        )
    return None, None


def tokenisation(
    tokenizer: Optional[str], kind: Optional[str], dictionary: "Dictionary", source: str, target: str
) -> Optional[Dict[str, Any]]:
    """Return the setting ``moses``: how Moses tokenises text before the subwords; None if it does not.

    Args:
        tokenizer: "moses", "none", or None for the default, which is "none" for sentencepiece
        kind: of subwords
        dictionary: hyphens are split if it has ``@-@``, which Moses' ``-a`` makes of a hyphen
    """
    if tokenizer == "none" or (tokenizer is None and kind == "sentencepiece"):
        return None
    return {"source": source, "target": target, "dash_splits": "@-@" in dictionary}


def segment_settings(args: argparse.Namespace, task: Any) -> Optional[Dict[str, Any]]:
    """Return the setting ``segments``: the flags, and for a flag that is not given, the value in the data folder.

    Returns:
        the number of tokens in the longest segments of the training, and their separator, or None if there are none

    Raises:
        ExportError: a value is missing or not allowed, or the separator is not in both dictionaries
    """
    path = os.path.join(args.data, SEGMENTS)
    flags = {"tokens": args.segment_tokens, "separator": args.separator}
    flags = {name: value for name, value in flags.items() if value is not None}
    segments: Dict[str, Any] = {"separator": SEPARATOR}
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                segments = json.load(file)
            if not isinstance(segments, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise ExportError(f"{path}: cannot be read ({error})") from None
    elif not flags:
        return None
    segments = {**segments, **flags}
    is_allowed, allowed = ALLOWED["segments"]
    if not is_allowed(segments):
        shown = f"--segment-tokens, --separator and {path} give {json.dumps(segments)[:200]}"
        raise ExportError(f"{shown}, and the segments must be {allowed}")
    tokens, separator = segments["tokens"], segments["separator"]
    for language, dictionary in (
        (task.cfg.source_lang, task.source_dictionary),
        (task.cfg.target_lang, task.target_dictionary),
    ):
        if dictionary.index(separator) < dictionary.nspecial:  # a word that is not there has the index of <unk>
            where = f"--separator {separator}" if "separator" in flags else path
            raise ExportError(f"{where}: the separator {separator} is not a word of dict.{language}.txt in {args.data}")
    return {"tokens": tokens, "separator": separator}


README = """# {source} to {target}

A model for CTranslate2, converted by fairseq-rope {version} from {checkpoint}.

    pip install '/path/to/fairseq-rope[ctranslate2]'    # the path of a clone of its repository
    fairseq-rope translate --model . < raw.{source} > translated.{target}

or in Python:

    from fairseq_rope.tools.translate import Translator
    translator = Translator(".")
    print(translator.translate("A small dog runs."))

A list of sentences gives a list; `translator.translate_lines(lines)` yields the translations one by one.

The search is the same as in

    fairseq-interactive --beam {beam} --lenpen {lenpen} --max-len-a 1 --max-len-b {max_len_b}

`--beam`, `--lenpen` and `--max-len-b` of `translate` change it. CTranslate2 calls the first two beam_size and
length_penalty. `{settings}` holds the settings for text and search, the name of the checkpoint, and checksums
of the other files, which are compared when the model is loaded.
"""


DOCUMENTS = """
The model was trained on segments of documents. With `--documents`, `translate` reads text with a blank line between
documents, and translates consecutive sentences together, in segments of up to {tokens} tokens.
"""


OF_SHORTLIST = f"""
`{SHORTLIST}` is a shortlist: only the target subwords that it has for the words of a batch are scored.
`--no-shortlist` scores all of them.
"""


def write_folder(
    folder: str, spec: Any, settings: Dict[str, Any], file: Optional[str], built: Optional[shortlist.Shortlist] = None
) -> None:
    """Write the model, vocabularies, subword model, shortlist, settings and README into *folder*."""
    os.makedirs(folder, exist_ok=True)
    spec.save(folder)
    if built is not None:
        built.write(os.path.join(folder, SHORTLIST))
    if file is not None:
        shutil.copyfile(file, os.path.join(folder, settings["subwords"]["file"]))
    sums = {name: checksum(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    with open(os.path.join(folder, SETTINGS), "w", encoding="utf-8") as out:
        json.dump({**settings, "sha256": sums}, out, indent=1, ensure_ascii=False)
        out.write("\n")
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as out:
        out.write(README.format(**{**settings, "settings": SETTINGS}))
        if settings.get("segments"):
            out.write(DOCUMENTS.format(**settings["segments"]))
        if built is not None:
            out.write(OF_SHORTLIST)


def exchange(one: str, other: str) -> bool:
    """Exchange the names of two folders in one step; return False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux, with glibc >= 2.28
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), flag) == 0


@contextlib.contextmanager
def replacing(output: str) -> Iterator[str]:
    """Yield the name of a new folder that replaces *output* when the block ends without an error.

    The new folder is written inside a hidden one, and is exchanged with *output* in one step. On systems
    that cannot do this, *output* is first moved into the hidden folder. If the process is killed before the
    new folder gets its name, the next call moves *output* back.

    Raises:
        ExportError: another process writes *output*
        OSError: a folder cannot be created or renamed; ``filename`` is the flag
    """
    hidden = os.path.join(os.path.dirname(output), f".{os.path.basename(output)}.export")
    new, old = os.path.join(hidden, "new"), os.path.join(hidden, "old")

    def put_back() -> None:
        if os.path.exists(old) and not os.path.exists(output):
            os.rename(old, output)

    with naming(f"--output {output}"):
        lock = _locked_folder(hidden, output)
    try:
        put_back()
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        yield new
        with naming(f"--output {output}"):
            if not os.path.exists(output):
                os.rename(new, output)
            elif not exchange(new, output):
                os.rename(output, old)
                os.rename(new, output)
    finally:
        put_back()
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(lock)


def _locked_folder(hidden: str, output: str) -> int:
    """Create the folder *hidden*, lock it, and return its descriptor; the lock ends with the process."""
    while True:
        os.makedirs(hidden, exist_ok=True)
        try:
            lock = os.open(hidden, os.O_RDONLY)
        except FileNotFoundError:  # another export has just ended
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ExportError(f"--output {output}: another export is writing it") from None
        except OSError:  # some network file systems have no locks
            pass
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(hidden)):
                return lock
        os.close(lock)  # of a folder that another export has just removed


def convert(args: argparse.Namespace, folder: str) -> str:
    """Write the model that the flags name into the new *folder*, and return the report of the check.

    Raises:
        ExportError: the model cannot be exported, or a check failed
    """
    import ctranslate2
    import fairseq
    import torch
    from fairseq import checkpoint_utils
    from fairseq.tasks.translation import TranslationTask

    from ..transformer.config import position_options

    if not os.path.isdir(args.data):
        raise ExportError(f"--data {args.data}: must be the folder of the dictionaries")
    try:
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([args.path], {"data": args.data})
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise ExportError(f"--path {args.path}, --data {args.data}: {error}") from error
    if type(task) is not TranslationTask:
        raise ExportError(f"--path {args.path}: its task is {type(task).__name__}, and must be --task translation")
    model = models[0].float().eval()
    refuse_unsupported(model, args.path, args.quantization)
    kind, file = subwords(args, task.source_dictionary)
    source, target = task.cfg.source_lang, task.cfg.target_lang
    settings = {
        "source": source,
        "target": target,
        "moses": tokenisation(args.tokenizer, kind, task.source_dictionary, source, target),
        "subwords": kind and {"kind": kind, "file": file},
        # the number of tokens, with the end, that have positions (null: any number), and whether a <pad> takes one
        "positions": {
            "source": positions(model.encoder),
            "target": positions(model.decoder),
            "counts_padding": counts_padding(model.encoder),
        },
        "beam": args.beam,
        "lenpen": args.lenpen,
        "max_len_b": args.max_len_b,
        # of translate --documents (null: the model was not trained on segments)
        "segments": segment_settings(args, task),
        "quantization": args.quantization,
        "checkpoint": os.path.basename(args.path),
        "model": position_options(model.cfg),
        "version": __version__,
        "versions": {module.__name__: module.__version__ for module in (ctranslate2, fairseq, torch)},
    }
    of_text = check_text("", settings, task, args.force)
    built = None
    if args.shortlist is not None:
        samples = shortlist_samples(settings, task, args.force)
        built = build_shortlist(args, settings, task)
    if kind:
        settings["subwords"] = {"kind": kind, "file": SUBWORDS[kind]}
    reference = Reference(model, task, beam=args.beam, lenpen=args.lenpen, max_len_b=args.max_len_b)
    report = []
    quantized = None if args.quantization == "float32" else args.quantization
    with naming(f"--output {args.output}"):
        # Only float32 scores are exact enough to tell the right model from a wrong one, so they come first.
        for quantization in dict.fromkeys([None, quantized]):
            spec = to_spec(model, task.source_dictionary, task.target_dictionary)
            spec.validate()
            spec.optimize(quantization=quantization)
            if os.path.exists(folder):
                shutil.rmtree(folder)
            write_folder(folder, spec, settings, file, built)
            report.append(check(folder, reference, quantization, args.force))
        if built is not None:
            of_text.append(check_shortlist(folder, settings, samples, built, args.force))
    return "\n".join([*report, *of_text])


def refuse_other_folders(output: str, args: argparse.Namespace) -> None:
    """Raise an ExportError if *output* exists and must not be replaced."""
    if not os.path.exists(output):
        return
    if not os.path.isdir(output):
        raise ExportError(f"--output {args.output}: is a file, and must be a folder")
    names = set(os.listdir(output))
    own = {"model.bin", "config.json", SETTINGS, SHORTLIST, "README.md", *SUBWORDS.values()}
    others = {name for name in names - own if not name.endswith("_vocabulary.json")}
    if SETTINGS not in names or others:
        what = f"files that are not a model's ({min(others)})" if others else "no exported model"
        raise ExportError(f"--output {args.output}: exists and has {what}; it is not replaced")
    if not args.replace and not args.force:
        raise ExportError(f"--output {args.output}: exists already; --replace replaces it")


# -- the command -----------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "--path averaged.pt --data data-bin --output served --quantization int8"
    description = (
        "Convert a checkpoint to CTranslate2, and check the result. The position encodings\n"
        f"sinusoidal, alibi, t5 and kerple are exported for sentences of up to {POSITIONS} tokens."
    )
    parser = command_parser("export", description, example)
    kinds = {"choices": ("float32", *QUANTIZATIONS), "default": "float32"}
    tokenizer_help = "how plain text is tokenised before the subwords; default: moses, but none with sentencepiece"
    tokens_help = "the number of tokens in the longest segments of documents that the model was trained on, for "
    tokens_help += f"translate --documents; default: the one in --data's {SEGMENTS}, if it has this file"
    separator_help = f"the token between two sentences of a segment; default: the one in --data's {SEGMENTS}, or "
    separator_help += SEPARATOR
    force_help = (
        "as --replace, and write the model even if too few sentences of the validation set are tokenised as in "
    )
    force_help += "the data or translated as by the checkpoint, or if a shortlist costs BLEU or cannot be checked"
    rows = [
        ("--path", {**REQUIRED, **FILE}, "a checkpoint of transformer_rope or transformer"),
        ("--data", {**REQUIRED, "metavar": "DIR"}, "the folder of its dictionaries (data-bin)"),
        ("--output", {**REQUIRED, "metavar": "DIR"}, "the folder to write"),
        ("--quantization", kinds, "the type of the weights; default: %(default)s"),
        ("--tokenizer", {"choices": ("moses", "none")}, tokenizer_help),
        ("--segment-tokens", INTEGER, tokens_help),
        ("--separator", {"metavar": "TOKEN"}, separator_help),
        ("--replace", SWITCH, "replace an exported model"),
        ("--force", SWITCH, force_help),
    ]
    add_flags(parser, rows)
    files = [
        (flag, FILE, f"the {kind} model; default: {SUBWORDS[kind]} in --data") for flag, kind in SUBWORD_FLAGS.items()
    ]
    add_flags(parser.add_mutually_exclusive_group(), files)
    longer = "how many tokens longer than its source an output may be; default: %(default)s"
    of_shortlist = parser.add_argument_group("a shortlist, with which large vocabularies are searched faster")
    corpus_help = "build a shortlist from two files of parallel text, or without files from the training set in --data"
    count_help = "how many target subwords each source subword has, at most; default: %(default)s"
    rows = [
        ("--shortlist", {"nargs": "*", "metavar": "FILE"}, corpus_help),
        ("--shortlist-candidates", {**INTEGER, "default": shortlist.CANDIDATES}, count_help),
        (
            *("--shortlist-frequent", {**INTEGER, "default": shortlist.FREQUENT}),
            "how many of the most frequent target subwords are always possible; default: %(default)s",
        ),
    ]
    add_flags(of_shortlist, rows)
    rows = [
        ("--beam", {**INTEGER, "default": 4}, "beam size; default: %(default)s"),
        ("--lenpen", {**NUMBER, "default": 0.6}, "length penalty; default: %(default)s"),
        ("--max-len-b", {**INTEGER, "default": MAX_LEN_B}, longer),
    ]
    add_flags(parser.add_argument_group("the default search of fairseq-rope translate"), rows)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_numbers(parser, args)
    if len(args.shortlist or []) not in (0, 2):
        parser.error(f"--shortlist {' '.join(args.shortlist)}: takes two files, or none")
    for name in ("shortlist_candidates", "shortlist_frequent"):
        if args.shortlist is None and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: has no use without --shortlist")
    with ending_in_one_sentence("fairseq-rope export"):
        if args.shortlist is not None:
            shortlist.find_aligner()
            if args.shortlist:
                shortlist.refuse_corpus(*args.shortlist)
        output = os.path.realpath(args.output)
        if not os.path.isdir(os.path.dirname(output)):
            raise ExportError(f"--output {args.output}: must be in a folder that exists")
        with replacing(output) as folder:
            refuse_other_folders(output, args)
            report = convert(args, folder)
    print(f"{report}\nwrote {args.output}")
