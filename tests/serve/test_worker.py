"""The worker forms batches, meets deadlines, keeps the budget, and lets a bad sample fail alone."""

import math
import threading
import time
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from digit_service import folder, pixels, served_model
from fastapi.testclient import TestClient
from waiting import wait_until

from alight.engine.settings import RunSettings
from alight.policies.paced import Pace
from alight.policies.policy import Lottery
from alight.serve import app as app_module
from alight.serve import model as served
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.ledger import SpendLedger
from alight.serve.model import ExitTiming, load_policies, load_served_model, measure_timings
from alight.serve.monitoring import Metrics
from alight.serve.requests import Limits, RequestRefused
from alight.serve.worker import BatchWorker, QueuedRequest

INSTANT = ExitTiming([1e-9] * 4, growth=1.0, max_batch=8)


def make_worker(*names, policies=None, timing=INSTANT, state=None, reserve=64, **limits):
    policies = policies or load_policies([folder() / f"{name}.json" for name in names])
    model = load_served_model(folder() / "model", policies, settings=RunSettings(threads=1))
    ledger = SpendLedger(state, policies, reserve)
    bounds = Limits(**{"batch": 8, "wait": 0.05} | limits)
    return BatchWorker(model, ledger, dict.fromkeys(policies, timing), bounds, Metrics())


def kept_in(path, policies):
    """The pace in a file."""
    with closing(SpendLedger(path, policies)) as ledger:
        return ledger.state.pace


def samples(count, start=200):
    scaled = (pixels(count, start).astype(np.float32) / 255 - 0.305) / 0.376
    return [image[None, None] for image in scaled]


def responses(worker, requests):
    for request in requests:
        worker.submit(request)
    wait([request.response for request in requests], timeout=60)
    return [request.response.exception() or request.response.result() for request in requests]


def test_a_large_request_runs_in_turns_that_keep_nobody_waiting_long():
    worker = make_worker("unpaced", timing=ExitTiming([0.012] * 4, growth=32.0, max_batch=32))
    with worker.admitting(32, math.inf):
        assert worker.turn(32, math.inf) == 32  # nobody else is here
        with worker.admitting(1, math.inf):
            pass
    assert worker.turn(32, math.inf) == 2  # 24 ms, and 36 would be too long
    assert worker.turn(1, math.inf) == 1
    assert worker.turn(8, time.monotonic() + 60) == 2
    assert worker.turn(8, time.monotonic() + 0.2) == 8  # turns would use up the time of the last samples
    assert make_worker("unpaced").turn(32, math.inf) == 32  # as fast as one
    worker.close()


def test_requests_are_queued_while_a_change_is_written(tmp_path):
    worker, began, end = (
        make_worker("cheap", "expensive", state=tmp_path / "state.json"),
        threading.Event(),
        threading.Event(),
    )
    change = worker.ledger.change

    def slow(name, policy):
        began.set()
        assert end.wait(30)
        change(name, policy)

    worker.ledger.change = slow
    worker.start()
    done = worker.change_policy("expensive")
    assert began.wait(30)
    request = QueuedRequest(samples(1))
    queue = threading.Thread(target=worker.submit, args=(request,))  # as the event loop does, which must not wait
    queue.start()
    queue.join(5)
    waited = queue.is_alive()
    end.set()
    done.result(30)
    assert request.response.result(30).policy == "expensive"
    worker.close()
    assert not waited


@pytest.fixture
def unpaced():
    worker = make_worker("unpaced")
    worker.start()
    yield worker
    worker.close()


def test_requests_that_wait_run_together_up_to_the_batch_size():
    worker = make_worker("unpaced")
    requests = [QueuedRequest(samples(count)) for count in (3, 3, 3, 1, 1)]
    for request in requests:
        worker.submit(request)
    worker.start()
    worker.close()  # which decides the requests that wait
    assert [len(request.response.result().predictions) for request in requests] == [3, 3, 3, 1, 1]
    batches = {each.name: each.value for each in worker.metrics.batches.collect()[0].samples}
    assert (batches["alight_batch_samples_count"], batches["alight_batch_samples_sum"]) == (2, 11)
    with pytest.raises(RequestRefused, match="stopping"):
        worker.submit(QueuedRequest(samples(1)))


