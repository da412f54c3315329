"""The decoder. Source: ``fairseq/models/transformer/transformer_decoder.py``."""

import copy
from typing import cast

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from torch import Tensor, nn

from ..positions.sharing import FUTURE_MASK, current_pass, forward_pass
from .block import fit_norms
from .encodings import SidePositions, fit_positions
from .layers import DecoderLayer, with_dropout, wrap_layer
from .options import read

BUFFERED_FUTURE_MASK = TransformerDecoderBase.buffered_future_mask


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
        self.is_linear = self.options.decoder.is_linear
        without_positions = copy.copy(cfg)
        without_positions.no_token_positional_embeddings = True
        super().__init__(without_positions, dictionary, embed_tokens, no_encoder_attn, output_projection)
        dim = cfg.decoder.embed_dim
        self.embed_positions = self.positions.embedding(self.max_target_positions, dim, self.padding_idx)
        fit_norms(self, self.options.decoder)
        with_dropout(self, "TransformerDecoder")
        self.attention_in_training = False  # whether a criterion reads the weights of cross-attention
        self._own_mask = self._future_mask  # to notice one that a user has put in its place

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        layer = DecoderLayer(cfg, self.options, self.positions, no_encoder_attn)
        return wrap_layer(with_dropout(layer, "TransformerDecoderLayerBase"), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Return fairseq's mask of later positions, the same object for all layers of a forward pass.

        It is empty if self-attention is linear, which needs no (T, T) numbers.

        Args:
            tensor: (T, B, C)
        """
        if self.is_linear:
            return torch.empty([0], dtype=tensor.dtype, device=tensor.device)
        is_custom = self._future_mask.numel() > 0 and self._future_mask is not self._own_mask
        is_causal = not is_custom and TransformerDecoderBase.buffered_future_mask is BUFFERED_FUTURE_MASK
        fairseqs = super().buffered_future_mask

        def compute() -> Tensor:
            with torch.inference_mode(False):  # else a later training step could not use it
                return cast(Tensor, fairseqs(tensor))

        name = FUTURE_MASK if is_causal else "mask of another kind"
        mask: Tensor = current_pass().shared(name, (tensor.size(0),), compute)
        if not is_custom:
            self._own_mask = self._future_mask
        return mask

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
