import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from alight import HeadOutputs, calibrate, load_policy, replay
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.paced import Pace, Paced
from alight.policies.route import replay_on


@pytest.fixture(scope="module")
def policy(frozen):
    return calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, "50%", frozen.labelled, spend_all=True)


def table(scores):
    return HeadOutputs(scores, np.zeros(scores.shape, dtype=int))


def stream(frozen, kind, length, seed=0):
    rng = np.random.default_rng(seed)
    base = frozen.test.scores[rng.integers(len(frozen.test), size=length)]
    along = np.linspace(0, 1, length)[:, None]
    return {
        "as calibrated": base,
        "drift to hard": base * (1 - 0.9 * along),
        "drift to easy": base + along,
        "all unsure": 1e-9 * base,
        "all sure": 1 + base,
        "all equal": np.full_like(base, 0.5),
        "sure early, unsure late": np.where(along < 0.3, 1 + base, 1e-6 * base),
    }[kind]


KINDS = [
    "as calibrated",
    "drift to hard",
    "drift to easy",
    "all unsure",
    "all sure",
    "all equal",
    "sure early, unsure late",
]


SURE = ["drift to easy", "all sure", "all equal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [20, 333])
def test_a_stream_is_never_ahead_of_its_budget_and_uses_it(policy, frozen, kind, batch_size):
    length = 10_000
    spent = np.cumsum(replay(policy, table(stream(frozen, kind, length)), batch_size=batch_size).spent)
    ends = np.unique(np.append(np.arange(batch_size, length + 1, batch_size), length))
    assert (spent[ends - 1] <= ends * policy.budget + policy.costs[-1]).all()
    assert spent[-1] >= (0.96 if kind in SURE else 0.99) * length * policy.budget


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 7, 50]), st.sampled_from(["uniform", "ties", "huge", "constant"]))
def test_the_bound_holds_for_any_scores(frozen, policy, seed, batch_size, kind):
    rng = np.random.default_rng(seed)
    scores = rng.uniform(size=(300, 8))
    scores = {
        "uniform": scores,
        "ties": np.round(scores, 1),
        "huge": rng.standard_cauchy(size=(300, 8)) * 1e6,
        "constant": scores * 0 + rng.uniform(),
    }[kind]
    spent = np.cumsum(replay(policy, table(scores), batch_size=batch_size).spent)
    ends = np.unique(np.append(np.arange(batch_size, 301, batch_size), 300))
    assert (spent[ends - 1] <= ends * policy.budget + policy.costs[-1]).all()


def test_a_stream_can_be_stopped_saved_and_taken_up_again(policy, frozen, tmp_path):
    scores = stream(frozen, "drift to hard", 3000)
    whole, (end, *_) = replay_on(policy, table(scores), batch_size=100)
    first, (state, *_) = replay_on(policy, table(scores[:1500]), batch_size=100)
    state.save(tmp_path / "pace.json")
    restored = Pace.load(tmp_path / "pace.json")
    second, (resumed, *_) = replay_on(policy, table(scores[1500:]), (restored,), batch_size=100)
    np.testing.assert_array_equal(first.exits, whole.exits[:1500])
    assert resumed.admitted == end.admitted == 3000
    bound = 3000 * policy.budget + policy.costs[-1]
    assert first.spent.sum() + second.spent.sum() <= bound
    assert resumed.spent == pytest.approx(first.spent.sum() + second.spent.sum())
    assert (tmp_path / "pace.json").stat().st_size < 200_000


def test_the_state_counts_what_was_decided(policy, frozen):
    decisions, (state, *_) = replay_on(policy, table(stream(frozen, "as calibrated", 2000)), batch_size=64)
    assert state.admitted == 2000
    assert state.spent == pytest.approx(decisions.spent.sum())


def test_the_alarm_is_raised_after_a_shift_and_not_before(policy, frozen):
    rng = np.random.default_rng(0)
    calm = frozen.test.scores[rng.integers(len(frozen.test), size=6000)]
    hard = 0.3 * frozen.test.scores[rng.integers(len(frozen.test), size=3000)]
    _, (state, *_) = replay_on(policy, table(np.concatenate([calm, hard])), batch_size=50)
    assert state.alarmed
    assert 6000 < state.alarmed_at <= 8000
    _, (quiet, *_) = replay_on(policy, table(np.concatenate([calm, calm])), batch_size=50)
    assert not quiet.alarmed


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("batch_size", [10, 100])
def test_false_alarms_are_as_rare_as_stated_even_after_a_small_calibration(frozen, batch_size):
    rng, streams, alarms = np.random.default_rng(0), 150, 0
    for _ in range(streams):
        calibration, rest = frozen.test.split(0.04, rng)
        first, second = calibration.take(slice(100)), calibration.take(slice(100, None))
        method = calibrate.certified_stream(calibrate.geometric, alarm_rate=0.2, horizon=1000, seed=0)
        policy = method(frozen.costs, "40%", first, second)
        _, (state, *_) = replay_on(policy, rest.take(slice(1000)), batch_size=batch_size)
        alarms += state.alarmed
    assert alarms <= binom.ppf(0.999, streams, 0.2)
    assert alarms > 0  # it is not merely deaf


