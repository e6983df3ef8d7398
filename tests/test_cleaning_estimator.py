"""The classifier for scikit-learn, held to scikit-learn's own checks and to cleanlab's tools."""

import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from functools import partial

import cleanlab.filter
import cleanlab.rank
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from neuvar import predict
from neuvar.cleaning import LabelIssues
from neuvar.cleaning.find import find_label_issues
from neuvar.cleaning.sklearn import NVRMClassifier, seed_from
from neuvar.cleaning.training import Trained, weighted_cross_entropy
from neuvar.models import mlp

SETTINGS = {"b": 0.02, "epochs": 6, "batch_size": 32, "lr": 0.05}


@parametrize_with_checks([NVRMClassifier(**SETTINGS, draws=4)])
def test_of_scikit_learn(estimator, check, monkeypatch):
    if check.func.__name__ == "check_sample_weight_equivalence_on_dense_data":
        # Networks are trained in float32: 1e-4 is what scikit-learn itself grants float32.
        close = partial(estimator_checks.assert_allclose_dense_sparse, rtol=1e-4)
        monkeypatch.setattr(estimator_checks, "assert_allclose_dense_sparse", close)
    check(estimator)


def test_of_scikit_learn_that_needs_a_process_of_its_own():
    """scipy reads the variable when it is imported; without it the check above is left out."""
    code = f"""
from sklearn.utils.estimator_checks import check_array_api_input
from neuvar.cleaning.sklearn import NVRMClassifier
check_array_api_input(
    "NVRMClassifier", NVRMClassifier(**{SETTINGS | {"epochs": 1}}), array_namespace="numpy",
    expect_only_array_outputs=False,
)
print("passed")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SCIPY_ARRAY_API": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "passed\n"


def small(features, classes, seed):
    return mlp((features, 16, classes), seed=seed)


def classifier(**change):
    return NVRMClassifier(**{"model": small, **SETTINGS, **change})


def examples(n=240, classes=3, wrong=0.1, seed=0):
    """Features of well separated classes, their true labels, and labels some of which are wrong."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    features = rng.normal(size=(n, 6)) + 4 * np.eye(6)[true]
    given = true.copy()
    flipped = rng.choice(n, round(wrong * n), replace=False)
    given[flipped] = (given[flipped] + 1) % classes
    return features, true, given


class TestLabelIssues:
    def test_wrong_labels_are_found_and_not_learned(self):
        features, true, given = examples()
        found = classifier(epochs=20).fit(features, given)
        assert isinstance(found.label_issues_, LabelIssues)
        wrong = given != true
        assert wrong[found.label_issues_.ranked[: wrong.sum()]].mean() > 0.9
        assert found.label_issues_.flagged[wrong].mean() > 0.9
        assert found.label_issues_.flagged[~wrong].mean() < 0.05
        assert found.score(features, true) > 0.97
        fresh, labels, _ = examples(seed=1)
        assert found.score(fresh, labels) > 0.95

    def test_attributes(self):
        features, _, given = examples()
        words = np.array(["a", "b", "c"])[given]
        found = classifier().fit(features, words)
        issues = found.label_issues_
        assert found.classes_.tolist() == ["a", "b", "c"]
        assert (found.predict(features) == words).mean() > 0.8
        assert issues.names == ("a", "b", "c")
        assert (found.classes_[issues.labels] == words).all()
        assert issues.values is found.classes_
        assert (issues.cleaned == words).mean() == pytest.approx(1 - issues.sure().mean())
        assert found.probabilities_ is issues.probabilities
        assert found.label_quality_ is issues.quality
        assert found.probabilities_.shape == (240, 3)
        assert found.n_features_in_ == 6
        assert isinstance(found.model_, nn.Module)
        assert not found.model_.training
        assert not any(p.requires_grad for p in found.model_.parameters())

    def test_names_of_features_are_kept(self):
        features, _, given = examples()
        frame = pd.DataFrame(features, columns=list("uvwxyz"))
        found = classifier().fit(frame, pd.Series(given))
        assert found.feature_names_in_.tolist() == list("uvwxyz")
        assert (found.predict(frame) == classifier().fit(features, given).predict(features)).all()

    def test_it_is_what_find_label_issues_finds(self):
        """On features that are standard already, with the same network and seed."""
        features, _, given = examples()
        features = (features - features.mean(0)) / features.std(0)
        found = classifier(random_state=3).fit(features, given).label_issues_
        settings = SETTINGS | {"seed": 3}
        other = find_label_issues(small(6, 3, 3), (features, given), **settings)
        np.testing.assert_allclose(found.probabilities, other.probabilities, rtol=0, atol=1e-5)
        assert (found.labels == other.labels).all()


