"""Scores of predictions, as GLUE and image classification report them. Plain PyTorch, in fp64."""

import torch
from torch import Tensor


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of equal entries."""
    return (predicted == labels).double().mean().item()


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often class i (row) was taken for class j (column)."""
    pairs = labels.long() * classes + predicted.long()
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def class_f1(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """2 TP / (2 TP + FP + FN) of each class; 0 for one that is neither there nor predicted."""
    matrix = confusion(predicted, labels, classes).double()
    return 2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1)).clamp(min=1)


def f1(predicted: Tensor, labels: Tensor) -> float:
    """F1 of class 1, of two."""
    return class_f1(predicted, labels, 2)[1].item()


def matthews(predicted: Tensor, labels: Tensor) -> float:
    """Matthews' correlation: Pearson's of two classes. 0 where one side is constant."""
    return pearson(predicted, labels)


def pearson(predicted: Tensor, labels: Tensor) -> float:
    """cov(x, y) / (std(x) std(y)); 0 where one side is constant."""
    x, y = (values.double() - values.double().mean() for values in (predicted, labels))
    scale = x.norm() * y.norm()
    return 0.0 if scale == 0 else (x @ y / scale).item()


METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "pearson": pearson}
