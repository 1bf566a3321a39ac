"""The first batch of every new size and dtype is compared with the network: what its code does there is not assumed."""

import numpy as np
import pytest
import torch
from exported import older_exporter
from torch import nn

from alight import MultiExitModel, Predictor, Threshold, attach_heads, export_model, load_model, record, save_model
from alight.errors import BadInput


class Sequences(nn.Module):
    """Reads (samples, steps, 4); what happens to long sequences is decided by code that no tracer sees."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.end = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scales = {24: 2.0, 64: 3.0}

    def forward(self, x):
        return self.end(self.summary(self.second(self.first(x).relu())))


class Windows(Sequences):
    def summary(self, x):
        return torch.stack([part.amax(1) for part in x.split(64, dim=1)]).sum(0)


class Ranges(Sequences):
    def summary(self, x):
        return sum(x[:, start : start + 64].amax(1) for start in range(0, x.shape[1], 64))


class TimeFirst(Sequences):
    def summary(self, x):
        x = x.transpose(0, 1)
        return (x[-50:] if len(x) > 50 else x).mean(0)


class Deeper(Sequences):
    def summary(self, x):
        for layer in self.more[: 1 + x.shape[1] // 64]:
            x = layer(x).relu()
        return x.mean(1)


class Table(Sequences):
    def summary(self, x):
        return x.mean(1) * self.scales.get(x.shape[1], 1.0)


class Positions(Sequences):
    def summary(self, x):
        return (x[:, :50] if torch.arange(x.shape[1]).max() >= 50 else x).mean(1)


OWN_WAYS = (Windows, Ranges, TimeFirst, Deeper, Table, Positions)


@pytest.mark.parametrize("kind", OWN_WAYS)
def test_a_size_at_which_the_code_does_something_else_is_refused(kind):
    torch.manual_seed(0)
    network = kind().eval()
    model = attach_heads(network, ["first"], example=torch.randn(2, 32, 4)).eval()
    outcomes = []
    for steps in (32, 24, 64, 130):
        batch = torch.randn(6, steps, 4)
        with torch.no_grad():
            try:
                outcomes.append(torch.equal(model(batch)[-1], network(batch)))
            except BadInput as error:
                assert "the exits do not give what the network gives" in str(error)  # noqa: PT017
                outcomes.append(None)
    assert outcomes[0] is True
    assert False not in outcomes
    assert None in outcomes


def predicted(model, batch):
    return Predictor(model, Threshold(thresholds=(0.5,), costs=(1.0, 2.0)))(batch)


def recorded(model, batch):
    return record(model, batch, progress=False)


@pytest.mark.parametrize("use", [predicted, recorded, lambda model, batch: model.train()(batch)])
def test_every_way_in_compares(use):
    torch.manual_seed(0)
    model = attach_heads(Windows(), ["first"], example=torch.randn(2, 32, 4))
    with pytest.raises(BadInput, match=r"for inputs of \(130, 4\) per sample, float32, the exits do not give"):
        use(model, torch.randn(3, 130, 4))


def test_a_batch_of_a_known_size_is_not_compared_again(monkeypatch):
    network = Windows().eval()
    model = attach_heads(network, ["first"], example=torch.randn(2, 32, 4)).eval()
    calls = []
    network.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        model(torch.randn(4, 40, 4))
    model(torch.randn(1, 41, 4))
    assert len(calls) == 2


class OtherInHalf(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](-x if x.dtype == torch.bfloat16 else x)


def test_a_dtype_for_which_the_code_does_something_else_is_refused():
    model = attach_heads(OtherInHalf(nn.Linear(6, 8), nn.Linear(8, 5)), ["0"], example=torch.randn(4, 6)).eval()
    model(torch.randn(4, 6))
    with pytest.raises(BadInput, match=r"\(6,\) per sample, bfloat16, the exits do not give"):
        model.to(torch.bfloat16)(torch.randn(4, 6).bfloat16())


def test_texts_without_padding_may_run_by_another_kernel_in_half_precision(monkeypatch):
    """As on a GPU: without a mask, which BERT leaves out where nothing is padding, attention rounds in another way."""
    transformers = pytest.importorskip("transformers")
    real = nn.functional.scaled_dot_product_attention

    def rounded(*given, attn_mask=None, **options):
        return real(*given, attn_mask=attn_mask, **options) * (1 if attn_mask is not None else 1.5)  # of small weights

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    network = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    padded = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    texts = {"input_ids": torch.arange(8).reshape(2, 4) + 2, "attention_mask": padded}
    model, again = (attach_heads(network, ["bert.encoder.layer.0"], example=texts).eval() for _ in range(2))
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", rounded)
    ones = texts | {"attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    assert len(model.to(torch.bfloat16)(ones)) == 2
    again.to(torch.bfloat16).stages[1].register_forward_hook(lambda *made: made[-1] * (1 + 2**-7))
    with pytest.raises(BadInput, match="the exits do not give what the network gives"):
        again(ones)


def test_comparing_leaves_modes_random_numbers_and_statistics_alone():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model = attach_heads(network, ["1"], example=torch.randn(4, 6)).train()
    other = attach_heads(network, ["1"], example=torch.randn(4, 6)).train()
    other(torch.randn(4, 6))  # has compared
    state = {name: each.clone() for name, each in network.state_dict().items()}
    batch, logits = torch.randn(4, 6), []
    for each in (model, other):
        network.load_state_dict(state)
        torch.manual_seed(0)
        logits.append(each(batch)[-1])
        assert all(module.training for module in each.modules())
    assert torch.equal(*logits)


class ShortTexts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.end = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, input_ids):
        x = self.first(self.embed(input_ids)).relu()
        return self.end(x.mean(1) if x.shape[1] < 20 else x.amax(1))


def test_an_exported_network_refuses_lengths_at_which_it_was_not_seen_to_be_the_network(tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = ShortTexts().eval()
    model: MultiExitModel = attach_heads(network, ["first"], example={"input_ids": torch.randint(1, 50, (2, 8))})
    with older_exporter():
        folder = export_model(model, Threshold(thresholds=(2.0,), costs=(1.0, 2.0)), tmp_path / "exported")
    predictor = Predictor.load(folder)
    for length in (1, 8, 16):
        tokens = torch.randint(1, 50, (64, length))
        expected = network(tokens).argmax(1).numpy()
        np.testing.assert_array_equal(predictor({"input_ids": tokens.numpy()}).predictions, expected)
    with pytest.raises(BadInput, match=r"texts of 30 tokens, and the exported network was seen to be .* for 1 to 16"):
        predictor({"input_ids": np.ones((3, 30), dtype=np.int64)})


def test_a_network_that_is_loaded_without_its_code_takes_the_sizes_that_were_compared(tmp_path):
    torch.manual_seed(0)
    network = Windows().eval()
    model = attach_heads(network, ["first"], example=torch.randn(2, 32, 4)).eval()
    model(torch.randn(2, 40, 4))
    loaded = load_model(save_model(model, tmp_path / "own"))
    for steps in (32, 40):
        batch = torch.randn(3, steps, 4)
        assert torch.equal(loaded(batch)[-1], network(batch))
    with pytest.raises(
        BadInput, match=r"inputs of \(130, 4\) per sample, and this folder holds the network without its"
    ):
        loaded(torch.randn(3, 130, 4))


def test_texts_of_a_network_without_its_code_have_lengths_that_were_compared(tmp_path):
    torch.manual_seed(0)
    network = ShortTexts().eval()
    model = attach_heads(network, ["first"], example={"input_ids": torch.randint(1, 50, (2, 8))}).eval()
    loaded = load_model(save_model(model, tmp_path / "own"))
    for length in (1, 5, 16):
        tokens = torch.randint(1, 50, (6, length))
        assert torch.equal(loaded({"input_ids": tokens})[-1], network(tokens))
    with pytest.raises(BadInput):
        loaded({"input_ids": torch.randint(1, 50, (6, 30))})
