import pytest
import torch
from torch import nn

from alight.cutting import placement
from alight.cutting.cut import cut
from alight.data.preprocess import Normalisation
from alight.engine.recorder import record
from alight.errors import BadInput
from alight.networks.attach import attach_heads, from_outputs
from alight.networks.heads import FlattenLinear, MLPHead, PooledLinear, TokenHead
from alight.networks.libraries import from_transformers
from alight.networks.multi_exit import MultiExitModel, TwoLogits, check_heads
from alight.networks.store import fingerprint, load_model, save_model
from alight.networks.zoo import msdnet_cifar

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def backbone(num_classes=5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )


def attached(**arguments):
    return attach_heads(backbone(), ["0", "1"], **{"num_classes": 5, "example": IMAGES[:2]} | arguments)


def test_the_last_exit_is_the_backbone_bit_by_bit():
    network = backbone().eval()
    model = attach_heads(network, ["0", "1"], num_classes=5, example=IMAGES[:2]).eval()
    assert model.exits == ("0", "1", "end")
    logits = model(IMAGES)
    assert [tuple(each.shape) for each in logits] == [(4, 5)] * 3
    assert torch.equal(logits[-1], network(IMAGES))


def test_attaching_changes_no_weight_and_no_mode():
    network = backbone()
    network[1].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    model = attach_heads(network, ["0"], example=IMAGES)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert network[0].training
    assert not network[1].training
    assert model.heads.training


def test_automatic_placement_gives_the_requested_number_of_exits():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)]
    model = attach_heads(nn.Sequential(*blocks, nn.Linear(8, 3)), example=torch.randn(2, 8), after=2)
    assert model.num_exits == 3
    assert model.num_classes == 3


def test_the_number_of_classes_is_the_networks_own():
    assert attached(num_classes=None).num_classes == 5
    with pytest.raises(BadInput, match="num_classes is 7, but the network itself gives 5 logits"):
        attached(num_classes=7)
    with pytest.raises(BadInput, match="2 names for 5 classes"):
        attached(classes=["cat", "dog"])


def test_heads_are_chosen_for_all_exits_or_for_each():
    assert {type(head) for head in attached().heads[:2]} == {PooledLinear}
    assert {type(head) for head in attached(head="flatten_linear").heads[:2]} == {FlattenLinear}
    assert [type(head) for head in attached(head=["mlp", "pooled_linear"]).heads] == [
        MLPHead,
        PooledLinear,
        nn.Identity,
    ]
    own = attached(head=lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 5)))
    assert own.heads[0][1].in_features == 8 * 16 * 16


def test_a_head_has_the_device_and_dtype_of_its_features():
    model = attach_heads(backbone().double(), ["0"], example=IMAGES.double())
    assert model.heads[0].linear.weight.dtype == torch.float64


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.classifier = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 5)
        self.block = nn.Linear(12, 12)

    def forward(self, x):
        return self.classifier(self.block(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))


def test_channels_last_maps_are_recognised():
    model = attach_heads(ChannelsLast(), ["block"], example=torch.randn(2, 3, 16, 32))
    assert model.heads[0].settings["channels_last"]
    assert model.heads[0].linear.in_features == 12


def test_text_gets_masked_heads():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    batch = {"input_ids": torch.randint(50, (3, 8)), "attention_mask": torch.ones(3, 8, dtype=torch.int64)}
    batch["attention_mask"][:, 6:] = 0
    network = BertForSequenceClassification(config).eval()
    names = [name for name, part in network.named_modules() if type(part).__name__ == "BertLayer"]
    model = attach_heads(network, names[:2], example=batch).eval()
    assert [type(head) for head in model.heads] == [TokenHead, TokenHead, nn.Identity]
    assert model.heads[0].reads_everything
    assert model.input_names == ("input_ids", "attention_mask")
    with torch.no_grad():
        assert torch.equal(model(batch)[-1], network(**batch).logits)
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][:, 6:] = 1
        torch.testing.assert_close(model(batch)[0], model(changed)[0])


