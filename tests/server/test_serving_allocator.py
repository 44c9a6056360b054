"""What `saltus serve` asks of the C library's allocator."""

from types import SimpleNamespace

import pytest

from saltus.server import allocator
from saltus.server.allocator import M_ARENA_MAX, M_MMAP_THRESHOLD, MEGABYTE, return_freed_buffers

SETTINGS = {"MALLOC_ARENA_MAX": (M_ARENA_MAX, 2), "MALLOC_MMAP_THRESHOLD_": (M_MMAP_THRESHOLD, MEGABYTE)}


@pytest.mark.parametrize("given", ["", *SETTINGS])
def test_settings_of_the_environment_stay(given: str, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[int, int]] = []
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "4")
    library = SimpleNamespace(mallopt=lambda setting, value: made.append((setting, value)))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    return_freed_buffers()
    kept = SETTINGS[given] if given else None
    assert made == [one for one in SETTINGS.values() if one != kept]


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    return_freed_buffers()
