"""The devices that tests of the torch front run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where scores are; the emulated device is the host, called something else."""
    pytest.importorskip("torch")
    from devices import emulate

    from factormax import _engines

    _engines.engine_there.cache_clear()
    if request.param == "cuda":
        yield "cuda"
        return
    request.addfinalizer(_engines.engine_there.cache_clear)
    engine = emulate(request, monkeypatch)
    yield "cpu"
    assert engine.solves, "nothing was solved on the emulated device"
