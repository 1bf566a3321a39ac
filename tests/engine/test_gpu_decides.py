"""A GPU that decides by itself answers as a replay of its recording does, and as the host would."""

import itertools
import warnings
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn

from alight import attach_heads, calibrate, replay
from alight.engine.backends.torch import conditional
from alight.engine.backends.torch.device_walk import StreamWalk
from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.engine.settings import RunSettings
from alight.networks.multi_exit import MultiExitModel
from alight.networks.zoo import resnet18_cifar
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Streak, Threshold

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("error:the host decides"),  # where the device was asked to
]
DEVICE, HOST = (RunSettings("cuda", decide=each) for each in ("device", "host"))
COSTS = (1.0, 2.0, 3.0, 4.0)


@pytest.fixture(autouse=True)
def _same_bits_for_all_batch_sizes():
    """Small matrices in float64: rows do not depend on the size of their batch."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


class Split(nn.Module):
    """A stage that hands on two tensors of different kinds."""

    def forward(self, inputs):
        return inputs.tanh(), inputs[:, :3] > 0


class Joined(nn.Module):
    def forward(self, features, signs):
        return (features * 1.5).sin() + signs.double().sum(1, keepdim=True), signs


class Turned(nn.Module):
    """A head whose logits are the same bits in batches of any size: no matrix product."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, features):
        return torch.stack([(features.roll(index + self.shift, 1) * 3).cos()[:, 0] for index in range(5)], 1)


@pytest.fixture(scope="module")
def small():
    """Every number of it depends on one sample alone, to the bit."""
    return MultiExitModel([Split(), Joined(), Joined(), Joined()], [Turned(index) for index in range(4)]).eval()


