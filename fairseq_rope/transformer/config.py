"""The options of the rotary models: their defaults, and which values are refused."""

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Union

from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer.transformer_legacy import base_architecture as fairseq_base_architecture
from omegaconf import DictConfig, OmegaConf

from ..positions.rotary import BASE, FRACTION, LAYOUTS


@dataclass
class TransformerRopeConfig(TransformerConfig):
    """fairseq's transformer configuration with the options of the rotation."""

    rope_base: float = field(default=BASE, metadata={"help": "base of the rotation's angles, theta_i = base^(-2i/d)"})
    rope_layout: ChoiceEnum(LAYOUTS) = field(  # type: ignore[valid-type]
        default=LAYOUTS[0],
        metadata={
            "help": "which dimensions of a head rotate together: interleaved = (2i, 2i+1), as the RoFormer "
            "paper; half = (i, i + d/2), as GPT-NeoX and LLaMA"
        },
    )
    rope_fraction: float = field(
        default=FRACTION, metadata={"help": "fraction of each head's dimensions that rotates, in (0, 1]"}
    )


def as_namespace(args: Union[Namespace, DictConfig]) -> Namespace:
    """Return the options as a namespace, as the command line gives them.

    fairseq-hydra-train gives a DictConfig. TransformerConfig.from_namespace would copy only the fields that
    it declares, and not those of the rotation. A nested ``encoder:``, ``decoder:`` or ``quant_noise:``
    overrides the architecture, as with fairseq's transformer.
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
    """Set the options that *args* lacks: fairseq's base sizes and the paper's rotation."""
    args.rope_base = getattr(args, "rope_base", BASE)
    args.rope_layout = getattr(args, "rope_layout", LAYOUTS[0])
    args.rope_fraction = getattr(args, "rope_fraction", FRACTION)
    args.no_token_positional_embeddings = True
    fairseq_base_architecture(args)


def refuse_what_cannot_work(args: Union[Namespace, DictConfig]) -> None:
    """Raise a ValueError with one sentence if rotary self-attention does not support an option in *args*."""
    if args.cross_self_attention:
        raise ValueError(
            "--cross-self-attention has no meaning with rotary positions: its keys are the encoder's output "
            "followed by the prefix, which share no positions; drop the flag"
        )
    for side in ("encoder", "decoder"):
        heads, width = getattr(args, f"{side}_attention_heads"), getattr(args, f"{side}_embed_dim")
        if heads < 1 or width % heads:
            raise ValueError(
                f"--{side}-attention-heads {heads}: must divide --{side}-embed-dim {width} without remainder"
            )
        if getattr(args, f"{side}_learned_pos"):
            raise ValueError(
                f"--{side}-learned-pos asks for learned absolute positions, but positions of "
                "transformer_rope are rotary; drop the flag, or use --arch transformer"
            )
        if getattr(args, f"{side}_xformers_att_config", None):
            raise ValueError(
                f"--{side}-xformers-att-config {getattr(args, f'{side}_xformers_att_config')}: xFormers' "
                "attention cannot rotate queries and keys; drop the flag"
            )
