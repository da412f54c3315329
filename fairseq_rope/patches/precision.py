"""The flags of precision do what they say: ``--bf16`` and ``--fp16`` in training, ``--bf16`` also in other programs."""

import logging
from argparse import Namespace
from typing import Any

from fairseq.models import BaseFairseqModel
from fairseq.models.nat import FairseqNATModel
from fairseq.modules import AdaptiveSoftmax
from fairseq.trainer import Trainer

from ..checkpoints import option_value, set_option
from .linear import replace_linear_layers
from .registry import replaces

_init_trainer = Trainer.__init__
_prepare_for_inference_ = BaseFairseqModel.prepare_for_inference_

logger = logging.getLogger(__name__)


@replaces(
    "fairseq.trainer.Trainer.__init__",
    prevents="wrong results",
    until="fairseq-hydra-train sets bf16 for memory_efficient_bf16, and oneDNN needs no code for each size",
    wraps=_init_trainer,
)
def init_trainer(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
    """Set up a trainer, in 16 bits if a flag asks for it.

    fairseq-hydra-train ignores common.memory_efficient_bf16 and common.memory_efficient_fp16 without common.bf16 and
    common.fp16, and trains in float32. In 16 bits on a CPU, oneDNN generates code for each size of a matrix product;
    here layers of the class torch.nn.Linear compute products of few different sizes.
    """
    common = cfg if isinstance(cfg, Namespace) else cfg.common
    for name in ("fp16", "bf16"):  # fairseq-train does this when it reads the flags, and fairseq-hydra-train does not
        if option_value(common, f"memory_efficient_{name}") and not option_value(common, name):
            set_option(common, name, True)
    _init_trainer(self, cfg, *args, **kwargs)
    if not self.cuda and (option_value(common, "bf16") or option_value(common, "fp16")):
        replace_linear_layers(self._model)


def narrow(model: Any) -> None:
    """Convert *model* to bfloat16, if fairseq's programs can compute with it in this type.

    They give models of speech their input in float32. They normalise the output of adaptive softmax in the type of the
    model, and compute lengths and places of words in it with models that are not autoregressive.
    """
    encoder = getattr(model, "encoder", None)
    if encoder is None:
        reads_words = hasattr(model, "decoder")  # a language model
    else:
        reads_words = any(name.rpartition(".")[2] == "embed_tokens" for name, _ in encoder.named_modules())
    reasons = {
        "the input of this model is not text": not reads_words,
        "adaptive softmax would round probabilities": any(
            isinstance(each, AdaptiveSoftmax) for each in model.modules()
        ),
        "this model is not autoregressive, and would round lengths": isinstance(model, FairseqNATModel),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is None:
        model.bfloat16()
    else:
        logger.warning(f"--bf16: has no effect, because {reason}")


@replaces(
    "fairseq.models.BaseFairseqModel.prepare_for_inference_",
    prevents="wrong results",
    until="these programs convert models for --bf16",
    wraps=_prepare_for_inference_,
)
def prepare_for_inference_(self: Any, cfg: Any) -> Any:
    # fairseq's programs pass their own options, which have a --path. from_pretrained passes those of the training.
    """Prepare the model for a search, in bfloat16 if --bf16 asks for it.

    fairseq-generate, fairseq-interactive and fairseq-eval-lm ignore --bf16 and compute in float32. Models of speech,
    whose input they give in float32, do so here too, after a warning, and so do models with adaptive softmax and models
    that are not autoregressive, with which they would round probabilities and lengths.
    """
    if option_value(cfg.common, "bf16") and option_value(cfg.common_eval, "path"):
        narrow(self)
    return _prepare_for_inference_(self, cfg)
