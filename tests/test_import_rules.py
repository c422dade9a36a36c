"""The rule of imports that import-linter has no sentence for: what is not named in it is in it."""

import grimp
import pytest

OTHERS = {"hear.app", "hear.buses", "hear.engines", "hear.harnesses", "hear.policies"}
IO = {"trio", "pynng", "structlog", "vllm", "rich", "socket", "asyncio", "threading", "subprocess"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hear", include_external_packages=True)


def test_all_of_hear_but_its_app_does_no_io_and_knows_neither_the_app_nor_a_wing(
    graph: grimp.ImportGraph,
) -> None:
    protocol = graph.find_children("hear") - OTHERS
    assert {"hear.engine_operations", "hear.messages", "hear.codec"} <= protocol
    for module in protocol:
        inside = {module} | graph.find_descendants(module)
        imported = set().union(*map(graph.find_modules_directly_imported_by, inside))
        tops = {".".join(name.split(".")[:2]) for name in imported}
        assert not tops & (OTHERS | IO), f"{module}: {sorted(tops & (OTHERS | IO))}"
