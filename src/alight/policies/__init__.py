"""Does it leave? The rules, the lenses, and the one walk through the exits."""

from alight.policies.lenses import Ensemble, Gain, Lens, Recall
from alight.policies.limits import Capped, Quota, capped
from alight.policies.paced import Pace, Paced
from alight.policies.policy import (
    BatchState,
    Certificate,
    ExitAt,
    Lottery,
    Mixture,
    Patience,
    Policy,
    Streak,
    Threshold,
)
from alight.policies.route import replay, replay_on, route, visit
from alight.policies.saved import load_policy, policy_from_dict

__all__ = [
    "BatchState",
    "Capped",
    "Certificate",
    "Ensemble",
    "ExitAt",
    "Gain",
    "Lens",
    "Lottery",
    "Mixture",
    "Pace",
    "Paced",
    "Patience",
    "Policy",
    "Quota",
    "Recall",
    "Streak",
    "Threshold",
    "capped",
    "load_policy",
    "policy_from_dict",
    "replay",
    "replay_on",
    "route",
    "visit",
]
