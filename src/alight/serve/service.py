"""What the endpoints do: answer samples, change the policy in force, tell where the stream stands."""

import asyncio
import math
import time
from collections.abc import Sequence

from fastapi import Request

from alight.costs import Costs
from alight.errors import AlightError
from alight.policies.paced import Paced
from alight.serve.limits import Limits, Refused
from alight.serve.logs import event
from alight.serve.metrics import Metrics
from alight.serve.network import Network, Sample
from alight.serve.schemas import Allowance, Answers, Asked, Budget, Change, Left, Offered, Status, Told
from alight.serve.worker import Job, Worker


class Service:
    """What the endpoints share."""

    def __init__(self, network: Network, worker: Worker, limits: Limits, metrics: Metrics) -> None:
        self.network, self.worker, self.limits, self.metrics = network, worker, limits, metrics

    async def answer(self, request: Request, samples: Sequence[Sample], allowed: Allowance | Asked) -> Answers:
        """What the samples of a request got."""
        start: float = request.scope["state"]["came"]
        deadline = math.inf if allowed.deadline_ms is None else start + 1e-3 * allowed.deadline_ms
        job = Job(samples, allowed.budget, deadline)
        self.worker.offer(job)
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(job.answer), self.limits.timeout)
        except TimeoutError as error:
            raise Refused(504, f"there was no answer within {self.limits.timeout:g} seconds") from error
        classes = self.network.classes
        told = [
            Told(
                label=classes[each.prediction] if classes else each.prediction,
                index=each.prediction,
                exit=each.exit,
                cost=each.cost,
                probability=each.probability,
            )
            for each in found.answers
        ]
        exits = [each.exit for each in told]
        request.scope["state"]["told"] = {"samples": len(told), "exits": exits[:32], "policy": found.policy}
        return Answers(
            answers=told,
            policy=found.policy,
            budget=found.budget,
            unit=self.worker.book.spending.policy.unit,
            queued_ms=round(1e3 * found.queued, 3),
            took_ms=round(1e3 * (time.monotonic() - start), 3),
        )

    def budget(self) -> Budget:
        """The policy in force, and those that may be."""
        spending = self.worker.book.spending
        offered = [
            Offered(
                name=name,
                budget=runner.policy.budget,
                rule=runner.policy.summary(),
                contract=runner.policy.certificate.contract if runner.policy.certificate else None,
            )
            for name, runner in self.network.runners.items()
        ]
        return Budget(policy=spending.name, budget=spending.policy.budget, unit=spending.policy.unit, policies=offered)

    async def change(self, asked: Change) -> Budget:
        """The policies, once another one is in force."""
        name = self._chosen(asked)
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.worker.change(name)), self.limits.timeout)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise Refused(503, "the service is stopping: ask another one", 1) from error
            raise Refused(503, f"the change cannot be written down ({error}): make room on the disk", 60) from error
        event("budget changed", policy=name, budget=self.network.runners[name].policy.budget)
        return self.budget()

    def _chosen(self, asked: Change) -> str:
        policies = {name: runner.policy for name, runner in self.network.runners.items()}
        known = ", ".join(f"{name} ({policy.budget})" for name, policy in policies.items())
        if asked.policy is not None:
            if asked.policy not in policies:
                raise Refused(422, f"there is no policy {asked.policy[:100]!r}: choose among {known}")
            return asked.policy
        now = self.worker.book.spending.policy
        dearest = max((policy.costs for policy in policies.values()), key=lambda costs: costs[-1])
        assert asked.budget is not None  # one of both is given
        try:
            amount = Costs.from_cumulative(dearest, unit=now.unit).budget(asked.budget)
        except AlightError as error:
            raise Refused(422, str(error)) from error
        budgets = {name: policy.budget for name, policy in policies.items() if policy.budget is not None}
        affordable = [name for name, budget in budgets.items() if budget <= amount]
        if not affordable:
            raise Refused(422, f"no policy has a budget of {amount:g} or less: choose among {known}")
        return max(affordable, key=lambda name: budgets[name])

    def status(self) -> Status:
        """What was done, and where the stream stands."""
        spending, metrics = self.worker.book.spending, self.metrics
        costs = dict(zip(spending.policy.open_exits, spending.policy.costs, strict=True))
        exits = [
            Left(exit=index, name=name, cost=costs.get(index), samples=metrics.counts[index])
            for index, name in enumerate(self.network.exits)
        ]
        return Status(
            policy=spending.name,
            budget=spending.policy.budget,
            unit=spending.policy.unit,
            samples=sum(metrics.counts),
            spent=metrics.total_spent,
            allowed=metrics.total_allowed,
            ahead_at_most=spending.policy.costs[-1] if isinstance(spending.policy, Paced) else None,
            exits=exits,
            queue=self.worker.queued,
            alarm=spending.pace.alarmed,
            takes=self.network.kind,
            shape=list(self.network.shape),
            batch=self.limits.batch,
        )