class TestCleanlab:
    def test_both_rank_the_wrong_labels_first(self):
        features, true, given = examples()
        issues = classifier(epochs=20).fit(features, given).label_issues_
        wrong = given != true
        theirs = cleanlab.rank.get_label_quality_scores(issues.labels, issues.probabilities)
        for quality in (issues.quality, theirs):
            first = np.argsort(quality)[: wrong.sum()]
            assert wrong[first].mean() > 0.8

    def test_its_search_by_the_most_probable_class_finds_what_we_flag(self):
        features, _, given = examples()
        issues = classifier(epochs=20).fit(features, given).label_issues_
        mask = cleanlab.filter.find_label_issues(
            issues.labels, issues.probabilities, filter_by="predicted_neq_given", n_jobs=1
        )
        assert mask[issues.flagged].all()
        assert mask.any()

    @pytest.mark.parametrize("method", ["prune_by_noise_rate", "confident_learning"])
    def test_its_own_search_takes_our_probabilities(self, method):
        features, true, given = examples()
        issues = classifier(epochs=20).fit(features, given).label_issues_
        mask = cleanlab.filter.find_label_issues(
            issues.labels, issues.probabilities, filter_by=method, n_jobs=1
        )
        wrong = given != true
        assert mask[wrong].mean() > 0.4
        assert mask[~wrong].mean() < 0.02


