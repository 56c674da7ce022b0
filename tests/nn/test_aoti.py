"""Layers compiled ahead of time by AOTInductor."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import factormax as fm  # noqa: E402
import factormax.nn as fnn  # noqa: E402
from factormax._fronts.torch import traced  # noqa: E402
from factormax._layout import Layout  # noqa: E402
from factormax._options import Options  # noqa: E402

VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])
LOADING = """
import sys, torch
if len(sys.argv) > 2:
    import factormax.nn
try:
    run = torch._inductor.aoti_load_package(sys.argv[1] + "/layers.pt2")
except RuntimeError as error:
    assert len(sys.argv) == 2 and "factormax::solve" in str(error)
else:
    for scores, expected in torch.load(sys.argv[1] + "/numbers.pt"):
        torch.testing.assert_close(run(scores), expected, rtol=0, atol=0)
"""


class Layers(torch.nn.Module):
    """Of rows, of structures, with numbers and with learned scores: one takes a minute, too."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                fnn.Matching("coarse"),
                fnn.DependencyTree(),
                fnn.KSubset(2),
                fnn.PairwiseMRF(4, [(0, 1), (1, 2)]),
            ]
        )

    def forward(self, scores):
        matching, tree, subset, mrf = self.layers
        return matching(scores), tree(scores), subset(scores[:, 0]), mrf(scores[:, 1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch about itself
@pytest.mark.skipif(VERSION < (2, 6), reason="torch has no packages before 2.6")
def test_a_package_runs_where_the_layers_are_imported(tmp_path):
    """With batches of other sizes."""
    layers, batch = Layers(), torch.export.Dim("batch", min=2, max=64)
    scores = torch.randn(3, 4, 4)
    program = torch.export.export(layers, (scores,), dynamic_shapes={"scores": {0: batch}})
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "layers.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # to compile it sooner
    )
    given = [scores, torch.randn(7, 4, 4)]
    with torch.no_grad():
        torch.save([(s, layers(s)) for s in given], tmp_path / "numbers.pt")
    for imports in (["factormax.nn"], []):
        command = [sys.executable, "-c", LOADING, str(tmp_path), *imports]
        subprocess.run(command, check=True, timeout=240)


def test_lists_that_come_as_none():
    """AOTInductor does so with those that are empty."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(torch.randn(2, 3, 3))
    fg.add(fm.DepTree(u))
    args = traced._op_args(fg, Layout.of(fg), Options(), None, None)
    assert args[4:7] == ([], [], [])
    expected = torch.ops.factormax.solve(*args)
    found = traced._solve(*args[:4], None, None, None, *args[7:])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
