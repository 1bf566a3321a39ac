"""On a GPU the predictor equals a replay of its own recording, but for samples that lie on a threshold."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from alight import calibrate, replay
from alight.engine.backends import Reads
from alight.engine.backends.torch import values
from alight.engine.backends.torch.prepare import SHAPES
from alight.engine.backends.torch.rows import kernels, move
from alight.engine.backends.torch.values import CLASSES, RANKS, pack, pack_by_kernel
from alight.engine.predictor import Predictor
from alight.engine.recorder import Recorder, record
from alight.engine.settings import RunSettings
from alight.errors import AlightError
from alight.networks.multi_exit import MultiExitModel
from alight.networks.zoo import resnet18_cifar
from alight.policies.policy import ExitAt, Lottery, Threshold

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEAR = {"fp32": 1e-5, "bf16": 2e-2}  # last bits change with the batch size
COSTS = np.arange(1.0, 9.0)
CUDA, GRAPHS = RunSettings("cuda"), RunSettings("cuda", graphs=True)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = resnet18_cifar(num_classes=10)
    for head in made.heads[:-1]:
        for each in head.parameters():
            each.data *= 5
    return made.eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(1500, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("batch_size", [64, 1000])
def test_the_predictor_equals_replay_on_a_gpu(model, images, dtype, channels_last, batch_size):
    settings = RunSettings("cuda", dtype, channels_last)
    table = record(model, [images], progress=False, settings=settings)
    methods = {
        "eero": calibrate.eero(COSTS, "50%", table),
        "patience": calibrate.patience(COSTS, "50%", table),
        "quota": calibrate.certified_batch(calibrate.geometric)(COSTS, "50%", table),
    }
    for name, policy in methods.items():
        decisions = Predictor(model, policy, batch_size=batch_size, settings=settings)(images)
        expected = replay(policy, table, batch_size=batch_size)
        differ = (decisions.exits != expected.exits) | (decisions.predictions != expected.predictions)
        thresholds = np.array([*getattr(policy, "thresholds", ()), np.inf])
        near = table.scores < NEAR[dtype]  # two classes level: either may be answered
        if name == "eero":
            near |= np.abs(table.scores - thresholds) < NEAR[dtype]
        if name == "quota":  # as many leave at each exit; two of neighbouring ranks may change places
            np.testing.assert_array_equal(decisions.exit_shares, expected.exit_shares)
            assert differ.mean() <= (0.01 if dtype == "fp32" else 0.2)
        else:
            assert not (differ & ~near.any(axis=1)).any(), (name, int(differ.sum()))
        assert decisions.mean_cost <= 1.05 * policy.budget


@pytest.mark.parametrize("settings", [CUDA, GRAPHS], ids=["eager", "graphs"])
def test_a_stream_on_a_gpu_is_decided_alike_however_it_is_divided_into_calls(model, images, settings):
    rule = Lottery(costs=tuple(COSTS.tolist()), exit_rates=(0.125,) * 8, salt=7)
    whole = Predictor(model, rule, settings=settings, batch_size=64)(images[:400])
    found, ends = Predictor(model, rule, settings=settings, batch_size=64), [0, 1, 2, 66, 100, 357, 399, 400]
    parts = [found(images[start:stop]).exits for start, stop in itertools.pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(parts), whole.exits)


def test_a_loader_and_a_stream_on_a_gpu_give_every_sample_once(model, images):
    table = record(model, [images], settings=CUDA, progress=False)
    policy = calibrate.eero(COSTS, "60%", table)
    predictor = Predictor(model, policy, settings=CUDA, batch_size=128, probabilities=True)
    whole = predictor.run([images[:700], images[700:]], progress=False)
    assert len(whole) == 1500
    assert ((whole.probabilities > 0) & (whole.probabilities <= 1)).all()
    answered = np.concatenate([each.samples for each in predictor.stream([images])])
    assert sorted(answered) == list(range(1500, 3000))
    broken = images.clone()
    broken[321] = float("nan")
    with pytest.raises(ValueError, match="sample 3321"):
        predictor(broken)


def test_a_recording_on_a_gpu_keeps_the_order_while_batches_are_on_their_way(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds by batch size, in the third digit
    labels = torch.arange(1500) % 10
    batches = [
        (part.cuda(), known.cuda()) if index % 2 else (part.cpu(), known)
        for index, (part, known) in enumerate(zip(images.split(70), labels.split(70), strict=True))
    ]
    recorder = Recorder(model, features=["negative_entropy"], settings=CUDA)
    whole, parts = (recorder.table(each, progress=False) for each in ([(images, labels)], batches))
    np.testing.assert_array_equal(parts.labels, labels.numpy())
    np.testing.assert_allclose(parts.scores, whole.scores, atol=1e-4)
    np.testing.assert_allclose(parts.features["negative_entropy"], whole.features["negative_entropy"], atol=1e-3)
    written = recorder.write(tmp_path / "table.npz", batches, progress=False).load()
    for name, column in parts.rows().items():
        np.testing.assert_allclose(written.rows()[name], column, atol=1e-4)
    assert written.fingerprint == parts.fingerprint == whole.fingerprint
    broken = images.clone()
    broken[1234] = float("nan")
    with pytest.raises(ValueError, match="sample 1234"):
        record(model, [*broken.split(70)], settings=CUDA, progress=False)


def test_answers_of_the_last_exit_that_wait_to_be_fetched_survive_an_error(model, images):
    def loader():
        yield from images.split(100)
        raise OSError("disk gone")

    table = record(model, [images], settings=CUDA, progress=False)
    policy = calibrate.geometric(COSTS, "90%", table)
    with pytest.raises(OSError, match="disk gone") as caught:
        Predictor(model, policy, settings=CUDA, batch_size=100).run(loader(), progress=False)
    assert 7 in np.concatenate([each.open_indices for each in caught.value.finished])
    answered = np.concatenate([each.samples for each in caught.value.finished])
    assert len(np.unique(answered)) == len(answered) > 700


def test_the_full_network_is_a_policy_too(model, images):
    policy = ExitAt(costs=(8.0,), open_exits=(7,), num_exits=8)
    decisions = Predictor(model, policy, settings=CUDA, batch_size=16)(images)  # more batches than are fetched at once
    with torch.inference_mode():
        expected = torch.cat([model.to("cuda")(part.to("cuda"))[-1].argmax(-1) for part in images.split(16)])
    model.to("cpu")
    np.testing.assert_array_equal(decisions.predictions, expected.cpu().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5, 7), (8, 4, 4), (1,), (129,)])
@pytest.mark.parametrize("last", [False, True])
def test_rows_move_on_a_gpu_as_they_do_on_the_host(dtype, shape, last):
    source, target = ((100 * torch.rand(40, *shape)).to(dtype) for _ in range(2))
    if last and len(shape) == 3:
        source, target = (each.to(memory_format=torch.channels_last) for each in (source, target))
    rng = np.random.default_rng(0)
    rows, slots = rng.permutation(37)[:17], rng.permutation(38)[:17]
    there = (source.cuda(), target.cuda())
    move((source[3:],), rows, (target[2:],), slots)  # not at the start of their memory
    move((there[0][3:],), rows, (there[1][2:],), slots)
    assert torch.equal(there[1].cpu(), target)
    assert kernels() is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3, 100, 1000, 5000])
@pytest.mark.parametrize("columns", [("margin",), ("max_probability",), ("margin", "negative_entropy"), ()])
@pytest.mark.parametrize(("probability", "top"), [(False, 0), (False, 5), (True, 3)])
def test_one_kernel_packs_logits_as_ten_do(dtype, classes, columns, probability, top, monkeypatch):
    logits = (4 * torch.randn(33, classes, generator=torch.Generator().manual_seed(2))).to(dtype).cuda()
    logits[0] = 1.0  # all level
    logits[1, 1:] = -np.inf  # masked out
    logits[2, 1], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf
    quick = pack(logits, Reads(columns, probability, top)).cpu().numpy()
    assert pack_by_kernel(logits, Reads(("margin",), probability, top)) is not None
    monkeypatch.setattr(values, "pack_by_kernel", lambda *given: None)
    slow = pack(logits, Reads(columns, probability, top)).cpu().numpy()
    assert quick.shape == slow.shape
    assert not np.isfinite(quick[2:5, 1]).any()
    assert not np.isfinite(slow[2:5, 1]).any()
    usable = np.delete(np.arange(33), [2, 3, 4])
    np.testing.assert_allclose(quick[usable, 1:], slow[usable, 1:], rtol=1e-12, atol=1e-14)
    answers = quick[usable, 0].astype(int)
    np.testing.assert_array_equal(logits.double().cpu().numpy()[usable, answers], quick[usable, 1])
    turned = logits.t().contiguous().t()  # classes far apart in memory
    one, other = (pack_by_kernel(each, Reads(("margin",), top=top)) for each in (turned, logits))
    np.testing.assert_array_equal(one.cpu(), other.cpu())


def test_too_many_classes_for_one_program_are_packed_by_torch():
    assert pack_by_kernel(torch.zeros(2, CLASSES + 1, device="cuda"), Reads(("margin",))) is None
    assert pack_by_kernel(torch.zeros(2, 3, device="cuda"), Reads(("logit_margin",))) is None
    assert pack_by_kernel(torch.zeros(2, 30, device="cuda"), Reads(("margin",), top=RANKS + 1)) is None


def test_replayed_batches_decide_as_launched_ones(model, images):
    settings = RunSettings("cuda", "bf16", channels_last=True)
    table = record(model, [images], progress=False, settings=settings)
    policy = calibrate.eero(COSTS, "60%", table)
    plain = Predictor(model, policy, batch_size=100, settings=settings)(images)
    quick = Predictor(model, policy, batch_size=100, settings=replace(settings, graphs=True))
    for _ in range(2):
        decisions = quick(images)
        near = (np.abs(table.scores - np.array([*policy.thresholds, np.inf])) < NEAR["bf16"]) | (table.scores < 2e-2)
        differ = (decisions.exits != plain.exits) | (decisions.predictions != plain.predictions)
        assert not (differ & ~near.any(axis=1)).any(), int(differ.sum())
    assert [len(run.captured) for run in quick.backend.runs[:3]] == [1, 1, 1]
    loaded = quick.run([*images.split(70)], progress=False)  # while another thread pins memory
    assert (loaded.exits == decisions.exits).mean() > 0.95
    np.testing.assert_array_equal(quick(images[:100]).predictions, quick(images).predictions[:100])


def test_the_full_network_is_replayed_too(model, images):
    policy = ExitAt(costs=(8.0,), open_exits=(7,), num_exits=8)
    plain, quick = (Predictor(model, policy, settings=each, batch_size=16)(images) for each in (CUDA, GRAPHS))
    assert (plain.predictions == quick.predictions).mean() > 0.999
    broken = images.clone()
    broken[77] = float("nan")
    with pytest.raises(ValueError, match="sample 77"):
        Predictor(model, policy, settings=GRAPHS, batch_size=16)(broken)


def test_a_recording_may_be_replayed(model, images, monkeypatch):
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # which rounds by batch size: a rest runs as a full one
    options = {"batch_size": 200, "progress": False}  # 1,500 images: the last batch has 100
    plain, quick = (record(model, images, settings=each, **options) for each in (CUDA, GRAPHS))
    np.testing.assert_allclose(quick.scores, plain.scores, atol=1e-3)
    assert (quick.predictions == plain.predictions).mean() > 0.999


def test_partial_batches_are_replayed_in_the_rows_of_a_full_batch_where_launching_takes_longer(model, images):
    policy = Threshold((np.inf,) * 7, costs=tuple(COSTS))  # nobody leaves early
    chosen = [RunSettings("cuda", "bf16", channels_last=True, graphs=graphs) for graphs in (False, True)]
    plain, quick = (Predictor(model, policy, settings=each, batch_size=64) for each in chosen)
    quick(images[:64])
    assert all(each.fast for run in quick.backend.runs for each in run.captured.values())  # kernels of microseconds
    run_unchanged = []
    for run in quick.backend.runs:
        run.run = run_unchanged.append
    rests = quick(images[:100]), quick(images[100:130])
    assert not run_unchanged
    expected = plain(images[:130]).predictions
    assert (np.concatenate([each.predictions for each in rests]) == expected).mean() > 0.98


class Waits(nn.Module):
    """Looks at its numbers on the host, which no graph can."""

    def forward(self, features):
        return features * (1.0 if features.sum().item() > 0 else 2.0)


def test_what_cannot_be_captured_is_an_error_and_never_a_silent_fall_back():
    model = MultiExitModel([nn.Linear(4, 4), Waits()], [nn.Linear(4, 3), nn.Linear(4, 3)]).eval()
    predictor = Predictor(model, Threshold((2.0,), costs=(1.0, 2.0)), settings=GRAPHS, batch_size=8)
    with pytest.raises(AlightError, match=r"stage 1 cannot be captured as a CUDA graph .* graphs=False"):
        predictor(torch.randn(64, 4))
    assert torch.ones(3, device="cuda").sum().item() == 3  # the GPU is of use again


class Mean(nn.Module):
    """A head that reads sequences of any length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        return self.linear(features.mean(1))


def test_shapes_beyond_the_first_few_are_launched():
    model = MultiExitModel([nn.Linear(4, 4), nn.Linear(4, 4)], [Mean(), Mean()]).eval()
    policy = Threshold((2.0,), costs=(1.0, 2.0))
    plain, quick = (Predictor(model, policy, settings=each, batch_size=8) for each in (CUDA, GRAPHS))
    for length in range(1, 14):
        texts = torch.randn(8, length, 4)
        np.testing.assert_array_equal(quick(texts).predictions, plain(texts).predictions)
    assert len(quick.backend.runs[0].captured) == SHAPES
