"""Padding is never read: masks are known by name or asked for, and never ignored."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.heads import TokenHead
from alight.networks.multi_exit import example_of
from alight.networks.store import load_model, save_model
from alight.policies.policy import Threshold

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "roberta": lambda: transformers.RobertaConfig(**SIZES),
    "electra": lambda: transformers.ElectraConfig(**SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(vocab_size=60, dim=16, n_layers=3, n_heads=2, hidden_dim=32),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, **SPECIAL),
    "xlnet": lambda: transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=3, n_head=2, d_inner=32),
    "funnel": lambda: transformers.FunnelConfig(
        vocab_size=60, block_sizes=[2, 2], d_model=16, n_head=2, d_head=8, d_inner=32
    ),
}


def texts(count, length=8):
    generator = torch.Generator().manual_seed(count)
    mask = (torch.arange(length) < torch.randint(3, length, (count, 1), generator=generator)).long()
    return {"input_ids": torch.randint(5, 60, (count, length), generator=generator) * mask, "attention_mask": mask}


def encoder(name):
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(ENCODERS[name]()).eval()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_mask_is_refused_where_the_network_was_cut_without_one(name):
    network, batch = encoder(name), texts(4)
    model = attach_heads(network, 1, example={"input_ids": batch["input_ids"]}).eval()
    with torch.no_grad():
        alone = network(input_ids=batch["input_ids"]).logits
        assert torch.equal(model({"input_ids": batch["input_ids"]})[-1], alone)
        assert (network(**batch).logits - alone).abs().max() > 1e-4 * alone.abs().max()  # not to be ignored
        with pytest.raises(BadInput, match="the batch has 'attention_mask', and the network was cut with"):
            model(batch)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_network_cut_with_a_mask_gives_what_it_gives_alone(name):
    network, batch = encoder(name), texts(4)
    model = attach_heads(network, 1, example=texts(2)).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[-1], network(**batch).logits)
    head = model.heads[0]
    assert head.mask == "tokens" or head.pooling == "class"


@pytest.fixture
def without_mask():
    return attach_heads(encoder("bert"), 1, example={"input_ids": texts(2)["input_ids"]}).eval()


def test_every_way_in_refuses_what_the_network_was_cut_without(without_mask):
    policy = Threshold(thresholds=(0.5,), costs=(1.0, 2.0))
    batch = texts(4)
    labelled = batch | {"labels": torch.zeros(4, dtype=torch.int64)}
    arrays = {name: part.numpy() for name, part in batch.items()}
    ways = {
        "model": lambda: without_mask(batch),
        "predictor": lambda: Predictor(without_mask, policy)(arrays),
        "run": lambda: Predictor(without_mask, policy).run([batch], progress=False),
        "record": lambda: record(without_mask, [labelled], progress=False),
        "the mask alone": lambda: record(without_mask, [{"attention_mask": batch["attention_mask"]}], progress=False),
    }
    for name, way in ways.items():
        with pytest.raises(BadInput, match="attention_mask"):
            pytest.fail(f"{name} gave {way()}")
    own = {"input_ids": arrays["input_ids"], "token_type_ids": np.zeros((4, 8), int), "labels": np.zeros(4, int)}
    assert len(Predictor(without_mask, policy)(own)) == 4  # types of single texts, and labels, change nothing
    assert len(record(without_mask, [own], progress=False)) == 4


class Encoder(nn.Module):
    """torch's own encoder, whose mask is True for padding."""

    def __init__(self, name="src_key_padding_mask"):
        super().__init__()
        self.name = name
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.end = nn.Linear(8, 3)

    def forward(self, tokens, src_key_padding_mask):
        hidden = self.layers(tokens, src_key_padding_mask=src_key_padding_mask)
        return self.end(hidden.masked_fill(src_key_padding_mask[..., None], 0).sum(1))


class Own(nn.Module):
    """Layers on tokens, and an input whose name does not say whether 1 is a token or padding."""

    def __init__(self, padding=True):
        super().__init__()
        self.one, self.two, self.padding = nn.Linear(8, 8), nn.Linear(8, 3), padding

    def forward(self, tokens, flags):
        kept = ~flags if self.padding else flags
        return self.two((self.one(tokens).relu() * kept[..., None]).sum(1))


def padded(count=4, length=6):
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, length, 8, generator=generator)
    return tokens, torch.arange(length) >= torch.arange(count)[:, None] % 3 + 2  # True is padding


