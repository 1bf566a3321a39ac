"""One budget for many replicas: each holds a part of the savings of all, and a ledger in Redis or Valkey moves them.

Every sample brings its budget, and pays its cost. What is left over is credit. A replica decides samples as long as its
own credit does not fall below zero, so all replicas together have never spent more than the budgets of all samples so
far, whatever they do at the same moment. At every exchange a replica deposits half of its credit, and is granted its
share of all credit by its share of the load: savings flow to where samples are hard.

- The pool in the ledger never falls below zero, and credit is never given twice: one script does each exchange as a
  whole, and an exchange that is sent again, because its answer was lost, gives the same answer. What such an exchange
  deposits is lost if the ledger has restarted meanwhile, or does not know the replica any more.
- A replica that dies takes its credit with it: it may have spent it. It counts no more after `EXPIRES` seconds.
- A ledger that restarts, or loses its data, starts with an empty pool: what it held may be older than what was spent.
- While the ledger does not answer, replicas go on with the credit that they hold.
- A ledger that has lost what tenants have spent in this hour leases nothing until the next: a replica that knew it
  before says so. What only this replica's last leases were lost of, it says with the next.

Under a policy without the contract `stream` there is no credit, and the ledger keeps the policy in force alone.
"""

import hashlib
import json
import logging
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from alight.errors import BadInput
from alight.policies.paced import Pace, Paced
from alight.policies.policy import Policy
from alight.serve.ledger import HOUR, SpendState
from alight.serve.monitoring import error_type, log_event

EXCHANGE = 0.1  # seconds between two exchanges
TIMEOUT = 1.0  # seconds for the ledger to answer
PAUSE = 1.0  # seconds after which a ledger that did not answer is asked again
EXPIRES = 30.0  # seconds after which a replica that is silent counts no more
FORGET = 86_400.0  # seconds for which the last exchange of a replica is remembered

SCRIPT_EXCHANGE = """
local account, replicas, force, caps = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local replica, sequence, leaving = ARGV[1], ARGV[2], ARGV[9] == '1'
local again, known_run, known_data = ARGV[11] == '1', ARGV[12], ARGV[13]
local samples, spent, deposit, keeps = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local expires, forget = tonumber(ARGV[7]), tonumber(ARGV[8])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local function text(number) return string.format('%.17g', number) end
local function read(value) -- sequence, grant, weight, rate, credit, moment
  local fields = {}
  for field in string.gmatch(value or '', '%S+') do fields[#fields + 1] = tonumber(field) end
  return fields
end

local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
if redis.call('HGET', account, 'run') ~= run then
  redis.call('HSET', account, 'run', run, 'pool', '0')
end
redis.call('HSETNX', caps, 'data', text(now) .. ' ' .. run) -- when this data began
local data = redis.call('HGET', caps, 'data')
if known_data ~= '' and known_data ~= data then
  redis.call('HSET', caps, 'lost', string.match(data, '%S+'))
end
redis.call('SETNX', force, ARGV[10])
local policy = redis.call('GET', force)
local total = tonumber(redis.call('HGET', account, 'samples') or '0')
local own = read(redis.call('HGET', replicas, replica))
if own[1] == tonumber(sequence) then
  return {text(own[2]), text(own[3] * total), policy, run, data}
end
if again and (known_run ~= run or not own[1]) then deposit = 0 end -- it may have been granted to others

local pool = tonumber(redis.call('HGET', account, 'pool')) or 0
if not (pool >= 0 and pool < math.huge) then pool = 0 end -- somebody else has written it
pool = pool + deposit
local rates, held, others = 0, 0, 0
local all = redis.call('HGETALL', replicas)
for index = 1, #all, 2 do
  local each = read(all[index + 1])
  local age = now - each[6]
  if age > forget then
    redis.call('HDEL', replicas, all[index])
  elseif all[index] ~= replica and age < expires then
    rates, held, others = rates + each[4], held + each[5], others + 1
  end
end
local rate = own[4] and 0.5 * own[4] + 0.5 * samples / math.max(now - own[6], 0.001) or samples
local weight = rate + rates > 0 and rate / (rate + rates) or 1 / (others + 1)
local grant = leaving and 0 or math.max(0, math.min(pool, weight * (pool + keeps + held) - keeps))
total = total + samples
redis.call('HSET', account, 'pool', text(pool - grant), 'samples', text(total))
redis.call('HINCRBYFLOAT', account, 'spent', ARGV[4])
local kept = {sequence, text(grant), text(weight), text(rate), text(keeps + grant), text(leaving and 0 or now)}
redis.call('HSET', replicas, replica, table.concat(kept, ' '))
return {text(grant), text(weight * total), policy, run, data}
"""

