"""Requests are routed as a replay says, none is lost or charged twice, and the spend stays within its bound."""

import asyncio
import json
import math
import threading
import warnings
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
from made_up_log import MODELS, MOST, columns_of, logged_rows

from alight import Router, Threshold, calibrate, load_policy, read_log, replay
from alight.calibrate import METHODS, certified_batch, certified_stream
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.limits import meter
from alight.policies.policy import Streak
from alight.routing.account import SpendWarning

LOG = read_log(columns_of(logged_rows()))
POLICY = certified_stream(calibrate.eero, max_costs=MOST, seed=0)(LOG.costs, "50%", LOG.outputs)
TWO = Threshold(thresholds=(0.8,), costs=(1.0, 5.0), budget=3.0, exits=("small", "large"), unit="USD")


def route_log(router: Router, log=LOG.outputs):
    """Route every request of a log, calls answered as the log says."""
    routed = []
    for row in range(len(log)):
        request = router.ask()
        for call in request:
            place = (row, call.member)
            call.report(score=log.scores[place], answer=int(log.predictions[place]), cost=log.costs[place])
        routed.append(request)
    return routed


@pytest.mark.parametrize("name", ["eero", "geometric", "global_threshold", "pcee", "patience", "search"])
def test_a_router_decides_and_spends_as_a_replay_of_the_log(name):
    policy = METHODS[name](LOG.costs, "40%", LOG.outputs)
    router, decisions = Router(policy), replay(policy, LOG.outputs)
    routed = route_log(router)
    assert [request.model for request in routed] == [MODELS[index] for index in decisions.exits]
    np.testing.assert_allclose([request.spent for request in routed], decisions.spent)
    assert router.spent == pytest.approx(decisions.spent.sum())
    assert router.allowed == math.inf


def test_a_metered_router_keeps_the_stream_as_a_replay_does():
    routed, decisions = route_log(router := Router(POLICY)), replay(POLICY, LOG.outputs, batch_size=1)
    np.testing.assert_allclose([request.spent for request in routed], decisions.spent)
    assert np.all(np.cumsum(decisions.spent) <= np.arange(1, len(decisions) + 1) * POLICY.budget + sum(MOST))
    assert router.reserved == pytest.approx(0, abs=1e-12)


def test_answers_of_any_kind_come_back_and_combined_ones_are_those_that_were_given():
    policy = calibrate.combined(calibrate.eero, "vote")(LOG.costs, "70%", LOG.outputs)
    router, decisions = Router(policy), replay(policy, LOG.outputs)
    routed = route_log(router)
    assert [request.model for request in routed] == [MODELS[index] for index in decisions.exits]
    for request in routed:
        assert request.answer in [call.answer for call in request.calls]


def test_a_policy_from_its_file_routes_the_same(tmp_path):
    POLICY.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == POLICY
    again = route_log(Router(load_policy(tmp_path / "policy.json")))
    assert [request.model for request in again] == [request.model for request in route_log(Router(POLICY))]


class Faulty:
    """A member that answers, fails, times out, lies about its cost or about its score, by the number of the request."""

    def __init__(self, model: str, most: float):
        self.model, self.most, self.called, self.ended = model, most, Counter(), threading.Event()

    def reply(self, number: int) -> tuple[object, float, object]:
        kind = (7 * number + ord(self.model[0])) % 23
        if kind == 0:
            raise ConnectionError("the member is down")
        cost = {1: math.nan, 2: -5.0, 3: None, 4: "free", 5: 3 * self.most}.get(kind, 0.4 * self.most)
        score = {6: math.nan}.get(kind, (number * 37 % 100) / 100)
        return (self.model, number), score, cost

    def times_out(self, number: int) -> bool:
        return (7 * number + ord(self.model[0])) % 23 == 8


class FaultyTask(Faulty):
    async def __call__(self, number: int):
        self.called[number] += 1  # before it waits, since a busy machine may let it time out there
        await asyncio.sleep(0)
        if self.times_out(number):
            await asyncio.Event().wait()  # which nothing sets
        return self.reply(number)


