"""What all tests share: how Hypothesis runs, which tests need a GPU, and which stay with one worker.

Hypothesis draws the same examples on every run, so a tree that passes keeps passing; with `--turn` it draws a share of
so many, by a seed that the commit says; `--hypothesis-profile=explore` draws others each time. A test's own `@settings`
are on top of each.
"""

import itertools
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from tests import turns

import shardplan

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True, database=None)
settings.register_profile("planted", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")


def load_package() -> None:
    """Load all modules: Hypothesis draws constants that it finds in those, else as the order of tests has them."""
    for module in pkgutil.walk_packages(shardplan.__path__, "shardplan."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # who gives out work runs none
        load_package()


def pytest_addoption(parser: pytest.Parser) -> None:
    says = "run one of so many shares of long files and of the examples of laws, as the commit says"
    parser.addoption("--turn", type=int, default=1, help=says)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[turns.COLLECTED] = frozenset(item.nodeid for item in items)
    parts = int(config.getoption("--turn"))
    long = tuple(f"tests/{name}" for name in turns.LONG)
    by_long = itertools.groupby(items, lambda item: next((name for name in long if item.nodeid.startswith(name)), ""))
    kept = [i for name, own in by_long for i in (turns.share_of_cases(list(own), parts) if name else own)]
    if len(kept) < len(items):
        ran = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in ran])
        items[:] = kept
    turn = turns.commit()
    for item in items if parts > 1 else ():
        if not item.nodeid.startswith(long):
            turns.draw_share(item, parts, turn)
    items.sort(key=lambda item: not item.nodeid.startswith(long))  # else a worker has a long file when all else is done
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """End what a test left of torch.distributed in this process: a baseline plans on a fake group, and leaves it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file stay with one worker: they share launches, models and searches, which each would pay.

    Files of many long cases come first, so that no worker is left with one at the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # by number of tests, which says little
    return Files(config, log)
