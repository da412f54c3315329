"""The layers of the rotary transformer: fairseq's own, with rotary self-attention.

Source: ``fairseq/modules/transformer_layer.py``.
"""

import logging
from typing import Any, Dict

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from ..attention import CrossAttention, RotaryMultiheadAttention
from ..dropout import Dropout, ResidualInPlace
from ..positions.rotary import RotaryEmbedding

logger = logging.getLogger(__name__)


def build_rotary_self_attention(cfg: TransformerConfig, side: Any) -> RotaryMultiheadAttention:
    """Return the self-attention of one layer of *side* (cfg.encoder or cfg.decoder), rotated as *cfg* says."""
    rotary = RotaryEmbedding(
        side.embed_dim // side.attention_heads, base=cfg.rope_base, layout=cfg.rope_layout, fraction=cfg.rope_fraction
    )
    return RotaryMultiheadAttention(
        side.embed_dim,
        side.attention_heads,
        rotary,
        dropout=cfg.attention_dropout,
        q_noise=cfg.quant_noise.pq,
        qn_block_size=cfg.quant_noise.pq_block_size,
    )


class RotaryEncoderLayer(ResidualInPlace, TransformerEncoderLayerBase):
    """fairseq's encoder layer with rotary self-attention."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        return build_rotary_self_attention(cfg, cfg.encoder)


class RotaryDecoderLayer(ResidualInPlace, TransformerDecoderLayerBase):
    """fairseq's decoder layer with rotary self-attention; cross-attention computes what fairseq's does."""

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        assert not add_bias_kv and not add_zero_attn, "no flag of fairseq's transformer sets these"
        return build_rotary_self_attention(cfg, cfg.decoder)

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
        return attention


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Return *layer* with activation checkpointing and FSDP, as fairseq's own layer builders do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # A checkpointed layer is always wrapped by FSDP, whatever its size.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def with_dropout(module: nn.Module, fairseq_name: str) -> nn.Module:
    """*module* with its dropout replaced by :class:`~fairseq_rope.dropout.Dropout`.

    *fairseq_name* is the name of fairseq's class, by which ``--retain-dropout-modules`` selects modules.
    """
    for name in ("dropout_module", "activation_dropout_module"):
        if hasattr(module, name):
            setattr(module, name, Dropout(getattr(module, name).p, module_name=fairseq_name))
    return module


def drop_absolute_positions(state_dict: Dict[str, Tensor], name: str) -> None:
    """Remove ``NAME.embed_positions.*`` from *state_dict*, in place, and log a warning.

    Sinusoidal checkpoints of older fairseqs hold ``embed_positions._float_tensor``, learned ones
    ``embed_positions.weight``. A rotary model has no such parameters.
    """
    for key in [key for key in state_dict if key.startswith(f"{name}.embed_positions.")]:
        del state_dict[key]
        logger.warning(f"dropped {key} from the checkpoint: positions of transformer_rope are rotary")