class FaultyFunction(Faulty):
    def __call__(self, number: int):
        self.called[number] += 1
        if self.times_out(number):
            self.ended.wait()  # which the test sets at its end
        return self.reply(number)


def check_accounts(router: Router, routed, members, requests: int) -> None:
    """No request is lost, every call is charged once, and what was spent stays within its bound."""
    most = dict(zip(router.models, router.guard.max_costs, strict=True))
    assert len(routed) == requests == router.admitted
    assert {request.number for request in routed} == set(range(requests))
    made = sum(len(request.calls) for request in routed)
    assert made == sum(sum(member.called.values()) for member in members)
    assert max(max(member.called.values()) for member in members) == 1
    assert made == sum(counts["calls"] for counts in router.counts.values())
    assert router.spent == pytest.approx(math.fsum(request.spent for request in routed), rel=1e-9)
    assert router.reserved == pytest.approx(0, abs=1e-6)
    lies = math.fsum(
        max(0.0, call.charged - most[call.model]) for request in routed for call in request.calls if call.charged
    )
    assert lies > 0
    assert router.spent <= router.allowed + lies + 1e-9
    for request in routed:
        answered = [call for call in request.calls if call.failure is None]
        assert request.answer == (answered[-1].answer if answered else None)
    assert sum(request.answer is None for request in routed) < 0.02 * requests
    for model in router.models:
        for fault in ("failures", "timeouts", "unknown_costs", "above_most"):
            assert router.counts[model][fault] > 0, (model, fault)


def test_ten_thousand_requests_at_once_with_faulty_members_are_all_answered_and_charged_once():
    members = [FaultyTask(model, most) for model, most in zip(("small", "large"), (1.5, 8.0), strict=True)]
    router = Router(TWO, members, max_costs=[1.5, 8.0], timeout=0.2)
    peak = 0.0

    async def run():
        nonlocal peak
        routed, limit = [], asyncio.Semaphore(2000)

        async def one(number):
            nonlocal peak
            async with limit:
                request = await router.answer(number)
            routed.append((number, request))
            peak = max(peak, router.spent + router.reserved - router.allowed)

        await asyncio.gather(*(one(number) for number in range(10_000)))
        return routed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpendWarning)
        pairs = asyncio.run(run())
    check_accounts(router, [request for _, request in pairs], members, 10_000)
    for number, request in pairs:
        assert request.answer is None or request.answer[1] == number  # nobody gets the answer to another request
    assert router.counts["large"]["calls"] < 10_000
    excess = 2 * (1.5 + 8.0) * sum(counts["above_most"] for counts in router.counts.values())
    assert peak <= excess


def test_threads_share_a_router():
    members = [FaultyFunction(model, most) for model, most in zip(("small", "large"), (1.5, 8.0), strict=True)]
    router, routed = Router(TWO, members, max_costs=[1.5, 8.0], timeout=0.02), []
    numbers = iter(range(400))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            routed.append(router(number))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpendWarning)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for member in members:
        member.ended.set()
    assert len(routed) == router.admitted == 400
    assert router.spent == pytest.approx(math.fsum(request.spent for request in routed))
    assert sum(len(request.calls) for request in routed) == sum(each["calls"] for each in router.counts.values())
    assert router.reserved == pytest.approx(0, abs=1e-9)


def test_a_failed_member_is_skipped_charged_as_the_most_and_the_last_answer_stays():
    def broken(request):
        raise ConnectionError("down")

    router = Router(TWO, {"small": broken, "large": lambda request: ("yes", 0.9, 4.0)}, max_costs=[2.0, 8.0])
    request = router("?")
    assert (request.answer, request.model, request.failures) == ("yes", "large", {"small": "down"})
    assert request.spent == 6.0
    router = Router(TWO, {"small": lambda request: ("maybe", 0.1, 1.0), "large": broken}, max_costs=[2.0, 8.0])
    request = router("?")
    assert (request.answer, request.model, request.spent) == ("maybe", "small", 9.0)
    assert router.counts["large"]["failures"] == 1