SCRIPT_LEASE = """
local cap, need, want, period = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local replica, known_data, known_window, known_used = ARGV[7], ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
if redis.call('HGET', KEYS[2], 'data') ~= known_data then return {} end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local window, kept = math.floor(now / period), tonumber(redis.call('HGET', KEYS[1], 'window') or '-1')
if kept == window + 1 then window = kept end -- the clock was set back
local left = (window + 1) * period - now
if kept > window then -- it was set back by hours: what was used is not forgotten
  redis.call('HSET', KEYS[1], 'window', window)
elseif kept < window then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'window', window, 'used', '0')
  redis.call('EXPIRE', KEYS[1], math.ceil(2 * period))
end
local before = redis.call('HGET', KEYS[1], ARGV[5])
if before then
  return {before, string.format('%.17g', left), window}
end
local forgotten = known_window == window and known_used - tonumber(redis.call('HGET', KEYS[1], replica) or '0') or 0
if forgotten > 0 then
  redis.call('HINCRBYFLOAT', KEYS[1], 'used', string.format('%.17g', forgotten))
  redis.call('HINCRBYFLOAT', KEYS[1], replica, string.format('%.17g', forgotten))
end
local free = cap - tonumber(redis.call('HGET', KEYS[1], 'used'))
local lost = redis.call('HGET', KEYS[2], 'lost')
if lost and math.floor(tonumber(lost) / period) == window then free = 0 end
local granted = need <= free and math.max(need, math.min(want, free / 8)) or 0
redis.call('HINCRBYFLOAT', KEYS[1], 'used', string.format('%.17g', granted))
redis.call('HINCRBYFLOAT', KEYS[1], replica, string.format('%.17g', granted))
redis.call('HSET', KEYS[1], ARGV[5], string.format('%.17g', granted))
redis.call('HDEL', KEYS[1], ARGV[6])
return {string.format('%.17g', granted), string.format('%.17g', left), window}
"""


@dataclass(frozen=True)
class Exchange:
    """What a replica tells the ledger: it is sent until it is answered, and counts once."""

    account: str  # of the policy
    sequence: int
    samples: int
    spent: float
    deposit: float
    keeps: float


@dataclass(frozen=True)
class ExchangeAnswer:
    """What the ledger answers: credit, this replica's share of all samples, the policy in force, and its data."""

    granted: float
    share: float
    policy: str
    run: str
    data: str

    @classmethod
    def of(cls, values: Sequence[bytes]) -> Self:
        """Return the answer of the script; a ValueError says that somebody else has written into the ledger."""
        granted, share, policy, run, data = (value.decode(errors="replace") for value in values)
        amounts = float(granted), float(share)
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise ValueError(f"the ledger grants {granted} and counts {share} samples: remove what is not its own")
        return cls(*amounts, policy, run, data)


