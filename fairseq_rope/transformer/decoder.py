"""The decoder. Source: ``fairseq/models/transformer/transformer_decoder.py``."""

import copy
from typing import cast

from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from torch import Tensor, nn

from ..positions.sharing import forward_pass
from .block import fit_norms
from .encodings import SidePositions, fit_positions
from .layers import DecoderLayer, with_dropout, wrap_layer
from .options import read


class Decoder(TransformerDecoderBase):
    """fairseq's decoder with the position encoding that *cfg* names."""

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        output_projection: nn.Module | None = None,
    ) -> None:
        self.options = read(cfg)
        self.positions = SidePositions(self.options.decoder, cfg)
        without_positions = copy.copy(cfg)
        without_positions.no_token_positional_embeddings = True
        super().__init__(without_positions, dictionary, embed_tokens, no_encoder_attn, output_projection)
        dim = cfg.decoder.embed_dim
        self.embed_positions = self.positions.embedding(self.max_target_positions, dim, self.padding_idx)
        fit_norms(self, self.options.decoder)
        with_dropout(self, "TransformerDecoder")
        self.attention_in_training = False  # whether a criterion reads the weights of cross-attention

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        layer = DecoderLayer(cfg, self.options, self.positions, no_encoder_attn)
        return wrap_layer(with_dropout(layer, "TransformerDecoderLayerBase"), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Return fairseq's mask, left empty: self-attention is causal, and makes the mask if its kernel needs one."""
        return cast(Tensor, self._future_mask)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return fairseq's features, without the weights of cross-attention if they are not needed.

        They are needed if *alignment_layer* is given, and in evaluation until ``make_generation_fast_`` is
        called. In training they are needed with ``--load-alignments``, and by criteria whose class has
        ``needs_attention = True``.
        """
        if alignment_layer is None and not self._weights_are_needed():
            alignment_layer = -1  # no layer has that number
        states = encoder_out["encoder_out"] if encoder_out is not None else []
        with forward_pass(states[0].size(0) if states else None):
            return self.extract_features_scriptable(
                *(prev_output_tokens, encoder_out, incremental_state),
                *(full_context_alignment, alignment_layer, alignment_heads),
            )

    def _weights_are_needed(self) -> bool:
        if self.training:
            return self.attention_in_training
        return any(getattr(layer, "need_attn", True) for layer in self.layers)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        fit_positions(self, self.positions, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
