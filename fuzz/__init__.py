"""Random graphs, solved by factormax and judged by code that shares nothing with it.

`python -m fuzz` (or `make fuzz`) draws graphs of every factor (`generate`), builds and solves them
(`case`), and compares the answers with certificates: what every factor means, written again from
its definition (`model`), an interior point method with a rigorous bound (`program`), enumeration
and, where SciPy is installed, integer programming (`checks`). What fails is made small (`shrink`).
"""
