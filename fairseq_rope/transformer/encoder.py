"""The encoder. Source: ``fairseq/models/transformer/transformer_encoder.py``."""

import copy

from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from torch import Tensor, nn

from ..positions.sharing import forward_pass
from .block import fit_norms
from .encodings import SidePositions, fit_positions
from .layers import EncoderLayer, with_dropout, wrap_layer
from .options import read


class Encoder(TransformerEncoderBase):
    """fairseq's encoder with the position encoding that *cfg* names."""

    def __init__(
        self, cfg: TransformerConfig, dictionary: Dictionary, embed_tokens: nn.Embedding, return_fc: bool = False
    ) -> None:
        self.options = read(cfg)
        self.positions = SidePositions(self.options.encoder, cfg)
        without_positions = copy.copy(cfg)
        without_positions.no_token_positional_embeddings = True
        super().__init__(without_positions, dictionary, embed_tokens, return_fc=return_fc)
        dim = embed_tokens.embedding_dim
        self.embed_positions = self.positions.embedding(self.max_source_positions, dim, self.padding_idx)
        fit_norms(self, self.options.encoder)
        with_dropout(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        layer = EncoderLayer(cfg, self.options, self.positions, return_fc=self.return_fc)
        return wrap_layer(with_dropout(layer, "TransformerEncoderLayerBase"), cfg)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Return fairseq's output. The layers share the masks and biases of the scores."""
        with forward_pass(src_tokens.size(1)):
            return self.forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        fit_positions(self, self.positions, state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)
