"""fairseq's own tests, with the plugin loaded and with our models in place of the transformer and models made of it.

The suite is not part of this repository. ``FAIRSEQ_SOURCE`` is the path of a checkout of fairseq, or of an archive with
its folders ``tests`` and ``examples``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.commands import ENVIRONMENT, LIMIT, PLUGIN, ROOT

# Tests that train, generate or script with a transformer. The others train other models.
OF_BINARIES = """
    transformer multilingual_transformer translation_multi_simple_epoch translation_multi_simple_epoch_no_vepoch
    translation_multi_simple_epoch_dicts translation_multi_simple_epoch_src_tgt_dict_spec
    transformer_cross_self_attention mixture_of_experts alignment alignment_full_context transformer_layerdrop
    generation eval_bleu update_freq max_positions raw
""".split()
FILES = """
    sequence_generator export multihead_attention reproducibility activation_checkpointing inference_dropout
    checkpoint_utils transformer roberta valid_subset_checks lm_context_window
""".split()
OF_LANGUAGE_MODELS = [
    *(f"LanguageModeling::test_{name}" for name in ("transformer_lm", "normformer_lm")),
    "LanguageModeling::test_transformer_lm_with_adaptive_softmax",
    *(f"MaskedLanguageModel::test_roberta_{name}" for name in ("masked_lm", "sentence_prediction")),
    *(f"MaskedLanguageModel::test_roberta_regression_{name}" for name in ("single", "multiple")),
    "MaskedLanguageModel::test_r4f_roberta",
]
TRANSFORMERS = [
    *(f"tests/test_binaries.py::TestTranslation::test_{name}" for name in OF_BINARIES),
    *(f"tests/test_binaries.py::Test{name}" for name in OF_LANGUAGE_MODELS),
    "tests/test_binaries.py::TestActivationCheckpointing",
    *(f"tests/test_{name}.py" for name in FILES),
]
# FAIRSEQ_SUITE=whole also runs tests that take most of the suite's time: those of LASER, which has none of our
# positions, and of models without a beam search from left to right; and with fairseq's models and the plugin, those
# trainings that run with the rotary model in any case.
IS_WHOLE = os.environ.get("FAIRSEQ_SUITE") == "whole"
LEFT_OUT = ("xformers", *(() if IS_WHOLE else ("laser", "insertion", "cmlm", "nonautoregressive")))
# Refused by design: docs/compatibility.md, "Refused".
REFUSED = {
    "tests/test_binaries.py::TestTranslation::test_transformer_cross_self_attention",
    "tests/test_multihead_attention.py::test_add_bias_parity",
    # torch.jit.script
    *(f"tests/test_export.py::TestExportModels::test_export_{name}" for name in ("multihead_attention", "transformer")),
    "tests/test_export.py::TestExportModels::test_export_transformer_no_token_pos_emb",
    "tests/test_export.py::TestExportModels::test_incremental_state_multihead_attention",
    "tests/test_sequence_generator.py::TestJitSequenceGenerator::test_ensemble_sequence_generator",
    *(
        f"tests/test_sequence_generator.py::TestJitSequenceGenerator::test_export_{name}"
        for name in ("ensemble_model", "transformer")
    ),
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder with fairseq's tests/ and examples/, and a copy of the plugin's folder."""
    if "FAIRSEQ_SOURCE" not in os.environ:
        pytest.skip("FAIRSEQ_SOURCE is not set to a checkout of fairseq or an archive of its tests")
    source = Path(os.environ["FAIRSEQ_SOURCE"])
    folder = tmp_path_factory.mktemp("fairseq")
    if source.is_dir():
        for part in ("tests", "examples"):
            shutil.copytree(source / part, folder / part)
    else:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    shutil.copytree(PLUGIN, folder / "fairseq_rope", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(suite: Path, mode: str, *words: str) -> str:
    """The output of pytest on fairseq's tests. fairseq_with.py describes *mode*."""
    path = os.pathsep.join([str(suite), str(ROOT / "tests")])
    command = [
        *(sys.executable, "-m", "pytest", "-p", "fairseq_with", "-p", "no:cacheprovider", "--tb=line"),
        *("-k", f"not ({' or '.join(LEFT_OUT)})", "-c", os.devnull, "--rootdir", str(suite)),
        *("--continue-on-collection-errors", *words),
    ]
    environment = {**ENVIRONMENT, "FAIRSEQ_WITH": mode, "PYTHONPATH": path}
    an_hour = 12 * LIMIT
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=an_hour).stdout


def collected(suite: Path, mode: str, cases: Iterable[str]) -> set[str]:
    """The names of the tests in *cases*."""
    return set(re.findall(r"^(tests/\S+::.*)$", run(suite, mode, "--collect-only", "-q", *cases), re.M))


def passed(suite: Path, mode: str, cases: Iterable[str]) -> set[str]:
    """The names of the tests of *cases* that pass."""
    printed = run(suite, mode, "-v", "-n", "2", "--dist", "worksteal", *sorted(cases))
    assert re.search(r"\d (passed|failed|skipped)", printed), printed
    return set(re.findall(r"^\[gw\d+\] \[ *\d+%\] PASSED (.*?)\s*$", printed, re.M))


def passing_only_with(other: str, mode: str, suite: Path, cases: Iterable[str]) -> set[str]:
    """The tests of *cases* that pass with the *other* mode, and fail with *mode*, at first and then alone."""
    every_test = collected(suite, other, cases)
    first = passed(suite, mode, cases)
    print(f"{len(first)} of {len(every_test)} tests of fairseq pass with {mode}")
    assert len(first) > len(every_test) / 2
    # Some of fairseq's tests fail at random or because of an earlier test.
    missing = every_test - first
    only_other = passed(suite, other, missing) if missing else set()
    return {case for case in only_other if not passed(suite, mode, [case])}


@pytest.mark.slow
def test_all_tests_that_pass_with_fairseq_alone_pass_with_the_plugin(suite):
    left_out = () if IS_WHOLE else (name for name in TRANSFORMERS if "test_binaries" in name)
    cases = ["tests", *(f"--deselect={name}" for name in left_out)]
    assert passing_only_with("nothing", "plugin", suite, cases) == set()


@pytest.mark.slow
def test_tests_of_transformers_pass_with_the_rotary_models(suite):
    assert passing_only_with("transformer", "transformer_rope", suite, TRANSFORMERS) == REFUSED