def test_single_samples_are_numbered_on_and_replicas_draw_otherwise():
    rule = load_policies([folder() / "unpaced.json"])["unpaced"]
    halves = (0.5, *(0.0,) * (len(rule.costs) - 2), 0.5)
    lottery, exits = Lottery(**rule.terms() | {"exit_rates": halves}), []
    for _ in range(2):
        replica = make_worker(policies={"lottery": lottery}, batch=1)
        replica.start()
        found = responses(replica, [QueuedRequest(samples(1)) for _ in range(200)])
        replica.close()
        exits.append([each.predictions[0].exit for each in found])
    assert all(60 < each.count(0) < 140 for each in exits)
    assert exits[0] != exits[1]


def test_a_bad_sample_fails_alone(unpaced):
    good, bad = samples(1)[0], np.full((1, 1, 8, 8), np.nan, np.float32)
    first, second, third = responses(
        unpaced, [QueuedRequest([good]), QueuedRequest([good, bad]), QueuedRequest([good])]
    )
    assert first.predictions == third.predictions
    assert second.status_code == 422
    assert "sample 1: the network gives no usable answer" in second.detail
    assert unpaced.ready


def test_a_request_that_makes_the_network_fail_gets_the_error_and_the_worker_continues(unpaced):
    bad = np.zeros((1, 5, 8, 8), np.float32)  # a shape that the network does not take
    failed, fine = responses(unpaced, [QueuedRequest([bad]), QueuedRequest(samples(1))])
    assert isinstance(failed, Exception)
    assert len(fine.predictions) == 1


def test_a_deadline_chooses_the_deepest_exit_that_is_reached_in_time():
    worker = make_worker("unpaced", timing=ExitTiming([1.0, 100.0, 10_000.0, 1_000_000.0], growth=1.0, max_batch=8))
    now = time.monotonic()
    rng = np.random.default_rng(0)
    hard = [rng.normal(size=(1, 1, 8, 8)).astype(np.float32) for _ in range(3)]  # of which no head is confident
    requests = [
        QueuedRequest(hard[:3], deadline=now + 1000),
        QueuedRequest(hard[:3], deadline=now + 50),
        QueuedRequest(hard[:1], deadline=now + 0.5),
    ]
    for request in requests:
        worker.submit(request)
    worker.start()
    worker.close()
    assert max(each.exit for each in requests[0].response.result().predictions) == 1
    assert {each.exit for each in requests[1].response.result().predictions} == {0}
    assert requests[2].response.exception().status_code == 504


def test_measured_exits_take_longer_the_deeper_they_are(clock_of_this_thread):
    clock_of_this_thread(served)
    policies = load_policies([folder() / "unpaced.json", folder() / "expensive.json"])
    model = load_served_model(folder() / "model", policies, settings=RunSettings(threads=1))
    timing = measure_timings(model, 8)["unpaced"]
    seconds = [timing.seconds(1, open_index) for open_index in range(4)]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] <= timing.seconds(8, 3)
    assert timing.deepest(1, seconds[-1]) == 3
    assert timing.deepest(1, 0.0) is None
    timing.update(1, 3, 30 * seconds[-1])
    assert timing.seconds(1, 3) > 2 * seconds[-1]


@pytest.mark.parametrize("budgets", [[None], [None, "20%", "70%"]])
def test_a_stream_never_exceeds_its_budget_whatever_requests_ask(budgets, tmp_path):
    worker = make_worker("cheap", state=tmp_path / "spending.json", reserve=16)
    worker.start()
    rng, spent, count = np.random.default_rng(0), 0.0, 0
    policy = worker.ledger.state.policy
    noise = [rng.normal(size=(1, 1, 8, 8)).astype(np.float32) for _ in range(200)]  # of which no head is confident
    for turn in range(40):
        requests = [
            QueuedRequest(noise[place : place + 3], budgets[(turn + place) % len(budgets)]) for place in range(0, 24, 3)
        ]
        found = responses(worker, requests)
        spent += sum(prediction.cost for each in found for prediction in each.predictions)
        count += 24
        assert spent <= count * policy.budget + policy.costs[-1]
    worker.close()
    pace = worker.ledger.state.pace
    assert (pace.admitted, pace.spent) == (count, pytest.approx(spent))
    assert kept_in(tmp_path / "spending.json", {"cheap": policy}).spent == pytest.approx(spent)


