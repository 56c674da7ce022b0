"""What an installed wheel must do, with NumPy alone: `python tests/smoke.py` in any environment."""

import subprocess
import sys
import time


def main() -> None:
    begin = time.perf_counter()
    import numpy as np

    numpy_there = time.perf_counter()
    import factormax as fm

    imported = time.perf_counter()
    rng = np.random.default_rng(0)
    for dtype in (np.float64, np.float32):
        scores = rng.normal(size=(4, 6, 6)).astype(dtype)
        scores[:, 2, 3] = -np.inf
        for factors in (
            lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)],
            lambda u: [fm.Matching(u)],
            lambda u: [fm.DepTree(u), fm.Budget(u, 2, axis=0)],
            lambda u: [fm.Sequence(u, np.zeros((6, 6)))],
        ):
            fg = fm.FactorGraph(batch_dims=1)
            u = fg.variable_from(scores)
            for factor in factors(u):
                fg.add(factor)
            solution = fg.solve()
            assert u.value.dtype == dtype
            np.testing.assert_allclose(u.value.sum(2), 1, atol=1e-4)
            assert (u.value[:, 2, 3] == 0).all()
            assert np.isfinite(solution.vjp({u: np.ones_like(u.value)})[u]).all()
    solved = time.perf_counter()
    command = [sys.executable, "-m", "factormax", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == f"factormax {fm.__version__}\n", told
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(
        f"factormax {fm.__version__}, Python {sys.version.split()[0]}"
        f"{'' if gil else ' without the GIL'}, NumPy {np.__version__}: "
        f"import {1e3 * (imported - numpy_there):.0f} ms after NumPy's "
        f"{1e3 * (numpy_there - begin):.0f} ms, solves {1e3 * (solved - imported):.0f} ms"
    )


if __name__ == "__main__":
    main()
