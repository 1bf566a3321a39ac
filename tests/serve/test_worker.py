"""The worker batches what waits, hurries what has a deadline, keeps to the budget, and spares others a bad sample."""

import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from served import folder, pixels

from alight.policies.paced import Pace
from alight.serve.ledger import Book, resumed
from alight.serve.limits import Limits, Refused
from alight.serve.metrics import Metrics
from alight.serve.network import load_network
from alight.serve.run import example, load_policies
from alight.serve.timing import Timing, timings
from alight.serve.worker import Job, Worker

QUICK = Timing([1e-9] * 4, growth=1.0, most=8)  # as if nothing took any time


def worker(*names, timing=QUICK, state=None, ahead=64, **limits):
    policies = load_policies([folder() / f"{name}.json" for name in names])
    network = load_network(folder() / "model", policies, threads=1)
    bounds = Limits(**{"batch": 8, "wait": 0.05} | limits)
    book = Book(resumed(state, policies), state, ahead)
    return Worker(network, book, dict.fromkeys(policies, timing), bounds, Metrics(network.exits))


def samples(count, start=200):
    scaled = (pixels(count, start).astype(np.float32) / 255 - 0.305) / 0.376
    return [image[None, None] for image in scaled]


def answered(made, jobs):
    for job in jobs:
        made.offer(job)
    wait([job.answer for job in jobs], timeout=60)
    return [job.answer.exception() or job.answer.result() for job in jobs]


@pytest.fixture
def plain():
    made = worker("plain")
    made.start()
    yield made
    made.close()


def test_what_waits_runs_together_up_to_the_batch_size():
    made = worker("plain")
    jobs = [Job(samples(count)) for count in (3, 3, 3, 1, 1)]
    for job in jobs:
        made.offer(job)
    made.start()
    made.close()  # which answers what waits
    assert [len(job.answer.result().answers) for job in jobs] == [3, 3, 3, 1, 1]
    batches = {each.name: each.value for each in made.metrics.batches.collect()[0].samples}
    assert (batches["alight_batch_samples_count"], batches["alight_batch_samples_sum"]) == (2, 11)
    with pytest.raises(Refused, match="stopping"):
        made.offer(Job(samples(1)))


def test_one_bad_sample_takes_no_other_along(plain):
    good, bad = samples(1)[0], np.full((1, 1, 8, 8), np.nan, np.float32)
    first, second, third = answered(plain, [Job([good]), Job([good, bad]), Job([good])])
    assert first.answers == third.answers
    assert second.status == 422
    assert "sample 1: the network gives no usable answer" in second.reason
    assert plain.alive


def test_a_fault_of_the_network_is_told_to_those_it_befell_and_the_worker_goes_on(plain):
    wrong = np.zeros((1, 5, 8, 8), np.float32)  # which no check has let through
    failed, fine = answered(plain, [Job([wrong]), Job(samples(1))])
    assert isinstance(failed, Exception)
    assert len(fine.answers) == 1


def test_a_deadline_chooses_the_deepest_exit_that_is_reached_in_time():
    made = worker("plain", timing=Timing([1.0, 100.0, 10_000.0, 1_000_000.0], growth=1.0, most=8))
    now = time.monotonic()
    rng = np.random.default_rng(0)
    hard = [rng.normal(size=(1, 1, 8, 8)).astype(np.float32) for _ in range(3)]  # of which no head is sure
    jobs = [
        Job(hard[:3], deadline=now + 1000),
        Job(hard[:3], deadline=now + 50),
        Job(hard[:1], deadline=now + 0.5),
    ]
    for job in jobs:
        made.offer(job)
    made.start()
    made.close()
    assert max(answer.exit for answer in jobs[0].answer.result().answers) == 1
    assert {answer.exit for answer in jobs[1].answer.result().answers} == {0}
    assert jobs[2].answer.exception().status == 504


def test_measured_exits_take_longer_the_deeper_they_are():
    policies = load_policies([folder() / "plain.json", folder() / "dear.json"])
    network = load_network(folder() / "model", policies, threads=1)
    found = timings(network, example(network), 8)
    timing = found["plain"]
    seconds = [timing.seconds(1, open_index) for open_index in range(4)]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] <= timing.seconds(8, 3)
    assert timing.deepest(1, seconds[-1]) == 3
    assert timing.deepest(1, 0.0) is None
    timing.learn(1, 3, 30 * seconds[-1])
    assert timing.seconds(1, 3) > 2 * seconds[-1]


@pytest.mark.parametrize("budgets", [[None], [None, "20%", "70%"]])
def test_a_stream_is_never_ahead_of_its_budget_whatever_is_asked(budgets, tmp_path):
    made = worker("cheap", state=tmp_path / "spending.json", ahead=16)
    made.start()
    rng, spent, count = np.random.default_rng(0), 0.0, 0
    policy = made.book.spending.policy
    noise = [rng.normal(size=(1, 1, 8, 8)).astype(np.float32) for _ in range(200)]  # of which no head is sure
    for turn in range(40):
        jobs = [Job(noise[place : place + 3], budgets[(turn + place) % len(budgets)]) for place in range(0, 24, 3)]
        found = answered(made, jobs)
        spent += sum(answer.cost for each in found for answer in each.answers)
        count += 24
        assert spent <= count * policy.budget + policy.costs[-1]
    made.close()
    pace = made.book.spending.pace
    assert (pace.admitted, pace.spent) == (count, pytest.approx(spent))
    assert resumed(tmp_path / "spending.json", {"cheap": policy}).pace.spent == pytest.approx(spent)


def test_while_the_state_cannot_be_written_samples_cost_no_more_than_the_budget(tmp_path: Path):
    home = tmp_path / "state"
    home.mkdir()
    made = worker("dear", state=home / "spending.json", ahead=8)
    made.start()
    policy = made.book.spending.policy
    home.rename(tmp_path / "elsewhere")  # as if the disk were gone
    found = answered(made, [Job(samples(8, start)) for start in range(0, 80, 8)])
    assert all(answer.cost <= policy.budget for each in found for answer in each.answers)
    assert made.metrics.state_errors.collect()[0].samples[0].value >= 1
    (tmp_path / "elsewhere").rename(home)
    found = answered(made, [Job(samples(8, start)) for start in range(0, 80, 8)])
    assert any(answer.cost > policy.budget for each in found for answer in each.answers)
    made.close()
    assert resumed(home / "spending.json", {"dear": policy}).pace.admitted == 160


def test_a_change_that_cannot_be_written_is_none(tmp_path: Path):
    home = tmp_path / "state"
    home.mkdir()
    made = worker("dear", "cheap", state=home / "spending.json")
    made.start()
    home.rename(tmp_path / "elsewhere")
    assert isinstance(made.change("cheap").exception(timeout=30), OSError)
    assert made.book.spending.name == "dear"
    (tmp_path / "elsewhere").rename(home)
    assert made.change("cheap").exception(timeout=30) is None
    assert made.book.spending.name == "cheap"
    made.close()


def test_a_batch_that_fails_is_paid_for(tmp_path: Path):
    made = worker("cheap")
    made.start()
    bad = np.full((1, 1, 8, 8), np.nan, np.float32)
    answered(made, [Job([bad])])
    assert isinstance(made.book.spending.pace, Pace)
    assert made.book.spending.owed == made.book.spending.policy.costs[-1] - made.book.spending.policy.budget
    made.close()
