"""Scores against values worked out by hand."""

import math

import pytest
import torch

from pamm.recipes.finetuning.metrics import accuracy, class_f1, confusion, f1, matthews, pearson

# 3 true positives, 1 false positive, 2 false negatives, 4 true negatives.
LABELS = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
PREDICTED = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])


def test_two_classes() -> None:
    assert accuracy(PREDICTED, LABELS) == pytest.approx(7 / 10)
    assert f1(PREDICTED, LABELS) == pytest.approx(6 / 9)
    # (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN))
    assert matthews(PREDICTED, LABELS) == pytest.approx((12 - 2) / (4 * 5 * 5 * 6) ** 0.5)


def test_pearson() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert pearson(x, 3 * x + 1) == pytest.approx(1)
    assert pearson(x, -x) == pytest.approx(-1)
    assert pearson(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)


def test_constant_predictions_score_nothing() -> None:
    zeros = torch.zeros(10, dtype=torch.int64)
    assert f1(zeros, LABELS) == 0
    assert matthews(zeros, LABELS) == 0
    assert pearson(zeros.double(), LABELS.double()) == 0


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    assert math.isnan(pearson(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])))


def test_the_confusion_matrix_has_labels_in_rows() -> None:
    labels, predicted = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2, 1, 2])
    assert confusion(predicted, labels, 4).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]
    assert class_f1(predicted, labels, 4).tolist() == pytest.approx([1, 2 / 3, 2 / 3, 0])
