"""recipes/compare/full_stop.py: the probability of the end after the first full stop."""

import pytest
import torch
from fairseq import checkpoint_utils

from recipes.compare import full_stop
from recipes.compare.full_stop import after_the_first_stop, main, sureness

STOP, END, PAD = 9, 2, 1


def test_the_place_after_the_first_stop_counts_only_if_a_word_follows():
    rows = torch.tensor(
        [
            [5, 9, 6, 9, 2],
            [5, 6, 7, 8, 2],  # no stop
            [5, 6, 7, 9, 2],  # the last word is the stop
            [9, 5, 2, 1, 1],
            [5, 9, 2, 1, 1],
            [5, 6, 7, 8, 9],
        ]
    )
    assert after_the_first_stop(rows, STOP, END, PAD).tolist() == [2, 0, 0, 1, 0, 0]


def test_the_probabilities_are_those_of_each_sentence_alone(trained, data_bin, monkeypatch):
    monkeypatch.setattr(full_stop, "STOP", "DOG")
    checkpoint = trained / "checkpoint_last.pt"
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data_bin)})
    model.eval()
    words = task.target_dictionary
    task.load_dataset("test")
    ends, following = [], []
    for pair in task.dataset("test"):
        target = pair["target"].tolist()
        after = target.index(words.index("DOG")) + 1 if words.index("DOG") in target else len(target) - 1
        if after >= len(target) - 1:
            continue
        source = pair["source"].unsqueeze(0)
        previous = torch.tensor([[words.eos(), *target[:-1]]])
        with torch.no_grad():
            logits = model(source, torch.tensor([source.size(1)]), previous)[0]
        probabilities = logits[0, after].softmax(dim=0)
        ends.append(probabilities[words.eos()].item())
        following.append(probabilities[target[after]].item())
    actual = sureness(checkpoint, data_bin)
    assert actual.lines == len(ends) > 3
    assert actual.of_the_end == pytest.approx(sum(ends) / len(ends), rel=1e-4)
    assert actual.of_the_next_word == pytest.approx(sum(following) / len(ends), rel=1e-4)


def test_a_folder_without_models_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path}: must be the work folder of a finished comparison"):
        main([str(tmp_path)])
