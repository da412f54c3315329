"""The model ``multilingual_transformer_rope``: our encoder and decoder for each language, or shared ones.

As ``fairseq/models/multilingual_transformer.py``, for ``--task multilingual_translation``.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqMultiModel, register_model
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from torch import nn

from .defaults import as_namespace, set_defaults
from .meaning import refuse_other_model
from .models import TransformerRopeModel, needs_attention
from .refusals import refuse_contradictions


@register_model("multilingual_transformer_rope")
class MultilingualTransformerRopeModel(MultilingualTransformerModel):
    """fairseq's MultilingualTransformerModel with our encoders and decoders."""

    @staticmethod
    def add_args(parser: ArgumentParser | _ArgumentGroup) -> None:
        """Add the flags of transformer_rope and of fairseq's multilingual_transformer."""
        TransformerRopeModel.add_args(parser)
        MultilingualTransformerModel.add_args(parser)  # does not add existing flags again

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> FairseqMultiModel:
        """Build the model that *args* describes. Raises the errors of TransformerRopeModel."""
        args = as_namespace(args)
        refuse_contradictions(args, set_defaults(args))
        model = super().build_model(args, task)
        for of_pair in model.models.values():
            of_pair.decoder.attention_in_training = needs_attention(args)
        model.refuse_other_model = refuse_other_model  # fairseq builds an object of its own class
        return model

    @classmethod
    def _get_module_class(
        cls, is_encoder: bool, args: Namespace, lang_dict: Dictionary, embed_tokens: nn.Embedding, langs: list[str]
    ) -> nn.Module:
        build = TransformerRopeModel.build_encoder if is_encoder else TransformerRopeModel.build_decoder
        return build(args, lang_dict, embed_tokens)
