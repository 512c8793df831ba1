"""Settings of the whole suite."""

import pytest
import torch

torch.set_num_threads(1)
"""The towers of the tests are tiny: one thread is faster than two, and much faster where cores are shared."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`: tests that share a model of a session or module run in one process, one behind the other."""
    if not items or not items[0].config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        shared = [str(item.path)]
        call = getattr(item, "callspec", None)
        if call is not None:
            scopes = call._arg2scope
            names = [str(call.params[name]) for name in sorted(scopes) if scopes[name].value != "function"]
            shared = names or shared
        item.add_marker(pytest.mark.xdist_group("-".join(shared)))
