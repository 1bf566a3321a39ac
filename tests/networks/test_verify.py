"""`verify` finds what attaching refuses, also where the guard that refuses it is taken out."""

import copy
import random
import re

import pytest
import torch
import transformers
from torch import nn
from two_convolutions import IMAGES, DropsAtRandom, Network

from alight.cli import main
from alight.cutting import calls
from alight.cutting import cut as cutting
from alight.errors import BadInput
from alight.networks import attach, features, multi_exit
from alight.networks.attach import attach_heads, from_outputs
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import load_model, save_model


def test_verify_finds_a_head_that_writes_into_what_it_reads(monkeypatch):
    monkeypatch.setattr(attach, "checked_read", lambda head, carried, name: head(carried[0]))
    model = attach_heads(Network(), ["first"], example=IMAGES)
    model.heads[0] = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6 * 144, 4))
    with pytest.raises(BadInput, match="in place"):
        model.verify()


def test_verify_finds_weights_that_were_exchanged_in_the_network_alone():
    model = attach_heads(Network(), ["first"], example=IMAGES)
    model.network.classifier = nn.Linear(6, 4)
    with pytest.raises(BadInput, match="do not give what the network gives"):
        model.verify()


def test_verify_changes_nothing_and_says_whether_the_network_can_be_trained(tmp_path):
    model = attach_heads(Network(), ["first"], example=IMAGES).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = torch.randn(1, 3, 20, 16)
    state = random.getstate(), torch.get_rng_state()
    assert model.verify() == ""
    assert model.verify(other) == ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    again = load_model(save_model(model, tmp_path), backbone=Network())
    assert again.verify() == ""
    assert again.sizes == "(3, any size 1, any size 2)"
    refusing = attach_heads(DropsAtRandom(), ["first"], example=IMAGES)
    assert "cannot run in training mode" in refusing.verify()


class HasRoomForFew(Network):
    """Gives no more than forty samples of a batch to its classifier."""

    class Room(nn.Module):
        def forward(self, x):
            return torch.cat([x[:40], torch.zeros_like(x[40:])])

    def __init__(self):
        super().__init__()
        self.room = self.Room()

    def rest(self, x):
        return self.room(super().rest(x))


def test_a_batch_that_is_given_is_verified_unchanged():
    model = attach_heads(HasRoomForFew(), ["first"], example=IMAGES)
    assert model.verify(torch.randn(30, 3, 12, 12)) == ""
    with pytest.raises(BadInput, match="depend on the other samples of its batch, as first seen in what 'room'"):
        model.verify(torch.randn(90, 3, 12, 12))


def test_a_size_that_was_verified_with_random_inputs_is_still_compared_for_the_first_batch():
    model = attach_heads(Network(), ["first"], example=IMAGES).eval()
    assert model.verify() == ""
    model.network.classifier = nn.Linear(6, 4)
    with pytest.raises(BadInput, match="the exits do not give what the network gives"):
        model(torch.randn(4, 3, 12, 12))


class ScalesBytes(Network):
    def forward(self, x):
        return super().forward(x / 255 if x.dtype == torch.uint8 else x)


def test_without_its_code_a_network_takes_inputs_of_the_dtype_that_it_was_compared_with(tmp_path):
    model = load_model(save_model(attach_heads(ScalesBytes(), ["first"], example=IMAGES), tmp_path))
    model(torch.randn(4, 3, 12, 12))
    with pytest.raises(BadInput, match=r"inputs of uint8, and this folder holds .* compared with it for float32"):
        model(torch.zeros(4, 3, 12, 12, dtype=torch.uint8))


class CentresItsInput(Network):
    def forward(self, x):
        x -= 0.5
        return super().forward(x)


def test_a_network_that_writes_into_its_input_is_checked_without_its_code(tmp_path):
    folder = save_model(attach_heads(CentresItsInput(), ["first"], example=IMAGES.clone()), tmp_path)
    assert load_model(folder).verify() == ""


def test_a_model_without_a_network_has_nothing_to_be_compared_with():
    described = {"source": "stages", "example": {"shape": [2, 4], "dtype": "float32"}}
    with pytest.raises(BadInput, match="there is no network to compare with"):
        MultiExitModel(
            [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)], recipe=described
        ).verify()


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.early, self.late = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        return [self.early(x), self.late(self.second(x))]


def test_a_network_with_several_outputs_is_verified():
    assert from_outputs(TwoOutputs(), torch.randn(2, 4)).verify() == ""


def test_a_network_in_another_dtype_is_verified_in_it():
    assert attach_heads(Network(), ["first"], example=IMAGES).to(torch.bfloat16).verify() == ""


class Negated(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *carried):
        return -self.stage(*carried)