@pytest.mark.parametrize("reply", [None, ("answer", 0.5), {"answer": 1}, ("answer", "sure", 1.0)])
def test_a_reply_that_cannot_be_read_is_a_failure(reply):
    router = Router(TWO, [lambda request: reply, lambda request: ("yes", 0.9, 4.0)], max_costs=[2.0, 8.0])
    request = router("?")
    assert request.answer == "yes"
    assert "small" in request.failures


def test_a_call_is_charged_once_though_it_is_reported_twice_or_never():
    router = Router(TWO, max_costs=[2.0, 8.0])
    request = router.ask()
    for call in request:
        call.report(score=0.9, cost=1.0)
        with pytest.raises(BadInput, match="a call of small was reported twice"):
            call.report(score=0.9, cost=1.0)
    assert router.spent == 1.0
    for _ in router.ask():
        break  # and nothing is reported
    assert router.spent == 3.0
    assert router.reserved == 0


def test_no_call_is_made_that_the_budget_might_not_pay_for():
    router = Router(TWO, [lambda request: ("no", 0.1, 2.0), lambda request: ("yes", 0.9, 8.0)], max_costs=[2.0, 8.0])
    models = [router(number).model for number in range(1000)]
    assert models[0] == "large"
    spent = np.cumsum(np.where(np.array(models) == "large", 10.0, 2.0))
    assert (spent <= 3.0 * np.arange(1, 1001) + 10.0).all()
    assert router.spent > 0.95 * 3.0 * 1000  # and what it pays for is made


def test_costs_above_the_most_are_charged_warned_of_and_paid_back():
    lies = iter([500.0])
    large = lambda request: ("yes", 0.9, next(lies, 4.0))  # noqa: E731
    router = Router(TWO, {"small": lambda request: ("no", 0.1, 1.0), "large": large}, max_costs=[2.0, 8.0])
    with pytest.warns(SpendWarning, match=r"large reported a cost of 500.0 for a call that can cost 8 USD"):
        router(0)
    assert router.spent > router.allowed
    assert {router(number).model for number in range(100)} == {"small"}
    for number in range(400):
        router(number)
    assert router.spent <= router.allowed
    assert router.counts["large"]["above_most"] == 1


def test_the_state_is_saved_and_restored_with_calls_on_their_way_charged(tmp_path):
    router = Router(TWO, [lambda request: ("no", 0.1, 1.0), lambda request: ("yes", 0.9, 4.0)], max_costs=[2.0, 8.0])
    for number in range(10):
        router(number)
    calls = iter(router.ask())
    next(calls)  # on its way
    router.save(tmp_path / "state.json")
    again = Router(TWO, max_costs=[2.0, 8.0])
    again.restore(tmp_path / "state.json")
    assert (again.admitted, again.spent, again.reserved) == (11, router.spent + 2.0, 0.0)
    assert again.counts == router.counts
    assert again.ask().number == 11
    calls.close()
    other = Router(Threshold(thresholds=(0.8,), costs=(1.0, 5.0), budget=4.0, exits=("small", "large"), unit="USD"))
    with pytest.raises(Mismatch, match="is of a router of small, large, budget 3"):
        other.restore(tmp_path / "state.json")
    document = json.loads((tmp_path / "state.json").read_text())
    for damage in ({"spent": None}, {"counts": {}}):
        (tmp_path / "state.json").write_text(json.dumps({**document, **damage}))
        with pytest.raises(BadFile, match="its content is not usable"):
            Router(TWO, max_costs=[2.0, 8.0]).restore(tmp_path / "state.json")


def test_a_request_is_routed_once():
    router = Router(meter(TWO, [1.0, 8.0]))
    request = router.ask()
    for call in request:
        call.report(score=0.9, answer=1, cost=1.0)
    with pytest.raises(BadInput, match="was routed already"):
        next(iter(request))
    assert router.spent == 1.0


