"""Multilabel classification: a logistic loss, a structured hinge, and the LP-SparseMAP loss."""
