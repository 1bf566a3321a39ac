"""What PyTorch's backend adds: closed exits, compaction, dtypes, modes, compilation, late values."""

import copy

import numpy as np
import pytest
import torch
import transformers
from exported import ALL_COSTS, images, middle, network, table
from torch import nn

from alight import HeadOutputs, Predictor, replay
from alight.data.preprocess import InputSpec
from alight.engine import walk
from alight.engine.backends.torch import in_few_lengths
from alight.engine.backends.torch.values import OnDevice
from alight.engine.recorder import record
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.policies.policy import ExitAt, Lottery, Threshold


def thresholds(share):
    return Threshold(tuple(middle(index, share) for index in range(3)), costs=ALL_COSTS)


def assert_equal(decisions, expected):
    np.testing.assert_array_equal(decisions.exits, expected.exits)
    np.testing.assert_array_equal(decisions.predictions, expected.predictions)


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_texts_of_unlike_length_keep_their_masks_when_they_are_rebatched(batch_size):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    config.initializer_range, config.num_labels = 0.5, 5  # attention that matters
    encoder = transformers.BertForSequenceClassification(config).eval()
    mask = (torch.arange(9) < torch.randint(2, 10, (400, 1))).long()
    texts = {"input_ids": torch.randint(5, 60, (400, 9)) * mask, "attention_mask": mask}
    model = attach_heads(encoder, [f"bert.encoder.layer.{index}" for index in range(3)], example=texts)
    for each in model.heads[:-1].parameters():
        nn.init.normal_(each)
    recorded = record(model, [texts], progress=False)
    scores = np.sort(recorded.scores, axis=0)
    place = int(0.8 * 398)
    cuts = tuple(((scores[place] + scores[place + 1]) / 2).tolist()[:3])
    rule = Threshold(cuts, costs=ALL_COSTS)
    before = {name: each.clone() for name, each in texts.items()}
    decisions = Predictor(model, rule, batch_size=batch_size, probabilities=True)(texts)
    assert_equal(decisions, replay(rule, recorded))
    logs = recorded.top_log_probabilities[np.arange(400), decisions.exits, 0]
    np.testing.assert_allclose(np.log(decisions.probabilities), logs, atol=2e-3)
    assert all(torch.equal(texts[name], before[name]) for name in texts)


def test_texts_are_answered_alike_in_few_lengths(tmp_path):
    torch.manual_seed(0)
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(40))])}
    tokenizer = transformers.BertTokenizerFast(vocab=words, model_max_length=32)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(words), num_labels=5, initializer_range=0.5, **sizes)
    example = {name: torch.ones(2, 9, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    model = attach_heads(transformers.BertForSequenceClassification(config).eval(), after=2, example=example)
    model.tokenizer = tokenizer
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 40, size=length))) for length in rng.integers(1, 40, size=200)]
    rule = Lottery(costs=(1.0, 2.0, 3.0), exit_rates=(0.3, 0.3, 0.4))
    one, other = (Predictor(model, rule, batch_size=7, probabilities=True) for _ in range(2))
    other.backend.inputs = in_few_lengths(model.input_spec)
    expected = one(texts)
    seen = other.place(texts, 200)[0].shape[1]
    found = other(texts)
    assert seen == 32
    assert in_few_lengths(InputSpec()).token_multiple == 1
    assert_equal(found, expected)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-6)


def test_closed_exits_are_not_evaluated_and_the_rest_of_the_network_is_not_run():
    model, ran = network(), []
    rule = Threshold((middle(1, 0.5),), costs=(2.5, 3.0), open_exits=(1, 2), num_exits=4)
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for index in range(4)
        for name, module in ((f"stage {index}", model.stages[index]), (f"head {index}", model.heads[index]))
    ]
    Predictor(model, rule)(images())
    for hook in hooks:
        hook.remove()
    assert ran == ["stage 0", "stage 1", "head 1", "stage 2", "head 2"]


