"""The model ``transformer_rope_align``: translation with supervised alignments and our position encodings.

Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models", as in
``fairseq/models/transformer_align.py``, whose ``build_model`` would build fairseq's own transformer.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer_align import TransformerAlignModel

from .defaults import as_namespace
from .models import RopeModel, TransformerRopeModel


@register_model("transformer_rope_align")
class TransformerRopeAlignModel(RopeModel, TransformerAlignModel):
    """fairseq's TransformerAlignModel with our encoder and decoder."""

    @staticmethod
    def add_args(parser: ArgumentParser | _ArgumentGroup) -> None:
        """Add the flags of transformer_rope and of fairseq's transformer_align."""
        TransformerRopeModel.add_args(parser)
        TransformerAlignModel.add_args(parser)  # does not add existing flags again

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> "TransformerRopeAlignModel":
        """Build the model that *args* describes. Raises the errors of TransformerRopeModel."""
        rotary = TransformerRopeModel.build_model(args, task)
        return cls(rotary.encoder, rotary.decoder, as_namespace(args))  # from which fairseq reads also our options
