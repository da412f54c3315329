"""The model ``transformer_rope_align``: translation with supervised alignments, positions rotary.

Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models", as in
``fairseq/models/transformer_align.py``, whose build_model names fairseq's own transformer.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer_align import TransformerAlignModel

from .config import position_options
from .models import TransformerRopeModel


@register_model("transformer_rope_align")
class TransformerRopeAlignModel(TransformerAlignModel):
    """fairseq's TransformerAlignModel around a rotary encoder and decoder."""

    position_options = staticmethod(position_options)

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Add the flags of transformer_rope and of fairseq's transformer_align."""
        TransformerAlignModel.add_args(parser)
        TransformerRopeModel.add_args(parser)  # leaves alone what is there

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> "TransformerRopeAlignModel":
        """Build the model that *args* describes; raises what TransformerRopeModel raises."""
        rotary = TransformerRopeModel.build_model(args, task)
        return cls(rotary.encoder, rotary.decoder, args)
