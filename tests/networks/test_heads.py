import pytest
import torch
from torch import nn

from alight.errors import BadInput
from alight.networks.heads import (
    HEADS,
    ConvHead,
    FlattenLinear,
    MLPHead,
    PooledLinear,
    SeparableHead,
    TokenHead,
    make_head,
)

SHAPES = {"map": (12, 6, 6), "tokens": (9, 12), "vector": (12,), "volume": (12, 2, 4, 4)}


def features(shape, samples=3):
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", SHAPES)
def test_an_automatic_head_gives_one_logit_per_class_for_any_features(kind):
    head = make_head("auto", SHAPES[kind], 5)
    assert head(features(SHAPES[kind])).shape == (3, 5)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_built_again_from_its_settings(name):
    shape = SHAPES["tokens" if name == "token" else "map"]
    head = make_head(name, shape, 5).eval()
    again = HEADS[name](**head.settings).eval()
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(features(shape)), head(features(shape)))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_treats_every_sample_alone(name):
    shape = SHAPES["tokens" if name == "token" else "map"]
    head, batch = make_head(name, shape, 5).eval(), features(shape)
    torch.testing.assert_close(head(batch)[1:2], head(batch[1:2]))


def test_the_pooled_head_is_adaptive_pooling_flatten_and_linear():
    head, maps = PooledLinear((12, 6, 6), 5), features((12, 6, 6))
    paper = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head.linear)
    torch.testing.assert_close(head(maps), paper(maps))


def test_the_flatten_head_is_flatten_and_linear():
    head, maps = FlattenLinear((12, 6, 6), 5), features((12, 6, 6))
    assert torch.equal(head(maps), nn.Sequential(nn.Flatten(), head.linear)(maps))


@pytest.mark.parametrize("kind", [PooledLinear, ConvHead, SeparableHead, MLPHead])
def test_channels_last_maps_give_the_logits_of_channels_first_ones(kind):
    first, maps = kind((12, 6, 6), 5).eval(), features((12, 6, 6))
    last = kind((6, 6, 12), 5, channels_last=True).eval()
    last.load_state_dict(first.state_dict())
    torch.testing.assert_close(last(maps.movedim(1, -1)), first(maps))


def test_a_separable_head_halves_the_map_to_4_x_4_and_doubles_the_channels_up_to_its_width():
    for size, channels, made in ((32, 64, 512), (16, 128, 512), (8, 256, 512), (4, 512, 512), (32, 16, 128)):
        head = SeparableHead((channels, size, size), 5)
        maps = head.convolutions(torch.zeros(1, channels, size, size))
        assert tuple(maps.shape) == (1, made, *[4 if size > 4 else 2] * 2)
    assert SeparableHead((64, 32, 32), 5, width=100).linear.in_features == 100


@pytest.mark.parametrize("meaning", ["tokens", "padding"])
def test_a_masked_mean_does_not_see_padding(meaning):
    head = TokenHead((9, 12), 5, mask=meaning)
    tokens, mask = features((9, 12)), (torch.arange(9) < 6).expand(3, 9).long()
    mask = mask if meaning == "tokens" else 1 - mask
    other = tokens.clone()
    other[:, 6:] = 100.0
    assert head.reads_everything
    assert torch.equal(head(tokens, mask), head(other, mask))
    torch.testing.assert_close(head(tokens, mask), head(tokens[:, :6], mask[:, :6]))
    assert torch.isfinite(head(tokens, torch.full_like(mask, meaning == "padding"))).all()  # nothing is a token


def test_a_class_token_is_the_first_token():
    head, tokens = TokenHead((9, 12), 5, pooling="class"), features((9, 12))
    assert not head.reads_everything
    assert torch.equal(head(tokens), head(tokens[:, :1]))


def test_a_custom_head_is_made_for_the_shape():
    shapes = []

    def make(shape):
        shapes.append(shape)
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))

    assert isinstance(make_head(make, (12, 6, 6), 5), nn.Sequential)
    assert shapes == [(12, 6, 6)]


def test_bad_input_is_refused():
    with pytest.raises(BadInput, match="no head 'pooled': choose 'auto', 'pooled_linear'"):
        make_head("pooled", (12, 6, 6), 5)
    with pytest.raises(BadInput, match="not tokens"):
        make_head("token", (12, 6, 6), 5)
    with pytest.raises(BadInput, match="are not a map"):
        make_head("conv", (12,), 5)
    with pytest.raises(BadInput, match="are not a map"):
        make_head("separable", (9, 12), 5)
    with pytest.raises(BadInput, match="nothing for a head to read"):
        make_head("auto", (), 5)
    with pytest.raises(BadInput, match="a mask of 'words'"):
        TokenHead((9, 12), 5, mask="words")
    with pytest.raises(BadInput, match="no pooling 'max'"):
        TokenHead((9, 12), 5, pooling="max")
    with pytest.raises(BadInput, match="returned a str"):
        make_head(lambda shape: "linear", (12,), 5)
