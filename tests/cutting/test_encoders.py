"""Text encoders are cut between layers, with the mask carried."""

import copy

import pytest
import torch
import transformers
from torch import nn

from alight.cutting.cut import cut
from alight.cutting.placement import suggest_exits
from alight.errors import BadInput

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32}
DISTILLED = {"vocab_size": 60, "dim": 16, "n_layers": 5, "n_heads": 2, "hidden_dim": 32}
ENCODERS = {
    "bert.encoder.layer": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    "roberta.encoder.layer": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES)),
    "electra.encoder.layer": lambda: transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**SIZES)),
    "distilbert.transformer.layer": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**DISTILLED)
    ),
    "mpnet.encoder.layer": lambda: transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SIZES)),
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TRACED = {  # need no cutter: the layers, and how the configuration is made
    "transformer.h": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=16, n_layer=3, n_head=2, n_positions=16, **TOKENS
    ),
    "model.layers": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, **TOKENS),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, **TOKENS),
}


@pytest.fixture(params=ENCODERS)
def encoder(request):
    torch.manual_seed(0)
    return ENCODERS[request.param]().eval(), request.param


@pytest.fixture(scope="module", params=ENCODERS)
def in_stages(request):
    """An encoder and its stages up to three of its layers and the rest; not to be changed."""
    torch.manual_seed(0)
    model = ENCODERS[request.param]().eval()
    return model, cut(model, names(request.param, 0, 2, 3), texts(2))


def texts(count, length=9):
    generator = torch.Generator().manual_seed(count)
    shortest = min(3, length)
    mask = (torch.arange(length) < torch.randint(shortest, length + 1, (count, 1), generator=generator)).long()
    return {"input_ids": torch.randint(5, 60, (count, length), generator=generator) * mask, "attention_mask": mask}


def chained(stages, batch):
    carried = tuple(batch.values())
    for stage in stages:
        carried = stage(*carried)
    return carried


def names(layers, *indices):
    return [f"{layers}.{index}" for index in indices]


def test_the_chain_gives_the_logits_of_the_encoder_bit_by_bit(in_stages):
    model, stages = in_stages
    for batch in (texts(1), texts(5), texts(5, length=4)):
        assert torch.equal(chained(stages, batch), model(**batch).logits)


def test_a_mask_that_was_changed_in_place_counts(in_stages):
    (model, stages), batch = in_stages, texts(3)
    chained(stages, batch)
    batch["attention_mask"][:, 2:] = 0
    assert torch.equal(chained(stages, batch), model(**batch).logits)


def test_hidden_states_and_the_mask_are_carried_and_can_be_compacted(in_stages):
    model, (*early, last) = in_stages
    carried, kept = tuple(texts(5).values()), [4, 1]
    for stage in early:
        carried = stage(*carried)
    hidden, mask, *_ = carried
    assert hidden.shape == (5, 9, 16)
    assert torch.equal(mask, texts(5)["attention_mask"])
    expected = model(**{name: tensor[kept] for name, tensor in texts(5).items()}).logits
    torch.testing.assert_close(last(*(tensor[kept] for tensor in carried)), expected)


def test_without_a_mask_every_token_counts(encoder):
    model, layers = encoder
    ids = texts(3)["input_ids"].clamp(min=5)
    first, last = cut(model, names(layers, 2), ids)
    (hidden,) = first(ids)
    assert torch.equal(last(hidden), model(ids).logits)


def test_a_mask_that_hides_nothing_gives_the_bits_of_the_encoder_and_so_does_an_example_of_ones(encoder):
    model, layers = encoder
    ones = {name: torch.ones_like(tensor) for name, tensor in texts(2).items()}  # 1 is MPNet's padding
    stages = cut(model, names(layers, 0, 2), ones)
    for batch in (texts(5), {**texts(5), "attention_mask": torch.ones(5, 9, dtype=torch.long)}):
        assert torch.equal(chained(stages, batch), model(**batch).logits)


def test_stages_share_parameters_under_the_names_they_have_in_the_encoder(in_stages):
    model, stages = in_stages
    theirs = model.state_dict(keep_vars=True)
    held = [name for stage in stages for name in stage.state_dict()]
    assert set(held) == set(theirs)  # a table of positions may be in several
    for stage in stages:
        assert all(tensor is theirs[name] for name, tensor in stage.state_dict(keep_vars=True).items())


def test_gradients_through_the_chain_are_those_of_the_encoder(in_stages):
    model, stages = in_stages
    expected, found = (
        torch.autograd.grad(run().square().sum(), list(model.parameters()))
        for run in (lambda: model(**texts(5)).logits, lambda: chained(stages, texts(5)))
    )
    torch.testing.assert_close(found, expected)


def test_modes_dtypes_and_copies_are_those_of_the_encoder(in_stages):
    model, *stages = copy.deepcopy([in_stages[0], *in_stages[1]])
    stages = nn.ModuleList(stages)
    copied = copy.deepcopy(stages)
    stages.train()
    assert all(module.training for module in model.modules() if isinstance(module, nn.Linear))
    stages.eval().double()
    assert torch.equal(chained(stages, texts(5)), model.double()(**texts(5)).logits)
    assert next(copied.parameters()).dtype == torch.float32


def test_exits_are_suggested_at_even_layers(encoder):
    model, layers = encoder
    assert suggest_exits(model, texts(2), count=4) == names(layers, 0, 1, 2, 3)


