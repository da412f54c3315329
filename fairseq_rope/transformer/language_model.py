"""The model ``transformer_lm_rope``: fairseq's language model with a choice of position encodings, rotary by default.

A subclass of ``fairseq/models/transformer_lm.py`` with our decoder, without cross-attention. Flags, parameter names and
checkpoints are the same.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
)
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from omegaconf import DictConfig

from ..checkpoints import option_value, options_of_task
from ..patches.options import literal
from .decoder import Decoder
from .defaults import as_namespace, save_options, set_defaults
from .flags import config_class
from .models import RopeModel
from .refusals import refuse_contradictions


@register_model("transformer_lm_rope")
class TransformerRopeLanguageModel(RopeModel, TransformerLanguageModel):
    """fairseq's TransformerLanguageModel with our decoder: ``--task language_modeling``."""

    @classmethod
    def add_args(cls, parser: ArgumentParser | _ArgumentGroup) -> None:
        """Add fairseq's flags of transformer_lm, and our flags of the decoder."""
        config = config_class(TransformerLanguageModelConfig, sides=("decoder",))
        gen_parser_from_dataclass(parser, config(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Namespace | DictConfig, task: Any) -> "TransformerRopeLanguageModel":
        """Build the model that *args* describes for the dictionaries of *task*.

        Raises:
            ValueError: our models do not support an option in *args*, or its value is not allowed
        """
        config, args = args, as_namespace(args)
        if option_value(args, "decoder_layers_to_keep"):
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        task_options = options_of_task(task)  # fairseq-hydra-train does not copy these into the model's options
        lengths = (
            option_value(options, n)
            for n in ("max_target_positions", "tokens_per_sample")
            for options in (args, task_options)
        )
        args.max_target_positions = next(filter(None, lengths), DEFAULT_MAX_TARGET_POSITIONS)
        refuse_contradictions(args, set_defaults(args))
        if args.tie_adaptive_weights and args.adaptive_input_cutoff != args.adaptive_softmax_cutoff:
            raise ValueError(
                f"--tie-adaptive-weights: --adaptive-input-cutoff {args.adaptive_input_cutoff} must be equal to "
                f"--adaptive-softmax-cutoff {args.adaptive_softmax_cutoff}"
            )
        embed_tokens = cls.build_input_embeddings(args, task.source_dictionary)
        cfg = TransformerConfig.from_namespace(args)
        model = cls(Decoder(cfg, task.target_dictionary, embed_tokens, no_encoder_attn=True))
        save_options(config, args)
        return model

    @classmethod
    def build_input_embeddings(cls, args: Namespace, dictionary: Dictionary) -> Any:
        """Return the embeddings of tokens: of their characters, of several widths, or fairseq's usual ones."""
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                *(dictionary, literal(args.character_filters), args.character_embedding_dim),
                *(args.decoder_embed_dim, args.char_embedder_highway_layers),
            )
        if args.adaptive_input:
            cutoff = utils.eval_str_list(args.adaptive_input_cutoff, type=int)
            return AdaptiveInput(
                *(len(dictionary), dictionary.pad(), args.decoder_input_dim, args.adaptive_input_factor),
                *(args.decoder_embed_dim, cutoff, args.quant_noise_pq, args.quant_noise_pq_block_size),
            )
        return cls.build_embedding(args, dictionary, args.decoder_input_dim)
