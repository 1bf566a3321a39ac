"""Does it leave? The rules, combinations of answers, the one walk through the exits; and policies from their files."""

import math
from collections.abc import Mapping
from typing import Any

from alight.errors import BadFile
from alight.files import PathLike, read_json
from alight.policies.combinations import combination_from_dict
from alight.policies.limits import Metered, Quota
from alight.policies.paced import Paced
from alight.policies.policy import Certificate, ExitAt, Lottery, Mixture, Patience, Policy, Streak, Threshold

RULES: Mapping[str, type[Policy]] = {
    rule.__name__: rule for rule in (Threshold, Streak, Patience, ExitAt, Lottery, Mixture, Quota, Paced, Metered)
}
INFINITE = {"never": math.inf, "always": -math.inf}  # thresholds, as JSON has them


def load_policy(path: PathLike) -> Policy:
    """Load the policy of a JSON file that `Policy.save` wrote.

    Args:
        path: A JSON file.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/policy.json"
    >>> Threshold(thresholds=(0.9,), costs=(1.0, 3.0), method="by hand").save(path)
    >>> load_policy(path).method
    'by hand'
    """
    content = read_json(path, "Policy")
    try:
        return policy_from_dict(content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BadFile(path, f"its content is not usable ({reason})", "calibrate and save the policy again") from error


def policy_from_dict(content: Mapping[str, Any]) -> Policy:
    """Return the policy that `Policy.to_dict` wrote."""
    values = dict(content)
    rule = RULES[values.pop("rule")]
    for name, value in values.items():
        if isinstance(value, dict) and "rule" in value:
            values[name] = policy_from_dict(value)
        elif name == "combination" and value is not None:
            values[name] = combination_from_dict(value)
        elif name == "certificate" and value is not None:
            values[name] = Certificate(**value)
        elif name == "threshold" and isinstance(value, str):
            values[name] = INFINITE[value]
        elif name == "thresholds":
            values[name] = [INFINITE[each] if isinstance(each, str) else each for each in value]
    return rule(**values)
