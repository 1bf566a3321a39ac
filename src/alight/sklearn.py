"""Classifiers of scikit-learn, LightGBM and XGBoost that stop early: after some of their trees, or after a cheaper one.

The trees of a model are summed part by part, so that a sample which goes on pays for each tree once. Trees are counted;
the classifiers of a list are timed.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from alight.calibrate import METHODS, certified_risk
from alight.costs import Costs
from alight.errors import BadInput
from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import route
from alight.scores import probabilities, score_of

Floats = npt.NDArray[np.float64]

FOREST, BOOSTED, LISTED = "forest", "boosted", "list"  # what parts give: probabilities to be summed, logits, or neither
SOONEST = 20  # the first of several exits comes after one tree in so many
LEAST = 20  # samples from which on a part is held out to calibrate on
TINY = 1e-12  # a probability at least, before its logarithm is taken
ROUNDS = 3  # in which a classifier of a list is timed
SAME, CHECKED = 1e-4, 100  # how far the sum of all parts may be from the model's own probabilities, on so many samples
MIXING = np.uint64(0x9E3779B97F4A7C15)  # an odd number, by which the bits of a row become the number of a sample


class BudgetedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that spends on each sample as much as it needs, within a budget on average.

    A boosting model or a forest stops after some of its trees; of a list of classifiers, cheap before expensive, later
    ones are asked where earlier ones are not sure. A part of the training data is held out to calibrate that.

    After `fit` it has `exits_`, their names, `costs_`, `policy_`, and `spent_`, the mean cost of a held-out sample;
    `decide` gives exit and cost of each sample.

    Args:
        estimator: A boosting model or forest of scikit-learn, LightGBM or XGBoost, or a list of classifiers; None:
            `HistGradientBoostingClassifier()`.
        budget: Mean cost of a sample: "50%" of the full model, "40 trees" of a forest, "40 rounds" of boosting,
            "0.1 ms" of a list.
        max_loss: Instead of a budget: as cheap as loses at most so much accuracy, with 95 % confidence.
        exits: How many, or the trees or rounds after which there is one; the full model is always the last.
        method: Calibrates, by its name in `alight.calibrate.METHODS`.
        held_out: Share of the training data to calibrate on.
        prefit: The estimator is fitted; all data calibrates, and must not have trained it.
        random_state: Of the draw of held-out samples.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.ensemble import RandomForestClassifier
    >>> features, labels = load_digits(return_X_y=True)
    >>> forest = RandomForestClassifier(100, random_state=0)
    >>> model = BudgetedClassifier(forest, budget="40%", random_state=0).fit(features[:1000], labels[:1000])
    >>> model.exits_
    ('5 trees', '11 trees', '22 trees', '47 trees', '100 trees')
    >>> bool(model.decide(features[1000:]).mean_cost < 45), model.predict(features[1000:1002])
    (True, array([1, 4]))
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        budget: float | str | None = "50%",
        max_loss: float | None = None,
        exits: int | Sequence[int] = 5,
        method: str = "eero",
        held_out: float = 0.25,
        prefit: bool = False,
        random_state: Any = None,
    ) -> None:
        self.estimator, self.budget, self.max_loss, self.exits = estimator, budget, max_loss, exits
        self.method, self.held_out, self.prefit, self.random_state = method, held_out, prefit, random_state

    def fit(self, X: Any, y: Any, **more: Any) -> "BudgetedClassifier":  # noqa: N803
        """Fit the estimator to most of the data, and where samples stop to the rest of it.

        There are no weights of samples: a budget is a mean over samples as they come, each of which counts alike.
        """
        if more:
            raise BadInput(
                f"fit takes X and y, no {next(iter(more))}: fit the estimator with it, and where samples stop to"
                " other data, BudgetedClassifier(fitted, prefit=True).fit(X, y), in which each sample counts alike"
            )
        if self.method not in METHODS:
            raise BadInput(f"there is no method {self.method!r}: choose one of {', '.join(METHODS)}")
        models = _probabilistic(self._estimators(), prefit=self.prefit)
        _check_columns(X, models if self.prefit else [])
        rows, truth = validate_data(self, X, y, ensure_all_finite=self._finite())
        check_classification_targets(truth)
        self.classes_ = np.unique(truth) if not self.prefit else _common_classes(models)
        if len(self.classes_) < 2:
            raise BadInput(
                f"the data has one class, {self.classes_.tolist()[0]!r}: give samples of at least two classes"
            )
        if len(unknown := np.setdiff1d(truth, self.classes_)):
            raise BadInput(f"the estimator does not know the class {unknown.tolist()[0]!r}: fit it to all classes")
        labels = np.searchsorted(self.classes_, truth)
        rest: Any = slice(None)
        if not self.prefit:
            train, rest = self._parts(labels)
            models = [self._seeded(clone(each)).fit(rows[train], labels[train]) for each in models]
        listed = isinstance(self.estimator, list | tuple)
        self.estimator_ = models if listed else models[0]
        self.kind_, self.parts_, self.exits_, self.costs_ = (
            _of_list(models, rows[rest]) if listed else _of_trees(models[0], self.exits, rows[rest])
        )
        self.policy_ = self._calibrated(rows[rest], labels[rest])
        self.spent_ = self._walked(rows[rest])[0].mean_cost
        return self

    def decide(self, X: Any) -> Decisions:  # noqa: N803
        """Return class index, exit and cost of every sample."""
        return self._walked(self._validated(X))[0]

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the class of every sample."""
        decisions = self.decide(X)
        return self.classes_[decisions.predictions]

    def predict_proba(self, X: Any) -> Floats:  # noqa: N803
        """Return the probabilities of all classes, (samples, classes), as of the exit where each sample stops."""
        return probabilities(self._walked(self._validated(X))[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = all(get_tags(each).input_tags.allow_nan for each in self._estimators())
        return tags

    def _estimators(self) -> list[Any]:
        if self.estimator is None:
            return [HistGradientBoostingClassifier(random_state=self.random_state)]
        return [*self.estimator] if isinstance(self.estimator, list | tuple) else [self.estimator]

    def _seeded(self, model: Any) -> Any:
        """Return an estimator whose random states are this one's where it has none."""
        free = [name for name, value in model.get_params().items() if name.endswith("random_state") and value is None]
        return model.set_params(**dict.fromkeys(free, self.random_state))

    def _finite(self) -> Any:
        return "allow-nan" if get_tags(self).input_tags.allow_nan else True

    def _validated(self, X: Any) -> Floats:  # noqa: N803
        check_is_fitted(self)
        _check_columns(X)
        return validate_data(self, X, reset=False, ensure_all_finite=self._finite())

    def _parts(self, labels: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Return samples to train on and to calibrate on; all for both where they are too few to divide.

        The only sample of a class trains.
        """
        counts = np.bincount(labels)
        alone = counts[labels] < 2
        rows, single = np.flatnonzero(~alone), np.flatnonzero(alone)
        if len(rows) < LEAST:
            if self.max_loss is not None:
                raise BadInput(
                    f"{len(rows)} samples of classes that have two or more are too few to hold some out, without which"
                    f" no loss can be guaranteed: give {LEAST} or more, or a budget instead of max_loss"
                )
            return np.arange(len(labels)), np.arange(len(labels))
        if not 0 < self.held_out < 1:
            raise BadInput(
                f"held_out {self.held_out!r}: give a share of the training data between 0 and 1, such as 0.25"
            )
        size = max(self.held_out, int((counts > 1).sum()) / len(rows))
        drawn = train_test_split(rows, test_size=size, stratify=labels[rows], random_state=self.random_state)
        return np.concatenate([drawn[0], single]), drawn[1]

    def _calibrated(self, rows: Floats, labels: npt.NDArray[np.int64]) -> Policy:
        logits, table = np.zeros((len(rows), len(self.classes_))), []
        for exit_index in range(len(self.exits_)):
            logits = self._advanced(exit_index, rows, logits)
            table.append(self._logits(exit_index, logits))
        outputs = HeadOutputs.from_logits(table, labels)
        if self.max_loss is None:
            policy = METHODS[self.method](self.costs_, self.budget, outputs)
        else:
            method = certified_risk(METHODS[self.method], risk="excess_error", alpha=self.max_loss)
            policy = method(self.costs_, None, outputs)
        if policy.is_batch_dependent or not policy.keeps_answers or policy.inputs != (outputs.score,):
            raise BadInput(
                f"{policy.method} does not decide on the score of one exit: choose eero, search or geometric"
            )
        return policy

    def _advanced(self, exit_index: int, rows: Floats, before: Floats) -> Floats:
        """Return what the parts up to an exit give together, from what those before it gave."""
        made = self.parts_[exit_index](rows)
        if made.ndim == 1:  # one number for two classes
            made = np.stack([np.zeros_like(made), made], axis=1)
        return made if self.kind_ == LISTED else before + made

    def _logits(self, exit_index: int, values: Floats) -> Floats:
        if self.kind_ == BOOSTED:
            return values
        trees = self.parts_[exit_index].stop if self.kind_ == FOREST else 1
        return np.log(np.maximum(values / trees, TINY))

    def _walked(self, rows: Floats) -> tuple[Decisions, Floats]:
        """Return decisions, and the logits of the exit where each sample stops."""
        policy, waiting = self.policy_, np.arange(len(rows))
        values, logits = np.zeros((len(rows), len(self.classes_))), np.zeros((len(rows), len(self.classes_)))
        exits, done = np.zeros(len(rows), dtype=np.int64), 0

        def read(exit_index: int, staying: Any) -> tuple[Any, tuple[Any, ...]]:
            nonlocal waiting, done
            waiting = waiting[staying]
            part = rows[waiting] if len(waiting) < len(rows) else rows
            first = exit_index if self.kind_ == LISTED else done
            for own in range(first, exit_index + 1):
                values[waiting] = self._advanced(own, part, values[waiting])
            done, exits[waiting] = exit_index + 1, exit_index
            logits[waiting] = now = self._logits(exit_index, values[waiting])
            return now.argmax(axis=1), (score_of(policy.score, now),)

        for _ in route(policy, _numbers(rows), read):
            pass
        places = np.searchsorted(policy.open_exits, exits)
        spent = np.asarray(policy.costs)[places]
        names: dict[str, Any] = {"exit_names": self.exits_, "unit": policy.unit, "num_exits": len(self.exits_)}
        return Decisions(logits.argmax(axis=1), exits, spent, **names), logits


@dataclass(frozen=True)
class Trees:
    """The trees of a model from one to another, and what they add to its logits, or to a forest's probabilities."""

    model: Any
    start: int
    stop: int
    base: Any = 0.0  # that XGBoost adds to every part

    def __call__(self, rows: Floats) -> Floats:
        """Return what they add, (samples, classes), or (samples,) for two classes."""
        library = _library(self.model)
        if library == "lightgbm":
            limits: dict[str, Any] = {"start_iteration": self.start, "num_iteration": self.stop - self.start}
            return self.model.booster_.predict(rows, raw_score=True, **limits)
        if library == "xgboost":
            limits = {
                "iteration_range": (self.start, self.stop),
                "predict_type": "margin",
                "missing": self.model.missing,
            }
            return self.model.get_booster().inplace_predict(rows, **limits).astype(np.float64) - self.base
        if hasattr(self.model, "decision_function"):
            return self.model.decision_function(rows)
        return self.model.predict_proba(rows) * (self.stop - self.start)


@dataclass(frozen=True)
class Whole:
    """A classifier of a list."""

    model: Any

    def __call__(self, rows: Floats) -> Floats:
        """Return its probabilities."""
        return self.model.predict_proba(rows)


def _probabilistic(models: list[Any], *, prefit: bool) -> list[Any]:
    """Return the classifiers themselves, not what keeps them fitted, if all of them give probabilities."""
    if not models:
        raise BadInput("a list without classifiers: give at least one, better two, the cheapest first")
    if not prefit and any(isinstance(each, FrozenEstimator) for each in models):
        raise BadInput("a FrozenEstimator is fitted: say prefit=True, and give data that did not train it")
    models = [each.estimator if isinstance(each, FrozenEstimator) else each for each in models]
    if lacking := [type(each).__name__ for each in models if not hasattr(each, "predict_proba")]:
        raise BadInput(f"a {lacking[0]} gives no probabilities: wrap it, CalibratedClassifierCV({lacking[0]}(...))")
    return models


def _common_classes(models: Sequence[Any]) -> np.ndarray:
    """Return the classes of fitted models, which all of them must number alike."""
    for each in models:
        if not hasattr(each, "classes_"):
            raise BadInput(
                f"the {type(each).__name__} is not fitted: fit it, in a FrozenEstimator where it is cloned, or leave"
                " prefit out"
            )
    classes = np.asarray(models[0].classes_)
    for each in models:
        if not np.array_equal(np.unique(classes), each.classes_):
            raise BadInput(
                f"a {type(each).__name__} knows the classes {[*each.classes_]}, and others {[*classes]}: fit all to the"
                " same classes, in ascending order"
            )
    return classes


def _check_columns(X: Any, fitted: Sequence[Any] = ()) -> None:  # noqa: N803
    """Check a table whose columns have names: these are lost, and so must not matter."""
    if not hasattr(X, "columns") or not hasattr(X, "dtypes"):
        return
    columns = [str(name).replace(" ", "_") for name in X.columns]
    for place, kind in enumerate(str(each).lower() for each in X.dtypes):
        if kind.startswith(("categ", "enum")):
            raise BadInput(
                f"the column {columns[place]!r} holds categories, whose numbers differ between libraries: fit the model"
                " to codes of your own (OrdinalEncoder), and give these"
            )
        objects = np.asarray(X)[:, place] if kind == "object" else ()
        if kind.startswith("str") or any(isinstance(each, str) for each in objects):
            raise BadInput(
                f"the column {columns[place]!r} holds texts: encode them first, as in"
                " make_pipeline(encoder, BudgetedClassifier(...))"
            )
    for each in fitted:
        _check_names(each, columns)


def _check_names(model: Any, columns: list[str]) -> None:
    """Check that a fitted model has the columns of a table, in its order, or knows no names of them."""
    names = [str(name).replace(" ", "_") for name in getattr(model, "feature_names_in_", ())]
    unnamed = names in ([], [f"Column_{place}" for place in range(len(names))])  # as LightGBM calls those of arrays
    if not unnamed and names != columns:
        place = next((place for place, pair in enumerate(zip(names, columns, strict=False)) if pair[0] != pair[1]), 0)
        raise BadInput(
            f"the {type(model).__name__} was fitted to {len(names)} columns, {names[place]!r} at index {place}, and the"
            f" data has {len(columns)}, {columns[place]!r} there: give the same columns in the same order"
        )


Made = tuple[str, list[Any], tuple[str, ...], Costs]  # the kind of parts, the parts, names of exits, and costs


def _of_trees(model: Any, exits: int | Sequence[int], rows: Floats) -> Made:
    """Return the parts of a boosting model or a forest, once they are shown to add up to it."""
    total = _number_of_trees(model)
    stops = _stops(exits, total)
    base = _base(model, rows[:1], total)
    parts = [_part(model, start, stop, base) for start, stop in zip([0, *stops], stops, strict=False)]
    few, kind = rows[:CHECKED], FOREST if hasattr(model, "oob_score") else BOOSTED
    added = np.sum([part(few) for part in parts], axis=0)
    if added.ndim == 1:
        added = np.stack([np.zeros_like(added), added], axis=1)
    found = probabilities(added) if kind == BOOSTED else added / total
    differs = np.abs(found - model.predict_proba(few)).max() > SAME
    if kind == FOREST:  # whose average would be right too if every part ran all trees
        own = np.mean([tree.predict_proba(few) for tree in model.estimators_[: stops[0]]], axis=0)
        differs |= np.abs(parts[0](few) / stops[0] - own).max() > SAME
    if differs:
        raise BadInput(f"the trees of a {type(model).__name__} do not add up to its probabilities: give a list instead")
    unit = "trees" if kind == FOREST else "rounds"
    names = tuple(f"{stop} {unit if stop > 1 else unit[:-1]}" for stop in stops)
    return kind, parts, names, Costs.from_cumulative(stops, unit)


def _stops(exits: int | Sequence[int], total: int) -> list[int]:
    """Return after how many trees there is an exit; the last is after all."""
    given: Any = exits
    ends = [*given] if isinstance(given, list | tuple | range | np.ndarray) else []
    if isinstance(given, int | np.integer) and given >= 1:
        ends = np.geomspace(total, max(1, total // SOONEST), given).round().tolist()
    if not any(1 <= end <= total for end in ends):
        raise BadInput(
            f"exits {exits!r} of a model with {total} trees or rounds: give how many, or some from 1 to {total}"
        )
    return sorted({*(int(end) for end in ends if 1 <= end < total), total})


def _number_of_trees(model: Any) -> int:
    """Return after how many rounds of boosting, or trees of a forest, a model is complete."""
    library = _library(model)
    if library == "lightgbm":
        return int(model.best_iteration_ or model.booster_.current_iteration())
    if library == "xgboost" and model.booster != "gblinear":
        best = getattr(model, "best_iteration", None)  # of early stopping, counted from 0
        return int(model.get_booster().num_boosted_rounds() if best is None else best + 1)
    if hasattr(model, "_predictors") or (hasattr(model, "estimators_") and hasattr(model, "criterion")):
        return len(model._predictors if hasattr(model, "_predictors") else model.estimators_)
    raise BadInput(
        f"a {type(model).__name__} has no trees to stop after: give a boosting model or a forest of scikit-learn,"
        " LightGBM or XGBoost, or a list of classifiers"
    )


def _library(model: Any) -> str:
    """Return whose trees a model has, which may be of a class of the user's that extends one of a library."""
    bases = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    return next((name for name in bases if name in ("lightgbm", "xgboost")), "sklearn")


def _base(model: Any, row: Floats, total: int) -> Any:
    """Return what XGBoost adds to any range of trees, which only the first part may have."""
    if _library(model) != "xgboost" or total < 2:
        return 0.0
    first, second, both = (Trees(model, *ends)(row)[0] for ends in ((0, 1), (1, 2), (0, 2)))
    return first + second - both


def _part(model: Any, start: int, stop: int, base: Any) -> Trees:
    """Return the trees of a model from one to another; those of scikit-learn as a model of their own."""
    if _library(model) != "sklearn":
        return Trees(model, start, stop, base if start else 0.0)
    own = copy.copy(model)
    if hasattr(model, "_predictors"):
        own._predictors = model._predictors[start:stop]
        if start:
            own._baseline_prediction = np.zeros_like(model._baseline_prediction)
    else:
        own.estimators_, own.n_estimators = model.estimators_[start:stop], stop - start
        if start and hasattr(model, "init_"):
            own.init_ = "zero"
    return Trees(own, start, stop)


def _of_list(models: Sequence[Any], rows: Floats) -> Made:
    """Return the classifiers of a list as parts, timed."""
    names = [type(each).__name__ for each in models]
    exits = tuple(f"{name} {place}" if names.count(name) > 1 else name for place, name in enumerate(names, start=1))
    return LISTED, [Whole(each) for each in models], exits, Costs(np.zeros(len(models)), _times(models, rows), "ms")


def _times(models: Sequence[Any], rows: Floats) -> list[float]:
    """Return milliseconds per sample of each model, the fastest of some rounds, which other work disturbs least."""
    taken = np.empty((ROUNDS, len(models)))
    for place in np.ndindex(*taken.shape):
        start = time.perf_counter()
        models[place[1]].predict_proba(rows)
        taken[place] = time.perf_counter() - start
    return (1e3 * taken.min(axis=0) / len(rows)).tolist()


def _numbers(rows: Floats) -> npt.NDArray[np.int64]:
    """Return a number for every row, by which ties are broken: of its own bits, so that it is the same in any batch."""
    bits = np.ascontiguousarray(rows, dtype=np.float64).view(np.uint64)
    weights = np.cumprod(np.full(bits.shape[1], MIXING))
    mixed = (bits * weights).sum(axis=1, dtype=np.uint64)
    return ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(1)).astype(np.int64)
