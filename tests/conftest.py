import sys

import pytest

pytest.register_assert_rewrite("contract", "graphs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where no kernel can run."""
    if item.get_closest_marker("gpu") is not None:
        from factormax._engines.cuda.driver import unavailable

        reason = unavailable()
        if reason:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def compiler_of_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips what compiles or exports where torch is older than docs/howto/torch.md asks for."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__version__ >= (2, 11):
        return
    import torch.export

    for owner, name in ((torch, "compile"), (torch.export, "export")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.skip("needs a newer torch"))
