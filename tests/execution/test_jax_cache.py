"""What is compiled is kept by bytes; one line where JAX is missing."""

import sys
import threading
from importlib import import_module

import pytest

from rank_threads import in_threads
from shardplan.errors import BackendError
from shardplan.execution.jax.cache import BoundedCache


def test_the_oldest_goes_when_the_bytes_are_too_many() -> None:
    made: list[str] = []

    def get(key: str, size: int = 4) -> str:
        return cache.get(key, lambda: (made.append(key) or key.upper(), size))

    cache = BoundedCache(12)
    assert [get(k) for k in "abcabc"] == list("ABCABC") and made == list("abc") and cache.bytes == 12
    get("a")
    get("d")
    assert cache.keys() == ("c", "a", "d") and cache.bytes == 12, "b was used longest ago"
    get("e", 7)
    assert cache.keys() == ("d", "e") and cache.bytes == 11, "as many go as are needed"
    get("big", 100)
    assert cache.keys() == ("big",) and cache.bytes == 100, "one above the bound is kept alone"
    get("a")
    assert cache.keys() == ("a",) and cache.bytes == 4
    assert made == ["a", "b", "c", "d", "e", "big", "a"]


def test_two_threads_that_make_one_value_count_it_once() -> None:
    cache, barrier = BoundedCache(100), threading.Barrier(2, timeout=60)

    def make() -> tuple[str, int]:
        barrier.wait()  # both are making it
        return "value", 10

    in_threads(range(2), lambda _: cache.get("key", make))
    assert cache.bytes == 10 and cache.keys() == ("key",)


def test_a_failure_leaves_nothing() -> None:
    cache = BoundedCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: ("value", 1)) == "value"


def test_a_missing_jax_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the drop-in, and of a program that is to run on it."""
    import shardplan as sp

    monkeypatch.setitem(sys.modules, "jax", None)
    for name in [name for name in sys.modules if name.startswith("shardplan.interop.jax")]:
        monkeypatch.delitem(sys.modules, name)
    t = sp.TensorType("f32", (4,), (None,), sp.Mesh(a=1))
    program = sp.Program({"0": t}, (), ("0",))
    for call in (lambda: import_module("shardplan.interop.jax"), lambda: sp.run(program, [[1.0]], backend="jax")):
        with pytest.raises(BackendError) as caught:
            call()
        assert str(caught.value) == "jax is not installed: pip install 'shardplan[jax]'"
