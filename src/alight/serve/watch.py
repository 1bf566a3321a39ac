"""Do early answers still agree with the last exit? Drift of accuracy that shows without labels.

The first watched samples say how often an early answer differs from that of the last exit: at most `p` with 99.5 %
confidence (Clopper and Pearson). From then on a Shiryaev-Roberts sum of bets that it differs more often grows only by
chance while `p` holds: over `HORIZON` samples it is raised to 1 / ALARM_RATE with probability ALARM_RATE at most.
"""

import math

FIRST = 300  # samples that say what is usual
CONFIDENCE = 0.995  # of the bound on what is usual
FACTORS = (1.5, 2.0, 4.0)  # times the bound: rates of disagreement that are bet on
ALARM_RATE, HORIZON = 0.01, 100_000


class DisagreementWatch:
    """Counts disagreements, and raises an alarm once there are more than at first.

    >>> watch = DisagreementWatch()
    >>> watch.add(300, 6)
    >>> watch.add(300, 9)
    >>> watch.alarmed
    False
    >>> watch.add(300, 60)
    >>> watch.alarmed
    True
    """

    def __init__(self) -> None:
        self.samples = self.disagreements = 0
        self.usual: float | None = None  # rate of disagreement that is exceeded at first with little probability
        self.alarmed = False
        self._sums = [0.0] * len(FACTORS)

    def add(self, samples: int, disagreements: int) -> None:
        """Take note of watched samples."""
        self.samples += samples
        self.disagreements += disagreements
        if self.usual is None:
            if self.samples >= FIRST:
                self.usual = upper_rate(self.samples, self.disagreements)
            return
        for index, factor in enumerate(FACTORS):
            rate = min(factor * self.usual, (1 + self.usual) / 2)
            won, lost = rate / self.usual, (1 - rate) / (1 - self.usual)
            stake = disagreements * math.log(won) + (samples - disagreements) * math.log(lost)
            self._sums[index] = (self._sums[index] + samples / HORIZON) * math.exp(min(stake, 500.0))
        self.alarmed = self.alarmed or sum(self._sums) / len(FACTORS) >= 1 / ALARM_RATE


def upper_rate(samples: int, events: int) -> float:
    """Return the rate that a rate is below with 99.5 % confidence, where so many of the samples had the event.

    >>> round(upper_rate(300, 6), 4)
    0.0514
    """
    from scipy.stats import beta  # slow to import

    return float(beta.ppf(CONFIDENCE, events + 1, samples - events)) if events < samples else 1.0 - 1e-9
