"""Logits that another system has computed: the policy decides about them, and nothing is run."""

from collections.abc import Sequence

from alight.data.preprocess import InputSpec, TensorSpec
from alight.engine.backends import HeadValues, Reads, State, score_one, score_rows
from alight.engine.backends.onnx import OnnxBackend


class LogitsBackend(OnnxBackend):
    """The logits of every exit as input, (samples, exits, classes).

    >>> import numpy as np
    >>> from alight import Predictor, Threshold
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0))
    >>> logits = np.array([[[0.0, 9.0], [9.0, 0.0]], [[0.0, 0.1], [9.0, 0.0]]])
    >>> decisions = Predictor(LogitsBackend(("first", "end"), policy.open_exits), policy)(logits)
    >>> decisions.predictions, decisions.exits
    (array([1, 0]), array([0, 1]))
    """

    name = "recorded logits"

    def __init__(
        self, exits: Sequence[str], open_exits: Sequence[int], classes: int | None = None, fingerprint: str = ""
    ) -> None:
        self.exits, self.open_exits, self.fingerprint = tuple(exits), tuple(open_exits), fingerprint
        self.inputs = InputSpec((TensorSpec("logits", (None, len(self.exits), classes), "float64"),))
        self.reads = [Reads(())] * len(self.open_exits)  # until a policy asks for more

    def run(self, stage: int, state: State) -> tuple[HeadValues, State]:
        return score_rows(state[0][:, self.open_exits[stage]], self.reads[stage]), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        return score_one(state[0][:, self.open_exits[stage]], self.reads[stage]), state

    def owns(self, made: State, given: State) -> bool:
        return False  # they are the caller's
