"""
Sudoku
======

A Sudoku asks for one digit per cell, and for every digit once per row, column and box. Those are
four calls of ``Xor``. The clues are a mask: a cell that is given has a single digit to choose from.
"""

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

CLUES = """53..7.... 6..195... .98....6. 8...6...3 4..8.3..1
           7...2...6 .6....28. ...419..5 ....8..79"""
grid = np.array([[int(c) for c in row.replace(".", "0")] for row in CLUES.split()])

# %%
# ``u[row, column, digit]`` is on if the cell holds that digit. All scores are 0, as there is
# nothing to prefer: ``decode`` only has to find an assignment that satisfies every factor.

given = grid[:, :, None] > 0
right = grid[:, :, None] == np.arange(1, 10)

fg = fm.FactorGraph()
u = fg.variable_from(np.zeros((9, 9, 9)), mask=~given | right)
fg.add(fm.Xor(u, axis=2))  # every cell has one digit
fg.add(fm.Xor(u, axis=1))  # every row has each digit once,
fg.add(fm.Xor(u, axis=0))  # so has every column,
fg.add(fm.Xor(u.reshape(3, 3, 3, 3, 9), axis=(1, 3)))  # and so has every box
solution = fg.decode()
answer = 1 + u.value.argmax(axis=2)

# %%
# The search proves its answer. For clues that contradict each other, the status would be
# ``INFEASIBLE``, and ``solution.conflict()`` would name a few factors that exclude each other: with
# two fives in the first row, those two cells, and the row that wants a single five.

assert solution.optimal
assert (answer[grid > 0] == grid[grid > 0]).all()
for part in (answer, answer.T, answer.reshape(3, 3, 3, 3).swapaxes(1, 2).reshape(9, 9)):
    assert (np.sort(part, axis=1) == np.arange(1, 10)).all()

figure, ax = plt.subplots(figsize=(4, 4))
for (i, j), digit in np.ndenumerate(answer):
    ax.text(j, i, digit, ha="center", va="center", color="black" if grid[i, j] else "tab:blue")
for k in range(10):
    ax.axhline(k - 0.5, color="black", linewidth=2 if k % 3 == 0 else 0.5)
    ax.axvline(k - 0.5, color="black", linewidth=2 if k % 3 == 0 else 0.5)
ax.set(xlim=(-0.5, 8.5), ylim=(8.5, -0.5), aspect="equal", title="Blue: found; black: given")
ax.axis("off")
plt.show()