def check_reads_tokens_alone(model, batch, padding):
    """Another content of padding changes nothing, another content of tokens does."""
    tokens, *others = batch.values() if isinstance(batch, dict) else batch
    noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(9))

    def first(changed):
        return model(
            dict(zip(batch, (changed, *others), strict=True)) if isinstance(batch, dict) else (changed, *others)
        )

    with torch.no_grad():
        own = first(tokens)[0]
        torch.testing.assert_close(first(tokens + noise * padding[..., None])[0], own)
        assert not torch.allclose(first(tokens + noise * ~padding[..., None])[0], own, atol=1e-3)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_padding_mask_hides_padding_from_heads(by_name, tmp_path):
    torch.manual_seed(0)
    network = Encoder().eval()
    tokens, padding = padded()
    batch = {"tokens": tokens, "src_key_padding_mask": padding} if by_name else (tokens, padding)
    model = attach_heads(network, ["layers.layers.0"], example=batch).eval()
    assert model.heads[0].mask == "padding"
    check_reads_tokens_alone(model, batch, padding)
    with torch.no_grad():
        assert torch.equal(model(batch)[-1], network(tokens, padding))
    again = load_model(save_model(model, tmp_path), backbone=Encoder())
    check_reads_tokens_alone(again, batch, padding)
    assert not model.admit(example_of(model))[1].any()  # an example of tokens, not of padding


@pytest.mark.parametrize("meaning", ["tokens", "padding"])
def test_an_input_that_may_be_a_mask_has_to_be_explained(meaning, tmp_path):
    torch.manual_seed(0)
    network = Own(padding=meaning == "padding").eval()
    tokens, padding = padded()
    batch = {"tokens": tokens, "flags": padding if meaning == "padding" else ~padding}
    with pytest.raises(BadInput, match=r"'flags' may be a mask of the features of shape \(6, 8\) after 'one'.*mask={}"):
        attach_heads(network, ["one"], example=batch)
    model = attach_heads(network, ["one"], example=batch, mask={"flags": meaning}).eval()
    check_reads_tokens_alone(model, batch, padding)
    check_reads_tokens_alone(load_model(save_model(model, tmp_path), backbone=network), batch, padding)
    assert attach_heads(network, ["one"], example=batch, mask={}).heads[0].mask is None
    for wrong in ({"flag": meaning}, {"flags": "words"}, {"flags": "tokens", "tokens": "tokens"}):
        with pytest.raises(BadInput, match=r"of inputs \['tokens', 'flags'\]: say which is the one of the features"):
            attach_heads(network, ["one"], example=batch, mask=wrong)


class Decoder(nn.Module):
    """Token ids that are used again at the end, as decoders do to find the last token."""

    def __init__(self):
        super().__init__()
        self.words, self.one, self.end = nn.Embedding(60, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids):
        return self.end((self.one(self.words(input_ids)) * (input_ids > 9)[..., None]).sum(1))


def test_token_ids_are_not_taken_for_a_mask():
    head = attach_heads(Decoder(), ["one"], example=texts(2)["input_ids"]).heads[0]
    assert (type(head), head.mask) == (TokenHead, None)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.end = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, sound, padding_mask):
        return self.end((self.two(self.one(sound)) * ~padding_mask[:, None]).sum(2))


def test_features_whose_padding_no_head_can_tell_are_refused():
    example = {"sound": torch.randn(2, 1, 6), "padding_mask": torch.zeros(2, 6, dtype=torch.bool)}
    with pytest.raises(BadInput, match=r"head 'auto' would read the padding of features of shape \(8, 6\)"):
        attach_heads(Convolutions(), ["one"], example=example)
    assert attach_heads(Convolutions(), ["one"], example=example, mask={}).heads[0].linear.in_features == 8


class Additive(Own):
    def forward(self, tokens, attention_mask):
        return self.two((self.one(tokens).relu() * attention_mask.exp()[..., None]).sum(1))


def test_a_mask_that_is_added_is_not_taken_for_ones_and_zeros():
    tokens, padding = padded()
    for mask in (padding * -1e4, torch.zeros(4, 6)):
        with pytest.raises(BadInput, match="'attention_mask' is not 1 for tokens and 0 for padding"):
            attach_heads(Additive(), ["one"], example={"tokens": tokens, "attention_mask": mask})


@pytest.mark.parametrize("length", [9, 10])
def test_a_decoder_that_looks_back_at_a_few_tokens_may_be_padded_on_the_left(length):
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4, pad_token_id=0)
    network = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    example = {name: each.flip(1) for name, each in texts(4, length).items()}
    model = attach_heads(network, ["model.layers.0"], example=example)
    model.verify()
    with torch.no_grad():
        assert torch.equal(model.eval()(example)[-1], network(**example).logits)
    with pytest.raises(BadInput, match="where 'attention_mask' is 1 it means tokens, as the network reads it"):
        attach_heads(network, ["model.layers.0"], example=example, mask={"attention_mask": "padding"})
