"""What was fitted: the policy beside the full network in a table, a report, a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alight import calibrate
from alight.costs import Costs
from alight.display import accuracy_text, aligned, html_table, layer_label, quantity
from alight.engine.predictor import Predictor
from alight.errors import BadFile, BadInput
from alight.evaluation import Point, evaluate_policy, sweep
from alight.files import (
    CALIBRATION,
    CALLS,
    COSTS,
    FIT,
    POLICY,
    TEST,
    PathLike,
    check_replaceable,
    read_json,
    write_json,
    write_text,
)
from alight.outputs import Decisions, HeadOutputs
from alight.policies import load_policy
from alight.policies.policy import Policy
from alight.policies.route import replay
from alight.report import Baseline, MeasuredSpeed, ReportedNetwork, examples, write_report

if TYPE_CHECKING:
    from alight.planning.engines import RuntimeComparison
    from alight.planning.timing import SpeedComparison

BUDGETS = 11  # of the curve in a report
COST = "cost per sample"
WORDS = ("verdict", "caution", "note")  # of a fit, kept beside its network
TIMINGS = ("batch_size", "full_per_second", "per_second", "speedup", "low", "high")  # of a comparison, for programs


@dataclass(frozen=True)
class Fit:
    """What `fit` made on its way: costs, tables, times, and the calls that made them."""

    policy: Policy
    costs: Costs  # in the policy's unit
    labelled: HeadOutputs  # calibrated on
    test: HeadOutputs  # not used before: what is said of accuracy and cost is of these
    exits: tuple[str, ...]
    calls: str  # as Python, to go on by hand
    speeds: "Sequence[SpeedComparison]" = ()  # in batches, and sample by sample; none without a network
    verdict: str = ""  # does it pay here, and what is lost: in one sentence
    shown: tuple[Any, Any] | None = field(default=None, repr=False)  # some test samples, and their rows
    note: str = ""
    caution: str = ""  # why the numbers say little: comes first
    timed: Any = field(default=None, repr=False)  # validation samples, of which timings are; None where there are none

    @property
    def decisions(self) -> Decisions:
        """The answers about the test samples."""
        return replay(self.policy, self.test)

    @property
    def guarantee(self) -> str:
        """What is guaranteed, and under which assumption; the certificate of the policy says more."""
        if (certificate := self.policy.certificate) is not None:
            text = f"{certificate.guarantee} {certificate.assumption.partition('. ')[0]}"
            return text.strip().removesuffix(".") + "."
        return "" if len(self.policy.open_exits) == 1 else "The mean cost is not guaranteed."

    def columns(self) -> list[list[str]]:
        """Return a table as columns of text: the full network, and the policy beside it."""
        decisions, truth, unit = self.decisions, self.test.truth(), self.costs.unit
        share = decisions.mean_cost / self.costs.full
        accuracies = self.test.correct()[:, -1].mean(), decisions.accuracy(truth)
        agreement = "accuracy" if self.test.labels is not None else "agreement"
        rows = {
            "": ("full network", "with exits"),
            agreement: tuple(accuracy_text(each, "%") for each in accuracies),
            COST: (quantity(self.costs.full, unit), quantity(decisions.mean_cost, unit)),
            "of the full network": ("100%", f"{share:.1%}"),
        }
        if unit == "ms" and self.speeds:  # the sum of stages timed alone may contradict what is measured as a whole
            rows[f"{COST}, by timed stages"] = rows.pop(COST)
            del rows["of the full network"]
        for speed in self.speeds:
            rows |= _speed_rows(speed)
        return [[*rows], [left for left, _ in rows.values()], [right for _, right in rows.values()]]

    def lines(self) -> list[str]:
        """Return sentences about the fit, below its table."""
        shares = zip(map(layer_label, self.exits), self.decisions.exit_shares, strict=True)
        left = [f"{share:.0%} {'at the end' if name == 'end' else f'after {name}'}" for name, share in shares]
        samples = f"{len(self.test):,} test samples were answered: {', '.join(left)}."
        over, budget = "", self.policy.budget
        if self.guarantee and budget and self.decisions.mean_cost > budget:
            spent, allowed = (f"{each / self.costs.full:.1%}" for each in (self.decisions.mean_cost, budget))
            over = f"The test samples cost {spent}, over {allowed}: the guarantee is about the mean of all new samples."
        return [each for each in (samples, self.verdict, self.guarantee, over) if each]

    def __str__(self) -> str:
        return "\n".join([*filter(None, [self.caution]), *aligned(self.columns()), *self.lines()])

    def _repr_html_(self) -> str:
        return html_table(self.caution or "Fitted to a budget", self.columns(), self.lines())

    def values(self) -> dict[str, Any]:
        """Return what the table says, and how it came about, for programs."""
        decisions = self.decisions
        return {
            "exits": self.exits,
            "accuracy": decisions.accuracy(self.test.truth()),
            "full_accuracy": float(self.test.correct()[:, -1].mean()),
            "mean_cost": decisions.mean_cost,
            "full_cost": self.costs.full,
            "unit": self.costs.unit,
            "exit_shares": decisions.exit_shares,
            "runs": [{name: getattr(each, name) for name in TIMINGS} for each in self.speeds],
            "caution": self.caution,
            "verdict": self.verdict,
            "guarantee": self.guarantee,
            "policy": self.policy.to_dict(),
            "calls": self.calls,
        }

    def points(self, methods: Mapping[str, calibrate.Method], *, progress: bool = False) -> list[Point]:
        """Return methods at many budgets, every exit alone and the best that could be decided, on the test samples."""
        lowest = max(self.costs.shares()[0], 0.01)
        shares = np.linspace(lowest, max(lowest, 1.0), BUDGETS)
        budgets = list(dict.fromkeys((shares * self.costs.full).tolist()))
        return sweep(methods, self.costs, budgets, labelled=self.labelled, test=self._judged(), progress=progress)

    def reported(
        self, points: Sequence[Point] = (), classes: Sequence[str] = (), smaller: Baseline | None = None
    ) -> ReportedNetwork:
        """Return what a report shows: the policy among `points`, by default those of `eero` at many budgets."""
        budget = self.policy.budget or self.decisions.mean_cost
        policy = replace(self.policy, budget=budget, method=self.policy.method or "fitted")
        shown = None
        if self.shown is not None:
            samples, rows = self.shown
            shown = examples(samples, [], self.test.take(rows), chosen=policy, classes=classes)
        return ReportedNetwork(
            points or self.points({"eero": calibrate.eero}),
            exits=[*map(layer_label, self.exits)],
            classes=classes,
            examples=shown,
            note=self.note,
            chosen=evaluate_policy(policy, self.costs, self._judged()),
            speed=_measured(self.speeds),
            smaller=smaller,
            guarantees=[str(self.policy.certificate)] if self.policy.certificate else (),
            caution=self.caution,
            verdict=self.verdict,
        )

    def _judged(self) -> HeadOutputs:
        return replace(self.test, labels=self.test.truth())  # without labels the last exit is right


class FittedPredictor(Predictor):
    """A predictor that `fit` made: it knows its table, its report, the calls that made it, and how to save itself.

    Args:
        network: A `MultiExitModel`, or a backend.
        fitted: What `fit` found.
        batch_size: Of what is not a loader.

    >>> import numpy as np
    >>> from alight import Costs, fit
    >>> logits = np.random.default_rng(0).normal(size=(400, 2, 3)) * [[[2.0], [4.0]]]
    >>> predictor = fit(Costs.from_cumulative([1.0, 4.0]), validation=(logits, logits[:, 1].argmax(1)), progress=False)
    >>> predictor.report(f"{__import__('tempfile').mkdtemp()}/report.html").name
    'report.html'
    """

    def __init__(self, network: Any, fitted: Fit, batch_size: int) -> None:
        super().__init__(network, fitted.policy, batch_size=batch_size)
        self.network, self.fitted = network, fitted  # a MultiExitModel, or a backend

    @property
    def summary(self) -> str:
        """The full network and the policy side by side, and what is guaranteed."""
        return str(self.fitted)

    @property
    def calls(self) -> str:
        """The calls that made this predictor, as Python to go on with by hand."""
        return self.fitted.calls

    def __str__(self) -> str:
        return self.summary

    def _repr_html_(self) -> str:
        return self.fitted._repr_html_()

    def report(self, path: PathLike, *, title: str = "Fitted to a budget", smaller: Baseline | None = None) -> Path:
        """Write one HTML page about this predictor, and return its path; `smaller` is a network to compare with."""
        return write_report(self.fitted.reported(classes=self._classes, smaller=smaller), path, title=title)

    @property
    def _classes(self) -> Sequence[str]:
        return getattr(self.network, "classes", ())

    def compare_runtimes(self, inputs: Any = None, *, batch_size: int | None = None) -> "RuntimeComparison":
        """Return samples per second by PyTorch, ONNX Runtime and OpenVINO, under this policy and without exits.

        Its `export` writes the fastest to a folder; `alight.deploy` does so in int8. None: validation samples run.
        """
        if not hasattr(self.network, "stages"):
            raise BadInput("this predictor was fitted to logits: give a network to `fit` to compare what runs it")
        if inputs is None and self.fitted.timed is None:
            raise BadInput("this predictor was fitted to recorded outputs: give samples to run")
        from alight.planning.engines import compare_runtimes
        from alight.planning.timing import inputs_for_duration
        from alight.planning.tune import BATCHES

        size = batch_size or self.batch_size
        given = inputs_for_duration(self, self.fitted.timed, size, BATCHES)[0] if inputs is None else inputs
        return compare_runtimes(self.network, self.policy, given, size)

    def save(self, folder: PathLike, *, force: bool = False) -> Path:
        """Write network, policy, costs, tables and calls to a folder; `Predictor.load` and the commands read it.

        One that holds another network or policy is refused unless `force` lets it be replaced.
        """
        folder = Path(folder)
        check_replaceable(folder, force=force)
        if hasattr(self.network, "stages"):
            from alight.networks.store import save_model

            save_model(self.network, folder, force=force)
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save(folder / POLICY)
        self.fitted.costs.save(folder / COSTS)
        self.fitted.labelled.save(folder / CALIBRATION)
        self.fitted.test.save(folder / TEST)
        speed = _measured(self.fitted.speeds)
        words = {name: getattr(self.fitted, name) for name in WORDS}
        names = {"exits": self.fitted.exits, "classes": self._classes}
        write_json(folder / FIT, "Fit", {**words, **names, "speed": speed and asdict(speed)})
        write_text(folder / CALLS, self.calls)
        return folder


def reported_folder(folder: PathLike) -> ReportedNetwork:
    """Return what a report shows of a folder that a fitted predictor was saved to: all but real samples."""
    folder = Path(folder)
    if not (folder / FIT).is_file():
        raise BadFile(folder, f"it has no {FIT}", "give a folder that `alight fit` or FittedPredictor.save wrote")
    said = read_json(folder / FIT, "Fit")
    fitted = Fit(
        load_policy(folder / POLICY),
        Costs.load(folder / COSTS),
        HeadOutputs.load(folder / CALIBRATION),
        HeadOutputs.load(folder / TEST),
        tuple(said["exits"]),
        calls="",
        **{name: said[name] for name in WORDS},
    )
    shown = fitted.reported(classes=tuple(said.get("classes", ())))
    return replace(shown, speed=said["speed"] and MeasuredSpeed(**said["speed"]))


def _speed_rows(speed: "SpeedComparison") -> dict[str, tuple[str, str]]:
    """Return rows of a table about one batch size."""
    if speed.batch_size == 1:
        return {"one sample": (f"{speed.full_latency[0]:.2f} ms", f"{speed.latency[0]:.2f} ms")}
    size = f"batches of {speed.batch_size}"
    return {
        f"samples/s, {size}": (f"{speed.full_per_second:,.0f}", f"{speed.per_second:,.0f}"),
        "speed-up": ("1.00x", f"{speed.speedup:.2f}x ({speed.low:.2f} to {speed.high:.2f})"),
    }


def _measured(speeds: "Sequence[SpeedComparison]") -> MeasuredSpeed | None:
    """Return what a report shows of timings in batches and sample by sample; None where nothing was timed."""
    if not speeds:
        return None
    batches, single = speeds
    terms = {"latency": single.latency[0], "full_latency": single.full_latency[0]}
    return MeasuredSpeed(batches.speedup, batches.low, batches.high, batches.batch_size, **terms)