def test_only_survivors_run_on_and_are_put_together_into_full_batches():
    sizes, rule = [], thresholds(0.8)
    hook = network().stages[3].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    staying = int((replay(rule, table()).exits == 3).sum())
    Predictor(network(), rule, batch_size=15)(images())
    hook.remove()
    assert sum(sizes) == staying
    assert sizes == [15] * (staying // 15) + [staying % 15] * (staying % 15 > 0)


def test_half_precision_needs_and_has_its_own_decisions():
    model = network()
    with torch.inference_mode():
        halved = copy.deepcopy(model).to(torch.bfloat16)(torch.from_numpy(images()).bfloat16())
    recorded = HeadOutputs.from_logits([logits.float().numpy() for logits in halved])
    cuts = np.quantile(recorded.scores[:, :3], 0.5, axis=0)
    rule = Threshold(tuple(cuts.tolist()), costs=ALL_COSTS)
    decisions = Predictor(model, rule, settings=RunSettings(dtype="bf16"))(images())
    expected = replay(rule, recorded)
    near = (np.abs(recorded.scores - np.array([*cuts, np.inf])) < 2e-2).any(axis=1)
    np.testing.assert_array_equal(decisions.exits[~near], expected.exits[~near])
    assert next(model.parameters()).dtype == torch.float32  # the user's network is unchanged


def test_training_mode_does_not_change_answers_and_is_left_unchanged():
    model, rule = copy.deepcopy(network()), thresholds(0.5)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decisions = Predictor(model, rule)(images())
    assert model.training
    assert model.stages[0].training
    assert_equal(decisions, replay(rule, table()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_error_inside_a_stage_says_where():
    class Full(nn.Module):
        def forward(self, features, *others):
            raise torch.OutOfMemoryError("no memory")

    model = network()
    stages = [*model.stages[:2], Full(), *model.stages[3:]]
    broken = MultiExitModel(stages, [*model.heads])
    for batch_size in (256, 1):
        with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
            Predictor(broken, thresholds(0.9), batch_size=batch_size)(images())
        assert "stage 2" in caught.value.__notes__[0]
        assert batch_size == 1 or len(caught.value.finished) == 2


def test_late_values_are_fetched_before_they_take_too_much_memory(monkeypatch):
    model = network()
    predictor = Predictor(model, ExitAt(costs=(1.0,), open_exits=(3,), num_exits=4), batch_size=10)
    expected = predictor(images()).predictions
    gather, counts = OnDevice.gather, []
    predictor.backend.in_flight = 2  # as on a GPU, where values of the last exit are fetched late
    monkeypatch.setattr(OnDevice, "gather", lambda self, others: counts.append(1 + len(others)) or gather(self, others))
    np.testing.assert_array_equal(predictor(images()).predictions, expected)
    assert counts == [15]
    with torch.inference_mode():
        monkeypatch.setattr(walk, "LATE_BYTES", 3 * model(torch.from_numpy(images()[:10]))[-1].nbytes)
    np.testing.assert_array_equal(predictor(images()).predictions, expected)
    assert counts[1:] == [4, 4, 4, 3]


COMPILED = RunSettings(compile=True)


@pytest.mark.slow
def test_compiled_stages_decide_the_same_for_any_batch_size():
    rule = Threshold((middle(1, 0.5),), costs=(2.5, 6.0), open_exits=(1, 3))
    predictor = Predictor(network(), rule, settings=COMPILED, batch_size=64)
    expected = replay(rule, table())
    assert_equal(predictor(images()), expected)
    for size in (7, 33):
        predictor.batch_size = size
        assert_equal(predictor(images()), expected)


@pytest.mark.slow
def test_networks_of_one_shape_are_compiled_apart_and_run_with_the_weights_they_have():
    inputs, rule = torch.from_numpy(images()), Threshold((0.3,), costs=(1.0, 2.0))
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        stages = [nn.Sequential(nn.Flatten(), nn.Linear(126, 8), nn.Dropout()), nn.Linear(8, 8)]
        models.append(MultiExitModel(stages, [nn.Linear(8, 5), nn.Linear(8, 5)]).eval())
    eager, fast = ([Predictor(each, rule, settings=chosen) for each in models] for chosen in (None, COMPILED))
    for one, other in zip(eager, fast, strict=True):
        assert_equal(other(inputs), one(inputs))
    models[0].load_state_dict(models[1].state_dict())
    assert_equal(fast[0](inputs), eager[1](inputs))
    for training in (True, False):  # what changes the network as a whole is noticed
        models[0].train(training)
        first, second = (fast[0](inputs).predictions for _ in range(2))
        assert (first == second).all() == (not training)  # dropout
    models[0].double()
    assert_equal(fast[0](inputs.double()), eager[0](inputs.double()))


@pytest.mark.slow
def test_a_network_is_compiled_again_where_more_of_its_likeliest_classes_are_read():
    for top in (2, 3):
        plain, fast = (
            record(network(), torch.from_numpy(images()), top=top, settings=each, progress=False)
            for each in (None, COMPILED)
        )
        np.testing.assert_array_equal(fast.predictions, plain.predictions)


@pytest.mark.slow
def test_a_network_that_cannot_be_compiled_is_an_error_and_never_a_silent_fall_back():
    class Asks(nn.Module):
        def forward(self, features):
            return features if float(features.sum()) > 0 else -features

    model = MultiExitModel([nn.Flatten(), Asks()], [nn.Linear(126, 5), nn.Linear(126, 5)])
    predictor = Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)), settings=COMPILED)
    with pytest.raises(AlightError, match=r"compiling stage 1 gave up .* compile=False"):
        predictor(torch.from_numpy(images()))