class FleetLedger:
    """The part of a fleet's budget that this replica holds."""

    wanted: str | None = None

    def __init__(
        self, url: str, model: str, policies: Mapping[str, Policy], *, exchange: float = EXCHANGE, period: float = HOUR
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise BadInput('a shared ledger needs the package redis: pip install "alight[serve]"') from error
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise BadInput(f"the ledger {url} is not a URL ({error}): write redis://HOST:PORT/0") from error
        self._failures = (redis.RedisError, OSError)
        self._exchange_script = self._redis.register_script(SCRIPT_EXCHANGE)
        self._lease_script = self._redis.register_script(SCRIPT_LEASE)
        self.model, self.replica, self.period = model, secrets.token_hex(8), period
        self.up = False  # whether the ledger answered last time
        self.state = _without_credit(first := next(iter(policies)), policies[first])
        self._lock = threading.Lock()
        self._in_batch = False
        self._samples, self._spent = 0, 0.0  # since the last exchange
        self._sequence = self._leases = 0
        self._pending: Exchange | None = None  # not answered yet
        self._again = False  # whether it was sent before
        self._known_run = self._known_data = ""  # of the ledger, when it answered last
        self._leased: dict[str, tuple[int, float]] = {}  # by tenant: the hour, and cost units taken of its cap
        self._granted: tuple[float, int] | None = None  # to be taken over between two batches
        self._pause, self._stop = exchange, threading.Event()
        if not self._trade():  # so that the policy in force is known at once
            log_event("ledger does not answer", logging.ERROR, model=model)
        if self.wanted is not None and self.wanted in policies:
            self._adopt(self.wanted, policies[self.wanted])
        self._thread = threading.Thread(target=self._run, name="alight-ledger", daemon=True)
        self._thread.start()

    @property
    def credit(self) -> float:
        """What this replica may spend beyond the budgets of samples to come; 0 where the policy keeps no pace."""
        policy, pace = self.state.policy, self.state.pace
        if not isinstance(policy, Paced) or policy.budget is None:
            return 0.0
        bound = pace.admitted * policy.budget + policy.costs[-1]
        return max(0.0, bound - pace.spent - 4 * float(np.spacing(bound)))  # never more than it was, by rounding

    def admit(self, count: int) -> None:
        """Begin a batch: credit does not change before it is settled."""
        with self._lock:
            self._in_batch = True

    def settle(self, pace: Pace) -> None:
        """Take over the pace after a batch, and what was granted meanwhile."""
        with self._lock:
            before, self._in_batch = self.state.pace, False
            self._samples += pace.admitted - before.admitted
            self._spent += pace.spent - before.spent
            self.state = replace(self.state, pace=pace)
            self._take_over()

    def change(self, name: str, policy: Policy) -> None:
        """Put another policy in force for all replicas; after an OSError nothing has changed."""
        if name != self.wanted:
            try:
                self._redis.set(self._key("policy"), name)
            except self._failures as error:
                self._lose(error)
                raise ConnectionError(f"the ledger does not answer ({error_type(error)})") from error
        with self._lock:
            self._adopt(name, policy)

    def lease(self, tenant: str, cap: float, need: float, want: float) -> tuple[float, float]:
        """Take cost units from a tenant's cap for all replicas; a ConnectionError says that the ledger is not there."""
        if not self.up:  # at once: requests that wait for it would take the place of those that need no lease
            raise ConnectionError("the ledger does not answer")
        with self._lock:
            self._leases += 1
            own, before = (f"{self.replica}:{number}" for number in (self._leases, self._leases - 8))
            hour, used = self._leased.get(tenant, (-1, 0.0))
            values = [repr(cap), repr(need), repr(want), repr(self.period), own, before]
            values += [f"of:{self.replica}", self._known_data, str(hour), repr(used)]
        keys = [self._key("cap", tenant), self._key("caps")]
        try:
            try:
                answer = self._lease_script(keys=keys, args=values)
            except self._failures:
                answer = self._lease_script(keys=keys, args=values)
        except self._failures as error:
            self._lose(error)
            raise ConnectionError(f"the ledger does not answer ({error_type(error)})") from error
        if not answer:
            raise ConnectionError("the ledger has lost its data")
        granted, left, hour = float(answer[0]), float(answer[1]), int(answer[2])
        with self._lock:
            before_hour, used = self._leased.get(tenant, (hour, 0.0))
            self._leased[tenant] = (hour, granted + (used if before_hour == hour else 0.0))
        return granted, left

    def close(self) -> None:
        """Give all credit back."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._in_batch = False
        if self._pending is not None:
            self._trade()
        self._trade(leaving=True)
        with suppress(*self._failures):
            self._redis.close()

    def _run(self) -> None:
        pause = self._pause
        while not self._stop.wait(pause):
            answered = False
            try:
                answered = self._trade()
            except Exception as error:  # a fault of ours: it is tried again, and the service goes on
                self._lose(error)
            pause = self._pause if answered else max(PAUSE, self._pause)

    def _trade(self, leaving: bool = False) -> bool:
        """Exchange credit with the ledger, and return whether it answered."""
        with self._lock:
            if self._pending is None and not self._in_batch:
                self._pending = self._prepared(leaving)
            trade = self._pending
        if trade is None:  # a batch is under way
            return True
        values: list[Any] = [self.replica, trade.sequence, trade.samples, repr(trade.spent), repr(trade.deposit)]
        values += [repr(trade.keeps), repr(EXPIRES), repr(FORGET), "1" if leaving else "0", self.state.name]
        values += ["1" if self._again else "0", self._known_run, self._known_data]
        keys = [self._key(trade.account), self._key(trade.account, "replicas"), self._key("policy"), self._key("caps")]
        self._again = True
        try:
            answer = ExchangeAnswer.of(self._exchange_script(keys=keys, args=values))
        except (*self._failures, ValueError, TypeError) as error:
            self._lose(error)
            return False
        self.up = True
        with self._lock:
            self._pending, self._again = None, False
            self._known_run, self._known_data = answer.run, answer.data
            if trade.account == _account(self.state.policy):
                self._granted = answer.granted, int(answer.share)
            self.wanted = answer.policy if answer.policy != self.state.name else None
            if not self._in_batch:
                self._take_over()
        return True

    def _lose(self, error: Exception) -> None:
        """Take note that the ledger does not answer; the log says it once."""
        if self.up:
            log_event("ledger lost", logging.ERROR, model=self.model, error=error_type(error))
        self.up = False

    def _prepared(self, leaving: bool) -> Exchange:
        """Return the next exchange; what is deposited is credit no more."""
        credit = self.credit
        deposit = credit if leaving or not self._samples else credit / 2
        pace = self.state.pace
        self.state = replace(self.state, pace=replace(pace, spent=pace.spent + deposit))
        self._sequence += 1
        samples, spent, self._samples, self._spent = self._samples, self._spent, 0, 0.0
        return Exchange(_account(self.state.policy), self._sequence, samples, spent, deposit, credit - deposit)

    def _take_over(self) -> None:
        """Add what was granted, and count this replica's share of all samples as its own, as its plan does."""
        if self._granted is not None and isinstance(self.state.policy, Paced):
            (granted, share), policy, pace = self._granted, self.state.policy, self.state.pace
            assert policy.budget is not None  # checked at the border
            credit, last = self.credit + granted, policy.costs[-1]
            admitted = max(share, pace.last, math.ceil((credit - last) / policy.budget))
            spent = max(0.0, admitted * policy.budget + last - credit)
            self.state = replace(self.state, pace=replace(pace, admitted=admitted, spent=spent))
        self._granted = None

    def _adopt(self, name: str, policy: Policy) -> None:
        """Go on under another policy, without credit: savings are not carried over, and nothing is owed."""
        self.state, self.wanted = _without_credit(name, policy), None
        self._samples, self._spent, self._granted = 0, 0.0, None

    def _key(self, *parts: str) -> str:
        return ":".join(["alight", f"{{{self.model}}}", *parts])  # the braces keep all keys on one node of a cluster


def _without_credit(name: str, policy: Policy) -> SpendState:
    return SpendState(name, policy, Pace(spent=policy.costs[-1] if isinstance(policy, Paced) else 0.0))


def _account(policy: Policy) -> str:
    """Return the name of a policy's account: replicas share it if they keep the same budget with the same costs."""
    terms = [policy.budget, list(policy.costs), policy.unit]
    return "account:" + hashlib.sha256(json.dumps(terms).encode()).hexdigest()[:16]


def check_ledger(url: str) -> None:
    """Log what a ledger lacks, so that a power cut, a restart or full memory loses nothing."""
    import redis

    with suppress(redis.RedisError, OSError):  # managed ones refuse it
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT) as client:
            settings: Any = client.config_get("appendonly") | client.config_get("maxmemory-policy")
        for name, wanted in {"appendonly": "yes", "maxmemory-policy": "noeviction"}.items():
            if settings.get(name, wanted) != wanted:
                log_event("ledger may lose data", logging.WARNING, advice=f"start it with --{name} {wanted}")
