"""The flags of precision do what they say, or end in one sentence: ``--bf16``, ``--fp16``, ``--amp`` and ``--tpu``."""

import importlib.util
import logging
import os
import re
import sys
import types
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from fairseq import options
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.models.nat import FairseqNATModel
from fairseq.modules import AdaptiveSoftmax
from fairseq.trainer import Trainer
from torch import Tensor

from ..checkpoints import option_value, set_option
from ..errors import InputError, flag_of
from .ignored import heed_flags
from .linear import replace_linear_layers
from .registry import replaces

_call_main = distributed_utils.call_main
_init_trainer = Trainer.__init__
_parse_args_and_arch = options.parse_args_and_arch
_prepare_for_inference_ = BaseFairseqModel.prepare_for_inference_

logger = logging.getLogger(__name__)

# The type of numbers that each flag chooses. Flags of one type can be combined, others cannot.
TYPES = {
    "fp16": "float16",
    "memory_efficient_fp16": "float16",
    "bf16": "bfloat16",
    "memory_efficient_bf16": "bfloat16",
    "amp": "mixed precision",
}
LAUNCHERS = ("WORLD_SIZE", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")  # fairseq takes processes from these variables
LOCAL_RANK = re.compile(r"^--local-rank(?==|$)")  # as torch.distributed.launch writes the flag since torch 2.0


def refuse_two_types(names: Iterable[str]) -> None:
    """Raise an InputError if the options *names*, which are given, choose two types."""
    flags = {TYPES[name]: flag_of(name) for name in names}
    if len(flags) > 1:
        raise InputError(f"{' and '.join(sorted(flags.values()))} exclude each other: give one of them")


def refuse_precision(common: Any, optimization: Any) -> None:
    """Raise an InputError if a training in this precision is not possible on this machine.

    Args:
        common, optimization: these parts of fairseq's configuration, or its flags
    """
    refuse_two_types(name for name in TYPES if option_value(common, name))
    narrow = next((name for name in ("bf16", "fp16") if option_value(common, name)), None)
    if option_value(optimization, "use_bmuf") and narrow and not option_value(common, "memory_efficient_bf16"):
        flag = flag_of(f"memory_efficient_{narrow}" if option_value(common, f"memory_efficient_{narrow}") else narrow)
        instead = "give --memory-efficient-bf16, or no such flag for float32"
        raise InputError(f"--use-bmuf with {flag}: fairseq would not update the weights; {instead}")
    if option_value(common, "tpu"):
        if importlib.util.find_spec("torch_xla") is None:
            raise InputError("--tpu: needs torch_xla, which is not installed")
        return
    if torch.cuda.is_available() and not option_value(common, "cpu"):
        return
    where = "--cpu" if option_value(common, "cpu") else "this machine has none that torch can use"
    if option_value(common, "amp") and torch.cuda.is_available():  # torch's GradScaler is for tensors on the GPU
        raise InputError(f"--amp: needs a GPU ({where}); on a CPU, give --bf16, or no such flag for float32")
    is_flat = option_value(common, "fp16") and not option_value(common, "memory_efficient_fp16")
    if is_flat and not option_value(common, "fp16_no_flatten_grads"):
        instead = "on a CPU, give --bf16, --memory-efficient-fp16, or no such flag for float32"
        raise InputError(f"--fp16: needs a GPU in training ({where}); {instead}")


@replaces(
    "fairseq.options.parse_args_and_arch",
    prevents="wrong results",
    until="fairseq does not set tpu for --bf16, and heeds or refuses these flags",
    wraps=_parse_args_and_arch,
)
def parse_args_and_arch(parser: Any, input_args: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Read the flags of a program, and heed or refuse those that it would ignore.

    fairseq reads --bf16 as --tpu too, so every training with --bf16 ends with "'NoneType' object has no attribute
    'xla_device'". Here only --tpu means a TPU. --local-rank, which torch.distributed.launch adds, is read as
    --local_rank. Flags that exclude each other (--fp16, --bf16, --amp) are refused. fairseq-generate ignores
    --num-shards, --sacrebleu and --no-seed-provided; here it heeds them. Flags that ask a program for what it does not
    do are refused, as is asynchronous writing without iopath, with which fairseq-train ends with status 0 without
    training. Flags without an effect on the result give a warning.
    """
    words = sys.argv[1:] if input_args is None else list(input_args)
    words = [LOCAL_RANK.sub("--local_rank", word) if isinstance(word, str) else word for word in words]
    refuse_two_types(name for name in TYPES if name != "amp" and flag_of(name) in words)
    parts = [group.title for group in parser._action_groups]
    parsed = _parse_args_and_arch(parser, words, *args, **kwargs)
    namespace = parsed if isinstance(parsed, Namespace) else parsed[0]
    if not kwargs.get("suppress_defaults"):  # then fairseq calls this function again, without it
        heed_flags(parts, namespace, words)
    if option_value(namespace, "bf16"):
        namespace.tpu = "--tpu" in words
    return parsed


@replaces(
    "fairseq.distributed.utils.call_main",
    prevents="an unreadable error",
    until="fairseq checks these flags before it starts, and --cpu starts one process",
    wraps=_call_main,
)
def call_main(cfg: Any, main: Any, **kwargs: Any) -> Any:
    """Start a program, after checks of its precision and of the number of processes.

    --fp16 in a training on a CPU ends with 'Torch not compiled with CUDA enabled'. Here it ends in one sentence before
    data are read, and so do --amp with --cpu on a machine with a GPU, and --use-bmuf in types in which fairseq would
    not update the weights. With --cpu on a machine with several GPUs, fairseq starts a process for each GPU, and nccl
    cannot connect them; here it starts one process, except inside SLURM and torchrun (fairseq-hydra-train needs
    distributed_training.distributed_world_size=1).
    """
    code = getattr(main, "__code__", None)  # its module is __main__ after python -m
    if code is not None and os.path.basename(code.co_filename) == "train.py":
        refuse_precision(cfg.common, cfg.optimization)
    processes = cfg.distributed_training
    is_default = processes.distributed_world_size == torch.cuda.device_count()
    is_default = is_default and processes.distributed_init_method is None and processes.distributed_backend == "nccl"
    if cfg.common.cpu and is_default and not any(name in os.environ for name in LAUNCHERS):
        processes.distributed_world_size = 1
    return _call_main(cfg, main, **kwargs)


@replaces(
    "fairseq.trainer.Trainer.__init__",
    prevents="wrong results",
    until="fairseq-hydra-train sets bf16 for memory_efficient_bf16, and the patch of call_main goes",
    wraps=_init_trainer,
)
def init_trainer(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
    """Set up a trainer, after checks of its precision.

    fairseq-hydra-train ignores common.memory_efficient_bf16 and common.memory_efficient_fp16 without common.bf16 and
    common.fp16, and trains in float32. The checks of call_main are made here too, since fairseq-hydra-train loads the
    plugin after it has called call_main. In 16 bits on a CPU, oneDNN generates code for each size of a matrix product;
    here layers of the class torch.nn.Linear compute products of few different sizes.
    """
    common, optimization = (cfg, cfg) if isinstance(cfg, Namespace) else (cfg.common, cfg.optimization)
    for name in ("fp16", "bf16"):  # fairseq-train does this when it reads the flags, and fairseq-hydra-train does not
        if option_value(common, f"memory_efficient_{name}") and not option_value(common, name):
            set_option(common, name, True)
    refuse_precision(common, optimization)
    if option_value(common, "amp") and not torch.cuda.is_available():
        logger.warning("--amp: has no effect without a GPU, and this training computes in float32")
    _init_trainer(self, cfg, *args, **kwargs)
    TorchForTrainers.on_gpu = bool(self.cuda)
    if not self.cuda and (option_value(common, "bf16") or option_value(common, "fp16")):
        replace_linear_layers(self._model)


class TorchForTrainers(types.ModuleType):
    """``torch`` as ``fairseq.trainer`` sees it; a number that it makes stays on the CPU if the model is there.

    With --memory-efficient-fp16 on a CPU, a training without a GPU ends at the first overflow of the gradients with
    'Torch not compiled with CUDA enabled', and with --cpu it uses the GPU. Here the update is left out.
    """

    on_gpu = True  # whether the model of the latest trainer is on a GPU

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        made = torch.tensor(*args, **kwargs)
        return made if self.on_gpu else made.as_subclass(_OnTheCPU)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TORCH = replaces(
    "fairseq.trainer.torch",
    prevents="wrong results",
    until="fairseq makes the norm of such an update on the device of the model",
)(TorchForTrainers("torch"))


class _OnTheCPU(Tensor):
    """A tensor whose ``cuda()`` is the plain tensor, on the CPU."""

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor)


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
