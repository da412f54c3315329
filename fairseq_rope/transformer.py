"""The model ``transformer_rope``: fairseq's transformer, its self-attention rotary.

Everything but self-attention and the missing absolute positions is fairseq's own code
(``fairseq/models/transformer``, ``fairseq/modules/transformer_layer.py``), reached by subclassing, so
that flags, parameter names and checkpoints are the same.
"""

import logging
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer.transformer_legacy import base_architecture as fairseq_base_architecture
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from .attention import CrossAttention, RotaryMultiheadAttention, pad_scores
from .beams import LARGEST, STATE, Beams, EqualRows, whole_sentences
from .decoding import PackedProjection, bind_all, project_packed
from .dropout import Dropout, ResidualInPlace
from .overrides import has_methods, methods_of
from .rotary import LAYOUTS, RotaryEmbedding

logger = logging.getLogger(__name__)


@dataclass
class TransformerRopeConfig(TransformerConfig):
    """fairseq's transformer configuration with the options of the rotation."""

    rope_base: float = field(
        default=10000.0,
        metadata={"help": "base of the rotation's angles, theta_i = base^(-2i/d)"},
    )
    rope_layout: ChoiceEnum(LAYOUTS) = field(  # type: ignore[valid-type]
        default="interleaved",
        metadata={
            "help": "which dimensions of a head rotate together: interleaved = (2i, 2i+1), as the RoFormer "
            "paper; half = (i, i + d/2), as GPT-NeoX and LLaMA"
        },
    )
    rope_fraction: float = field(
        default=1.0,
        metadata={"help": "fraction of each head's dimensions that rotates, in (0, 1]"},
    )


def build_rotary_self_attention(cfg: TransformerConfig, side: Any) -> RotaryMultiheadAttention:
    """The self-attention of one layer.

    Args:
        cfg: the model's configuration, with rope_base, rope_layout and rope_fraction
        side: cfg.encoder or cfg.decoder
    """
    return RotaryMultiheadAttention(
        side.embed_dim,
        side.attention_heads,
        rotary=RotaryEmbedding(
            side.embed_dim // side.attention_heads,
            base=cfg.rope_base,
            layout=cfg.rope_layout,
            fraction=cfg.rope_fraction,
        ),
        dropout=cfg.attention_dropout,
        q_noise=cfg.quant_noise.pq,
        qn_block_size=cfg.quant_noise.pq_block_size,
    )


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Activation checkpointing, then FSDP, as fairseq's own layer builders do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # A checkpointed layer is always wrapped by FSDP, whatever its size.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def drop_absolute_positions(state_dict: Dict[str, Tensor], name: str) -> None:
    """Remove ``NAME.embed_positions.*`` from *state_dict*, in place, and say so.

    Sinusoidal checkpoints of older fairseqs hold ``embed_positions._float_tensor``, learned ones
    ``embed_positions.weight``; a rotary model has no place for either.
    """
    for key in [key for key in state_dict if key.startswith(f"{name}.embed_positions.")]:
        del state_dict[key]
        logger.warning(f"dropped {key} from the checkpoint: positions of transformer_rope are rotary")


class RotaryEncoderLayer(ResidualInPlace, TransformerEncoderLayerBase):
    """fairseq's encoder layer with rotary self-attention."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        return build_rotary_self_attention(cfg, cfg.encoder)


class RotaryDecoderLayer(ResidualInPlace, TransformerDecoderLayerBase):
    """fairseq's decoder layer with rotary self-attention; cross-attention computes what fairseq's does."""

    def build_self_attention(
        self,
        embed_dim: int,
        cfg: TransformerConfig,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
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


def with_dropout(module: nn.Module, fairseq_name: str) -> nn.Module:
    """*module* with dropout of ours, by the name of fairseq's class, as --retain-dropout-modules wants it."""
    for name in ("dropout_module", "activation_dropout_module"):
        if hasattr(module, name):
            setattr(module, name, Dropout(getattr(module, name).p, module_name=fairseq_name))
    return module


