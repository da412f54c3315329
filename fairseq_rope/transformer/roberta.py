"""The model ``roberta_rope``: fairseq's RoBERTa with a choice of position encodings, rotary by default.

Subclasses of ``fairseq/models/roberta/model.py`` with our encoder. Flags, parameter names and checkpoints are the same.
With rotary positions, it is RoFormer (Su et al. 2021, arXiv:2104.09864, section 4.2) with RoBERTa's training.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from omegaconf import DictConfig
from torch import nn

from ..checkpoints import option_value, options_of_task
from .defaults import as_namespace, save_options, set_defaults
from .encoder import Encoder
from .flags import config_class
from .models import RopeModel
from .refusals import refuse_contradictions


@contextmanager
def keeping_positions(encoder: Encoder) -> Iterator[None]:
    """Restore the parameters of positions in *encoder* afterwards: the encoding chooses its initial values."""
    positions = [layer.self_attn.position for layer in encoder.layers.children()]  # an iteration drops some layers
    drawn = [(one, one.detach().clone()) for position in positions for one in position.parameters()]
    yield
    with torch.no_grad():
        for parameter, values in drawn:
            parameter.copy_(values)


class RobertaRopeEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder, whose ``sentence_encoder`` is our encoder."""

    def build_encoder(self, args: Namespace, dictionary: Dictionary, embed_tokens: nn.Embedding) -> Encoder:
        encoder = Encoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        with keeping_positions(encoder):
            encoder.apply(init_bert_params)
        return encoder


@register_model("roberta_rope")
class RobertaRopeModel(RopeModel, RobertaModel):
    """fairseq's RobertaModel with our encoder: tasks masked_lm, sentence_prediction and sentence_ranking."""

    def __init__(self, args: Namespace, encoder: RobertaRopeEncoder) -> None:
        with keeping_positions(encoder.sentence_encoder):
            super().__init__(args, encoder)

    @staticmethod
    def add_args(parser: ArgumentParser | _ArgumentGroup) -> None:
        """Add fairseq's flags of roberta, and our flags of the encoder."""
        RobertaModel.add_args(parser)
        config = config_class(FairseqDataclass, sides=("encoder",))  # does not add existing flags again
        gen_parser_from_dataclass(parser, config(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Namespace | DictConfig, task: Any) -> "RobertaRopeModel":
        """Build the model that *args* describes for the dictionary of *task*.

        Raises:
            ValueError: our models do not support an option in *args*, or its value is not allowed
        """
        config, args = args, as_namespace(args)
        task_options = options_of_task(task)  # fairseq-hydra-train does not copy these into the model's options
        lengths = (
            option_value(args, "max_positions"),
            *(option_value(options, "tokens_per_sample") for options in (args, task_options)),
            option_value(task_options, "max_positions"),
        )
        args.max_positions = next(filter(None, lengths), 512)
        args.max_source_positions = args.max_positions
        refuse_contradictions(args, set_defaults(args))
        model = cls(args, RobertaRopeEncoder(args, task.source_dictionary))
        save_options(config, args)
        return model