@pytest.fixture(scope="module")
def numbers():
    return torch.randn(700, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def table(small, numbers):
    labels = np.random.default_rng(2).integers(5, size=len(numbers))
    return record(small, (numbers, labels), progress=False, settings=RunSettings("cuda"))


def rules(table):
    middle = tuple(np.median(table.scores, axis=0)[:3].tolist())
    terms = {"costs": COSTS, "salt": 7 << 32 | 11}
    threshold = Threshold(middle, costs=COSTS)
    return {
        "threshold": threshold,
        "ties": Threshold((table.scores[5, 0], table.scores[6, 1], table.scores[7, 2]), (0.0, 0.5, 1.0), **terms),
        "nobody": Threshold((np.inf,) * 3, costs=COSTS),
        "everybody": Threshold((-np.inf,) * 3, costs=COSTS),
        "lottery": Lottery(exit_rates=(0.4, 0.3, 0.2, 0.1), **terms),
        "one exit": ExitAt(costs=(3.0,), open_exits=(2,), num_exits=4),
        "patience": Patience(patience=1, costs=COSTS),
        "streak": Streak(threshold=middle[0], patience=2, costs=COSTS),
        "mixture": Mixture(
            first=replace(threshold, salt=5), second=Patience(patience=1, costs=COSTS), share=0.4, **terms
        ),
        "vote": calibrate.combined(calibrate.eero, "vote")(COSTS, "60%", table),
        "geometric mean": calibrate.combined(calibrate.eero, "geometric_mean")(COSTS, "60%", table),
        "temperature": calibrate.combined(calibrate.eero, "temperature")(COSTS, "60%", table),
        "gain": calibrate.learned_stopping(COSTS, "60%", table),
    }


NAMES = "threshold,ties,nobody,everybody,lottery,one exit,patience,streak,mixture,vote,geometric mean,temperature,gain"


def assert_replayed(found, rule, table, count=None):
    expected = replay(rule, table if count is None else table.take(np.arange(count)))
    np.testing.assert_array_equal(found.exits, expected.exits)
    np.testing.assert_array_equal(found.predictions, expected.predictions)


@pytest.mark.parametrize("name", NAMES.split(","))
@pytest.mark.parametrize("size", [1, 2, 7, 16, 32, 100, 257])
def test_every_policy_decides_as_replayed_for_any_batch_size(small, numbers, table, name, size):
    rule, count = rules(table)[name], min(len(numbers), 37 * size)
    predictor = Predictor(small, rule, settings=DEVICE, batch_size=size, allow_mismatch=True)
    assert_replayed(predictor(numbers[:count]), rule, table, count)
    assert predictor.decided_by == "the device decides", predictor.decided_by
    again = predictor(numbers[:count].cuda(), samples=np.arange(count))  # on the device before, and once more
    assert_replayed(again, rule, table, count)


def test_batch_sizes_from_1_to_257_decide_alike(small, numbers, table):
    rule = rules(table)["threshold"]
    for size in range(3, 257, 23):
        found = Predictor(small, rule, settings=DEVICE, batch_size=size, allow_mismatch=True)
        assert_replayed(found(numbers[:600]), rule, table, 600)
        for count in (1, 2, size - 1, size):
            assert_replayed(found(numbers[:count], samples=np.arange(count)), rule, table, count)


def test_numbers_go_on_over_calls_loaders_and_streams(small, numbers, table):
    rule = rules(table)["lottery"]
    found, expected = Predictor(small, rule, settings=DEVICE, batch_size=32, allow_mismatch=True), replay(rule, table)
    exits = [found(numbers[:5]).exits, found.run([*numbers[5:400].split(50)], progress=False).exits]
    answers = [*found.stream([*numbers[400:].split(32)])]
    samples = np.concatenate([each.samples for each in answers])
    exits.append(np.concatenate([each.open_indices for each in answers])[np.argsort(samples)])
    np.testing.assert_array_equal(np.concatenate(exits), expected.exits)
    assert sorted(samples) == [*range(400, 700)]


def test_another_policy_of_the_same_rule_needs_no_new_capture(small, numbers, table):
    first, second = rules(table)["threshold"], rules(table)["ties"]
    found = Predictor(small, first, settings=DEVICE, batch_size=64, allow_mismatch=True)
    assert_replayed(found(numbers), first, table)
    walks = dict(found.backend.deciding.walks)
    other = found.with_policy(second)
    assert_replayed(other(numbers, samples=np.arange(700)), second, table)
    assert_replayed(found(numbers, samples=np.arange(700)), first, table)
    assert found.backend.deciding.walks == walks


def test_unusable_logits_are_named_and_what_was_answered_is_kept(small, numbers, table):
    broken = numbers.clone()
    broken[321] = float("nan")
    found = Predictor(small, rules(table)["nobody"], settings=DEVICE, batch_size=16, allow_mismatch=True)
    with pytest.raises(ValueError, match="unusable logits for 1 samples, the first is sample 321") as caught:
        found(broken)
    assert len(caught.value.finished) > 0
    assert_replayed(found(numbers, samples=np.arange(700)), rules(table)["nobody"], table)


def test_two_predictors_and_two_threads_at_once(small, numbers, table):
    names = ["threshold", "lottery", "patience", "threshold"]
    found = [
        Predictor(small, rules(table)[each], settings=DEVICE, batch_size=32, allow_mismatch=True) for each in names
    ]
    found[3] = found[0]  # one of them is used by two threads
    results = [[] for _ in names]

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results[index].append(found[index](numbers, samples=np.arange(700)))

    threads = [Thread(target=work, args=[index]) for index in range(len(names))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for name, decisions in zip(names, results, strict=True):
        assert len(decisions) == 20
        for each in decisions:
            assert_replayed(each, rules(table)[name], table)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [4, 32])
def test_batches_that_run_beside_each_other_share_no_memory(dtype, size):
    torch.manual_seed(0)  # long sums of few rows are divided, and their parts lie in memory that torch keeps
    stages = [nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4096)) for _ in range(3)]
    model = MultiExitModel(stages, [nn.Linear(4096, 10) for _ in range(3)]).eval()
    inputs, nobody = torch.randn(64 * size, 4096), Threshold((np.inf,) * 2, costs=(1.0, 2.0, 3.0))
    settings = [replace(each, dtype=dtype) for each in (DEVICE, DEVICE, HOST)]
    *ours, host = (Predictor(model, nobody, settings=each, batch_size=size, probabilities=True) for each in settings)
    expected, results = host(inputs).probabilities, ([], [])

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                results[index].append(ours[index](inputs, samples=np.arange(len(inputs))).probabilities)

    threads = [Thread(target=work, args=[index]) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [len(each) for each in results] == [10, 10]
    for found in itertools.chain(*results):
        np.testing.assert_allclose(found, expected, atol=1e-4 if dtype == "fp32" else 2e-2)


class Waits(nn.Module):
    """Looks at its numbers on the host, which no graph can."""

    def forward(self, features):
        return features * bool(features.isfinite().all().item())


def test_what_cannot_be_captured_is_decided_by_the_host_and_a_line_says_so():
    model = MultiExitModel([nn.Linear(4, 4), Waits()], [nn.Linear(4, 3), nn.Linear(4, 3)]).eval()
    found = Predictor(model, Threshold((0.2,), costs=(1.0, 2.0)), settings=DEVICE, batch_size=8)
    with pytest.warns(UserWarning, match="the host decides: stage 1 cannot be captured as a CUDA graph"):
        decisions = found(torch.randn(64, 4))
    assert len(decisions) == 64
    assert "stage 1 cannot be captured" in found.decided_by
    assert torch.ones(3, device="cuda").sum().item() == 3  # the GPU is of use again


def test_without_what_it_needs_the_host_decides_and_a_line_says_so(small, numbers, table, monkeypatch):
    monkeypatch.setattr(conditional, "why_not", lambda: "the package cuda-bindings is not installed")
    rule = rules(table)["threshold"]
    found = Predictor(small, rule, settings=DEVICE, batch_size=64, allow_mismatch=True)
    with pytest.warns(UserWarning, match="the host decides: the package cuda-bindings is not installed"):
        assert_replayed(found(numbers[:64]), rule, table, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = Predictor(small, rule, settings=RunSettings("cuda"), batch_size=64, allow_mismatch=True)
        assert_replayed(quiet(numbers[:64]), rule, table, 64)
        assert "cuda-bindings is not installed" in quiet.decided_by
        assert_replayed(found(numbers, samples=np.arange(700)), rule, table)  # many batches need no such package
    assert "the device decides" in found.decided_by


def test_when_memory_is_short_the_host_decides(small, numbers, table, monkeypatch):
    def full(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(StreamWalk, "__init__", full)
    rule = rules(table)["threshold"]
    found = Predictor(small, rule, settings=DEVICE, batch_size=64, allow_mismatch=True)
    with pytest.warns(UserWarning, match="the host decides: CUDA out of memory"):
        assert_replayed(found(numbers), rule, table)


def test_auto_measures_keeps_the_faster_and_says_which(small, numbers, table):
    rule = rules(table)["threshold"]
    found = Predictor(small, rule, settings=RunSettings("cuda"), batch_size=32, allow_mismatch=True)
    assert_replayed(found(numbers[:32]), rule, table, 32)
    assert found.decided_by == "the host decides about the first batches"
    assert_replayed(found(numbers, samples=np.arange(700)), rule, table)
    assert "decides about batches of 32: " in found.decided_by
    quota = calibrate.certified_batch(calibrate.geometric)(COSTS, "60%", table)
    by_rank = Predictor(small, quota, settings=RunSettings("cuda"), batch_size=32, allow_mismatch=True)
    by_rank(numbers)
    assert by_rank.decided_by == "the host decides: Quota needs it"


def test_memory_does_not_grow_over_a_thousand_windows(small, numbers, table):
    found = Predictor(small, rules(table)["lottery"], settings=DEVICE, batch_size=4, allow_mismatch=True)
    many = numbers[:640].repeat(50, 1)  # 8,000 batches, 1,000 windows
    found(many)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert len(found(many)) == len(many)
    assert len(found.run(itertools.repeat(numbers[:64], 500), progress=False)) == 32_000
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0] + 2**20
    assert torch.cuda.memory_reserved() <= before[1] + 2**25


@pytest.fixture(scope="module")
def images():
    return torch.randn(1000, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    made = resnet18_cifar(num_classes=10)
    for head in made.heads[:-1]:
        for each in head.parameters():
            each.data *= 5
    return made.eval()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_networks_decide_as_replayed_but_for_samples_on_a_threshold(resnet, images, dtype, compiled):
    if compiled and dtype == "fp16":
        pytest.skip("two dtypes are enough to compile for")
    settings = RunSettings("cuda", dtype, channels_last=True, compile=compiled, decide="device")
    table = record(resnet, images, progress=False, settings=replace(settings, compile=False))
    policy = calibrate.eero(np.arange(1.0, 9.0), "50%", table)
    found = Predictor(resnet, policy, batch_size=100, settings=settings, probabilities=True)
    decisions, expected = found(images), replay(policy, table)
    assert found.decided_by == "the device decides", found.decided_by
    near = 1e-3 if dtype == "fp32" else 5e-2
    level = (np.abs(table.scores - np.array([*policy.thresholds, np.inf])) < near) | (table.scores < near)
    differ = (decisions.exits != expected.exits) | (decisions.predictions != expected.predictions)
    assert not (differ & ~level.any(axis=1)).any(), int(differ.sum())
    assert ((decisions.probabilities > 0) & (decisions.probabilities <= 1)).all()


@pytest.mark.parametrize("name", ["vote", "geometric_mean", "gain"])
def test_compiled_stages_combine_exits_as_the_host_does(name):
    torch.manual_seed(0)
    model = MultiExitModel(
        [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)], [nn.Linear(8, 6) for _ in range(3)]
    )
    inputs, labels = torch.randn(900, 8), np.random.default_rng(1).integers(6, size=900)
    table = record(model.eval(), (inputs, labels), progress=False, settings=RunSettings("cuda"))
    method = calibrate.learned_stopping if name == "gain" else calibrate.combined(calibrate.eero, name)
    rule = method((1.0, 2.0, 3.0), "60%", table)
    assert rule.combination is not None
    for size in (32, 1):
        one, other = (
            Predictor(model, rule, settings=replace(each, compile=True), batch_size=size) for each in (DEVICE, HOST)
        )
        ours, theirs = (each(inputs[: 20 * size], samples=np.arange(20 * size)) for each in (one, other))
        assert one.decided_by == "the device decides", one.decided_by
        assert (ours.exits == theirs.exits).mean() > 0.99
        assert (ours.predictions == theirs.predictions).mean() > 0.99


def test_texts_of_several_lengths_have_a_walk_each():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    network = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=5, **sizes)).eval()
    tokens = torch.randint(5, 100, (2, 12))
    model = attach_heads(network, after=2, example={"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    batches = []
    for index in range(24):
        length = (12, 20, 7)[index % 3]
        mask = torch.ones(16, length, dtype=torch.int64)
        mask[::2, length // 2 :] = 0
        batches.append({"input_ids": torch.randint(5, 100, (16, length)), "attention_mask": mask})
    rule = Lottery(costs=(1.0, 2.0, 3.0), exit_rates=(0.4, 0.3, 0.3))
    one, other = (Predictor(model, rule, settings=each, batch_size=16) for each in (DEVICE, HOST))
    ours, theirs = (each.run(batches, progress=False) for each in (one, other))
    np.testing.assert_array_equal(ours.exits, theirs.exits)
    assert (ours.predictions == theirs.predictions).mean() > 0.99
    assert len(one.backend.deciding.walks) == 3


def test_inputs_from_host_and_device_share_batches(small, numbers, table):
    rule = rules(table)["nobody"]
    found = Predictor(small, rule, settings=DEVICE, batch_size=300, allow_mismatch=True)
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, 90, size=15)
        ends = np.minimum(np.cumsum([0, *sizes]), 700).tolist()
        parts = [numbers[start:stop] for start, stop in itertools.pairwise(ends) if start < stop]
        parts = [part.cuda() if (index + seed) % 2 else part for index, part in enumerate(parts)]
        abandoned = found.stream([numbers[:7].cuda(), *parts])  # leaves copies behind
        next(abandoned, None)
        abandoned.close()
        decisions = found.run(parts, samples=np.arange(ends[-1]), progress=False)
        assert_replayed(decisions, rule, table, ends[-1])


def test_weights_that_were_moved_are_captured_again(images):
    torch.manual_seed(0)
    model = resnet18_cifar(num_classes=10).cuda().eval()
    rule = Lottery(costs=tuple(np.arange(1.0, 9.0).tolist()), exit_rates=(0.125,) * 8)
    one, other = (Predictor(model, rule, settings=each, batch_size=64) for each in (DEVICE, HOST))
    for _ in range(2):
        ours, theirs = (each(images, samples=np.arange(1000)) for each in (one, other))
        np.testing.assert_array_equal(ours.exits, theirs.exits)
        assert (ours.predictions == theirs.predictions).mean() > 0.99
        with torch.no_grad():
            for each in model.cpu().parameters():
                each.mul_(-1.5)
        model.cuda()
        taken = torch.full((2**26,), float("nan"), device="cuda")  # where the weights were, perhaps
        del taken


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_network_on_another_device_than_the_current_one(small, numbers, table):
    rule = rules(table)["ties"]
    found = Predictor(small, rule, settings=replace(DEVICE, device="cuda:1"), batch_size=32, allow_mismatch=True)
    assert_replayed(found(numbers), rule, table)
    assert_replayed(found(numbers[:9], samples=np.arange(9)), rule, table, 9)


class Cached(nn.Module):
    """Keeps what it computes from its weights in a dict, as LeViT does, until it is trained."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(8, 8), {}

    def forward(self, inputs):
        if "weight" not in self.cache:
            self.cache["weight"] = self.linear.weight.sin()
        return nn.functional.linear(inputs, self.cache["weight"], self.linear.bias).tanh()

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)


def test_answers_are_the_hosts_under_autocast_and_once_a_network_has_been_trained():
    model = MultiExitModel([Cached(), Cached()], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval().cuda()
    rule, inputs = Threshold((np.inf,), costs=(1.0, 2.0)), torch.randn(512, 8)
    found, host = (Predictor(model, rule, settings=each, batch_size=64, probabilities=True) for each in (DEVICE, HOST))

    def assert_alike():
        for part in (inputs, inputs[:5], inputs[:1]):
            np.testing.assert_allclose(found(part).probabilities, host(part).probabilities, atol=1e-5)

    assert_alike()
    assert found.decided_by == "the device decides"
    with torch.autocast("cuda", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_alike()
    model.train()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))
    model.eval()
    assert_alike()
