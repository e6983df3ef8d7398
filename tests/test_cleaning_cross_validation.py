"""Any scikit-learn classifier finds wrong labels, by cross-validation."""

import numpy as np
import pandas as pd
import pytest
import torch

from neuvar.cleaning import find_label_issues

sklearn = pytest.importorskip("sklearn")
from sklearn.compose import make_column_transformer  # noqa: E402
from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LogisticRegression, RidgeClassifier  # noqa: E402
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder  # noqa: E402


def blobs(n=300, classes=3, seed=0):
    """Features of three classes, given labels of which a tenth is wrong, and which are."""
    rng = np.random.default_rng(seed)
    true = np.arange(n) % classes
    x = rng.normal(size=(n, 4)) + 5 * np.eye(4)[true]
    wrong = rng.random(n) < 0.1
    return x, np.where(wrong, (true + 1) % classes, true), wrong


def found_all(issues, wrong):
    assert issues.flagged[wrong].mean() > 0.9
    assert wrong[issues.flagged].mean() > 0.9
    assert wrong[issues.ranked[: wrong.sum()]].mean() > 0.9


def test_probabilities_are_those_of_cross_validation():
    x, y, wrong = blobs()
    model = LogisticRegression()
    issues = find_label_issues(model, (x, y), seed=3)
    folds = StratifiedKFold(5, shuffle=True, random_state=3)
    p = cross_val_predict(model, x, y, cv=folds, method="predict_proba")
    np.testing.assert_allclose(issues.probabilities, p, atol=1e-12)
    assert not hasattr(model, "coef_")  # a copy is fitted
    assert issues.b is None
    found_all(issues, wrong)
    same = find_label_issues(p, y)
    assert np.array_equal(issues.flagged, same.flagged)
    np.testing.assert_allclose(issues.quality, same.quality, atol=1e-6)


@pytest.mark.parametrize("kind", [list, torch.tensor, pd.DataFrame, "sparse"])
def test_inputs_of_any_kind(kind):
    x, y, wrong = blobs()
    if kind == "sparse":
        x = pytest.importorskip("scipy.sparse").csr_matrix(x)
    else:
        x = kind(x.tolist() if kind is list else x)
    found_all(find_label_issues(KNeighborsClassifier(15), (x, y)), wrong)


def test_text_and_categories():
    rng = np.random.default_rng(0)
    words = np.array([["sun", "rain", "wind"], ["goal", "match", "team"]])
    true = np.arange(200) % 2
    texts = [" ".join(rng.choice(words[k], 4)) for k in true]
    wrong = rng.random(200) < 0.1
    given = np.array(["weather", "sport"])[np.where(wrong, 1 - true, true)]
    issues = find_label_issues(
        make_pipeline(TfidfVectorizer(), LogisticRegression()), (texts, given)
    )
    found_all(issues, wrong)
    assert issues.names == ("sport", "weather")
    frame = pd.DataFrame({"colour": np.array(["red", "blue"])[true], "size": rng.normal(size=200)})
    encode = make_column_transformer((OneHotEncoder(), ["colour"]), remainder="passthrough")
    found_all(find_label_issues(make_pipeline(encode, LogisticRegression()), (frame, given)), wrong)


def test_a_class_with_one_example():
    x, y, _ = blobs()
    y[0] = 3
    issues = find_label_issues(LogisticRegression(), (x, y))
    assert issues.probabilities[0, 3] == 0
    assert issues.names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("model", "data", "options", "words"),
    [
        (RidgeClassifier(), None, {}, "model must have predict_proba, RidgeClassifier has none"),
        (LogisticRegression(), None, {"epochs": 3}, "epochs has no effect with an estimator"),
        (LogisticRegression(), None, {"trained": True}, "trained has no effect"),
        (LogisticRegression(), ([[1.0], [2.0], [3.0]], [0, 1, 1]), {}, "the largest has 2"),
        (LogisticRegression(), (np.zeros((9, 2)), [0, 1] * 5), {}, "same length, got 9 and 10"),
    ],
)
def test_errors_speak_to_the_user(model, data, options, words):
    with pytest.raises(ValueError, match=words):
        find_label_issues(model, data or blobs()[:2], **options)
