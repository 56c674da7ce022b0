import pytest

pytest.register_assert_rewrite("contract", "graphs")