@pytest.mark.slow
def test_vision_transformers_of_hugging_face_need_no_cutter():
    sizes = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(5, 3, 32, 32)
    after = suggest_exits(model, images[:1], count=3)
    for example in (images[:1], {"pixel_values": images[:1]}):
        stages = cut(model, after, example)
        assert torch.equal(chained(stages, {"pixel_values": images}), model(images).logits)


@pytest.fixture(scope="module", params=[(name, way) for name in TRACED for way in ("sdpa", "eager")])
def traced(request):
    """A text classifier without a cutter, as stages up to two of its layers and the rest; not to be changed."""
    torch.manual_seed(0)
    name, way = request.param
    config = TRACED[name]()
    config._attn_implementation = way
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    caching, is_tracing = getattr(config, "use_cache", None), transformers.masking_utils.is_tracing
    stages = cut(model, names("model.layers" if name == "modernbert" else name, 0, 1), texts(2))
    assert getattr(model.config, "use_cache", None) is caching  # cutting leaves settings alone
    assert transformers.masking_utils.is_tracing is is_tracing
    return model, stages


def test_text_classifiers_without_a_cutter_are_cut_bit_by_bit_with_padding(traced):
    model, stages = traced
    with torch.no_grad():
        for batch in (texts(1), texts(5), texts(8)):
            found, as_called = chained(stages, batch), model(**batch).logits
            assert torch.equal(found, without_cache(model, batch))
            torch.testing.assert_close(found, as_called)  # a cache copies keys, and kernels may round by layout


def without_cache(model, batch):
    """Logits of a text decoder that keeps no keys and values: those of a stage have the same memory layout."""
    caches = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
    return model(**batch, **caches).logits


def test_the_mask_is_carried_second_wherever_one_is_given(traced):
    model, (first, second, last) = traced
    carried, kept = first(*texts(5).values()), [4, 1]
    assert carried[0].shape == (5, 9, 16)
    assert torch.equal(carried[1], texts(5)["attention_mask"])
    assert all(len(tensor) == 5 for tensor in carried)
    carried = second(*(tensor[kept] for tensor in carried))
    assert torch.equal(carried[1], texts(5)["attention_mask"][kept])
    expected = model(**{name: tensor[kept] for name, tensor in texts(5).items()}).logits
    torch.testing.assert_close(last(*carried), expected)


@pytest.mark.parametrize(("name", "layers"), [(name, name.replace("modernbert", "model.layers")) for name in TRACED])
def test_exits_are_suggested_at_layers_of_text_classifiers_without_a_cutter(name, layers):
    model = transformers.AutoModelForSequenceClassification.from_config(TRACED[name]()).eval()
    assert all(place.rpartition(".")[0] == layers for place in suggest_exits(model, texts(2), count=2))


@pytest.mark.parametrize("length", [1, 4, 13])
def test_texts_may_have_another_length_than_the_example(traced, length):
    model, stages = traced
    batch = texts(5, length)
    with torch.no_grad():
        torch.testing.assert_close(chained(stages, batch), model(**batch).logits)


class Bag(nn.Module):
    """Layers on every token and the mean of those that the mask keeps."""

    def __init__(self):
        super().__init__()
        self.words, self.one, self.two, self.fc = nn.Embedding(60, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        tokens = self.two(self.one(self.words(input_ids)).relu())
        return self.fc((tokens * attention_mask.unsqueeze(-1)).mean(1))


def test_a_network_free_of_the_length_stays_free():
    model = Bag().eval()
    stages = cut(model, ["one"], texts(2))
    with torch.no_grad():
        assert torch.equal(chained(stages, texts(5, length=4)), model(**texts(5, length=4)))


class BatchSecond(Bag):
    """Tokens first and batch second."""

    def forward(self, input_ids, attention_mask):
        tokens = self.two(self.one(self.words(input_ids.T)).relu())
        return self.fc((tokens * attention_mask.T.unsqueeze(-1)).mean(0))


def test_the_mask_is_carried_where_tokens_come_before_the_batch_too():
    model = BatchSecond().eval()
    first, last = cut(model, ["one"], texts(2))
    hidden, mask, *rest = first(*texts(5).values())
    assert hidden.shape == (5, 9, 8)
    assert torch.equal(mask, texts(5)["attention_mask"])
    assert torch.equal(last(hidden, mask, *rest), model(**texts(5)))


def test_shared_layers_are_refused_with_the_number_of_calls():
    config = transformers.AlbertConfig(**SIZES, embedding_size=8, **TOKENS)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with pytest.raises(BadInput, match="is called 5 times in a forward pass: cut after one called once"):
        cut(model, ["albert.encoder.albert_layer_groups.0"], texts(2))
    (first, last) = cut(model, ["albert.embeddings"], texts(2))
    assert torch.equal(chained([first, last], texts(5)), model(**texts(5)).logits)


def test_a_network_that_fails_on_the_example_says_where_and_what_to_do():
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=3, n_head=2, n_positions=4, **TOKENS)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    for attempt in (lambda: cut(model, names("transformer.h", 0), texts(2)), lambda: suggest_exits(model, texts(2), 1)):
        with pytest.raises(BadInput, match=r"fails on the example with \w+Error: .*modeling_gpt2.py:.*register_cutter"):
            attempt()


def test_inputs_without_names_are_tokens_and_their_mask(encoder):
    model, layers = encoder
    stages = cut(model, names(layers, 1), tuple(texts(2).values()))
    batch = texts(5)
    with torch.no_grad():
        torch.testing.assert_close(chained(stages, batch), model(**batch).logits)
