"""The encoder of the rotary transformer. Source: ``fairseq/models/transformer/transformer_encoder.py``."""

from typing import Dict, List

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from torch import Tensor, nn

from .. import search
from .layers import RotaryEncoderLayer, drop_absolute_positions, with_dropout, wrap_layer


class RotaryEncoder(TransformerEncoderBase):
    """fairseq's encoder of rotary layers, without absolute positions."""

    def __init__(
        self, cfg: TransformerConfig, dictionary: Dictionary, embed_tokens: nn.Embedding, return_fc: bool = False
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        with_dropout(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        layer = RotaryEncoderLayer(cfg, return_fc=self.return_fc)
        return wrap_layer(with_dropout(layer, "TransformerEncoderLayerBase"), cfg)

    @torch.jit.export
    def reorder_encoder_out(self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor) -> Dict[str, List[Tensor]]:
        """*encoder_out* with row new_order[i] in the place of row i, as fairseq's returns it."""
        if not torch.jit.is_scripting():
            return search.reorder_encoder_out(super().reorder_encoder_out, encoder_out, new_order)
        return {
            "encoder_out": [x.index_select(1, new_order) for x in encoder_out["encoder_out"]],
            "encoder_padding_mask": [x.index_select(0, new_order) for x in encoder_out["encoder_padding_mask"]],
            "encoder_embedding": [x.index_select(0, new_order) for x in encoder_out["encoder_embedding"]],
            "encoder_states": [x.index_select(1, new_order) for x in encoder_out["encoder_states"]],
            "src_tokens": [x.index_select(0, new_order) for x in encoder_out["src_tokens"]],
            "src_lengths": [x.index_select(0, new_order) for x in encoder_out["src_lengths"]],
        }

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        drop_absolute_positions(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
