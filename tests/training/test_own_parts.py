"""Own optimizers, schedules and losses take the place of ours, and a checkpoint knows them apart."""

from functools import partial

import numpy as np
import pytest
import torch
from digits import digits, network
from short_training import quick, same, state
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

import alight
from alight.errors import BadInput
from alight.training.checkpoints import identity_of
from alight.training.metrics import cross_entropy
from alight.training.settings import TrainingSettings, learning_rate_factor


def trained(data=None, **options):
    model = network(dropout=0.2)
    history = quick(model, data, **{"mode": "joint", **options})
    return history, state(model)


def assert_same(one, other):
    assert one[0] == other[0]
    assert same(one[1], other[1])


@pytest.mark.parametrize("mode", ["joint", "mixed"])
def test_an_own_optimizer_schedule_and_loss_that_say_the_same_train_the_same(mode):
    own = {
        "optimizer": partial(AdamW, lr=1e-3, weight_decay=1e-4),
        "schedule": lambda done: 0.5 * (1 + np.cos(np.pi * done)),
        "loss": [partial(functional.cross_entropy, reduction="none")] * 3,
    }
    assert_same(trained(mode=mode, epochs=3), trained(mode=mode, epochs=3, **own))


def test_settings_that_are_given_reach_an_own_optimizer_and_others_are_its_own():
    groups = []

    def make(given):
        groups.extend(map(dict, given))
        return SGD(given, lr=0.1)

    trained(optimizer=make, epochs=1)
    assert [group.keys() for group in groups] == [{"params"}]
    ours = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0}
    assert_same(trained(optimizer=make, learning_rate=0.01), trained(learning_rate=0.01, **ours))
    trained(optimizer=make, weight_decay=0.5, epochs=1)
    assert groups[-1]["weight_decay"] == 0.5


def test_groups_keep_their_own_learning_rates_under_a_schedule():
    seen = []

    def make(groups):
        (group,) = groups
        return SGD([{"params": group["params"][:4], "lr": 0.01}, {"params": group["params"][4:], "lr": 0.1}])

    trained(optimizer=make, callbacks=[lambda now: seen.append([group["lr"] for group in now.optimizer.param_groups])])
    np.testing.assert_allclose([second / first for first, second in seen], 10)
    assert seen[0][0] > seen[1][0]


def test_without_decay_of_norms_and_biases_only_matrices_shrink():
    still = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0, "schedule": None, "loss_weights": [1e-12] * 3}
    start = state(network())
    shrunk = {}
    for decay_norms in (True, False):
        model = network()
        quick(model, mode="joint", epochs=1, weight_decay=1.0, decay_norms=decay_norms, **still)
        after = dict(model.named_parameters())
        shrunk[decay_norms] = {name for name in after if after[name].norm() < 0.9 * start[name].norm()}
    matrices = {name for name, weights in network().named_parameters() if weights.ndim > 1}
    assert shrunk[False] == matrices < shrunk[True]


def test_groups_are_those_of_timm():
    from timm.optim import param_groups_weight_decay

    seen = []

    def make(groups):
        seen.extend(groups)
        return AdamW(groups)

    model = network()
    quick(model, mode="joint", epochs=1, optimizer=make, weight_decay=0.05, decay_norms=False)
    theirs = {group["weight_decay"]: set(group["params"]) for group in param_groups_weight_decay(model, 0.05)}
    assert {group["weight_decay"]: set(group["params"]) for group in seen} == theirs


def test_the_learning_rate_warms_up_and_then_follows_the_whole_schedule():
    factors = [learning_rate_factor(TrainingSettings(warm_up=2), epoch, 10) for epoch in np.linspace(0, 10, 101)]
    assert factors[0] == pytest.approx(1 / 25)
    assert np.argmax(factors) == 20
    np.testing.assert_allclose(np.diff(factors[:20]), factors[1] - factors[0])
    assert factors[60] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize("samples", [256, 200])