class TestFit:
    def test_the_seed_decides_and_global_generators_are_left_alone(self):
        features, _, given = examples()
        torch.manual_seed(5)
        before, state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        one, same = (classifier(random_state=7).fit(features, given) for _ in range(2))
        other = classifier(random_state=8).fit(features, given)
        assert (one.probabilities_ == same.probabilities_).all()
        assert (one.predict_proba(features) == same.predict_proba(features)).all()
        assert (one.probabilities_ != other.probabilities_).any()
        assert torch.equal(torch.get_rng_state(), before)
        assert (np.random.get_state()[1] == state).all()  # noqa: NPY002

    def test_seeds(self):
        assert seed_from(7) == seed_from(np.int64(7)) == 7
        assert seed_from(2**32 - 1) == 2**32 - 1
        assert seed_from(None) != seed_from(None)
        for make in (np.random.RandomState, np.random.default_rng):
            generator = make(0)
            drawn = [seed_from(generator) for _ in range(50)]
            assert len(set(drawn)) == 50
            assert all(0 <= seed < 2**32 for seed in drawn)
            assert max(drawn) > 2**31
            assert seed_from(make(0)) == drawn[0]

    def test_units_of_features_do_not_matter(self):
        features, _, given = examples()
        scaled = features * np.array([1e-6, 1e6, 3, -1, 1, 1e3]) + np.array([0, 5, 1e4, 0, 7, 0])
        one = classifier(weight_decay=0.0).fit(features, given).predict_proba(features)
        # A feature with its sign changed is another one, so that is changed back.
        scaled[:, 3] *= -1
        other = classifier(weight_decay=0.0).fit(scaled, given).predict_proba(scaled)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)

    def test_a_feature_that_is_the_same_everywhere(self):
        features, true, given = examples()
        features[:, 5] = 12.5
        assert classifier(epochs=20).fit(features, given).score(features, true) > 0.9

    def test_a_prediction_does_not_depend_on_its_company(self, monkeypatch):
        """With few draws, because every one of 240 predictions makes all of them."""
        features, _, given = examples()
        found = NVRMClassifier(**SETTINGS, draws=4).fit(features, given)
        together = found.predict_proba(features)
        apart = np.concatenate([found.predict_proba(row[None]) for row in features])
        np.testing.assert_allclose(together, apart, rtol=0, atol=1e-13)
        monkeypatch.setattr("neuvar.cleaning.sklearn.CHUNK", 7)
        np.testing.assert_allclose(together, found.predict_proba(features), rtol=0, atol=1e-13)

    def test_a_network_may_be_given(self):
        features, true, given = examples()
        given_network = small(6, 3, 0)
        before = [p.clone() for p in given_network.parameters()]
        found = classifier(model=given_network, epochs=20).fit(features, given)
        after = given_network.parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert found.model_ is not given_network
        assert given_network.training
        assert found.score(features, true) > 0.9
        assert next(found.model_.parameters()).dtype == torch.float32
        # The network that a function makes from the same seed is the same one.
        made = classifier(epochs=20).fit(features, given)
        assert (made.probabilities_ == found.probabilities_).all()

    def test_a_function_is_told_what_the_network_is_for(self):
        features, _, given = examples()
        asked = []

        def make(*arguments):
            asked.append(arguments)
            return small(*arguments)

        classifier(model=make, random_state=11).fit(features, given)
        assert asked == [(6, 3, 11)]

    def test_progress_is_told(self):
        features, _, given = examples()
        told = []
        classifier(progress=told.append).fit(features, given)
        assert told == sorted(told)
        assert told[-1] == 1

    def test_arguments_reach_the_training(self, monkeypatch):
        """Every argument, under its name; only the seed has scikit-learn's."""
        called = {}

        def train(network, data, **arguments):
            called.update(arguments, data=data)
            n, classes = len(data), len(data.names)
            return Trained(network, np.full((n, classes), 1 / classes), 0.7)

        monkeypatch.setattr("neuvar.cleaning.sklearn.train_once", train)
        chosen = {
            "b": 0.7,
            "epochs": 3,
            "batch_size": 5,
            "lr": 0.2,
            "momentum": 0.3,
            "weight_decay": 0.4,
            "device": "cpu",
            "precision": "bf16",
            "progress": print,
        }
        features, _, given = examples()
        NVRMClassifier(**chosen, random_state=9).fit(features, given)
        data = called.pop("data")
        assert called == chosen | {"seed": 9, "weights": None}
        standard = data.inputs.double()
        torch.testing.assert_close(standard.mean(0), torch.zeros(6).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            standard.std(0, correction=0), torch.ones(6).double(), rtol=0, atol=1e-6
        )

    def test_names_and_defaults_are_those_of_find_label_issues(self):
        ours = inspect.signature(NVRMClassifier).parameters
        theirs = dict(inspect.signature(find_label_issues).parameters)
        theirs["random_state"] = theirs.pop("seed")
        # Clones for other folds would find the checkpoint of the first one.
        not_ours = {"data", "trained", "names", "checkpoint", "rho"}
        assert set(ours) - {"draws"} == set(theirs) - not_ours
        for name in set(ours) - {"model", "draws", "b"}:
            assert ours[name].default == theirs[name].default

    def test_without_noise_it_trains_with_sam_and_predicts_at_the_clean_weights(self):
        features, true, given = examples()
        sam = classifier(b=None, epochs=20).fit(features, given)
        assert sam.label_issues_.b is None
        assert sam.label_issues_.flagged[given != true].mean() > 0.9
        clean = sam.set_params(draws=0).predict_proba(features)
        assert np.allclose(sam.set_params(draws=2).predict_proba(features), clean)