def test_while_the_state_cannot_be_written_samples_cost_no_more_than_the_budget(tmp_path: Path):
    home = tmp_path / "state"
    home.mkdir()
    worker = make_worker("expensive", state=home / "spending.json", reserve=8)
    worker.start()
    policy = worker.ledger.state.policy
    home.rename(tmp_path / "elsewhere")  # as if the disk were gone
    found = responses(worker, [QueuedRequest(samples(8, start)) for start in range(0, 80, 8)])
    assert all(prediction.cost <= policy.budget for each in found for prediction in each.predictions)
    assert worker.metrics.registry.get_sample_value("alight_state_errors_total", {"model": "model"}) >= 1
    (tmp_path / "elsewhere").rename(home)
    found = responses(worker, [QueuedRequest(samples(8, start)) for start in range(0, 80, 8)])
    assert any(prediction.cost > policy.budget for each in found for prediction in each.predictions)
    worker.close()
    assert kept_in(home / "spending.json", {"expensive": policy}).admitted == 160


def test_a_change_of_policy_that_cannot_be_written_does_not_happen(tmp_path: Path):
    home = tmp_path / "state"
    home.mkdir()
    worker = make_worker("expensive", "cheap", state=home / "spending.json")
    worker.start()
    home.rename(tmp_path / "elsewhere")
    assert isinstance(worker.change_policy("cheap").exception(timeout=30), OSError)
    assert worker.ledger.state.name == "expensive"
    (tmp_path / "elsewhere").rename(home)
    assert worker.change_policy("cheap").exception(timeout=30) is None
    assert worker.ledger.state.name == "cheap"
    worker.close()


def test_a_batch_that_fails_is_owed(tmp_path: Path):
    worker = make_worker("cheap")
    worker.start()
    bad = np.full((1, 1, 8, 8), np.nan, np.float32)
    responses(worker, [QueuedRequest([bad])])
    assert isinstance(worker.ledger.state.pace, Pace)
    assert worker.ledger.state.owed == worker.ledger.state.policy.costs[-1] - worker.ledger.state.policy.budget
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_batch_in_which_the_worker_ends_is_owed():
    worker = make_worker("cheap")
    worker.start()

    def end(*_):
        raise SystemExit

    worker._count = end
    responses(worker, [QueuedRequest(samples(1))])
    wait_until(lambda: worker.stalled)
    assert worker.ledger.state.owed == worker.ledger.state.policy.costs[-1] - worker.ledger.state.policy.budget


def test_savings_that_were_given_to_others_just_before_a_batch_are_not_spent():
    worker = make_worker("cheap", watch=1.0)
    ledger, given = worker.ledger, 0.0
    admit, last = ledger.admit, ledger.state.policy.costs[-1]

    def give_first(count):  # as an exchange with a shared ledger does
        nonlocal given
        given += last / 8
        ledger.state = replace(ledger.state, pace=replace(ledger.state.pace, spent=ledger.state.pace.spent + last / 8))
        admit(count)

    ledger.admit = give_first
    worker.start()
    cost = sum(
        each.cost
        for start in range(0, 80, 8)
        for found in responses(worker, [QueuedRequest(samples(8, start), budget=ledger.state.policy.costs[0])])
        for each in found.predictions
    )
    worker.close()
    assert ledger.state.pace.spent == pytest.approx(cost + given + worker.watch.samples * last)


def test_a_change_that_nobody_waits_for_any_more_does_not_end_the_worker():
    worker = make_worker("expensive", "cheap")
    done = worker.change_policy("cheap")
    assert done.cancel()  # as a request that has timed out does
    worker.start()
    assert len(responses(worker, [QueuedRequest(samples(1))])[0].predictions) == 1
    assert worker.ledger.state.name == "expensive"
    worker.close()


def test_a_deadline_ends_the_wait_for_a_full_batch():
    worker = make_worker("unpaced", wait=30.0)
    worker.start()
    (found,) = responses(worker, [QueuedRequest(samples(1), deadline=time.monotonic() + 0.2)])
    assert len(found.predictions) == 1
    worker.close()