def test_a_state_is_not_restored_over_calls_on_their_way(tmp_path):
    router = Router(meter(TWO, [1.0, 8.0]))
    router.save(tmp_path / "state.json")
    router.ask()
    with pytest.raises(BadInput, match="on their way"):
        router.restore(tmp_path / "state.json")


@pytest.mark.parametrize("scores", [(math.nan, 0.2, 0.9), (0.1, math.nan, 0.9), (math.nan, math.nan, math.nan)])
def test_a_model_that_does_not_know_how_sure_it_is_does_not_break_a_vote(scores):
    policy = calibrate.combined(calibrate.eero, "vote")(LOG.costs, "70%", LOG.outputs)
    request = Router(policy).ask()
    for call, score in zip(request, scores, strict=False):
        call.report(score=score, answer=call.model, cost=0.0)
    assert request.answer in MODELS


def test_an_unknown_score_ends_a_streak():
    policy = Streak(threshold=0.5, patience=2, costs=(1.0, 2.0, 3.0, 4.0), exits=tuple("abcd"))
    request = Router(policy).ask()
    for call, score in zip(request, (0.9, math.nan, 0.9, 0.9), strict=False):
        call.report(score=score, answer="yes", cost=1.0)
    assert request.model == "d"


def test_what_a_router_cannot_do_is_refused():
    with pytest.raises(BadInput, match="keeps the budget of batches"):
        Router(certified_batch(calibrate.eero, max_costs=MOST)(LOG.costs, "50%", LOG.outputs))
    with pytest.raises(BadInput, match=r"one call of small can cost 4 USD, more than the budget of 3 USD"):
        Router(TWO, max_costs=[4.0, 8.0])
    with pytest.raises(BadInput, match="3 members for the models small, large"):
        Router(TWO, [print, print, print])
    with pytest.raises(BadInput, match="no member for the model 'large'"):
        Router(TWO, {"small": print})
    with pytest.raises(BadInput, match="has no members to call"):
        Router(TWO)("?")

    async def task(request):
        return "yes", 0.9, 1.0

    request = Router(TWO, [task, task])("?")
    assert "use `await router.answer(request)`" in request.failures["small"]
    assert request.answer is None
    for timeout in (0, -1, math.nan):
        with pytest.raises(BadInput, match="s: give more than 0, or None to wait"):
            Router(TWO, timeout=timeout)


def test_cancelled_requests_are_charged_for_the_call_on_its_way():
    async def never(started):
        started.set()
        await asyncio.Event().wait()

    router = Router(TWO, [never, never], max_costs=[2.0, 8.0])

    async def run():
        started = asyncio.Event()
        task = asyncio.create_task(router.answer(started))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert (router.spent, router.reserved) == (2.0, 0.0)


def test_functions_are_awaited_in_threads():
    router = Router(TWO, [lambda request: {"answer": request, "score": 0.9}, print], max_costs=[2.0, 8.0])
    request = asyncio.run(router.answer("hello"))
    assert (request.answer, request.spent) == ("hello", 2.0)
    assert router.counts["small"]["unknown_costs"] == 1
    assert repr(router) == "Router(small, large: 1 requests, 2 USD spent of 13 USD allowed)"


def test_a_meter_is_saved_with_what_it_meters(tmp_path):
    policy = meter(TWO, [2.0, 8.0])
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
    assert "call at most" in str(policy)


def test_functions_that_hang_do_not_keep_other_members_waiting():
    ended = threading.Event()

    async def route_all() -> tuple[list, Router]:
        members = [lambda request: ended.wait(60), lambda request: ("right", 0.9, 4.0)]
        router = Router(TWO, members, timeout=2.0)  # in which a busy machine starts 60 threads
        return await asyncio.gather(*(router.answer(number) for number in range(60))), router

    routed, router = asyncio.run(route_all())
    ended.set()
    assert {request.answer for request in routed} == {"right"}
    assert router.counts["small"]["timeouts"] == 60
    assert router.counts["large"]["timeouts"] == 0


async def cancel_itself(request):
    raise asyncio.CancelledError


