"""Replicas with one ledger keep one bound, whatever dies, and pool their savings; on a real server."""

import signal
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import redis
from digit_service import folder, served_model
from fastapi.testclient import TestClient
from processes import benchmark, service
from redis_server import running_server
from waiting import wait_until

from alight import calibrate
from alight.policies.route import replay_on
from alight.serve.app import build_app
from alight.serve.fleet import TIMEOUT, FleetLedger, _account, check_ledger
from alight.serve.hosting import ModelHost
from alight.serve.requests import Limits

QUICK = 0.005  # seconds between two exchanges


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = running_server(tmp_path_factory.mktemp("ledger") / "data")
    yield started
    started.kill()


@pytest.fixture(scope="module")
def policies(frozen):
    def certified(budget):
        return calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, budget, frozen.labelled, spend_all=True)

    return {"half": certified("50%"), "third": certified("33%")}


class Replica:
    """A stream of samples of a recorded table under a ledger, and what it has really spent."""

    def __init__(self, server, model, policies, table, seed):
        self.ledger = FleetLedger(server.url, model, policies, exchange=QUICK)
        self.table, self.rng = table, np.random.default_rng(seed)
        self.samples, self.spent = 0, 0.0

    def decide(self, count):
        """Decide a batch."""
        self.ledger.admit(count)
        state = self.ledger.state
        rows = self.table.take(self.rng.integers(len(self.table), size=count))
        decisions, (pace, *_) = replay_on(state.policy, rows, (state.pace,))
        self.samples += count
        self.spent += float(decisions.spent.sum())
        self.ledger.settle(pace)

    def stop_exchanging(self):
        """Exchange nothing on its own from now on, as a replica that has died."""
        self.ledger._stop.set()
        self.ledger._thread.join()


@pytest.fixture(scope="module")
def tables(frozen):
    """Easy and hard samples: those of the table that the last exit is surest about, and the others."""
    order = np.argsort(-frozen.test.scores[:, 2])
    return frozen.test.take(order[:5000]), frozen.test.take(order[5000:])


def wait_for_exchange(replicas):
    """Wait until each has exchanged credit with the ledger once more."""
    ends = [each.ledger._sequence + 1 for each in replicas]
    wait_until(lambda: all(each.ledger._sequence > end for each, end in zip(replicas, ends, strict=True)))


def total(replicas, policy):
    """What all have spent, and their budgets."""
    return sum(each.spent for each in replicas), sum(each.samples for each in replicas) * policy.budget


def test_all_together_stay_within_one_bound_and_savings_go_where_samples_are_hard(server, policies, tables):
    easy, hard = tables
    policy = policies["half"]
    replicas = [Replica(server, "pooled", policies, table, seed) for seed, table in enumerate((easy, hard, hard))]
    alone = Replica(server, "alone", policies, hard, 1)
    for each in (*replicas, alone):
        each.stop_exchanging()  # the test exchanges by hand, so that the clock decides nothing
    for turn in range(400):
        for each in (*replicas, alone):
            each.decide(8)
        spent, allowed = total(replicas, policy)
        assert spent <= allowed + 1
        if turn % 4 == 0:
            assert all(each.ledger._trade() for each in (*replicas, alone))
    spent, allowed = total(replicas, policy)
    assert spent > 0.95 * allowed
    assert replicas[1].spent > 1.1 * alone.spent  # which has nobody's savings
    for each in (*replicas, alone):
        each.ledger.close()


def test_the_bound_holds_when_replicas_and_the_ledger_die(server, policies, tables):
    policy, rng = policies["half"], np.random.default_rng(0)
    alive = [Replica(server, "dying", policies, tables[seed % 2], seed) for seed in range(4)]
    every = [*alive]
    for turn in range(400):
        for each in alive:
            each.decide(int(rng.integers(1, 17)))
        spent, allowed = total(every, policy)
        assert spent <= allowed + 1
        if turn % 100 == 50:
            alive.pop(0).stop_exchanging()
            alive.append(Replica(server, "dying", policies, tables[turn % 2], turn))
            every.append(alive[-1])
        if turn % 200 == 100:
            server.kill(forget=turn > 200)
            wait_until(lambda: not any(each.ledger.up for each in alive))
        if turn % 200 == 140:
            server.start()
            wait_until(lambda: all(each.ledger.up for each in alive))
        if turn % 4 == 0 and alive[0].ledger.up:
            wait_for_exchange(alive)
    spent, allowed = total(every, policy)
    assert spent > 0.9 * allowed
    for each in alive:
        each.ledger.close()


