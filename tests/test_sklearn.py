"""Trees and lists of classifiers stop early under a budget, and scikit-learn takes them as its own."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
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
    with pytest.raises(BadInput, match="a LinearSVC gives no probabilities"):
        BudgetedClassifier([LinearSVC(), fitted]).fit(features, labels)
    with pytest.raises(BadInput, match="a list without classifiers"):
        BudgetedClassifier([]).fit(features, labels)
    with pytest.raises(BadInput, match="the DecisionTreeClassifier is not fitted"):
        BudgetedClassifier([DecisionTreeClassifier(), fitted], prefit=True).fit(features, labels)
    with pytest.raises(BadInput, match=r"exits \[50\] of a model with 20 trees or rounds"):
        BudgetedClassifier(fitted, prefit=True, exits=[50]).fit(features, labels)


def test_fitted_classifiers_of_a_list_number_their_classes_alike():
    features, labels = table(4)
    small, large = DecisionTreeClassifier(max_depth=4), RandomForestClassifier(20, random_state=0)
    small.fit(features[labels > 0], labels[labels > 0])
    large.fit(features[labels < 3], labels[labels < 3])
    middle = np.isin(labels, (1, 2))
    with pytest.raises(BadInput, match=r"a RandomForestClassifier knows the classes \[.*0.*\], and others"):
        BudgetedClassifier([small, large], prefit=True).fit(features[middle], labels[middle])


@pytest.mark.parametrize("make", [MODELS["random forest"], lightgbm, xgboost])
def test_fitted_models_get_the_columns_that_they_were_fitted_to(make):
    features, labels = table(2)
    frame = pd.DataFrame(features).add_prefix("column ")
    model = BudgetedClassifier(make().fit(frame[:1200], labels[:1200]), prefit=True, budget="100%")
    with pytest.raises(BadInput, match="'column_0' at index 0, and the data has 12, 'column_11' there"):
        model.fit(frame[frame.columns[::-1]], labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn: arrays have no names
        assert model.fit(frame[1200:], labels[1200:]).score(frame[1200:], labels[1200:]) > 0.8


def test_categories_whose_numbers_the_libraries_differ_in_are_refused():
    rng = np.random.default_rng(0)
    drawn = rng.choice([10, 20, 30, 40], 400)
    frame, labels = pd.DataFrame({"kind": pd.Categorical(drawn), "size": rng.normal(size=400)}), drawn % 20 // 10
    fitted = lightgbm().fit(frame, labels)
    with pytest.raises(BadInput, match="the column 'kind' holds categories"):
        BudgetedClassifier(fitted, prefit=True).fit(frame, labels)


def test_no_sample_that_trained_calibrates_though_a_class_has_a_single_one():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(1000, 5)), rng.integers(0, 2, 1000)
    labels[0] = 2
    forest = RandomForestClassifier(20, random_state=0)
    model = BudgetedClassifier([DecisionTreeClassifier(max_depth=1), forest], budget="300%", random_state=0)
    assert model.fit(features, labels).policy_.costs  # calibrated
    held_out = model._parts(labels)[1]
    assert 0 not in held_out
    assert len(held_out) == 250
    with pytest.raises(BadInput, match="too few to hold some out"):
        BudgetedClassifier(forest, max_loss=0.1).fit(features[:15], labels[:15])


def test_weights_train_the_estimator_and_do_not_calibrate():
    features, labels = table(2)
    weights = np.where(labels == 0, 1.0, 25.0)
    forest = RandomForestClassifier(20, max_depth=3, random_state=0)
    with pytest.raises(BadInput, match=r"no sample_weight: fit the estimator with it.*prefit=True"):
        BudgetedClassifier(forest).fit(features, labels, sample_weight=weights)
    with pytest.raises(BadInput, match="no sample_weight"):
        make_pipeline(BudgetedClassifier(forest)).fit(features, labels, budgetedclassifier__sample_weight=weights)
    half = len(labels) // 2
    said = [
        BudgetedClassifier(clone(forest).fit(features[:half], labels[:half], each), prefit=True)
        .fit(features[half:], labels[half:])
        .predict(features[half:])
        .mean()
        for each in (None, weights[:half])
    ]
    assert said[1] > said[0] + 0.1  # class 1, which weighs more


class OwnForest(RandomForestClassifier):
    pass


class Averaged(RandomForestClassifier):
    def predict_proba(self, X):  # noqa: N803
        return np.full((len(X), self.n_classes_), 1 / self.n_classes_)


def test_a_forest_of_another_class_runs_only_the_trees_that_are_paid_for():
    features, labels = table(2)
    fitted = OwnForest(40, random_state=0).fit(features[:1000], labels[:1000])
    for estimator in (fitted, FrozenEstimator(fitted)):
        model = BudgetedClassifier(estimator, prefit=True).fit(features[1000:], labels[1000:])
        assert [len(part.model.estimators_) for part in model.parts_] == [2, 2, 5, 10, 21]
        first = np.mean([tree.predict_proba(features[:50]) for tree in fitted.estimators_[:2]], axis=0)
        np.testing.assert_allclose(model.parts_[0](features[:50]) / 2, first)
    with pytest.raises(BadInput, match="the trees of a Averaged do not add up"):
        BudgetedClassifier(Averaged(40, random_state=0).fit(features, labels), prefit=True).fit(features, labels)


def test_a_fitted_model_that_is_frozen_survives_clones():
    features, labels = table(2)
    members = [GaussianNB().fit(features[:500], labels[:500]), OwnForest(20).fit(features[:500], labels[:500])]
    with pytest.raises(BadInput, match="is not fitted: fit it, in a FrozenEstimator where it is cloned"):
        clone(BudgetedClassifier(members, prefit=True)).fit(features[500:], labels[500:])
    kept = [FrozenEstimator(each) for each in members]
    searched = GridSearchCV(BudgetedClassifier(kept, prefit=True), {"budget": ["90%", "100%"]}, cv=2)
    best = searched.fit(features[500:], labels[500:]).best_estimator_
    assert best.exits_ == ("GaussianNB", "OwnForest")
    with pytest.raises(BadInput, match="a FrozenEstimator is fitted: say prefit=True"):
        BudgetedClassifier(kept).fit(features, labels)


def test_xgboost_takes_its_own_missing_values_and_linear_models_have_no_trees():
    library = pytest.importorskip("xgboost")
    features, labels = table(2)
    features = np.where(np.abs(features) < 0.2, 0, features)
    given = library.XGBClassifier(n_estimators=20, max_depth=3, n_jobs=1, missing=0.0).fit(features, labels)
    model = BudgetedClassifier(given, prefit=True, budget="100%").fit(features, labels)
    whole = np.sum([part(features) for part in model.parts_], axis=0)
    np.testing.assert_allclose(1 / (1 + np.exp(-whole)), given.predict_proba(features)[:, 1], atol=1e-5)
    with pytest.raises(BadInput, match="a XGBClassifier has no trees to stop after"):
        BudgetedClassifier(library.XGBClassifier(n_estimators=5, booster="gblinear")).fit(features, labels)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"exits": "5"}, "exits '5' of a model"),
        ({"exits": 2.5}, "exits 2.5 of a model"),
        ({"held_out": 0}, "held_out 0: give a share"),
        ({"held_out": 2.0}, "held_out 2.0: give a share"),
    ],
)
def test_what_an_estimator_is_given_is_checked(given, said):
    with pytest.raises(BadInput, match=said):
        BudgetedClassifier(RandomForestClassifier(10), **given).fit(*table(2))


def test_texts_in_a_table_are_named():
    features, labels = table(2)
    for texts in (np.where(labels, "late", "early"), pd.array(np.where(labels, "late", "early"), "string")):
        frame = pd.DataFrame({"hour": features[:, 0], "was": texts})
        with pytest.raises(BadInput, match="the column 'was' holds texts: encode them first"):
            BudgetedClassifier([GaussianNB(), RandomForestClassifier(10)]).fit(frame, labels)