def test_pairs_of_texts_are_distinguished_or_refused():
    from transformers import BertConfig

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    tokens = torch.randint(50, (3, 8))
    single = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": torch.zeros_like(tokens),
    }
    pair = {**single, "token_type_ids": (torch.arange(8) > 4).long().expand(3, 8).contiguous()}
    model = from_transformers(config, count=1).eval()
    assert model(single)[-1].shape == (3, 2)
    with pytest.raises(BadInput, match=r"the batch has 'token_type_ids' \(pairs of texts\)"):
        model(pair)
    model = from_transformers(config, count=1, example=pair).eval()
    assert not torch.equal(model(single)[-1], model(pair)[-1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_logits_of_a_text_do_not_depend_on_padding():
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    network = DebertaV2ForSequenceClassification(config).eval()  # whose layers are given no mask with a row per token
    tokens = torch.randint(1, 50, (3, 6))
    short = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    long = {name: nn.functional.pad(part, (0, 4)) for name, part in short.items()}
    model = attach_heads(network, ["deberta.encoder.layer.1"], example=short).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(short)[0], model(long)[0])
    with pytest.raises(BadInput, match="head 'mlp' would read the padding of features"):
        attach_heads(network, ["deberta.encoder.layer.1"], example=short, head="mlp")


class Giving(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.linear, self.output = nn.Linear(4, 4), output

    def forward(self, x):
        return self.output(self.linear(x))


IN_PLACE = {
    "in place": lambda shape: nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(5)),
    "by a view": lambda shape: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.LazyLinear(5)),
    "in training": lambda shape: nn.Sequential(nn.Dropout(inplace=True), nn.Flatten(), nn.LazyLinear(5)),
    "behind autograd's back": lambda shape: nn.Sequential(Doubled(), nn.Flatten(), nn.LazyLinear(5)),
}


class Doubled(nn.Module):
    def forward(self, x):
        x.data.mul_(2)
        return x


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_head_that_changes_what_later_exits_read_is_refused(case):
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 12 * 12, 5)).eval()
    with pytest.raises(BadInput, match=r"the head at '0' changes its input in place.*use inplace=False"):
        attach_heads(conv, ["0"], example=IMAGES, head=IN_PLACE[case])
    model = attach_heads(conv, ["0"], example=IMAGES, head="pooled_linear").eval()
    check_heads(model, IMAGES)
    assert torch.equal(model(IMAGES)[-1], conv(IMAGES))
    model.heads[0] = IN_PLACE[case](())
    with pytest.raises(BadInput, match="the head at '0' changes its input in place"):
        check_heads(model, IMAGES[:1])


def test_a_check_of_heads_leaves_them_unchanged():
    model = attached(head=lambda shape: nn.Sequential(nn.BatchNorm2d(shape[0]), nn.Flatten(), nn.LazyLinear(5)))
    before = fingerprint(model.train())
    check_heads(model, IMAGES)
    assert fingerprint(model) == before
    assert model.heads.training


@pytest.mark.parametrize("after", [[], (), 0])
def test_a_network_without_exits_is_its_own_last_exit_and_is_saved_without_its_code(after, tmp_path):
    network = backbone().eval()
    model = attach_heads(network, after, example=IMAGES)
    assert model.exits == ("end",)
    assert torch.equal(model(IMAGES)[0], network(IMAGES))
    again = load_model(save_model(model, tmp_path / "model"))
    assert again.network is None
    assert torch.equal(again(IMAGES)[0], network(IMAGES))


def test_bad_input_is_refused():
    with pytest.raises(BadInput, match="after='0' is one text"):
        attach_heads(backbone(), "0", example=IMAGES)
    with pytest.raises(BadInput, match="1 heads for 2 exits"):
        attached(head=["mlp"])
    with pytest.raises(BadInput, match="no head 'linear'"):
        attached(head="linear")
    with pytest.raises(BadInput, match=r"the head at '0' gives \(2, 4\) for 2 samples and 5 classes"):
        attached(head=lambda shape: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))
    with pytest.raises(BadInput, match="not \\(samples, classes\\)"):
        attach_heads(Giving(lambda x: x[:, None]), ["linear"], example=torch.randn(2, 4))


def test_more_exits_than_places_are_as_many_as_there_are():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)]
    with pytest.warns(UserWarning, match=r"20 exits were asked for and \d placed, after .*: there are no more places"):
        model = attach_heads(nn.Sequential(*blocks, nn.Linear(6, 3)), 20, example=torch.zeros(2, 6))
    assert 2 <= model.num_exits <= 5


