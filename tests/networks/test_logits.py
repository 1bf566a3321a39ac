"""Which output of a network is the logits: the only tensor, the one of that name, or what is said."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from alight import cascade, record
from alight.errors import BadInput, Mismatch
from alight.networks.attach import attach_heads
from alight.networks.store import load_model, save_model

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@dataclass
class Output:
    features: Tensor
    logits: Tensor


class Pair(NamedTuple):
    aux: Tensor
    logits: Tensor


class Network(nn.Module):
    """Gives features of 8 numbers and logits of 3 classes in some form."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.end = form, nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        self.one = nn.Sequential(nn.Linear(6, 8), nn.ReLU())

    def logits(self, x):
        return self.end(self.one(x))

    def forward(self, x) -> Any:
        features = self.one(x)
        return self.form(features, self.end(features))


CLEAR = {
    "a tensor": lambda features, logits: logits,
    "the only tensor": lambda features, logits: (logits, None),
    "by name in a dict": lambda features, logits: {"features": features, "logits": logits},
    "by name in a dataclass": Output,
    "by name in a named tuple": Pair,
}


@pytest.mark.parametrize("form", CLEAR)
def test_logits_are_recognised_where_there_is_one_choice(form):
    network = Network(CLEAR[form]).eval()
    model = attach_heads(network, ["one"], example=BATCH).eval()
    assert model.num_classes == 3
    assert torch.equal(model(BATCH)[-1], network.logits(BATCH))


def last_of(output):
    return output[-1] * 2


CHOICES = {  # how a network gives its logits, what says so, and what is expected of logits
    "index": (lambda features, logits: (features, logits), 1, lambda logits: logits),
    "index from the end": (lambda features, logits: [features, logits], -1, lambda logits: logits),
    "name": (lambda features, logits: {"features": features, "scores": logits}, "scores", lambda logits: logits),
    "position in a dict": (lambda features, logits: {"features": features, "scores": logits}, 1, lambda logits: logits),
    "nested": (lambda features, logits: (features, (logits, None)), 1, lambda logits: logits),
    "another than logits": (lambda features, logits: Pair(logits * 3, logits), "aux", lambda logits: logits * 3),
    "function": (lambda features, logits: (features, logits), last_of, lambda logits: logits * 2),
}


@pytest.mark.parametrize("after", [["one"], 1])
@pytest.mark.parametrize("case", CHOICES)
def test_the_choice_holds_when_cut_checked_saved_and_loaded(case, after, tmp_path):
    form, choice, expected = CHOICES[case]
    network = Network(form).eval()
    model = attach_heads(network, after, example=BATCH, logits=choice).eval()
    assert model.num_classes == 3
    logits = expected(network.logits(BATCH))
    assert torch.equal(model(BATCH)[-1], logits)
    folder = save_model(model, tmp_path)
    if callable(choice):
        with pytest.raises(Mismatch, match=r"its logits are made by last_of: pass it in as load_model"):
            load_model(folder, backbone=Network(form))
    again = load_model(folder, backbone=Network(form), logits=choice if callable(choice) else None)
    assert torch.equal(again(BATCH)[-1], logits)
    assert torch.equal(again.train()(BATCH)[-1], logits)  # no layer differs in training


UNCLEAR = {
    "features first": (lambda features, logits: (features, logits), r"2 tensors \(\[0\] of shape .*, 8\), \[1\] of"),
    "no name": (lambda features, logits: {"a": features, "b": logits}, r"\['a'\] of shape .*logits=0"),
    "nothing": (lambda features, logits: None, r"0 tensors \(NoneType\)"),
}


@pytest.mark.parametrize("case", UNCLEAR)
@pytest.mark.parametrize("after", [["one"], 1])
def test_outputs_that_leave_a_choice_are_listed(case, after):
    form, message = UNCLEAR[case]
    with pytest.raises(BadInput, match=message):
        attach_heads(Network(form), after, example=BATCH)


@pytest.mark.parametrize("choice", [2, -3, "scores"])
def test_a_choice_that_is_not_there_is_refused(choice):
    with pytest.raises(BadInput, match=f"2 tensors, and none is {choice!r}"):
        attach_heads(Network(lambda *both: both), ["one"], example=BATCH, logits=choice)


def test_a_cascade_reads_logits_by_the_same_rule():
    networks = [Network(Output), Network(CLEAR["a tensor"])]
    said = record(cascade(networks, example=BATCH), BATCH, progress=False).predictions[:, 0]
    assert said.tolist() == networks[0].logits(BATCH).argmax(1).tolist()
    with pytest.raises(BadInput, match="let it return these alone"):
        cascade([Network(lambda *both: both), networks[1]], example=BATCH)


def ending_in(*last):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), *last)


@pytest.mark.parametrize("last", [(nn.Sigmoid(),), (nn.Sequential(nn.Identity(), nn.Sigmoid()),)])
def test_a_network_that_gives_every_class_a_probability_of_its_own_is_refused(last):
    with pytest.raises(BadInput, match=r"ends in a sigmoid, .* leave the sigmoid out"):
        attach_heads(ending_in(*last), ["1"], example=torch.randn(2, 6))


class SigmoidOfFunctions(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.first, self.last, self.end = nn.Linear(6, 8), nn.Linear(8, 4), end

    def forward(self, x):
        return self.end(self.last(self.first(x).relu()))


@pytest.mark.parametrize("end", [torch.sigmoid, nn.functional.sigmoid, torch.Tensor.sigmoid])
def test_a_sigmoid_is_found_however_it_is_called(end):
    with pytest.raises(BadInput, match="ends in a sigmoid"):
        attach_heads(SigmoidOfFunctions(end), ["first"], example=torch.randn(2, 6))


def test_a_network_that_gives_probabilities_is_warned_of_and_taken_by_their_logarithms():
    network, batch = ending_in(nn.Softmax(1)), torch.randn(5, 6)
    with pytest.warns(UserWarning, match=r"gives probabilities, not logits: .* logits=torch.log"):
        attach_heads(network, ["1"], example=batch[:2])
    model = attach_heads(network, ["1"], example=batch[:2], logits=torch.log)
    torch.testing.assert_close(model.eval()(batch)[-1].softmax(1), network(batch))


NOT_ONE_CLASS = {
    "segmentation": lambda x: x[:, :, None, None].expand(-1, -1, 8, 8),
    "boxes and scores of anchors": lambda x: x[:, None].repeat(1, 10, 1),
    "labels of tokens": lambda x: x.unflatten(1, (2, 2)),
    "a number per sample": lambda x: x[:, 0],
}


@pytest.mark.parametrize("task", NOT_ONE_CLASS)
def test_networks_that_decide_about_more_than_one_class_per_sample_are_refused_when_heads_are_attached(task):
    with pytest.raises(BadInput, match=r"not \(samples, classes\): exits decide about one class|gives one logit"):
        attach_heads(SigmoidOfFunctions(NOT_ONE_CLASS[task]), ["first"], example=torch.randn(2, 6))
