import pytest

pytest.register_assert_rewrite("contract", "graphs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where no kernel can run."""
    if item.get_closest_marker("gpu") is not None:
        from factormax._engines.cuda.driver import unavailable

        reason = unavailable()
        if reason:
            pytest.skip(reason)
