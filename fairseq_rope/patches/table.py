"""The table of replacements.

fairseq is archived, so its defects are fixed here, for every model in the process. A command or call that works with
fairseq alone does the same with a row in place, except where it would lose data, give wrong results or run code from
a file. ``Patch.prevents`` says which of these. A row that only changes the text of an error prevents "an unreadable
error", and one that computes the same in less time prevents "lost time".
"""

import builtins
import fnmatch
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from fairseq import checkpoint_utils

from ..checkpoints import allow_checkpoint_classes
from . import (
    adaptive,
    batches,
    criteria,
    ema,
    ending,
    fasta,
    ignored,
    indexed,
    loading,
    moses,
    nan,
    numpy_names,
    optimizers,
    options,
    pieces,
    precision,
    resuming,
    roberta,
    saving,
    searching,
    task_options,
    unknown_words,
)


class Patch(NamedTuple):
    """One row of the table."""

    target: str  # dotted name of what is replaced; "fairseq.*.NAME" is a global of each loaded module that has it
    replacement: Any  # the object that takes its place
    prevents: str  # "code execution", "lost data", "wrong results", "an unreadable error" or "lost time"
    reason: str  # what happens without the replacement
    until: str  # when the row can go


PATCHES: list[Patch] = [
    Patch(
        "fairseq.checkpoint_utils.torch",
        loading.TorchWithSafeLoad("torch"),
        "code execution",
        "torch >= 2.6 refuses fairseq's checkpoints, so fairseq's main branch loads them with weights_only=False, "
        "which runs any code in the file. Here a list names the classes that checkpoints may contain.",
        "fairseq loads its own checkpoints with weights_only=True",
    ),
    Patch(
        "fairseq.*.eval",
        options.literal,
        "code execution",
        "fairseq evaluates options such as --adaptive-softmax-cutoff as Python, also those in a checkpoint, which can "
        "then run code. Here options are literals and arithmetic on literals. (A script that imports * from a module "
        "of fairseq gets this eval too.)",
        "fairseq reads literals",
    ),
    Patch(
        "fairseq.data.fasta_dataset.FastaDataset._build_index",
        fasta.build_index,
        "code execution",
        "fairseq passes the path of FASTA files to a shell. The languages in a checkpoint are part of that path, so a "
        "checkpoint can run any command if the files beside it have suitable names.",
        "fairseq reads these files without a shell",
    ),
    Patch(
        "fairseq.checkpoint_utils.PathManager",
        saving.WholeFiles(checkpoint_utils.PathManager),
        "lost data",
        "fairseq copies a checkpoint to checkpoint_best.pt and checkpoint_last.pt in place. If it is killed meanwhile, "
        "or after a power cut, they can be incomplete. Here each copy is written under a temporary name, synced "
        "and renamed. So a hard link keeps the old contents, and a symbolic link leads to the new file.",
        "fairseq renames its copies and syncs before it renames",
    ),
    Patch(
        "fairseq.checkpoint_utils._torch_persistent_save",
        saving._save_with_retries,
        "lost data",
        "When a write fails, fairseq tries twice more and appends to what is already in the file. Then the file with "
        "the final name begins with half a checkpoint. Here each attempt starts at the beginning of the file.",
        "fairseq retries from the start of the file",
    ),
    Patch(
        "fairseq.checkpoint_utils.torch_persistent_save",
        saving.torch_persistent_save,
        "an unreadable error",
        "torch reports a full disk as an unexpected position in a file. Here the error names the checkpoint, the "
        "reason and the free space, and the temporary file is removed.",
        "fairseq names the checkpoint and the reason",
    ),
    Patch(
        "fairseq.checkpoint_utils.save_checkpoint",
        saving.save_checkpoint,
        "lost data",
        "fairseq skips a checkpoint of --save-interval-updates at the end of an epoch, even if it writes no "
        "checkpoint for that epoch (--no-epoch-checkpoints, --save-interval). An average of the last five "
        "checkpoints then uses an older one in its place. It also does not save the counter of --patience, so a "
        "training that resumes ends later than one that is not interrupted.",
        "fairseq writes a checkpoint at every interval, with the counter",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.get_batch_iterator",
        batches.get_batch_iterator,
        "wrong results",
        "fairseq composes the batches once per process, from the seed and the epoch in which the process starts. So "
        "training that resumes in the middle of an epoch skips some sentences and repeats others. Here the batches are "
        "always those of a start in epoch 1. The processes that load data (--num-workers) keep the epoch in which they "
        "start, so that a masked language model sees the same masks in each epoch; here they start again for each "
        "epoch if the data can depend on it. --skip-invalid-size-inputs-valid-test also skips sentences with more "
        "tokens than --max-tokens; fairseq ends with an AssertionError. fairseq-eval-lm skips blocks of text "
        "with more tokens than the model has positions, and prints the perplexity of the rest, or 1.00 if there is no "
        "rest; here a warning names the flag, and without a rest it is an error.",
        "fairseq composes batches from the seed alone, and skips such sentences",
    ),
    Patch(
        "fairseq.data.data_utils.batch_by_size",
        batches.batch_by_size,
        "wrong results",
        "fairseq drops the last batch if its size is not a multiple of --required-batch-size-multiple (8 by default), "
        "so up to 7 sentences of a test set are not translated (fairseq #5036, #5094, #5351). It ends with an "
        "AssertionError if a sentence has more tokens than --max-tokens. Here the error is one sentence with the flag, "
        "the number of the sentence and its length.",
        "fairseq keeps the last batch, and names the sentence",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
        loading.load_checkpoint_to_cpu,
        "wrong results",
        "With a joined dictionary, a model for the opposite direction loads without an error, and so does a model "
        "with another position encoding. Both are refused with one sentence that names the file. A training with "
        "--store-ema that starts from a checkpoint without an average ends in a KeyError; here the average begins with "
        "the weights. If the model keeps only some layers (--encoder-layers-to-keep), fairseq puts others into the "
        "average. A training that resumes without a state of the optimiser gets a warning.",
        "fairseq compares the languages and options of a checkpoint with those of the command",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        loading.load_checkpoint_to_train,
        "wrong results",
        "This row gives load_checkpoint_to_cpu the languages and options of the training, and writes languages that "
        "fairseq read from file names into new checkpoints. It names the file and the reason if weights do not fit, "
        "and warns if --restore-file does not exist. It restores the counter of --patience if the same "
        "training starts again, with the same metric and without a --reset-… flag. A training that has reached "
        "--max-update, or that --patience has ended, ends at once when it is started again, and the log says "
        "why; fairseq trains on each time. With fairseq-hydra-train --multirun, a training does not compare its "
        "results with those of the one before.",
        "the row of load_checkpoint_to_cpu goes",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_model_ensemble_and_task",
        loading.load_model_ensemble_and_task,
        "wrong results",
        "This row gives load_checkpoint_to_cpu the languages of the data. It names the file if weights do not fit. "
        "fairseq-validate ignores --bf16; here its models compute in bfloat16. fairseq-generate gives "
        "--model-overrides to the language model of --lm-path, too; here options of transformer_rope, such as a "
        "scaling of RoPE, are for the translation model alone, with a warning.",
        "the row of load_checkpoint_to_cpu goes, and fairseq-validate converts models for --bf16",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.build_generator",
        unknown_words.build_generator,
        "wrong results",
        "With --replace-unk, fairseq's search returns no alignment, or with --print-alignment one of another form than "
        "the replacement expects. So the first unknown word in an output ends the program. Here the "
        "search returns alignments for --replace-unk, also if none are printed. It turns attention weights on for "
        "print_alignment, also if make_generation_fast_ has turned them off.",
        "fairseq's search returns the alignment that its replace_unk expects",
    ),
    Patch(
        "fairseq.search.LexicallyConstrainedBeamSearch.init_constraints",
        searching.init_constraints,
        "an unreadable error",
        "fairseq-generate has --constraints and reads no constraints, so it ends with \"'NoneType' object is not "
        'iterable", and so does a call from Python that gives none. Here both end in one sentence.',
        "fairseq refuses --constraints without constraints",
    ),
    Patch(
        "fairseq.search.DiverseBeamSearch.step",
        searching.diverse_step,
        "wrong results",
        "With --diverse-beam-groups, fairseq takes the number of a sentence in the data set for its place in the "
        "batch. The second batch ends in an IndexError, and if the order differs, sentences exchange their penalties.",
        "fairseq counts in the batch",
    ),
    Patch(
        "fairseq.sequence_scorer.SequenceScorer.generate",
        searching.score,
        "an unreadable error",
        "--score-reference with several models adds the weights of their cross-attention, which the plugin's models do "
        "not compute if nothing reads them. Here they do if they are scored together with other models.",
        "fairseq adds only weights that are needed",
    ),
    Patch(
        "fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram",
        ignored._no_repeat_ngram,
        "wrong results",
        "fairseq ignores --no-repeat-ngram-size, if its extension for GPUs is not built: it looks for the last words "
        "of the sentence at the end of a tensor that ends with padding. Here no hypothesis repeats so many words, "
        "except in a prefix that the user gives.",
        "fairseq compares the words so far",
    ),
    Patch(
        "fairseq.hub_utils.GeneratorHubInterface.generate",
        searching.generate,
        "wrong results",
        "A call of generate from Python with inference_step_args, such as prefix_tokens, gives all rows to each batch, "
        "although batches have other sentences in another order, so sentences get the prefixes of others. For a single "
        "sentence it drops these arguments. Here a tensor with a row for each sentence is divided with the sentences.",
        "fairseq divides these arguments as it divides the sentences",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.get_interactive_tokens_and_lengths",
        unknown_words.get_interactive_tokens_and_lengths,
        "wrong results",
        "With --replace-unk, fairseq-interactive forgets the words that are not in the source dictionary, and could "
        "only copy <unk>. Here they are kept, and the S- lines show them; the model still reads <unk>.",
        "fairseq-interactive copies the words of its input",
    ),
    Patch(
        "fairseq.utils.load_align_dict",
        unknown_words.load_align_dict,
        "an unreadable error",
        "--replace-unk without a file looks for a file with the name '@@ '. Here it copies source words.",
        "fairseq's --replace-unk works without a file",
    ),
    Patch(
        "fairseq.utils.post_process_prediction",
        unknown_words.post_process_prediction,
        "wrong results",
        "fairseq joins subwords before it replaces unknown words, although alignments are between subwords. Here "
        "unknown words are replaced first.",
        "fairseq replaces unknown words before it joins subwords",
    ),
    Patch(
        "fairseq.data.encoders.moses_tokenizer.MosesTokenizer.__init__",
        moses.init,
        "wrong results",
        "--tokenizer moses has no rules for codes with a region, such as fr-CA: l'ami becomes l &apos; ami. Here the "
        "rules are those of fr, as in the recipes and tools. In the same way, those of kor are those of ko.",
        "sacremoses reads codes with a region",
    ),
    Patch(
        "fairseq.data.encoders.sentencepiece_bpe.SentencepieceBPE.decode",
        pieces.decode,
        "wrong results",
        "fairseq joins the pieces of SentencePiece itself. So the characters of a model with byte_fallback come out as "
        "<0xE2><0x82><0xAC>, and its control symbols as text. With --remove-bpe sentencepiece too, the D- lines lack "
        "all blanks. Here SentencePiece itself converts the pieces to text; <unk> remains, as in fairseq.",
        "fairseq decodes pieces with SentencePiece",
    ),
    Patch(
        "fairseq.*.post_process",
        pieces.post_process,
        "wrong results",
        "--remove-bpe sentencepiece joins pieces without their model. Here it also turns pieces for bytes into "
        "characters.",
        "fairseq decodes bytes",
    ),
    Patch(
        "fairseq.models.roberta.model*.RobertaHubInterface",
        roberta.RobertaHub,
        "wrong results",
        "If <s> or </s> is among the most probable words for a mask, fairseq's fill_mask drops it but not its "
        "probability, so the words after it get those of others. RobertaModel.from_pretrained downloads GPT-2's BPE by "
        "default, and with bpe=None, encode, decode and fill_mask end with \"'NoneType' object has no attribute "
        "'encode'\". Here the text then consists of words of the dictionary.",
        "fairseq keeps words and probabilities together, and encodes text without a BPE",
    ),
    Patch(
        "fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder.merge_file_",
        indexed.merge_file_,
        "wrong results",
        "With --workers, fairseq-preprocess adds up the lengths of sentences in 32 bits with NumPy 2. From 2 GiB of "
        "a language on (a billion tokens), the places of sentences in the file are then wrong, after a warning only. "
        "fairseq-preprocess needs --user-dir for this; the recipes give it.",
        "fairseq adds up Python's integers",
    ),
    Patch(
        "fairseq.trainer.torch",
        precision.TorchForTrainers("torch"),
        "wrong results",
        "With --memory-efficient-fp16 on a CPU, a training without a GPU ends at the first overflow of the gradients "
        "with 'Torch not compiled with CUDA enabled', and with --cpu it uses the GPU. Here the update is left out.",
        "fairseq makes the norm of such an update on the device of the model",
    ),
    Patch(
        "fairseq.nan_detector.NanDetector.add_hooks",
        nan.add_hooks,
        "an unreadable error",
        "If a loss or gradients are NaN, fairseq repeats the update with a hook on each module, to name the one in "
        "which NaN begins. torch's hooks cannot read the output of an encoder, a dictionary of lists, and the training "
        "ends with an empty StopIteration. Here encoders and whole models have no such hook, and their parts do.",
        "torch's hooks accept such outputs",
    ),
    Patch(
        "fairseq.models.ema.ema.EMA.restore",
        ema.restore,
        "wrong results",
        "fairseq does not average the versions of the decoder and the encoder, and so takes the average for a model of "
        "2017, which had no norms after the layers. With --encoder-normalize-before or --decoder-normalize-before, the "
        "average that --store-ema saves has none. Here the versions stay in it.",
        "fairseq keeps the versions",
    ),
    Patch(
        "fairseq.data.iterators.EpochBatchIterator.state_dict",
        resuming.state_dict,
        "wrong results",
        "A checkpoint in the middle of an epoch says how many batches each process has seen, and not of how many. "
        "Resumed with another number of GPUs or another --max-tokens, fairseq repeats or skips a part of the epoch, or "
        "ends with 'Cannot resume training due to dataloader mismatch'. This row also writes the number of batches.",
        "fairseq's checkpoints have this number",
    ),
    Patch(
        "fairseq.data.iterators.EpochBatchIterator.load_state_dict",
        resuming.load_state_dict,
        "wrong results",
        "See the row above. This row resumes after the same share of the epoch, and the log says so.",
        "fairseq resumes after the same share of the epoch",
    ),
    Patch(
        "fairseq.data.iterators.GroupedIterator.__init__",
        resuming.init_grouped,
        "wrong results",
        "If a training resumes in an epoch with another --update-freq, the batches before are not a multiple of it. "
        "fairseq then counts too few groups for the rest: the epoch does not end, and is trained again. Here the "
        "groups of the rest are counted.",
        "fairseq counts the groups of the rest",
    ),
    Patch(
        "fairseq.data.token_block_dataset.np",
        numpy_names.NumpyWithOldNames("numpy"),
        "an unreadable error",
        "--sample-break-mode eos, and so generation with a language model, needs np.compat.long, which newer versions "
        "of NumPy do not have, and ends with an AttributeError.",
        "fairseq has int in place of np.compat.long",
    ),
    Patch(
        "fairseq.tasks.translation.TranslationTask.args",
        task_options.OPTIONS,
        "an unreadable error",
        "args is the old name of a task's options. --task translation_from_pretrained_bart, which fine-tunes mBART, "
        "reads it, and so do noisy_channel_translation and tasks of users for fairseq up to 0.10. They end with an "
        "AttributeError.",
        "fairseq reads cfg in its tasks",
    ),
    Patch(
        "fairseq.data.language_pair_dataset.np",
        numpy_names.NumpyWithOldNames("numpy"),
        "an unreadable error",
        "--num-batch-buckets of translation needs np.compat.long, which newer versions of NumPy do not have.",
        "fairseq has int in place of np.compat.long",
    ),
    Patch(
        "fairseq.data.data_utils.np",
        numpy_names.NumpyWithOldNames("numpy"),
        "an unreadable error",
        "--num-batch-buckets needs np.percentile with interpolation, which newer versions of NumPy call method.",
        "fairseq has method in place of interpolation",
    ),
    Patch(
        "fairseq.modules.dynamic_crf_layer.np",
        numpy_names.NumpyWithOldNames("numpy"),
        "an unreadable error",
        "--arch nacrf_transformer needs np.float, which newer versions of NumPy do not have.",
        "fairseq has float in place of np.float",
    ),
    Patch(
        "fairseq.data.huffman.huffman_coder.HuffmanCoder._unpad",
        indexed.without_padding,
        "an unreadable error",
        "Data of --dataset-impl huffman cannot be read: bitarray 3 has no util.rindex.",
        "fairseq calls bitarray.find in place of util.rindex",
    ),
    Patch(
        "fairseq.options.parse_args_and_arch",
        precision.parse_args_and_arch,
        "wrong results",
        "fairseq reads --bf16 as --tpu too, so every training with --bf16 ends with \"'NoneType' object has no "
        "attribute 'xla_device'\". Here only --tpu means a TPU. "
        "--local-rank, which torch.distributed.launch adds, is read as --local_rank. "
        "Flags that exclude each other (--fp16, --bf16, --amp) are refused. fairseq-generate ignores "
        "--num-shards, --sacrebleu and --no-seed-provided; here it heeds them. Flags that ask a program for what it "
        "does not do are refused, as is asynchronous writing without iopath, with which fairseq-train ends "
        "with status 0 without training. Flags without an effect on the result give a warning.",
        "fairseq does not set tpu for --bf16, and heeds or refuses these flags",
    ),
    Patch(
        "fairseq.distributed.utils.call_main",
        precision.call_main,
        "an unreadable error",
        "--fp16 in a training on a CPU ends with 'Torch not compiled with CUDA enabled'. Here it ends in one sentence "
        "before data are read, and so do --amp with --cpu on a machine with a GPU, and --use-bmuf in types in which "
        "fairseq would not update the weights. With --cpu on a machine with several GPUs, fairseq starts a process for "
        "each GPU, and nccl cannot connect them; here it starts one process, except inside SLURM and torchrun "
        "(fairseq-hydra-train needs distributed_training.distributed_world_size=1).",
        "fairseq checks these flags before it starts, and --cpu starts one process",
    ),
    Patch(
        "fairseq.trainer.Trainer.__init__",
        precision.init_trainer,
        "wrong results",
        "fairseq-hydra-train ignores common.memory_efficient_bf16 and common.memory_efficient_fp16 without common.bf16 "
        "and common.fp16, and trains in float32. The checks of call_main are made here too, since fairseq-hydra-train "
        "loads the plugin after it has called call_main. In 16 bits on a CPU, oneDNN generates code for each size of a "
        "matrix product; here layers of the class torch.nn.Linear compute products of few different sizes.",
        "fairseq-hydra-train sets bf16 for memory_efficient_bf16, and the row of call_main goes",
    ),
    Patch(
        "fairseq.models.BaseFairseqModel.prepare_for_inference_",
        precision.prepare_for_inference_,
        "wrong results",
        "fairseq-generate, fairseq-interactive and fairseq-eval-lm ignore --bf16 and compute in float32. Models of "
        "speech, whose input they give in float32, do so here too, after a warning, and so do models with adaptive "
        "softmax and models that are not autoregressive, with which they would round probabilities and lengths.",
        "these programs convert models for --bf16",
    ),
    Patch(
        "fairseq.criterions.build_criterion",
        criteria.build_criterion,
        "wrong results",
        "Without --criterion, fairseq-train takes cross_entropy for every task. With --task masked_lm, that is the "
        "loss at all positions, also those without a masked word. Here a warning names the usual criterion.",
        "the tasks of fairseq choose their criterion",
    ),
    Patch(
        "fairseq.criterions.adaptive_loss.AdaptiveLoss.forward",
        adaptive.adaptive_loss,
        "wrong results",
        "The words of each tail of an adaptive softmax are counted from 0, and fairseq's adaptive_loss leaves out the "
        "word with the number of the padding. So in each tail the second word is not trained, and losses and "
        "perplexities are too low. With reduce=False it ends in an error. A model without adaptive softmax is refused "
        "with a sentence.",
        "fairseq ignores the padding in the head alone",
    ),
    Patch(
        "fairseq.optim.adam.Adam",
        optimizers.Adam,
        "lost time",
        "fairseq's Adam is a loop over the weights with several passes over the numbers of each. Here torch's fused "
        "kernel makes one pass. The formula and the state in checkpoints are fairseq's, up to rounding.",
        "fairseq uses a fused Adam on CPUs, and on GPUs without apex",
    ),
    Patch(
        "fairseq.utils.clip_grad_norm_",
        optimizers.clip_grad_norm_,
        "wrong results",
        "With --cpu on a machine with a GPU, fairseq moves the norm of the gradients to the GPU, so --clip-norm ends "
        "the training. Without apex, it starts an operation for each gradient and prints a warning; here one operation "
        "computes all norms.",
        "fairseq computes the norm on the device of the gradients, in one operation",
    ),
    Patch(
        "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.state_dict",
        optimizers.state_dict,
        "wrong results",
        "With --fp16 and --bf16, fairseq updates float32 copies of the weights, and does not save them. So a training "
        "that resumes continues from rounded weights. Here the state of the optimiser contains the copies.",
        "fairseq saves the float32 copies",
    ),
    Patch(
        "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.load_state_dict",
        optimizers.load_state_dict,
        "wrong results",
        "This row reads the float32 copies that the row of state_dict saves. Copies that do not round to the weights "
        "of the model are not used.",
        "the row of state_dict goes",
    ),
    Patch(
        "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.zero_grad",
        optimizers.zero_grad,
        "wrong results",
        "With --bf16 and an optimiser that divides gradients itself (apex's Adam, and that of this table), fairseq "
        "multiplies the factor for the gradients by that of all earlier updates.",
        "fairseq sets the factor to 1 before each update also without a loss scale",
    ),
    Patch(
        "fairseq.optim.amp_optimizer.AMPOptimizer.__init__",
        optimizers.init_amp,
        "wrong results",
        "fairseq ignores --amp-init-scale, and takes its value as the window if --amp-scale-window is given.",
        "fairseq gives both options to torch's GradScaler",
    ),
    Patch(
        "fairseq.optim.amp_optimizer.AMPOptimizer.step",
        optimizers.amp_step,
        "wrong results",
        "With --amp, fairseq divides the gradients by the loss scale twice, since it gives torch's GradScaler the "
        "optimiser once as fairseq's object and once as torch's. Adam's eps and weight decay then count too much, and "
        "other optimisers hardly learn.",
        "fairseq gives the GradScaler one object",
    ),
    Patch(
        "sys.excepthook",
        ending.excepthook,
        "an unreadable error",
        "An input that this plugin refuses, such as a checkpoint of the opposite direction, would end fairseq's "
        "programs with a traceback. Here they end with one line. Other errors and other programs keep theirs.",
        "fairseq's programs end with one line for errors that are the user's",
    ),
]


def apply(patches: Iterable[Patch]) -> None:
    """Put every replacement in its place. A second call changes nothing."""
    allow_checkpoint_classes()
    for patch in patches:
        for owner, name in owners(patch.target):
            setattr(owner, name, patch.replacement)


def owners(target: str) -> list[Any]:
    """Return (module or class, attribute) for each place that *target* of a ``Patch`` names."""
    path, _, name = target.rpartition(".")
    if "*" in path:
        modules = {module: sys.modules[module] for module in list(sys.modules) if fnmatch.fnmatch(module, path)}
        having = {module: it for module, it in modules.items() if name in vars(it) or hasattr(builtins, name)}
        return [(it, name) for module, it in having.items() if not module.startswith("fairseq.examples.")]
    return [(pkgutil.resolve_name(path), name)]