def test_gradients_of_several_batches_are_those_of_one_large_one(samples):
    batch = digits()[0][:samples]
    parts = [*zip(*(tensor.split(48) for tensor in batch), strict=True)]  # the last one is smaller
    options = {"optimizer": "sgd", "learning_rate": 0.05, "clip": 1.0, "ema": 0.5, "mode": "frozen"}
    together, apart = network(), network()
    quick(together, [batch], **options)
    quick(apart, parts, **options, accumulate=len(parts))
    for name, tensor in together.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], tensor, atol=1e-6, rtol=1e-5)


def test_batches_left_over_at_the_end_of_an_epoch_make_a_step():
    steps = []
    trained([digits()[0][:32]] * 5, accumulate=2, callbacks=[lambda now: steps.append(now.step)])
    assert steps == [3, 6]


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_every_exit_may_have_its_own_loss():
    def zero(logits, labels):
        return 0 * logits.sum(1)

    model, before = network(), state(network())
    history = quick(model, mode="frozen", loss=[zero, cross_entropy, zero], weight_decay=0.0)
    after = state(model)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("heads.0"))
    assert not torch.equal(before["heads.1.1.weight"], after["heads.1.1.weight"])
    assert history.epochs[0].losses[::2] == (0, 0)


def test_mixed_images_and_shares_of_their_labels_train_as_pairs():
    mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
    images, labels = digits()[0][:256]
    shares = []

    def mixed(samples):
        batch = mix(*default_collate(samples))
        shares.append(batch[1])
        return batch

    data = DataLoader([*zip(images, labels, strict=True)], 64, shuffle=True, collate_fn=mixed)
    backbone = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    model = alight.attach_heads(backbone, after=["1"], example=images[:2])
    history = quick(model, data, mode="joint", epochs=8, learning_rate=1e-2)
    assert all(each.shape == (64, 10) for each in shares)
    assert any(((each > 0) & (each < 1)).any() for each in shares)
    assert history.epochs[-1].losses[-1] < history.epochs[0].losses[-1]


SMOOTHING = 0.1


def smoothed(logits, labels, power=2):
    return power * functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="none")


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, logits, labels):
        return self.scale * functional.cross_entropy(logits, labels, reduction="none")

    def method(self, logits, labels):
        return self(logits, labels)


def closed_over(value):
    return lambda logits, labels: value * logits.sum(1)


DIFFERENT = {
    "code": (lambda done: 1 - done, lambda done: 1 + done),
    "constants": (lambda done: done**2, lambda done: done**3),
    "a closure": (closed_over(1.0), closed_over(2.0)),
    "a tensor in a closure": (closed_over(torch.ones(2)), closed_over(torch.zeros(2))),
    "an array in a closure": (closed_over(np.ones(2)), closed_over(np.ones(3))),
    "bound arguments": (partial(smoothed, power=1), partial(smoothed, power=3)),
    "another function": (partial(functional.cross_entropy, reduction="none"), partial(functional.nll_loss)),
    "a callable object": (Scaled(1.0), Scaled(2.0)),
    "a method": (Scaled(1.0).method, Scaled(2.0).method),
    "a class weight": (nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 2.0]))),
    "a module's setting": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "classes": (SGD, AdamW),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_functions_that_do_something_else_are_known_apart(case):
    one, other = DIFFERENT[case]
    assert identity_of(one) != identity_of(other)
    assert identity_of(one) == identity_of(one)


def test_a_function_keeps_its_identity_until_its_constants_change(monkeypatch):
    before = identity_of(smoothed)
    assert identity_of(closed_over(1.0)) == identity_of(closed_over(1.0))
    assert identity_of(closed_over(nn.Linear(2, 2))) == identity_of(closed_over(nn.Linear(2, 2)))  # weights change
    monkeypatch.setitem(globals(), "SMOOTHING", 0.2)
    assert identity_of(smoothed) != before


class KeepsAList(SGD):
    def __init__(self, groups):
        super().__init__(groups, lr=0.1)
        self.param_groups[0]["past"] = []


def test_an_optimizer_whose_state_does_not_fit_into_a_checkpoint_is_refused(tmp_path):
    trained(optimizer=KeepsAList, epochs=1)
    with pytest.raises(BadInput, match="the optimizer keeps a list as 'past', and a checkpoint keeps tensors"):
        trained(optimizer=KeepsAList, checkpoint=tmp_path / "last")
