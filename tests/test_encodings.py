"""What docs/encodings.md promises of every position encoding, by fairseq's own commands."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_rope.positions import ENCODINGS
from fairseq_rope.tools.average import main as average
from fairseq_rope.tools.convert_layout import main as convert_layout
from tests.commands import PLUGIN, call, outputs, train, training, valid_losses

DOCS = Path(__file__).parents[1] / "docs" / "encodings.md"
SHORT = ["--max-len-a", 0, "--max-len-b", 12]
# the flags of each encoding; xpos is for decoders only
FLAGS = {name: ["--position-encoding", name] for name in ENCODINGS}
FLAGS["xpos"] = ["--decoder-position-encoding", "xpos"]
SIZES = ("embed-dim=32", "layers=1", "ffn-embed-dim=32", "attention-heads=2")
SMALL = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in SIZES]
BOTH = ["--arch", "multilingual_transformer_rope", *SMALL, "--task", "multilingual_translation"]
BOTH += ["--lang-pairs", "en-de,de-en"]


def generate(data, paths, *flags):
    words = ["--path", ":".join(map(str, paths)), "--user-dir", PLUGIN, "--cpu", "--num-workers", 0, *SHORT, *flags]
    return call("fairseq-generate", data, *words)


def refusal(*command):
    with pytest.raises(ValueError) as refused:
        call(*command)
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_it_resumes_averages_translates_and_changes_into_another_encoding(name, data_bin, trained, tmp_path):
    flags, folder, rope = FLAGS[name], tmp_path / "resumed", trained / "checkpoint_last.pt"
    whole = train(data_bin, tmp_path / "whole", *flags, "--max-epoch", 2)
    folder.mkdir()
    for copy in ("checkpoint1.pt", "checkpoint_last.pt"):  # as at the end of the first epoch
        shutil.copy(tmp_path / "whole" / "checkpoint1.pt", folder / copy)
    resumed = call(*training(data_bin, folder, *flags, "--max-epoch", 2))
    assert valid_losses(resumed) == {2: valid_losses(whole)[2]}
    one, other = (torch.load(each / "checkpoint_last.pt", weights_only=False) for each in (folder, tmp_path / "whole"))
    assert all(torch.equal(weight, other["model"][key]) for key, weight in one["model"].items())

    averaged = tmp_path / "averaged.pt"
    checkpoints = [str(folder / f"checkpoint{epoch}.pt") for epoch in (1, 2)]
    average(["--inputs", *checkpoints, "--output", str(averaged)])
    assert sorted(outputs(generate(data_bin, [averaged, rope], "--beam", 2))) == list(range(20))  # with RoPE

    if name != "rope":
        refused = refusal(*training(data_bin, folder, "--max-epoch", 3))
        assert "checkpoint_last.pt was trained with --" in refused and f"position-encoding {name}, not rope" in refused
        with pytest.raises(SystemExit, match="not of the same model: --.*position-encoding is "):
            average(["--inputs", checkpoints[0], str(rope), "--output", str(averaged)])
    # The weights of another encoding are a beginning for this one.
    log = call(
        *training(data_bin, tmp_path / "tuned", *flags, "--finetune-from-model", rope, "--max-update", 1, "--no-save")
    )
    own = [key for key in one["model"] if re.search(r"\.position\.|embed_positions\.weight", key)]
    assert ("which starts with new values" in log) == bool(own)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(folder / "checkpoint_last.pt")])
    assert type(model.decoder.layers[0].self_attn.position) is ENCODINGS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLAGS if name != "learned"])  # no vectors for other positions
def test_it_is_an_encoding_of_the_align_and_multilingual_models(name, data_bin, tmp_path):
    align = ["--arch", "transformer_rope_align", *SMALL, "--alignment-layer", 0]
    for arch in (align, BOTH):
        losses = valid_losses(train(data_bin, tmp_path / str(arch[1]), *arch, *FLAGS[name], "--max-update", 1))
        assert losses and all(math.isfinite(float(loss)) for loss in losses.values())


def test_sides_can_have_different_encodings(data_bin, tmp_path):
    sides = ["--encoder-position-encoding", "alibi", "--decoder-position-encoding", "rope"]
    train(data_bin, tmp_path, *sides, "--alibi-type", "asymmetric", "--rope-layout", "half", "--max-update", 1)
    path = tmp_path / "checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    encoder, decoder = (side.layers[0].self_attn.position for side in (model.encoder, model.decoder))
    assert type(encoder) is ENCODINGS["alibi"] and encoder.less == 0.5
    assert type(decoder) is ENCODINGS["rope"] and decoder.layout == "half"
    resumed = training(data_bin, tmp_path, *sides, "--rope-layout", "half", "--max-update", 2)
    assert "was trained with --alibi-type asymmetric, not symmetric" in refusal(*resumed)

    # Only the side that rotates is converted.
    convert_layout(["--path", str(path), "--rope-layout", "interleaved", "--output", str(tmp_path / "turned.pt")])
    before, after = (torch.load(each, weights_only=False)["model"] for each in (path, tmp_path / "turned.pt"))
    changed = {key.split(".")[0] for key, weight in before.items() if not torch.equal(weight, after[key])}
    assert changed == {"decoder"}


def test_resuming_with_another_encoding_is_refused_unless_the_optimiser_is_new(data_bin, trained, sinusoidal, tmp_path):
    start = ["--restore-file", trained / "checkpoint_last.pt", "--max-update", 1]
    resumed = training(data_bin, tmp_path / "alibi", *start, "--position-encoding", "alibi")
    assert "position-encoding rope, not alibi" in refusal(*resumed)
    call(*resumed, "--reset-optimizer", "--reset-dataloader")
    refused = refusal(*training(data_bin, tmp_path / "rope", "--restore-file", sinusoidal, "--max-epoch", 2))
    assert "--encoder-position-encoding sinusoidal, not rope" in refused


def test_the_example_of_the_documentation_trains_and_translates(data_bin, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(# my_positions/__init__\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    folder = tmp_path / "my_positions"
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    monkeypatch.setitem(ENCODINGS, "recency", None)
    mine = ["--user-dir", folder, "--position-encoding", "recency"]
    train(data_bin, tmp_path / "model", *mine, "--recency-strength", 0.5, "--max-update", 1)
    path = tmp_path / "model" / "checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert {layer.self_attn.position.strength for layer in (*model.encoder.layers, *model.decoder.layers)} == {0.5}
    assert sorted(outputs(generate(data_bin, [path], "--user-dir", folder))) == list(range(20))
    refused = refusal(*training(data_bin, tmp_path / "other", *mine, "--recency-strength", -1))
    assert refused.startswith("--recency-strength -1.0: ")
    unused = refusal(*training(data_bin, tmp_path / "other", "--recency-strength", 2))
    assert unused.startswith("--recency-strength 2.0: ")
