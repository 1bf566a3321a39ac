"""Trees and lists of classifiers stop early under a budget, and scikit-learn takes them as its own."""

import numpy as np
import pytest
from sklearn.datasets import load_digits, make_classification
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from alight.errors import BadInput
from alight.sklearn import BudgetedClassifier

FEW = {"max_iter": 20, "random_state": 0}


def lightgbm():
    library = pytest.importorskip("lightgbm")
    return library.LGBMClassifier(n_estimators=40, num_leaves=7, n_jobs=1, random_state=0, verbose=-1)


def xgboost():
    library = pytest.importorskip("xgboost")
    return library.XGBClassifier(n_estimators=40, max_depth=3, n_jobs=1, random_state=0)


MODELS = {
    "HistGradientBoosting": lambda: HistGradientBoostingClassifier(max_iter=40, random_state=0),
    "GradientBoosting": lambda: GradientBoostingClassifier(n_estimators=40, max_depth=2, random_state=0),
    "random forest": lambda: RandomForestClassifier(60, random_state=0),
    "extra trees": lambda: ExtraTreesClassifier(60, random_state=0),
    "LightGBM": lightgbm,
    "XGBoost": xgboost,
}


@parametrize_with_checks(
    [
        BudgetedClassifier(HistGradientBoostingClassifier(max_iter=10, min_samples_leaf=5), random_state=0),
        BudgetedClassifier([DecisionTreeClassifier(max_depth=2), RandomForestClassifier(10)], random_state=0),
    ]
)
@pytest.mark.filterwarnings("ignore")  # of estimators that scikit-learn's checks feed with odd data
def test_it_is_an_estimator_of_scikit_learn(estimator, check):
    check(estimator)


def table(classes: int):
    drawn = {"n_informative": 6, "n_features": 12, "class_sep": 1.5, "random_state": 0}
    return make_classification(2400, n_classes=classes, **drawn)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_trees_stop_within_the_budget_and_all_trees_are_the_model(name, classes):
    features, labels = table(classes)
    model = BudgetedClassifier(MODELS[name](), budget="40%", random_state=0).fit(features[:1600], labels[:1600])
    decisions = model.decide(features[1600:])
    assert decisions.mean_cost < 1.1 * 0.4 * model.costs_.full
    assert len(set(decisions.exits.tolist())) > 1
    full = BudgetedClassifier(MODELS[name](), budget="100%", exits=1, random_state=0).fit(
        features[:1600], labels[:1600]
    )
    np.testing.assert_allclose(
        full.predict_proba(features[1600:]), full.estimator_.predict_proba(features[1600:]), atol=1e-4
    )
    assert (model.predict(features[1600:]) == labels[1600:]).mean() > full.score(features[1600:], labels[1600:]) - 0.06


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")  # thirty steps are enough here
def test_a_list_of_classifiers_is_a_cascade():
    features, labels = load_digits(return_X_y=True)
    members = [
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
        make_pipeline(StandardScaler(), MLPClassifier((256, 256), max_iter=30, random_state=0)),
    ]
    model = BudgetedClassifier(members, budget=None, max_loss=0.04, random_state=0).fit(features[:1200], labels[:1200])
    decisions = model.decide(features[1200:])
    large = model.estimator_[1].predict(features[1200:])
    assert model.costs_.is_cascade
    assert (model.predict(features[1200:]) == labels[1200:]).mean() > (large == labels[1200:]).mean() - 0.04
    reached = decisions.exits == len(model.exits_) - 1
    np.testing.assert_array_equal(model.classes_[decisions.predictions[reached]], model.classes_[large[reached]])


def test_a_fitted_model_is_calibrated_alone_and_a_sample_is_decided_alike_in_any_batch():
    features, labels = table(3)
    fitted = HistGradientBoostingClassifier(**FEW).fit(features[:1200], labels[:1200])
    model = BudgetedClassifier(fitted, budget="50%", prefit=True).fit(features[1200:2000], labels[1200:2000])
    assert model.estimator_ is fitted
    together = model.decide(features[2000:])
    alone = [model.decide(features[row : row + 1]).exits[0] for row in range(2000, 2040)]
    assert together.exits[:40].tolist() == alone


def test_what_cannot_stop_early_is_refused():
    features, labels = table(2)
    with pytest.raises(BadInput, match="a LogisticRegression has no trees to stop after"):
        BudgetedClassifier(LogisticRegression()).fit(features, labels)
    with pytest.raises(BadInput, match="there is no method 'guess'"):
        BudgetedClassifier(method="guess").fit(features, labels)
    fitted = HistGradientBoostingClassifier(**FEW).fit(features, labels)
    with pytest.raises(BadInput, match="does not know the class 2"):
        BudgetedClassifier(fitted, prefit=True).fit(features, labels + 1)