@pytest.mark.parametrize("count", [2, 20])
def test_a_network_that_is_refused_everywhere_is_tried_once(count, monkeypatch):
    tries = []
    monkeypatch.setattr(placement, "cut", lambda *arguments: tries.append(arguments[1]) or cut(*arguments))
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)) for _ in range(4)]
    with pytest.raises(BadInput, match="depend on the other samples of its batch"):
        attach_heads(nn.Sequential(*blocks, nn.Linear(6, 3)), count, example=torch.randn(2, 6))
    assert len(tries) == 1


def binary(squeezed: bool = False) -> nn.Module:
    last = [nn.Flatten(0)] if squeezed else []
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), *last)


def test_what_is_not_one_class_per_sample_is_refused_where_heads_are_attached():
    from transformers import BertConfig

    batch = torch.randn(2, 6)
    for network in (binary(), binary(squeezed=True)):
        with pytest.raises(BadInput, match=r"gives one logit.* alight.TwoLogits\(network\); a regression"):
            attach_heads(network, ["1"], example=batch)
    with pytest.raises(BadInput, match="gives one logit"):
        msdnet_cifar(1, blocks=2, channels=4)
    pixels = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 21, 1))
    with pytest.raises(BadInput, match=r"shape \(2, 21, 8, 8\), not \(samples, classes\).* detection, segmentation"):
        attach_heads(pixels, ["1"], example=torch.zeros(2, 3, 8, 8))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=50, num_labels=3, problem_type="multi_label_classification", **sizes)
    with pytest.raises(BadInput, match="trained for multi_label_classification: alight gives each sample one class"):
        from_transformers(config)


@pytest.mark.parametrize("squeezed", [False, True])
def test_two_logits_are_the_sigmoid_of_one(squeezed, tmp_path):
    network, batch = binary(squeezed).eval(), torch.randn(5, 6)
    model = attach_heads(TwoLogits(network), ["network.1", "network.3"], example=batch[:2]).eval()
    assert model.num_classes == 2
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[-1].softmax(1)[:, 1], network(batch).reshape(-1).sigmoid())
        again = load_model(save_model(model, tmp_path), backbone=TwoLogits(binary(squeezed)))
        assert all(map(torch.equal, again(batch), model(batch)))
    assert record(model, (batch, torch.tensor([0, 1, 1, 0, 1])), progress=False).predictions.shape == (5, 3)
    with pytest.raises(BadInput, match=r"gives \(2, 3\), not one logit per sample"):
        attach_heads(TwoLogits(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))), ["network.0"], example=batch[:2])


class TwoHeaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.early, self.late = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        early = self.early(x)
        return [early, self.late(torch.relu(self.second(x)))]


def test_a_network_with_several_outputs_is_split_between_them():
    torch.manual_seed(0)
    network, batch = TwoHeaded().eval(), torch.randn(4, 6)
    model = from_outputs(network, batch).eval()
    assert model.num_classes == 3
    for ours, theirs in zip(model(batch), network(batch), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(BadInput, match=r"the outputs give \[4, 2\] logits: give as many of each"):
        from_outputs(Giving(lambda x: [x, x[:, :2]]), torch.randn(2, 4))


def test_the_fingerprint_follows_weights_heads_normalisation_and_dtype_alone():
    model = attached()
    own = fingerprint(model)
    assert fingerprint(model.eval()) == own
    assert fingerprint(attached(head="mlp")) != own
    assert fingerprint(attached().train()) == own  # the same seed
    nn.init.zeros_(model.heads[0].linear.bias)
    assert fingerprint(model) != own
    model = attached()
    model.normalisation = Normalisation((0.5,), (0.5,))
    assert fingerprint(model) != own
    model.normalisation = None
    assert fingerprint(model) == own
    model.to(torch.bfloat16)
    assert fingerprint(model) != own


def test_numbers_of_names_stages_and_inputs_are_checked():
    with pytest.raises(BadInput, match="1 names for 2 exits"):
        MultiExitModel([nn.Linear(2, 2)] * 2, [nn.Identity()] * 2, exits=["one"])
    with pytest.raises(BadInput, match="one stage and one head"):
        MultiExitModel([nn.Linear(2, 2)], [])
    with pytest.raises(BadInput, match=r"the batch has \['pixels'\]"):
        attached()({"pixels": IMAGES})