def test_an_answer_leaves_while_later_stages_run_for_others(monkeypatch):
    worker = make_worker("unpaced")
    policy, early, seen = worker.ledger.state.policy, threading.Event(), []
    backend = next(iter(worker.model.predictors.values())).backend
    run = backend.run

    def run_after_the_first_has_left(self, stage, state):
        if stage:
            seen.append(early.wait(30))
        return run(stage, state)

    monkeypatch.setattr(type(backend), "run", run_after_the_first_has_left)
    cheap = QueuedRequest(samples(1), budget=policy.costs[0])
    rng = np.random.default_rng(0)
    hard = QueuedRequest([rng.normal(size=(1, 1, 8, 8)).astype(np.float32) for _ in range(3)])
    cheap.response.add_done_callback(lambda _: early.set())
    for request in (hard, cheap):
        worker.submit(request)
    worker.start()
    worker.close()
    assert cheap.response.result().predictions[0].exit == 0
    assert max(each.exit for each in hard.response.result().predictions) > 0
    assert seen
    assert all(seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_ends_is_replaced_and_its_requests_are_answered():
    worker = make_worker("unpaced")
    worker.start()

    def end(*_):
        raise SystemExit

    decide, worker._decide = worker._decide, end
    (lost,) = responses(worker, [QueuedRequest(samples(1))])
    assert lost.status_code == 503
    wait_until(lambda: worker.stalled)
    worker._decide = decide
    worker.revive()
    (found,) = responses(worker, [QueuedRequest(samples(1))])
    assert len(found.predictions) == 1
    assert not worker.stalled
    assert worker.metrics.registry.get_sample_value("alight_worker_restarts_total", {"model": "model"}) == 1
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_cannot_be_replaced_at_once_is_replaced_later(monkeypatch):
    monkeypatch.setattr(app_module, "LOOK", 0.01)
    host = ModelHost.of(served_model("unpaced"), Limits())
    (worker,) = host.workers
    with TestClient(build_app(host)):
        start, tried = worker.start, []

        def full():
            tried.append(1)
            if len(tried) < 3:
                raise RuntimeError("can't start new thread")
            start()

        def end(*_):
            raise SystemExit

        decide, worker._decide, worker.start = worker._decide, end, full
        responses(worker, [QueuedRequest(samples(1))])
        worker._decide = decide
        wait_until(lambda: len(tried) == 3)
        wait_until(lambda: worker.ready)
        assert len(tried) == 3


def test_a_worker_that_hangs_is_noticed():
    worker = make_worker("unpaced", timeout=0.05)
    go_on, decide = threading.Event(), worker._decide
    worker._decide = lambda *arguments: (go_on.wait(30), decide(*arguments))
    worker.start()
    request = QueuedRequest(samples(1))
    worker.submit(request)
    wait_until(lambda: worker.stalled)
    assert not worker.ready
    go_on.set()
    assert len(request.response.result(30).predictions) == 1
    wait_until(lambda: worker.ready)
    worker.close()


def test_a_model_is_replaced_between_two_batches_and_keeps_what_it_owes():
    worker = make_worker("cheap")
    worker.start()
    responses(worker, [QueuedRequest(samples(3))])
    worker.change_policy("cheap").result(30)  # after the batch, whose answers leave before it is settled
    before = worker.ledger.state
    again = make_worker("cheap").model
    worker.reload(again, dict.fromkeys(again.policies, INSTANT)).result(30)
    assert worker.model is again
    assert worker.ledger.state.pace is before.pace
    other = make_worker("expensive").model
    worker.reload(other, dict.fromkeys(other.policies, INSTANT)).result(30)
    assert worker.ledger.state.name == "expensive"
    assert worker.ledger.state.pace.spent == before.owed
    assert len(responses(worker, [QueuedRequest(samples(1))])[0].predictions) == 1
    worker.close()


@pytest.mark.parametrize("mean", [(0.305,), (0.9,)])
def test_samples_that_were_read_for_another_normalisation_are_not_decided(mean):
    worker = make_worker("cheap")
    old = worker.model
    new = replace(old, spec=replace(old.spec, normalisation=replace(old.spec.normalisation, mean=mean)))
    waiting, late = (QueuedRequest(samples(1), model=model) for model in (old, new))
    for request in (waiting, late):
        worker.submit(request)
    replaced = worker.reload(new, dict.fromkeys(new.policies, INSTANT))
    worker.start()
    replaced.result(30)
    assert len(late.response.result(30).predictions) == 1
    if new.spec.normalisation == old.spec.normalisation:
        assert len(waiting.response.result(30).predictions) == 1
    else:
        with pytest.raises(RequestRefused, match="replaced by one that reads otherwise"):
            waiting.response.result(30)
    worker.close()


def test_watched_samples_run_to_the_end_and_are_paid_from_savings():
    worker = make_worker("cheap", watch=1.0)
    worker.start()
    policy = worker.ledger.state.policy
    cost = 0.0
    for start in range(0, 160, 8):
        for found in responses(worker, [QueuedRequest(samples(8, start), budget=policy.costs[0])]):
            cost += sum(each.cost for each in found.predictions)
    wait_until(lambda: worker.watch.samples > 0)
    worker.close()
    pace = worker.ledger.state.pace
    assert pace.spent == pytest.approx(cost + worker.watch.samples * policy.costs[-1])
    assert pace.spent <= pace.admitted * policy.budget
    assert 0 < worker.watch.disagreements < worker.watch.samples