@pytest.mark.parametrize("member", [lambda request: next(iter(())), cancel_itself])
def test_a_member_that_stops_or_cancels_itself_has_failed_and_the_request_is_not_lost(member):
    router = Router(TWO, [member, lambda request: ("right", 0.9, 4.0)])
    request = asyncio.run(asyncio.wait_for(router.answer("?"), 2))
    assert request.answer == "right"
    assert [*request.failures] == ["small"]


@pytest.mark.parametrize("cost", [10**400, np.complex64(1), True, Decimal("NaN"), "0.1"], ids=type)
def test_what_cannot_be_a_cost_is_charged_as_the_most(cost):
    router = Router(TWO, [lambda request: ("a", 0.9, cost), lambda request: ("b", 0.9, 4.0)], max_costs=[2.0, 8.0])
    with pytest.warns(SpendWarning, match="can cost 2 USD: 2 USD was charged"):
        assert router("?").spent == 2.0
    assert router.counts["small"]["unknown_costs"] == 1


def test_decimal_costs_are_costs_and_without_a_guard_unknown_ones_are_the_mean():
    router = Router(TWO, [lambda request: ("a", 0.1, Decimal("1.5")), lambda request: ("b", 0.9, math.nan)])
    with pytest.warns(SpendWarning, match="a call that costs on average 4 USD: 4 USD was charged"):
        assert router("?").spent == 5.5


def test_a_report_that_is_refused_changes_nothing():
    router = Router(TWO)
    request = router.ask()
    for call in request:
        if call.model == "small":
            with pytest.raises((TypeError, ValueError)):
                call.report(score="sure", answer="a", cost=1.0)
            assert call.charged is None
            call.report(score=0.9, answer="b", cost=1.0)
            with pytest.raises(BadInput, match="reported twice"):
                call.fail("too late")
            assert call.failure is None
    assert (request.answer, request.model, request.failures, request.spent) == ("b", "small", {}, 1.0)
    assert router.counts["small"]["calls"] == 1
    assert router.counts["small"]["failures"] == 0


@pytest.mark.parametrize("kind", ["array", "object", "list"])
def test_an_answer_whose_text_equals_that_of_an_earlier_one_is_not_replaced_by_it(kind):
    class Opaque:
        def __str__(self):
            return "an answer"

    def made(place):
        values = np.zeros(3000)  # printed with dots in the middle
        values[1000 + place] = 1.0
        return {"array": values, "object": Opaque(), "list": [values]}[kind]

    small, large = made(0), made(1)
    request = Router(TWO, [lambda _: (small, 0.1, 1.0), lambda _: (large, 0.9, 4.0)])("question")
    assert request.model == "large"
    assert request.answer is large


@pytest.mark.parametrize("without", [(), ("answer", "truth")])
def test_missing_answers_agree_in_a_router_no_more_than_in_its_log(without):
    log = read_log(columns_of(logged_rows(), *without))
    policy = METHODS["patience"](log.costs, "70%", log.outputs)
    decisions, router = replay(policy, log.outputs), Router(policy)
    for row, left_at in enumerate(decisions.exits):
        request = router.ask()
        for call in request:
            place = (row, call.member)
            answer = None if without else int(log.outputs.predictions[place])
            call.report(score=log.outputs.scores[place], cost=log.outputs.costs[place], answer=answer)
        assert request.model == MODELS[left_at]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": math.inf}, "a timeout of inf s"),
        ({"timeout": "3"}, "a timeout of '3' s"),
        ({"max_costs": [0.2, "x"]}, "give a number for every open exit"),
        ({"max_costs": 5}, "give a number for every open exit"),
        ({"members": 5}, "a int instead of members"),
        ({"members": {"small": 1, "large": 2}}, "the member of small is a int: give a callable"),
        ({"policy": "policy.json"}, "a str is not a policy"),
    ],
)
def test_what_a_router_is_given_is_checked_before_the_first_request(given, said):
    with pytest.raises(BadInput, match=said):
        Router(**{"policy": TWO} | given)