class TestWeights:
    def test_the_loss_of_whole_weights_is_that_of_repeated_examples(self):
        scores = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        labels, weights = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([2, 0, 3, 1, 1])
        loss = weighted_cross_entropy(
            scores, torch.stack([labels, weights / weights.double().mean()], 1)
        )
        expected = nn.functional.cross_entropy(
            scores.repeat_interleave(weights, 0), labels.repeat_interleave(weights)
        )
        torch.testing.assert_close(loss, expected)

    def test_whole_weights_are_repeated_examples(self):
        """In one batch, in which the order does not matter."""
        features, _, given = examples(n=60)
        weights = np.arange(60) % 4
        one = classifier(batch_size=200).fit(features, given, sample_weight=weights)
        repeated = features.repeat(weights, 0), given.repeat(weights)
        other = classifier(batch_size=200).fit(*repeated)
        np.testing.assert_allclose(one.scaler_.mean_, other.scaler_.mean_)
        p, q, plain = (
            found.predict_proba(features)
            for found in (one, other, classifier(batch_size=200).fit(features, given))
        )
        np.testing.assert_allclose(p, q, rtol=0, atol=1e-4)
        assert np.abs(p - plain).max() > 1e-2

    def test_examples_without_weight_have_no_influence(self):
        """Whatever they are, in any batch; but their labels are judged too."""
        features, _, given = examples()
        weights = np.tile([1.0, 0.0, 2.5], 80)
        other, labels = features.copy(), given.copy()
        other[weights == 0] = 100 - 7 * other[weights == 0]
        labels[weights == 0] = (labels[weights == 0] + 1) % 3
        one = classifier().fit(features, given, sample_weight=weights)
        two = classifier().fit(other, labels, sample_weight=weights)
        p, q = one.predict_proba(features), two.predict_proba(features)
        np.testing.assert_allclose(p, q, rtol=0, atol=1e-6)
        assert len(one.label_issues_) == 240
        free = classifier().fit(other, labels)
        assert np.abs(p - free.predict_proba(features)).max() > 1e-2

    def test_equal_weights_are_no_weights(self):
        features, _, given = examples()
        one = classifier().fit(features, given, sample_weight=[3] * 240)
        other = classifier().fit(features, given)
        np.testing.assert_allclose(one.probabilities_, other.probabilities_, rtol=0, atol=1e-4)

    def test_score_takes_them(self):
        features, _, given = examples()
        weights = np.random.default_rng(0).random(240)
        found = classifier().fit(features, given)
        right = found.predict(features) == given
        assert 0 < right.sum() < 240
        expected = (weights * right).sum() / weights.sum()
        assert found.score(features, given, sample_weight=weights) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("weights", "sentence"),
        [
            ([1.0] * 29, r"one number for each of 30 examples, got the shape \(29,\)"),
            (np.ones((30, 1)), r"got the shape \(30, 1\)"),
            (2.0, r"got the shape \(\)"),
            (["a"] * 30, r"sample_weight must be numbers, got \['a'"),
            ([-1.0] + [1.0] * 29, "sample_weight must be finite numbers >= 0"),
            ([np.nan] + [1.0] * 29, "sample_weight must be finite numbers >= 0"),
            ([0.0] * 30, "not all of them zero"),
        ],
    )
    def test_bad_ones_get_a_sentence(self, weights, sentence):
        features, _, given = examples(n=30)
        with pytest.raises(ValueError, match=sentence):
            classifier().fit(features, given, sample_weight=weights)


