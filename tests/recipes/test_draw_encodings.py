"""recipes/compare/draw_encodings.py: what positions add to the scores, beside their formulas."""

import math

import pytest
import torch

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.errors import InputError
from recipes.compare.draw_encodings import added_scores, bound, figure_of_models, main
from tests.commands import run_program, train
from tests.references import ROPE, bucket, dot, rotated

LARGEST = 9


def mean_query_and_key(model, head):
    """The query and the key of one head of the encoder's first layer, of the mean word without positions."""
    attention, word = model.encoder.layers[0].self_attn, model.encoder.embed_tokens.weight.mean(0)
    word = (word * math.sqrt(len(word))).double()
    for projection in (attention.q_proj, attention.k_proj):
        vector = projection.weight.double() @ word + projection.bias.double()
        yield vector.view(attention.num_heads, -1)[head].tolist()


def expected_of(name, model, head, distance):
    if name == "alibi":
        return -(2.0 ** (-4 * (head + 1))) * abs(distance)
    if name == "t5":
        numbers = model.encoder.layers[0].self_attn.position.relative_attention_bias
        at = [bucket(each, True, 32, 128) for each in (distance, 0)]
        return float(numbers[at[0], head] - numbers[at[1], head])
    q, k = mean_query_and_key(model, head)
    options = {**ROPE, "rope_fraction": 1.0}
    return (dot(q, rotated(k, distance, options)) - dot(q, k)) / math.sqrt(len(q))


@pytest.mark.parametrize("name", ["alibi", "t5", "rope"])
def test_the_added_scores_are_those_of_the_formula(build, name):
    model = build(position_encoding=name)
    distances, heads = added_scores(model, "encoder", LARGEST)
    assert distances == [*range(-LARGEST, LARGEST + 1)] and len(heads) == 2
    for head, scores in enumerate(heads):
        expected = [expected_of(name, model, head, distance) for distance in distances]
        assert scores == pytest.approx(expected, abs=1e-5)
    distances, heads = added_scores(model, "decoder", LARGEST)
    assert distances == [*range(-LARGEST, 1)] and all(len(scores) == LARGEST + 1 for scores in heads)


def test_the_bound_is_that_of_the_paper():
    """By hand, for a head of 4: S_1 = 1, S_2 = 1 + exp(1j * distance * (1 - 1/100)) up to a common rotation."""
    at = [(1 + abs(2 * math.cos(distance * (1 - 0.01) / 2))) / 2 for distance in range(50)]
    assert bound([1.0, 0.01], 49) == pytest.approx(at)  # 10000^(-2t/4)


def test_each_model_has_a_row_and_each_head_a_panel(build):
    models = [("RoPE", build()), ("ALiBi", build(position_encoding="alibi")), ("fairseq's", build("transformer_tiny"))]
    panels = figure_of_models(models, "encoder", LARGEST).axes
    assert len(panels) == 9 and [panels[3 * row].get_ylabel() for row in range(3)] == [title for title, _ in models]
    drawn = [len(axes.get_lines()) for axes in panels]
    assert drawn == [1, 1, 1, 1, 1, 0, 1, 1, 0], "the bound is drawn for RoPE alone"
    (line,) = panels[3].get_lines()
    assert line.get_ydata() == pytest.approx([-abs(distance) / 16 for distance in line.get_xdata()], abs=1e-5)


@pytest.mark.parametrize(
    "arch, options, side, message",
    [
        ("transformer_rope_tiny", {"attention_type": "linear"}, "decoder", "A: the linear attention of its decoder"),
        ("transformer_rope_tiny", {"encoder_layers": 0}, "encoder", "A: its encoder has no layers"),
        *(
            (arch, {f"max_{place}_positions": positions, **options}, side, f"--largest {LARGEST}: .* at most 8")
            for arch, options in (
                ("transformer_rope_tiny", {"position_encoding": "tupe"}),
                ("transformer_rope_tiny", {"position_encoding": "learned"}),
                ("transformer_tiny", {"encoder_learned_pos": True, "decoder_learned_pos": True}),
            )
            for side, place, positions in (("encoder", "source", 18), ("decoder", "target", 9))
        ),
    ],
)
def test_models_without_such_scores_are_refused_by_name(build, arch, options, side, message):
    with pytest.raises(InputError, match=message):
        figure_of_models([("A", build(arch, **options))], side, LARGEST)
    if "at most 8" in message:
        figure_of_models([("A", build(arch, **options))], side, 8)


def test_the_program_draws_a_trained_model_and_refuses_other_files(data_bin, tmp_path, capsys):
    train(data_bin, tmp_path, "--position-encoding", "shaw", "--max-update", 1)
    picture, checkpoint = tmp_path / "encodings.svg", tmp_path / "checkpoint_last.pt"
    run_program("python", "-m", "recipes.compare.draw_encodings", f"Shaw={checkpoint}", "--output", picture)
    assert picture.read_text().count("<svg") == 1
    torch.save({"model": {}, "args": None}, tmp_path / "empty.pt")
    state = load_checkpoint(str(checkpoint))
    del state["model"]["encoder.layers.0.fc1.weight"]
    torch.save(state, tmp_path / "lacking.pt")
    for words, message in (
        ([f"A={tmp_path}/nothing.pt"], f"{tmp_path}/nothing.pt: No such file or directory"),
        ([f"A={tmp_path}/empty.pt"], "empty.pt"),
        ([f"A={tmp_path}/lacking.pt"], "lacking.pt does not fit its own options: it lacks encoder.layers.0.fc1.weight"),
        ([f"A={checkpoint}", "--user-dir", "mine"], "--user-dir mine: must be a folder that exists"),
        ([str(checkpoint)], "must be TITLE=CHECKPOINT"),
        ([f"A={checkpoint}", "--largest", "0"], "--largest 0: must be 1 or more"),
        ([f"A={checkpoint}", "--output", "x.gif"], "--output x.gif: must end with .svg, .png, .pdf"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["--output", str(picture), *words])
        assert stopped.value.code != 0
        assert message in f"{stopped.value.code} {capsys.readouterr().err}"
