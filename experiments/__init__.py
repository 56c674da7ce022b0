"""The three experiments of the LP-SparseMAP paper (Niculae and Martins, 2020), to be run again.

`python -m experiments.multilabel`, `experiments.listops` and `experiments.nli` train the models;
`python -m experiments.report` draws and tabulates what they wrote. See docs/experiments.md.
"""