def test_an_exchange_whose_answer_is_lost_counts_once(server, policies, tables):
    first, second = (Replica(server, "lossy", policies, tables[0], seed) for seed in range(2))
    for each in (first, second):
        each.stop_exchanging()  # the test exchanges by hand
    ledger, script = first.ledger, first.ledger._exchange_script

    def answer_is_lost(**arguments):
        script(**arguments)
        raise TimeoutError

    pooled = []
    for _ in range(20):
        first.decide(8)
        ledger._exchange_script = answer_is_lost
        assert not ledger._trade()
        assert not ledger._trade()
        ledger._exchange_script = script
        assert ledger._trade()
        pool = float(ledger._redis.hget(ledger._key(_account(policies["half"])), "pool"))
        pooled.append(pool + ledger.credit)
        assert pooled[-1] <= first.samples * policies["half"].budget - first.spent + 1
    assert pooled[-1] > 0.99 * (first.samples * policies["half"].budget - first.spent)  # and nothing is lost
    assert second.ledger._trade()


@pytest.mark.parametrize("forget", [True, False])
def test_a_deposit_that_is_sent_again_after_the_ledger_restarted_counts_once(policies, tables, tmp_path, forget):
    own = running_server(tmp_path / "data")
    first = Replica(own, "paused", policies, tables[0], 0)
    second, third = (Replica(own, "paused", policies, tables[1], seed) for seed in (1, 2))
    for each in (first, second, third):
        each.stop_exchanging()  # the test exchanges by hand
    script = first.ledger._exchange_script
    for each, turns in ((second, 50), (third, 50), (first, 20)):
        for _ in range(turns):
            each.decide(8)
        assert each is first or each.ledger._trade()
    saved = first.samples * policies["half"].budget - first.spent

    def answer_is_lost(**arguments):  # as if the replica was paused before it came
        script(**arguments)
        raise TimeoutError

    first.ledger._exchange_script = answer_is_lost
    assert not first.ledger._trade()
    own_credit = second.ledger.credit
    assert second.ledger._trade()
    assert second.ledger.credit > own_credit + 0.1 * saved
    if not forget:  # the last second is lost, as of --appendfsync everysec after a power cut
        key = second.ledger._key(_account(policies["half"]), "replicas")
        first.ledger._redis.hdel(key, first.ledger.replica)
    own.kill(forget)
    own.start()
    first.ledger._exchange_script = script
    assert first.ledger._trade()
    assert third.ledger._trade()
    everybody = sum(each.ledger.credit for each in (first, second, third))
    pool = float(first.ledger._redis.hget(first.ledger._key(_account(policies["half"])), "pool"))
    total_saved = sum(each.samples * policies["half"].budget - each.spent for each in (first, second, third))
    assert everybody + pool <= total_saved + 1
    own.kill()


def test_a_restarted_ledger_grants_nothing_that_it_held_before(server, policies, tables):
    first = Replica(server, "stale", policies, tables[0], 0)
    for _ in range(50):
        first.decide(8)
    first.ledger.close()  # all its savings are in the pool
    server.kill()
    server.start()
    with closing(FleetLedger(server.url, "stale", policies, exchange=QUICK)) as second:
        assert second.up
        assert second.credit == 0


def test_the_policy_in_force_is_set_once_for_all(server, policies):
    with (
        closing(FleetLedger(server.url, "forced", policies, exchange=QUICK)) as first,
        closing(FleetLedger(server.url, "forced", policies, exchange=QUICK)) as second,
    ):
        assert (first.state.name, second.state.name, second.wanted) == ("half", "half", None)
        first.change("third", policies["third"])
        wait_until(lambda: second.wanted == "third")
        second.change("third", policies["third"])
        wait_until(lambda: second.wanted is None)
        assert second.state.name == "third"
        with closing(FleetLedger(server.url, "forced", policies, exchange=QUICK)) as late:
            assert late.state.name == "third"
        with closing(FleetLedger(server.url, "forced", {"half": policies["half"]}, exchange=QUICK)) as other:
            assert other.wanted == "third"  # which it does not have


def test_without_an_answer_a_change_does_not_happen_and_no_lease_is_given(policies, tmp_path):
    own = running_server(tmp_path / "data")
    with closing(FleetLedger(own.url, "down", policies, exchange=QUICK)) as ledger:
        own.kill()
        with pytest.raises(ConnectionError, match="the ledger does not answer"):
            ledger.change("third", policies["third"])
        assert ledger.state.name == "half"
        with pytest.raises(ConnectionError, match="the ledger does not answer"):
            ledger.lease("shop", 100.0, 1.0, 1.0)
        wait_until(lambda: not ledger.up)
        own.start()
        wait_until(lambda: ledger.up)
        own.kill()


