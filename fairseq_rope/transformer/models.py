"""The model ``transformer_rope``: fairseq's transformer with a choice of position encodings, rotary by default.

The classes are subclasses of fairseq's (``fairseq/models/transformer``, ``fairseq/modules/transformer_layer.py``).
So flags, parameter names and checkpoints are the same.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import BaseFairseqModel, FairseqEncoder, register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel
from omegaconf import DictConfig
from torch import nn

from ..checkpoints import option_value, options_of_task, set_option
from ..modules.attention import SelfAttention
from ..positions.interface import SIDES
from .decoder import Decoder
from .defaults import as_namespace, save_options, set_defaults
from .encoder import Encoder
from .encodings import layers_in
from .flags import config_class
from .meaning import refuse_other_model
from .options import is_pruned
from .refusals import refuse_contradictions


class RopeModel(BaseFairseqModel):
    """What all models of our layers have in common."""

    refuse_other_model = staticmethod(refuse_other_model)  # called before a checkpoint is loaded for training
    compiles = False  # --compile

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        """Return no models, because fairseq's published models have other layers."""
        return {}

    def train(self, mode: bool = True) -> "RopeModel":
        """Set the mode of all modules if one has another; with ``--compile``, compile the layers for training alone."""
        if any(module.training is not mode for module in self._all_modules()):
            super().train(mode)
        for layer in (*self.encoder.layers, *self.decoder.layers) if self.compiles else ():
            if not mode:
                layer._compiled_call_impl = None
            elif layer._compiled_call_impl is None:
                layer.compile()
        return self

    def set_num_updates(self, num_updates: int) -> None:
        """Pass the number of updates to the modules that have this method. An encoder would only pass it on."""
        for module in self._all_modules()[1:]:
            if hasattr(type(module), "set_num_updates") and not isinstance(module, FairseqEncoder):
                module.set_num_updates(num_updates)

    def _all_modules(self) -> list[Any]:
        """Return what ``modules()`` does, in less time; a shared module stands in it repeatedly."""
        modules: list[Any] = [self]
        for module in modules:
            modules.extend(filter(None, module._modules.values()))
        return modules

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Namespace | None = None
    ) -> Any:
        """Load *state_dict* as fairseq does, with the layers that *model_cfg* keeps.

        fairseq removes all layers of a side whose layers to keep are not given, and prunes a checkpoint again that is
        pruned already. Here, all layers are kept in both cases.
        """
        self.complete_layers_to_keep(state_dict, model_cfg)
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    @staticmethod
    def complete_layers_to_keep(state_dict: dict[str, Any], model_cfg: Any) -> None:
        """If *model_cfg* keeps only some layers, change it so that fairseq prunes *state_dict* as described above."""
        sides = [side for side in SIDES if model_cfg is not None and option_value(model_cfg, f"{side}_layers_to_keep")]
        for side in SIDES if sides else ():
            layers, name = layers_in(state_dict, side), f"{side}_layers_to_keep"
            if layers and (side not in sides or is_pruned(layers, option_value(model_cfg, name))):
                set_option(model_cfg, name, ",".join(map(str, range(layers))))


def needs_attention(args: Namespace) -> bool:
    """Return whether the criterion of *args* says that it reads the weights of cross-attention."""
    return bool(getattr(CRITERION_REGISTRY.get(getattr(args, "criterion", None)), "needs_attention", False))


@register_model("transformer_rope")
class TransformerRopeModel(RopeModel, TransformerModel):
    """fairseq's encoder-decoder transformer with rotary position embedding (arXiv:2104.09864), or another encoding.

    Without flags, queries and keys of the self-attention of every layer, encoder and decoder, are rotated; values and
    cross-attention are not, and no absolute positions are added to the embeddings.
    """

    @classmethod
    def add_args(cls, parser: ArgumentParser | _ArgumentGroup) -> None:
        """Add fairseq's transformer flags, and all flags of ours."""
        gen_parser_from_dataclass(parser, config_class()(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Namespace | DictConfig, task: Any) -> "TransformerRopeModel":
        """Build the model that *args* describes for the dictionaries of *task*.

        Raises:
            ValueError: our models do not support an option in *args*, or its value is not allowed
        """
        config, args = args, as_namespace(args)
        refuse_contradictions(args, set_defaults(args))
        model = super().build_model(args, task)
        save_options(config, args)
        cfg = options_of_task(task)
        model.decoder.attention_in_training = needs_attention(args) or bool(option_value(cfg, "load_alignments"))
        model.compiles = bool(option_value(args, "compile"))
        if model.compiles and any(getattr(module, "depends_on_length", False) for module in model.modules()):
            raise ValueError("--compile: does not support --rope-scaling of the types dynamic and longrope")
        right_padded = str(option_value(cfg, "left_pad_target")) == "False"
        for module in model.decoder.modules():
            if isinstance(module, SelfAttention):
                module.right_padded = right_padded
        return model

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Dictionary, embed_tokens: nn.Embedding) -> Encoder:
        return Encoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> Decoder:
        cfg = TransformerConfig.from_namespace(args)
        return Decoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