class RotaryEncoder(TransformerEncoderBase):
    """fairseq's encoder of rotary layers, without absolute positions."""

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Embedding,
        return_fc: bool = False,
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        with_dropout(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        layer = RotaryEncoderLayer(cfg, return_fc=self.return_fc)
        return wrap_layer(with_dropout(layer, "TransformerEncoderLayerBase"), cfg)

    @torch.jit.export
    def reorder_encoder_out(
        self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor
    ) -> Dict[str, List[Tensor]]:
        """fairseq's: row i becomes row new_order[i].

        In a beam search the rows of a sentence are equal. :class:`EqualRows` among the entries says so to the
        decoder, and to the next call, which returns *encoder_out* itself if each sentence keeps its place.
        """
        if not torch.jit.is_scripting():
            return self._reorder_rows(encoder_out, new_order)
        return {
            "encoder_out": [x.index_select(1, new_order) for x in encoder_out["encoder_out"]],
            "encoder_padding_mask": [
                x.index_select(0, new_order) for x in encoder_out["encoder_padding_mask"]
            ],
            "encoder_embedding": [x.index_select(0, new_order) for x in encoder_out["encoder_embedding"]],
            "encoder_states": [x.index_select(1, new_order) for x in encoder_out["encoder_states"]],
            "src_tokens": [x.index_select(0, new_order) for x in encoder_out["src_tokens"]],
            "src_lengths": [x.index_select(0, new_order) for x in encoder_out["src_lengths"]],
        }

    def _reorder_rows(
        self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor
    ) -> Dict[str, List[Tensor]]:
        if torch.is_grad_enabled() or not encoder_out["encoder_out"]:
            return super().reorder_encoder_out(encoder_out, new_order)
        rows, beam = encoder_out["encoder_out"][0].size(1), EqualRows.of(encoder_out)
        kept = whole_sentences(new_order, beam) if beam > 1 else None
        if kept == list(range(rows // beam)):
            return encoder_out
        if kept is None:  # a search begins with each row repeated
            beam = new_order.numel() // rows
            begins = torch.equal(new_order, torch.arange(rows).to(new_order).repeat_interleave(beam))
            beam = beam if begins else 1
        # Tensors that are made in inference mode do not count their versions, which EqualRows compares.
        with torch.inference_mode(False), torch.no_grad():
            reordered = super().reorder_encoder_out(encoder_out, new_order)
        if 1 < beam <= LARGEST:
            reordered[EqualRows.NAME] = EqualRows(reordered, beam)
        return reordered

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        drop_absolute_positions(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)


class RotaryDecoder(TransformerDecoderBase):
    """fairseq's decoder of rotary layers, without absolute positions."""

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        output_projection: Optional[nn.Module] = None,
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        with_dropout(self, "TransformerDecoder")
        self.alignment_in_training = False  # whether a criterion reads the weights of cross-attention
        self._packed = PackedProjection()

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        layer = RotaryDecoderLayer(cfg, no_encoder_attn)
        return wrap_layer(with_dropout(layer, "TransformerDecoderLayerBase"), cfg)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, List[Tensor]]] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
        src_lengths: Optional[Any] = None,
        return_all_hiddens: bool = False,
    ) -> Tuple[Tensor, Dict[str, List[Optional[Tensor]]]]:
        """fairseq's; a search projects its features by the packed weight that it began with."""
        x, extra = self.extract_features(
            prev_output_tokens,
            encoder_out=encoder_out,
            incremental_state=incremental_state,
            full_context_alignment=full_context_alignment,
            alignment_layer=alignment_layer,
            alignment_heads=alignment_heads,
        )
        if features_only:
            return x, extra
        if not torch.jit.is_scripting():
            if incremental_state is not None and STATE in incremental_state:
                packed = incremental_state[STATE].packed
                if packed is not None and x.dtype == torch.float32:
                    return project_packed(x, packed), extra
        return self.output_layer(x), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, List[Tensor]]],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
    ) -> Tuple[Tensor, Dict[str, List[Optional[Tensor]]]]:
        """fairseq's, without the weights of cross-attention where nobody asked for them.

        They are asked for by *alignment_layer*, and by the model's use before ``make_generation_fast_`` has
        told it that nobody will; in training by alignments to learn from (``--load-alignments``) alone.
        """
        if not torch.jit.is_scripting():
            if alignment_layer is None and not self._weights_are_wanted():
                alignment_layer = -1  # no layer has that number
            if incremental_state is not None and encoder_out is not None and encoder_out["encoder_out"]:
                if not incremental_state and alignment_layer == -1:
                    self._begin_search(prev_output_tokens, encoder_out, incremental_state)
                if STATE in incremental_state:
                    return self._step(prev_output_tokens, incremental_state[STATE])
        return self.extract_features_scriptable(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )

    def _weights_are_wanted(self) -> bool:
        if self.training:
            return self.alignment_in_training
        return any(getattr(layer, "need_attn", True) for layer in self.layers)

    def _begin_search(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Dict[str, List[Tensor]],
        incremental_state: Dict[str, Any],
    ) -> None:
        """Put :class:`Beams` into the empty *incremental_state*, if steps can be taken with them."""
        (states,) = encoder_out["encoder_out"]  # (S, N * K, C)
        if (
            torch.is_grad_enabled()
            or not has_methods(self, DECODER)
            or self.embed_positions is not None
            or self.layers.training  # which drops layers
            or prev_output_tokens.size(0) != states.size(1)
        ):
            return
        steps = bind_all(self.layers)
        if steps is None:
            return
        beam = EqualRows.of(encoder_out)
        states = states[:, ::beam].contiguous()  # (S, N, C)
        (is_pad,) = encoder_out["encoder_padding_mask"] or [None]
        mask = pad_scores(is_pad[::beam], states) if is_pad is not None and is_pad.any() else None
        attentions = [layer.encoder_attn for layer in self.layers]
        source = {attention: attention.keys_and_values(states) for attention in attentions}
        packed = self._packed.of(self.output_projection) if self.adaptive_softmax is None else None
        incremental_state[STATE] = Beams(states.size(1), beam, steps, source, mask, packed, states)

    def _step(
        self, prev_output_tokens: Tensor, beams: Beams
    ) -> Tuple[Tensor, Dict[str, List[Optional[Tensor]]]]:
        """What :meth:`extract_features` finds for the last of *prev_output_tokens*: (B, 1, C).

        All but the layers is called as :meth:`extract_features_scriptable` calls it.
        """
        tokens = prev_output_tokens[:, -1:].contiguous()
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)  # (B, 1, C)
        inner_states = [x.transpose(0, 1)]
        beams.begin_step(beams.arranged(tokens.squeeze(1).eq(self.padding_idx)))
        x = beams.arranged(x.squeeze(1))
        for step in beams.steps:
            x = step(x, beams)
            inner_states.append((x if beams.rows is None else x.index_select(0, beams.rows)).unsqueeze(0))
        x = inner_states[-1]  # (1, B, C)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": inner_states}

    def reorder_incremental_state(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> None:
        """Called for every module that has one, the decoder first: reorder the :class:`Beams` if there are.

        Where they cannot be, the state becomes what fairseq's would be, for the layers to reorder.
        """
        if not torch.jit.is_scripting():
            if STATE in incremental_state:
                self._reorder_beams(incremental_state, new_order)

    @torch.jit.unused
    def _reorder_beams(self, incremental_state: Dict[str, Any], new_order: Tensor) -> None:
        beams = incremental_state[STATE]
        if not beams.reorder(new_order):
            del incremental_state[STATE]
            for layer in self.layers:
                layer.self_attn._set_input_buffer(incremental_state, beams.of_rows(layer.self_attn))

    def reorder_incremental_state_scripting(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> None:
        """Let row i of the next step go on from row new_order[i] of the last one."""
        if not torch.jit.is_scripting():
            self.reorder_incremental_state(incremental_state, new_order)
            if STATE in incremental_state:
                return
        for module in self.modules():  # as fairseq/models/fairseq_incremental_decoder.py
            if hasattr(module, "reorder_incremental_state"):
                result = module.reorder_incremental_state(incremental_state, new_order)
                if result is not None:
                    incremental_state = result

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> Dict[str, Tensor]:
        drop_absolute_positions(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)


# The methods that a search replaces, or relies on.
DECODER = methods_of(
    RotaryDecoder,
    *("forward", "extract_features", "extract_features_scriptable", "output_layer"),
    *("reorder_incremental_state", "reorder_incremental_state_scripting"),
)


def as_namespace(args: Union[Namespace, DictConfig]) -> Namespace:
    """The options as flags would give them.

    fairseq-hydra-train gives a DictConfig, of which TransformerConfig.from_namespace would copy only the
    fields that it declares, not those of the rotation. What a nested ``encoder:``, ``decoder:`` or
    ``quant_noise:`` says goes before the architecture, as with fairseq's transformer.
    """
    if not OmegaConf.is_config(args):
        return args
    flat = Namespace(**OmegaConf.to_container(args, resolve=True))
    nested = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
    for name, config in nested.items():
        given = vars(flat).pop(name, None)
        if given is not None:
            for option, value in vars(config(**given)).items():
                setattr(flat, f"{name}_{option}", value)
    return flat


def rope_architecture(args: Union[Namespace, DictConfig]) -> None:
    """Fill in what *args* leaves open of the base architecture: fairseq's sizes, the paper's rotation."""
    args.rope_base = getattr(args, "rope_base", 10000.0)
    args.rope_layout = getattr(args, "rope_layout", "interleaved")
    args.rope_fraction = getattr(args, "rope_fraction", 1.0)
    args.no_token_positional_embeddings = True
    fairseq_base_architecture(args)


def refuse_what_cannot_work(args: Union[Namespace, DictConfig]) -> None:
    """Raise a ValueError, one sentence, for options that rotary self-attention cannot honour."""
    if args.cross_self_attention:
        raise ValueError(
            "--cross-self-attention has no meaning with rotary positions: its keys are the encoder's output "
            "followed by the prefix, which share no positions; leave the flag out"
        )
    for side in ("encoder", "decoder"):
        heads, width = getattr(args, f"{side}_attention_heads"), getattr(args, f"{side}_embed_dim")
        if heads < 1 or width % heads:
            raise ValueError(
                f"--{side}-attention-heads {heads}: must divide --{side}-embed-dim {width} without a rest"
            )
        if getattr(args, f"{side}_learned_pos"):
            raise ValueError(
                f"--{side}-learned-pos asks for learned absolute positions, but positions of "
                "transformer_rope are rotary; leave the flag out, or use --arch transformer"
            )
        if getattr(args, f"{side}_xformers_att_config", None):
            raise ValueError(
                f"--{side}-xformers-att-config {getattr(args, f'{side}_xformers_att_config')}: xFormers' "
                "attention cannot rotate queries and keys; leave the flag out"
            )


@register_model("transformer_rope")
class TransformerRopeModel(TransformerModel):
    """fairseq's encoder-decoder transformer with rotary position embedding (arXiv:2104.09864).

    Queries and keys of the self-attention of every layer, encoder and decoder, are rotated; values and
    cross-attention are not, and no absolute positions are added to the embeddings.
    """

    @classmethod
    def hub_models(cls) -> Dict[str, Any]:
        """None yet: fairseq's published models are sinusoidal."""
        return {}

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's transformer flags and --rope-base, --rope-layout, --rope-fraction."""
        gen_parser_from_dataclass(parser, TransformerRopeConfig(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Union[Namespace, DictConfig], task: Any) -> "TransformerRopeModel":
        """Build the model that *args* describes for the dictionaries of *task*.

        Raises:
            ValueError: *args* asks for what rotary self-attention cannot do, or for a rotation that is
                not defined (see ``fairseq_rope.rotary``).
        """
        args = as_namespace(args)
        rope_architecture(args)  # fills in what checkpoints of older versions lack
        refuse_what_cannot_work(args)
        model = super().build_model(args, task)
        learns_alignments = getattr(getattr(task, "cfg", None), "load_alignments", False)
        model.decoder.alignment_in_training = bool(learns_alignments)
        return model

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Dictionary, embed_tokens: nn.Embedding) -> RotaryEncoder:
        return RotaryEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> RotaryDecoder:
        cfg = TransformerConfig.from_namespace(args)
        return RotaryDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