def test_while_the_ledger_hangs_only_the_first_lease_waits_for_it(policies, tmp_path, caplog):
    own = running_server(tmp_path / "data")
    with closing(FleetLedger(own.url, "hanging", policies, exchange=QUICK)) as ledger:
        assert ledger.lease("shop", 100.0, 1.0, 1.0)[0] == 1.0
        own.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not ledger.up)
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="the ledger does not answer"):
            ledger.lease("shop", 100.0, 1.0, 1.0)
        assert time.monotonic() - start < TIMEOUT
        assert [record.getMessage() for record in caplog.records] == ["ledger lost"]
        own.process.send_signal(signal.SIGCONT)
        wait_until(lambda: ledger.up)
        assert ledger.lease("shop", 100.0, 1.0, 1.0)[0] == 1.0
    own.kill()


@pytest.mark.parametrize("pool", ["nan", "inf", "-5", "junk"])
def test_a_pool_that_others_have_written_is_not_spent(server, policies, pool):
    with closing(FleetLedger(server.url, pool, policies, exchange=QUICK)) as ledger:
        account = f"alight:{{{pool}}}:{_account(policies['half'])}"
        with redis.Redis.from_url(server.url) as client:
            client.hset(account, "pool", pool)
            wait_until(lambda: client.hget(account, "pool") == b"0")
        wait_until(lambda: ledger.up)
        assert ledger.credit == 0.0


def test_an_answer_that_makes_no_sense_does_not_end_the_exchange(server, policies):
    with closing(FleetLedger(server.url, "sense", policies, exchange=QUICK)) as ledger:
        account = f"alight:{{sense}}:{_account(policies['half'])}"
        with redis.Redis.from_url(server.url) as client:
            client.hset(account, "samples", "inf")
            wait_until(lambda: not ledger.up)
            client.delete(account)
        wait_until(lambda: ledger.up)
        assert ledger.lease("shop", 100.0, 60.0, 60.0)[0] == 60.0


def test_a_policy_that_is_not_text_is_one_that_is_not_here(server, policies):
    with closing(FleetLedger(server.url, "text", policies, exchange=QUICK)) as ledger:
        with redis.Redis.from_url(server.url) as client:
            client.set("alight:{text}:policy", b"\xff\xfe")
            wait_until(lambda: ledger.wanted is not None)
            assert ledger.wanted not in policies
            client.set("alight:{text}:policy", "half")
        wait_until(lambda: ledger.wanted is None)


def test_a_clock_that_is_set_back_by_hours_forgets_no_lease(server, policies):
    with closing(FleetLedger(server.url, "clock", policies, exchange=1.0, period=1e9)) as ledger:
        assert ledger.lease("shop", 100.0, 60.0, 60.0)[0] == 60.0
        with redis.Redis.from_url(server.url) as client:
            client.hincrby("alight:{clock}:cap:shop", "window", 5)  # as if it had been later then
    with closing(FleetLedger(server.url, "clock", policies, exchange=1.0, period=1e9)) as another:
        assert another.lease("shop", 100.0, 60.0, 60.0)[0] == 0.0
        assert another.lease("shop", 100.0, 40.0, 40.0)[0] == 40.0


def test_a_change_that_the_ledger_may_still_hear_of_says_so(policies, tmp_path):
    own = running_server(tmp_path / "data")
    sources = ModelHost.of(served_model("expensive", "cheap"), Limits()).sources
    host = ModelHost(sources, Limits(), open_ledger=lambda _, policies, __: FleetLedger(own.url, "put", policies))
    with TestClient(build_app(host)) as client:
        own.kill()
        reply = client.put("/budget", json={"policy": "cheap"})
        assert reply.status_code == 503
        assert "may still hear of the change: look at /budget" in reply.json()["error"]
        assert client.get("/budget").json()["policy"] == "expensive"


def test_a_lease_that_finds_no_ledger_is_logged(policies, tmp_path, caplog):
    own = running_server(tmp_path / "data")
    with closing(FleetLedger(own.url, "logged", policies, exchange=60.0)) as ledger:
        own.kill()
        with pytest.raises(ConnectionError, match="the ledger does not answer"):
            ledger.lease("shop", 100.0, 1.0, 1.0)
        assert [record.getMessage() for record in caplog.records] == ["ledger lost"]


def test_leases_of_many_replicas_never_exceed_the_cap(server, policies):
    ledgers = [FleetLedger(server.url, "capped", policies, exchange=1.0, period=1e9) for _ in range(3)]
    taken = [[] for _ in ledgers]

    def take(index):
        rng = np.random.default_rng(index)
        for _ in range(40):
            need = float(rng.integers(1, 6))
            granted, left = ledgers[index].lease("shop", 100.0, need, 16 * need)
            assert granted == 0 or granted >= need
            assert 0 < left <= 1e9
            taken[index].append(granted)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 95 < sum(granted for each in taken for granted in each) <= 100.0
    for ledger in ledgers:
        ledger.close()


