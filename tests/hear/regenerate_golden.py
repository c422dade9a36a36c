"""Write the golden bytes anew: ``python -m tests.hear.regenerate_golden``.

Do this for a new kind or a new field. If bytes of a message change that older peers send or read,
raise ``hear.messages.SCHEMA_VERSION`` and say in docs/protocol.md what changed.
"""

from hear import codec
from tests.hear.golden_examples import EXAMPLES
from tests.hear.test_golden import GOLDEN


def main() -> None:
    """Replace all files."""
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for kind, (_, envelope) in EXAMPLES.items():
        (GOLDEN / f"{kind}.msgpack").write_bytes(codec.encode(envelope))


if __name__ == "__main__":
    main()