class Positions(nn.Module):
    """Positions in a buffer, of which bfloat16 has no odd ones above 256."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(1000, 1032, dtype=torch.float32))
        self.linear = nn.Linear(32, 8)

    def forward(self, x):
        return self.linear(x + 5 * torch.sin(self.positions))


class Memory(nn.Module):
    """Reads memory as if rows of images lay behind each other."""

    def forward(self, x):
        return x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1))


BROKEN = {  # networks, what breaks them, and what is said
    "dtype": (lambda: nn.Sequential(Positions(), nn.ReLU(), nn.Linear(8, 3)), (32,), {"dtype": "bf16"}, "in bfloat16 "),
    "layout": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Memory(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3)),
        (3, 8, 8),
        {"channels_last": True},
        "in float32 and channels_last ",
    ),
    "range": (
        lambda: nn.Sequential(Scaled(1e5), nn.Linear(8, 8), Scaled(1e-5), nn.Linear(8, 3)),
        (8,),
        {"dtype": "fp16"},
        "in float16 ",
    ),
}


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("case", BROKEN)
def test_the_first_batch_finds_a_network_that_another_dtype_or_layout_breaks(case):
    torch.manual_seed(0)
    make, shape, settings, message = BROKEN[case]
    model = attach_heads(make(), ["1" if case != "layout" else "2"], example=torch.randn(2, *shape))
    inputs = torch.randn(6, *shape).numpy()
    rule = ExitAt(costs=(1.0,), open_exits=(1,), num_exits=2)
    assert len(Predictor(model, rule)(inputs)) == 6
    predictor = Predictor(model, rule, settings=RunSettings(**settings))
    for given in (inputs, inputs[:1]):  # whole batches, and a single sample
        with pytest.raises(AlightError, match=f"{message}the logits at 'end' differ .*: run it in float32"):
            predictor(given)
    with pytest.raises(AlightError, match=message):
        record(model, [inputs], settings=RunSettings(**settings), progress=False)


class Table(nn.Module):
    """A table that is not a buffer stays in float32 in the network, and is cast in stages."""

    def __init__(self, *, buffer):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        table = torch.rand(8, generator=torch.Generator().manual_seed(0))
        if buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x):
        x = self.first(x)
        return self.last((x * self.table).type_as(x))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stages_in_half_precision_give_the_bits_of_the_network_in_it(dtype):
    rule, inputs = ExitAt(costs=(1.0,), open_exits=(1,), num_exits=2), torch.randn(6, 8).numpy()
    for buffer in (True, False):
        torch.manual_seed(0)
        model = attach_heads(Table(buffer=buffer), ["first"], example=torch.randn(2, 8))
        assert len(Predictor(model, rule)(inputs)) == 6
        predictor = Predictor(model, rule, settings=RunSettings(dtype=dtype))
        if buffer:
            assert len(predictor(inputs)) == 6
        else:
            with pytest.raises(
                BadInput, match=r"float16, the exits do not give what the network gives \(a tensor that"
            ):
                predictor(inputs)


def test_stages_are_compared_with_the_network_again_in_another_memory_layout():
    inputs = torch.randn(6, 3, 8, 8)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model = attach_heads(network, ["1"], example=inputs)
    model(inputs)  # which compares images of this size
    model.stages[1].register_forward_hook(lambda _, given, made: made * (1 if given[0].is_contiguous() else 1.005))
    rule = ExitAt(costs=(1.0,), open_exits=(1,), num_exits=2)
    assert len(Predictor(model, rule)(inputs.numpy())) == 6
    predictor = Predictor(model, rule, settings=RunSettings(channels_last=True))
    with pytest.raises(BadInput, match="the exits do not give what the network gives"):
        predictor(inputs.numpy())


@pytest.mark.parametrize("settings", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"channels_last": True}])
def test_only_the_first_batch_is_compared_and_the_original_is_let_go(settings):
    model, ran = copy.deepcopy(network()), []
    predictor = Predictor(model, thresholds(0.5), settings=RunSettings(**settings))
    model.stages[0].register_forward_hook(lambda *_: ran.append(1))  # of the original, not of the copy
    for _ in range(3):
        predictor(images())
    assert len(ran) == 1
    assert predictor.backend.unproven is None
