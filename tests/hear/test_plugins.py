from importlib.metadata import entry_points

import pytest

from hear.app import plugins
from hear.errors import PluginError
from hear.subjects import Pattern


def test_what_was_typed_may_be_the_path_of_a_module() -> None:
    assert plugins.load_typed("policies", "hear.subjects:Pattern") is Pattern
    assert plugins.load_typed("policies", "hear.subjects:Pattern.matches") is Pattern.matches


@pytest.mark.parametrize(
    ("group", "name"),
    [("buses", "memory"), ("commands", "replay"), ("engines", "simulated"), ("policies", "guard")],
)
def test_a_plugin_is_listed_and_loaded_by_the_name_of_its_entry_point(
    group: str, name: str
) -> None:
    names = plugins.names(group)
    assert names == sorted({entry.name for entry in entry_points(group=f"hear.{group}")})
    assert name in names
    [entry] = [e for e in entry_points(group=f"hear.{group}") if e.name == name]
    assert plugins.load_typed(group, name) is entry.load()
    assert plugins.load_received(group, name, "engine 'e'") is entry.load()
    assert plugins.load_installed(group, name) is entry.load()


def test_a_wrong_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(PluginError, match=r"no bus named 'memroy': did you mean 'memory'\?"):
        plugins.load_installed("buses", "memroy")
    with pytest.raises(PluginError, match=r"no policy named 'zzz': expected one of cache-aware, "):
        plugins.load_typed("policies", "zzz")


def test_a_group_without_plugins_says_so() -> None:
    assert plugins.names("nothing_like_it") == []
    with pytest.raises(PluginError, match="none is known here"):
        plugins.load_installed("nothing_like_it", "x")
    with pytest.raises(PluginError, match="none is installed"):
        plugins.load_received("nothing_like_it", "x", "engine 'e'")


@pytest.mark.parametrize(
    "path",
    [
        "no_such_module:Name",
        "hear.subjects:NoSuchName",
        "hear.subjects:Pattern.no_such_attribute",
        "hear.subjects:",
        ":Pattern",
        "tests.hear.broken_plugin:Policy",
    ],
)
def test_what_cannot_be_imported_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(PluginError, match=f"^{path} cannot be loaded: ") as caught:
        plugins.load_typed("policies", path)
    assert caught.value.__cause__ is not None


def test_an_error_names_the_distribution_that_the_plugin_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [ours] = [e for e in entry_points(group="hear.buses") if e.name == "memory"]

    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", gone)
    assert ours.dist is not None
    with pytest.raises(PluginError, match=rf"memory \(from {ours.dist.name} [0-9.]+\) cannot be"):
        plugins.load_installed("buses", "memory")