def test_verify_finds_a_loaded_stage_that_is_not_the_networks(tmp_path):
    model = load_model(save_model(attach_heads(Network(), ["first"], example=IMAGES), tmp_path), backbone=Network())
    model.stages[1] = Negated(model.stages[1])
    with pytest.raises(BadInput, match="do not give what the network gives"):
        model.verify()


def encoder(name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(vocab_size=60, initializer_range=0.5, **sizes)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).eval()


TEXTS = {"input_ids": torch.randint(5, 60, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
TOKENS = torch.randn(2, 6, 8)
NO_PADDING = torch.zeros(2, 6, dtype=torch.bool)


class Padded(nn.Module):
    """torch's own layers, whose mask is True for padding."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.end = nn.Linear(8, 3)

    def forward(self, tokens, src_key_padding_mask):
        for layer in (self.first, self.second):
            tokens = layer(tokens, src_key_padding_mask=src_key_padding_mask)
        return self.end(tokens.masked_fill(src_key_padding_mask[..., None], 0).sum(1))


class Flagged(Padded):
    """The same mask under a name that does not say so."""

    def forward(self, tokens, flags):
        return super().forward(tokens, flags)


class Unmasked(nn.Module):
    """A stage behind which every token counts."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *carried):
        hidden, *others = self.stage(*carried)
        return hidden, *map(torch.ones_like, others)


def test_verify_finds_an_mpnet_that_lost_its_position_bias_when_it_was_loaded(tmp_path):
    folder = save_model(attach_heads(encoder("MPNet"), 1, example=TEXTS), tmp_path)
    model = load_model(folder, backbone=encoder("MPNet"))
    assert model.verify() == ""
    model.stages[1] = copy.deepcopy(model.stages[1])
    with torch.no_grad():
        model.stages[1].get_parameter("mpnet.encoder.relative_attention_bias.weight").zero_()
    with pytest.raises(BadInput, match="do not give what the network gives"):
        model.verify()


def test_verify_finds_an_encoder_whose_mask_is_dropped():
    model = attach_heads(encoder("Bert"), 1, example=TEXTS)
    assert model.verify() == ""
    model.stages[0] = Unmasked(model.stages[0])  # for later stages, and heads
    with pytest.raises(BadInput, match="'attention_mask' hides from the network"):
        model.verify()


def test_verify_finds_that_a_mask_which_the_network_takes_is_ignored(monkeypatch):
    model = attach_heads(encoder("Bert"), 1, example={"input_ids": TEXTS["input_ids"]})
    assert model.verify() == ""
    monkeypatch.setattr(multi_exit, "by_name", lambda batch, names: tuple(batch[name] for name in names))
    with pytest.raises(BadInput, match="takes 'attention_mask', was cut without it, and it is ignored"):
        model.verify()


def other_meaning(mask, *_):
    return {"tokens": "padding", "padding": "tokens"}[mask.meaning]


MASK_MUTATIONS = {
    "in the head": (Padded, lambda patch: patch.setattr(features.Masks, "of", other_meaning)),
    "everywhere": (
        Padded,
        lambda patch: (
            patch.setattr(features, "mask_meaning", {"src_key_padding_mask": "tokens"}.get),
            patch.setattr(features.Masks, "_check_meaning", lambda *_: None),
        ),
    ),
    "not asked for": (Flagged, lambda patch: patch.setattr(features, "_is_flags", lambda _: False)),
}


@pytest.mark.parametrize("case", MASK_MUTATIONS)
def test_verify_finds_a_head_that_reads_padding(case, monkeypatch):
    kind, mutate = MASK_MUTATIONS[case]
    stated = {"mask": {"flags": "padding"}} if kind is Flagged else {}
    assert attach_heads(kind(), ["first"], example=(TOKENS, NO_PADDING), **stated).verify() == ""
    mutate(monkeypatch)
    model = attach_heads(kind(), ["first"], example=(TOKENS, NO_PADDING))
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"hides from the network|it means padding"):
        model.verify()


def test_a_head_may_read_everything_where_the_user_says_that_there_is_no_mask():
    assert attach_heads(Flagged(), ["first"], example=(TOKENS, NO_PADDING), mask={}).verify() == ""


class Sounds(nn.Module):
    """Features (batch, channels, time), of any length unless they are flattened."""

    def __init__(self, flat):
        super().__init__()
        self.first, self.flat = nn.Conv1d(1, 6, 3, padding=1), flat
        self.end = nn.Linear(6 * 16 if flat else 6, 3)

    def forward(self, x):
        x = self.first(x).relu()
        return self.end(x.flatten(1) if self.flat else x.mean(2))


class Rows(nn.Module):
    """Features (batch, height, width, channels)."""

    def __init__(self):
        super().__init__()
        self.first, self.end = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.end(self.first(x.permute(0, 2, 3, 1)).mean((1, 2)))


AXES = {
    "any length": (lambda: Sounds(flat=False), torch.randn(2, 1, 16)),
    "one length": (lambda: Sounds(flat=True), torch.randn(2, 1, 16)),
    "maps": (Rows, torch.randn(2, 3, 8, 8)),
}


@pytest.mark.parametrize("case", AXES)
@pytest.mark.parametrize("head", ["auto", "mlp"])
def test_verify_finds_heads_that_read_positions_for_channels(case, head, monkeypatch):
    network, example = AXES[case]
    assert attach_heads(network(), ["first"], example=example, head=head).verify() == ""
    right = attach.are_channels_last
    monkeypatch.setattr(attach, "are_channels_last", lambda *given: [not last for last in right(*given)])
    model = attach_heads(network(), ["first"], example=example, head=head)
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"the head at 'first' reads features of shape .* with channels"):
        model.verify()