class TestUse:
    def test_clone_and_search(self):
        features, _, given = examples(n=90)
        for model in (None, small, small(6, 3, 0)):
            twin = clone(classifier(model=model))
            assert not hasattr(twin, "classes_")
            assert type(twin.model) is type(model)
        search = GridSearchCV(classifier(), {"b": [0.0, 0.02], "lr": [0.05]}, cv=2)
        assert search.fit(features, given).best_params_["lr"] == 0.05
        held_out = cross_val_predict(classifier(), features, given, cv=2, method="predict_proba")
        np.testing.assert_allclose(held_out.sum(1), 1)

    def test_a_fitted_one_can_be_pickled(self):
        features, _, given = examples()
        found = classifier().fit(features, given)
        again = pickle.loads(pickle.dumps(found))
        assert (again.predict_proba(features) == found.predict_proba(features)).all()
        assert (again.label_issues_.ranked == found.label_issues_.ranked).all()

    def test_fitting_again_forgets_what_was_before(self):
        features, _, given = examples()
        found = classifier().fit(features[:, :2], given == 0)
        assert found.classes_.tolist() == [False, True]
        found.fit(features, given)
        assert (found.probabilities_ == classifier().fit(features, given).probabilities_).all()

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"model": 3}, r"model must be None, a torch\.nn\.Module or a function .* got 3"),
            ({"model": lambda *_: "net"}, "that returns one, got 'net'"),
            ({"model": nn.Linear(6, 4)}, "one logit for each of 3 classes"),
            ({"random_state": -1}, r"random_state must be an integer from 0 to 4294967295"),
            ({"random_state": 2**32}, "got 4294967296"),
            ({"random_state": 1.0}, r"got 1\.0"),
            ({"random_state": True}, "got True"),
            ({"epochs": 0}, "epochs must be"),
            ({"batch_size": 0}, "batch_size must be"),
            ({"b": -1.0}, "b must be"),
            ({"precision": "half"}, "precision must be one of"),
        ],
    )
    def test_bad_arguments_get_a_sentence(self, change, sentence):
        features, _, given = examples(n=30)
        with pytest.raises(ValueError, match=sentence):
            classifier(**change).fit(features, given)

    @pytest.mark.parametrize(
        ("labels", "sentence"),
        [
            (["a", None, "b", "a", "", "b"], "2 of 6 are missing, the first one at position 1"),
            (["a", np.nan, "b", "a", "b", "b"], "NaN|missing"),
            (pd.Series(["a", None, "b", "a", "b", "b"]), "NaN|missing"),
            ([1.0, np.nan, 2, 1, 2, 1], "NaN"),
            (["a"] * 6, "got only one class, 'a'"),
            ([0.5, 1, 2, 3, 4, 5], "Unknown label type"),
            (["a", 1, "b", 2, "a", 1], "one type that can be sorted"),
            ([[0, 1]] * 6, "one number or name for each example"),
            ([0, 1], "inconsistent numbers of samples"),
        ],
    )
    def test_bad_labels_get_a_sentence(self, labels, sentence):
        with pytest.raises(ValueError, match=sentence):
            classifier().fit(examples(n=6)[0], labels)

    def test_bad_features_get_a_sentence(self):
        features, _, given = examples()
        for bad in (np.nan, np.inf):
            changed = features.copy()
            changed[3, 2] = bad
            with pytest.raises(ValueError, match=r"NaN|infinity"):
                classifier().fit(changed, given)
        with pytest.raises(ValueError, match=r"X has values that are too large .* 1e\+200"):
            classifier().fit(np.where(features > 0, 1e200, -1e200), given)
        with pytest.raises(ValueError, match="dim 3"):
            classifier().fit(features.reshape(240, 2, 3), given)
        found = classifier().fit(features, given)
        with pytest.raises(ValueError, match="too large"):
            found.predict(features * 1e300)

    def test_without_scikit_learn_there_is_a_sentence(self, monkeypatch):
        place = importlib.util.find_spec("neuvar.cleaning.sklearn").origin
        monkeypatch.setitem(sys.modules, "sklearn.base", None)
        spec = importlib.util.spec_from_file_location("another", place)
        with pytest.raises(ImportError, match=r'pip install "neuvar\[sklearn\]"'):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


class TestAveragedPredictions:
    def test_they_are_those_of_predict(self):
        features, _, given = examples()
        found = classifier(draws=8).fit(features, given)
        scaled = torch.from_numpy(found.scaler_.transform(features)).float()
        expected = predict(found.model_, scaled, b=found.label_issues_.b, draws=8)
        assert (found.predict_proba(features) == expected.probabilities.numpy()).all()
        assert (found.predict_proba(features) == found.predict_proba(features)).all()

    def test_without_draws_they_are_those_of_the_clean_network(self):
        features, _, given = examples()
        found = classifier(draws=0).fit(features, given)
        scaled = torch.from_numpy(found.scaler_.transform(features)).float()
        plain = found.model_(scaled).softmax(1).numpy()
        np.testing.assert_allclose(found.predict_proba(features), plain, rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("draws", "message"), [(3, "even"), (-2, ">= 0"), (2.5, "integer")])
    def test_bad_numbers_of_draws(self, draws, message):
        features, _, given = examples()
        with pytest.raises(ValueError, match=message):
            classifier(draws=draws).fit(features, given)


def test_layers_that_were_frozen_in_training_have_no_noise():
    def make(features, classes, seed):
        network = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))
        network[0].requires_grad_(False)
        return network

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 60)
    X = rng.normal(size=(60, 5)) + y[:, None]
    classifier = NVRMClassifier(make, b=0.3, epochs=2).fit(X, y)
    assert classifier.noisy_parameters_ == ["2.weight", "2.bias"]
    inputs = torch.from_numpy(classifier.scaler_.transform(X)).float()
    names = classifier.noisy_parameters_
    expected = predict(classifier.model_, inputs, b=0.3, parameters=names)
    found = classifier.predict_proba(X)
    np.testing.assert_allclose(found, expected.probabilities.numpy(), atol=1e-6)
