"""The layers of the transformer: fairseq's own, whose self-attention has a position encoding.

Source: ``fairseq/modules/transformer_layer.py``.
"""

from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import nn

from ..modules.attention import CrossAttention, SelfAttention
from ..modules.dropout import Dropout, ResidualInPlace
from ..modules.linear_attention import Elu1, Favor, LinearSelfAttention
from .block import fit_attention, fit_layer, with_inner_width
from .encodings import SidePositions
from .options import ModelOptions


def build_self_attention(cfg: TransformerConfig, options: ModelOptions, positions: SidePositions) -> SelfAttention:
    """Return the self-attention of one layer, with its position encoding."""
    noise: dict[str, Any] = {"q_noise": cfg.quant_noise.pq, "qn_block_size": cfg.quant_noise.pq_block_size}
    side, position = positions.options, positions.of_layer()
    attention: SelfAttention
    if side.is_linear:
        feature_map = Favor(side.head_dim, side.features, side.favor_seed) if side.uses_favor else Elu1()
        attention = LinearSelfAttention(side.embed_dim, side.heads, feature_map, position, **noise)
    else:
        attention = SelfAttention(side.embed_dim, side.heads, position, dropout=cfg.attention_dropout, **noise)
    attention.average_length = options.attention_length_scaling
    fit_attention(attention, side, side.kv_heads)
    return attention


class EncoderLayer(ResidualInPlace, TransformerEncoderLayerBase):
    """fairseq's encoder layer, whose self-attention can have a position encoding, with the parts of its block.

    *options* are those of the model, and *positions* builds the encoding.
    """

    def __init__(
        self, cfg: TransformerConfig, options: ModelOptions, positions: SidePositions, return_fc: bool = False
    ) -> None:
        self._options, self._positions = options, positions
        super().__init__(with_inner_width(cfg, options.encoder), return_fc=return_fc)
        fit_layer(self, options.encoder)
        positions.initialise()

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        return build_self_attention(cfg, self._options, self._positions)


class DecoderLayer(ResidualInPlace, TransformerDecoderLayerBase):
    """fairseq's decoder layer, as :class:`EncoderLayer`."""

    def __init__(
        self, cfg: TransformerConfig, options: ModelOptions, positions: SidePositions, no_encoder_attn: bool = False
    ) -> None:
        self._options, self._positions = options, positions
        super().__init__(with_inner_width(cfg, options.decoder), no_encoder_attn)
        fit_layer(self, options.decoder)
        positions.initialise()

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        assert not add_bias_kv and not add_zero_attn, "no flag of fairseq's transformer sets these"
        return build_self_attention(cfg, self._options, self._positions)

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        attention = CrossAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )
        attention.dropout_module.module_name = "MultiheadAttention"
        attention.average_length = self._options.attention_length_scaling
        fit_attention(attention, self._options.decoder, self._options.cross_kv_heads)
        return attention


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Return *layer* with activation checkpointing and FSDP, as fairseq's own layer builders do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # A checkpointed layer is always wrapped by FSDP, whatever its size.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def with_dropout(module: nn.Module, fairseq_name: str) -> nn.Module:
    """Return *module* with its dropout replaced by :class:`~fairseq_rope.modules.dropout.Dropout`.

    *fairseq_name* is the name of fairseq's class, by which ``--retain-dropout-modules`` selects modules.
    """
    for name in ("dropout_module", "activation_dropout_module"):
        if hasattr(module, name):
            setattr(module, name, Dropout(getattr(module, name).p, module_name=fairseq_name))
    return module