def test_verify_reads_heads_at_another_size_whatever_was_said_of_axes():
    network, example = AXES["any length"]
    assert attach_heads(network(), ["first"], example=example, channels="first").verify() == ""
    with pytest.raises(BadInput, match=r"fails on features of shape .* where the input has another size"):
        attach_heads(network(), ["first"], example=example, channels="last").verify()
    assert attach_heads(network(), ["first"], example=example, head="flatten_linear").verify() == ""


class SeveralOutputs(Network):
    form = tuple

    def forward(self, x):
        features = self.rest(self.first(x).relu())
        return self.form((features, self.classifier(features)))


class NamedOutputs(SeveralOutputs):
    @staticmethod
    def form(outputs):
        return dict(zip(("features", "scores"), outputs, strict=True))


@pytest.mark.parametrize("kind", [SeveralOutputs, NamedOutputs])
def test_verify_finds_an_output_that_nobody_named(kind, monkeypatch):
    assert attach_heads(kind(), ["first"], example=IMAGES, logits=1).verify() == ""
    assert (
        attach_heads(
            kind(),
            ["first"],
            example=IMAGES,
            logits=lambda output: [*output][1] if isinstance(output, tuple) else output["scores"],
        ).verify()
        == ""
    )
    monkeypatch.setattr(attach, "pick_logits", lambda output, choice: next(each for each in calls.walk(output)))
    model = attach_heads(kind(), ["first"], example=IMAGES)
    monkeypatch.undo()
    with pytest.raises(BadInput, match="the network gives 2 tensors"):
        model.verify()


class First(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.first = network.first

    def forward(self, x):
        return (self.first(x).relu(),)


class Detaching(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network.classifier(self.network.rest(x.detach()))


@pytest.mark.parametrize("registered", [True, False])
def test_a_model_that_refuses_joint_training_refuses_again_when_loaded(registered, tmp_path, monkeypatch):
    """Traced stages are data, those of a registered cutter are cut again."""
    kind = Network if registered else DropsAtRandom
    if registered:
        cutter = (lambda _: True, lambda network, *_: [First(network), Detaching(network)])
        monkeypatch.setattr(cutting, "CUTTERS", [cutter])
    model = attach_heads(kind(), ["first"], example=IMAGES)
    folder = save_model(model, tmp_path)
    for each in (model, load_model(folder, backbone=kind())):
        assert "cannot run in training mode" in each.verify()
        assert len(each.eval()(IMAGES)) == 2
        for stage in each.train().stages:
            with pytest.raises(BadInput, match="cannot run in training mode"):
                stage(IMAGES)


SAVED_SO = {
    "mask": (Padded, (TOKENS, NO_PADDING), MASK_MUTATIONS["in the head"][1], "hides from the network"),
    "axes": (
        Rows,
        AXES["maps"][1],
        lambda patch: patch.setattr(attach, "are_channels_last", lambda *_: [False]),
        "reads features of shape .* with channels",
    ),
    "output": (
        SeveralOutputs,
        IMAGES,
        lambda patch: patch.setattr(attach, "pick_logits", lambda output, choice: next(iter(calls.walk(output)))),
        "the network gives 2 tensors",
    ),
}


@pytest.mark.parametrize("case", SAVED_SO)
def test_the_command_finds_masks_axes_and_outputs_that_were_saved_wrong(case, monkeypatch, tmp_path, capsys):
    kind, example, mutate, found = SAVED_SO[case]
    mutate(monkeypatch)
    folder = save_model(attach_heads(kind(), ["first"], example=example), tmp_path / "saved")
    monkeypatch.undo()
    assert main(["check", str(folder), "--network", f"{__file__}:{kind.__name__}"]) == 1
    assert re.search(found, capsys.readouterr().err)
