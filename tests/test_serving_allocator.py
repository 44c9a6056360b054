"""What `saltus serve` asks of the C library's allocator."""

from types import SimpleNamespace

import pytest

from saltus.serving import allocator
from saltus.serving.allocator import M_ARENA_MAX, M_MMAP_THRESHOLD, return_freed_buffers


@pytest.mark.parametrize("given", ["", *allocator.SETTINGS])
def test_settings_of_the_environment_stay(given: str, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    for name in allocator.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "4")
    library = SimpleNamespace(mallopt=lambda setting, value: made.append(setting))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    return_freed_buffers()
    kept = allocator.SETTINGS[given][0] if given else None
    assert made == [one for one in (M_ARENA_MAX, M_MMAP_THRESHOLD) if one != kept]


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    return_freed_buffers()