def test_a_cap_is_there_again_in_the_next_hour(server, policies):
    with closing(FleetLedger(server.url, "hourly", policies, exchange=1.0, period=0.5)) as ledger:
        granted = []

        def lease() -> float:
            granted.append(ledger.lease("shop", 1.0, 1.0, 1.0)[0])
            return granted[-1]

        wait_until(lambda: lease() == 0.0)
        wait_until(lambda: lease() == 1.0)
        assert set(granted) == {0.0, 1.0}  # the cap whole, or nothing


@pytest.mark.parametrize("loss", ["killed", "flushed", "evicted"])
def test_a_ledger_that_has_lost_its_data_leases_nothing_until_the_next_hour(policies, tmp_path, loss):
    own = running_server(tmp_path / "data")
    asking, idle, dead = (FleetLedger(own.url, "lost", policies, exchange=QUICK, period=1e9) for _ in range(3))
    assert dead.lease("shop", 100.0, 60.0, 60.0)[0] == 60.0
    dead._stop.set()
    dead._thread.join()
    if loss == "killed":
        own.kill(forget=True)
        own.start()
    else:
        with redis.Redis.from_url(own.url) as client:
            client.delete("alight:{lost}:caps", "alight:{lost}:cap:shop") if loss == "evicted" else client.flushall()
    taken = 0.0

    def refused():
        nonlocal taken
        try:
            granted = asking.lease("shop", 100.0, 10.0, 10.0)[0]
        except ConnectionError:  # until the next exchange
            return False
        taken += granted
        return granted == 0.0

    wait_until(refused)
    assert taken == 0.0
    with closing(FleetLedger(own.url, "lost", policies, exchange=QUICK, period=1e9)) as late:
        assert late.lease("shop", 100.0, 10.0, 10.0)[0] == 0.0
    with closing(FleetLedger(own.url, "lost", policies, exchange=QUICK, period=0.01)) as next_hour:
        wait_until(lambda: next_hour.lease("other", 100.0, 10.0, 10.0)[0] == 10.0, seconds=2.0)  # 200 such hours
    for each in (asking, idle):
        each.close()
    own.kill()


def test_leases_that_the_ledger_has_forgotten_are_counted_again(server, policies):
    with closing(FleetLedger(server.url, "partly", policies, exchange=1.0, period=1e9)) as ledger:
        assert ledger.lease("shop", 100.0, 60.0, 60.0)[0] == 60.0
        with redis.Redis.from_url(server.url) as client:
            client.delete("alight:{partly}:cap:shop")  # evicted, or written in the second before a power cut
            client.script_flush()
        assert ledger.lease("shop", 100.0, 60.0, 60.0)[0] == 0.0
        assert ledger.lease("shop", 100.0, 40.0, 40.0)[0] == 40.0
        assert ledger.lease("shop", 100.0, 1.0, 1.0)[0] == 0.0


def test_a_ledger_that_may_lose_data_is_reported(server, caplog):
    check_ledger(server.url)
    assert not caplog.records
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            check_ledger(server.url)
        finally:
            client.config_set("appendonly", "yes")
            client.config_set("maxmemory-policy", "noeviction")
    assert [record.getMessage() for record in caplog.records] == ["ledger may lose data"] * 2


@pytest.mark.slow  # starts a service
def test_a_service_logs_as_json_that_its_ledger_may_lose_data(tmp_path):
    own = running_server(tmp_path / "data")
    with redis.Redis.from_url(own.url) as client:
        client.config_set("appendonly", "no")
    with service(f"{folder() / 'model'} {folder() / 'cheap.json'} --ledger {own.url}", tmp_path) as running:
        assert running.stop() == 0
    own.kill()
    assert all("time" in line for line in running.lines)
    assert [line["advice"] for line in running.lines if line["event"] == "ledger may lose data"] == [
        "start it with --appendonly yes"
    ]


@pytest.mark.slow  # starts four services, and each of them again
@pytest.mark.usefixtures("server")  # so that it is skipped where there is none
def test_services_that_are_killed_in_turn_keep_one_bound_and_the_caps_of_tenants(tmp_path):
    rows = benchmark("serve_fleet").fleet(tmp_path, 2100)
    assert len(rows) == 7
    assert rows[-1]["answered_so_far"] >= 2100
    assert rows[-1]["most_ahead_of_budget_in_samples"] <= 1
    assert rows[-1]["spend_of_allowance_so_far"] > 0.9
    for tenant in ("shop", "bank"):
        assert 0 < rows[-1][f"{tenant}_of_cap"] <= rows[-1]["hours"]