def test_accuracy_is_that_of_the_plain_policy_while_nothing_drifts(policy, frozen):
    shuffled = frozen.test.take(np.random.default_rng(0).permutation(len(frozen.test)))
    plain = calibrate.certified_mean(calibrate.eero, seed=0)(frozen.costs, "50%", frozen.labelled, spend_all=True)
    gap = replay(plain, shuffled).accuracy(shuffled.labels) - replay(policy, shuffled, batch_size=100).accuracy(
        shuffled.labels
    )
    assert abs(gap) < 0.01


def test_tensors_take_the_same_steps(policy, frozen):
    torch = pytest.importorskip("torch")
    scores = stream(frozen, "drift to hard", 200)
    samples, memory = np.arange(200), ()
    others, remembered = torch.arange(200), ()
    waiting = slice(None)
    for open_index in range(3):
        column = scores[samples, open_index]
        leaving, memory = policy.step(open_index, samples, samples * 0, column, memory)
        also, remembered = policy.step(open_index, others, others * 0, torch.tensor(column), remembered)
        np.testing.assert_array_equal(also.numpy(), leaving)
        waiting = ~leaving
        samples, others = samples[waiting], others[torch.tensor(waiting)]
        memory = (*memory[:2], memory[2][waiting])
        remembered = (*remembered[:2], remembered[2][torch.tensor(waiting)])


def test_the_guard_holds_tensors_back_too(policy, frozen):
    torch = pytest.importorskip("torch")
    from alight import route

    scores = stream(frozen, "all unsure", 1000)

    def walk(as_array):
        memory, spent = (), 0.0
        for start in range(0, 1000, 100):
            rows = as_array(np.arange(start, start + 100))
            waiting, columns = rows, as_array(scores)

            def read(exit_index, staying):
                nonlocal waiting
                waiting = waiting[staying]
                return waiting * 0, (columns[waiting, exit_index],)  # noqa: B023

            steps = route(policy, rows, read, memory)
            while True:
                try:
                    open_index, leaving, _ = next(steps)
                except StopIteration as end:
                    memory = end.value[:1]
                    break
                spent += len(leaving) * policy.costs[open_index]
        return spent, memory[0].spent

    for as_array in (np.asarray, torch.tensor):
        spent, counted = walk(as_array)
        assert spent <= 1000 * policy.budget + policy.costs[-1]
        assert counted == pytest.approx(spent)


def test_an_empty_batch_changes_nothing(policy, frozen):
    scores = stream(frozen, "as calibrated", 200)
    _, (state, *_) = replay_on(policy, table(scores[:100]), batch_size=50)
    nothing = np.empty(0, dtype=int)
    _, (after, *_) = policy.step(0, nothing, nothing, np.empty(0), (state,))
    decisions, (later, *_) = replay_on(policy, table(scores[100:]), (after,), batch_size=50)
    assert later.admitted == 200
    assert len(decisions) == 100


def test_a_state_of_another_policy_is_refused(policy, frozen):
    other = calibrate.certified_stream(calibrate.two_exits, seed=0)(frozen.costs, "50%", frozen.labelled, early=2)
    _, (state, *_) = replay_on(other, table(stream(frozen, "as calibrated", 50)), batch_size=50)
    with pytest.raises(Mismatch, match="a state of 2 exits for a policy of 8"):
        replay_on(policy, table(stream(frozen, "as calibrated", 50)), (state,))


def test_a_plan_that_leaves_some_of_the_budget_is_kept_along_a_stream(frozen):
    lazy = calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, "100%", frozen.labelled)
    planned = calibrate.eero(frozen.costs, "99%", frozen.labelled)
    paced = calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, "99%", frozen.labelled)
    spent = replay(paced, frozen.test, batch_size=100).mean_cost
    assert planned.planned_cost < 0.98 * planned.budget
    assert spent <= 1.01 * planned.planned_cost
    assert "Guaranteed for every sample" in lazy.certificate.guarantee


def test_a_paced_policy_survives_saving(policy, tmp_path):
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
    assert "never ahead of its budget" in str(policy)


def test_files_that_are_no_state_are_refused(tmp_path):
    (tmp_path / "pace.json").write_text('{"alight": "Pace", "schema": 1, "admitted": 3}')
    with pytest.raises(BadFile, match="not usable"):
        Pace.load(tmp_path / "pace.json")


def test_parts_that_do_not_fit_are_refused(policy):
    from dataclasses import replace

    for change, message in {
        "exit_rates": ((), "needs a budget"),
        "recent": ((), "windows"),
        "alarm_rate": (2.0, "alarm rate"),
    }.items():
        with pytest.raises(BadInput, match=message[1]):
            replace(policy, **{change: message[0]})
    with pytest.raises(BadInput, match="a law"):
        replace(policy, law=(1, 2))
    assert isinstance(policy, Paced)
