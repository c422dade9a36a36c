"""Keys: proofs, what they grant, and the files that they stand in."""

from pathlib import Path

import pytest

from hear.buses.nng.access import (
    EVERYTHING,
    Grant,
    Grants,
    Handshake,
    Keyring,
    load_key,
    load_keyring,
    new_nonce,
)
from hear.errors import ConfigError
from tests.secret_files import write_secret

SECRET = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


def keyring() -> Keyring:
    return Keyring(
        (
            Grant(name="a", secret=SECRET, publish=("state.acme.>",), subscribe=("*.acme.>",)),
            Grant(name="b", secret=OTHER, publish=(">",), subscribe=(">",), sources=("b", "p-*")),
        )
    )


def test_a_proof_is_valid_for_its_key_nonce_session_and_name_alone() -> None:
    ring = keyring()
    told = Handshake(new_nonce(), new_nonce(), "a", "session", "name")
    proof = told.prove_client(bytes.fromhex(SECRET), "hub/1", 7)
    assert ring.check(told, proof, "hub/1", 7) is not None
    for other in (
        told._replace(key="b"),
        told._replace(key="nobody"),
        told._replace(hub_nonce=new_nonce()),
        told._replace(client_nonce=new_nonce()),
        told._replace(session="another"),
        told._replace(name="another"),
        told._replace(session="sessionn", name="ame"),  # nothing slides over
    ):
        assert ring.check(other, proof, "hub/1", 7) is None, other
    assert ring.check(told, b"", "hub/1", 7) is None
    assert ring.check(told, proof[:-1], "hub/1", 7) is None
    assert ring.check(told, proof, "hub/2", 7) is None, "what it would go on from is proven too"
    assert ring.check(told, proof, "hub/1", 8) is None
    assert ring.check(told, told.prove_hub(bytes.fromhex(SECRET), "", False, 0), "", 0) is None


def test_a_hub_proves_the_key_for_one_welcome_alone() -> None:
    secret = bytes.fromhex(SECRET)
    told = Handshake(new_nonce(), new_nonce(), "a", "session", "name")
    proofs = {
        told.prove_hub(secret, "hub/1", False, 0),
        told.prove_hub(secret, "hub/2", False, 0),
        told.prove_hub(secret, "hub/1", True, 0),
        told.prove_hub(secret, "hub/1", False, 1),
        told._replace(client_nonce=new_nonce()).prove_hub(secret, "hub/1", False, 0),
        told.prove_hub(bytes.fromhex(OTHER), "hub/1", False, 0),
        *told.seals(secret),
    }
    assert len(proofs) == 8


def test_nonces_do_not_repeat() -> None:
    assert len({new_nonce() for _ in range(1_000)}) == 1_000


def test_grants_are_by_patterns_of_subjects() -> None:
    grants = Grants(("state.acme.>", "outcome.*.e.*.*"), ("*.acme.>",), ("a",))
    assert grants.may_publish("state.acme.e.queue")
    assert grants.may_publish("outcome.acme.e.operation_outcome")
    assert not grants.may_publish("outcome.acme.f.operation_outcome")
    assert not grants.may_publish("state.umbra.e.queue")
    assert not grants.may_publish("state.acmee.e.queue"), "a token is whole"
    assert grants.may_hear("control.acme.e.retain")
    assert not grants.may_hear("control.umbra.e.retain")
    assert not grants.may_hear_all
    assert EVERYTHING.may_hear_all


def test_names_to_speak_under_are_whole_or_begin_alike() -> None:
    grants = Grants((">",), (">",), ("worker", "policy-*"))
    assert grants.may_be("worker")
    assert grants.may_be("policy-lru")
    assert not grants.may_be("worker-2")
    assert not grants.may_be("policy")
    assert grants.checks_sources
    assert not EVERYTHING.checks_sources


def test_a_key_without_sources_speaks_as_itself() -> None:
    told = Handshake(new_nonce(), new_nonce(), "a", "s", "n")
    found = keyring().check(told, told.prove_client(bytes.fromhex(SECRET), "", 0), "", 0)
    assert found is not None
    grants, secret = found
    assert grants.may_be("a")
    assert not grants.may_be("b")
    assert secret == bytes.fromhex(SECRET)


def test_answers_that_are_remembered_are_bounded() -> None:
    grants = Grants(("state.acme.>",), (), None)
    for number in range(40_000):
        grants.may_publish(f"state.acme.{number}.queue")
    grants.may_publish(f"state.acme.{'x' * 4_000}.queue")
    assert all(len(stem) <= 256 for _, stem in grants._known)
    assert len(grants._known) <= 16_384


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[key]]\nname = "a"\nsecret = "00"\n', "expected at least 32 hexadecimal digits"),
        (f'[[key]]\nname = "a"\nsecret = "{"x" * 64}"\n', "hexadecimal"),
        (f'[[key]]\nname = "a"\nsecret = "{SECRET}"\n' * 2, "'a' is there twice"),
        (
            f'[[key]]\nname = "a"\nsecret = "{SECRET}"\npublish = ["state..x"]\n',
            "subject pattern",
        ),
        (
            f'[[key]]\nname = "a"\nsecret = "{SECRET}"\nsubscribe = ["state.a.b.c.d"]\n',
            "whole streams",
        ),
        (f'[[key]]\nname = "a"\nsecret = "{SECRET}"\npublishes = []\n', "unknown key"),
        ("key = 1\n", "array"),
    ],
)
def test_a_keyring_that_cannot_be_used_is_refused_with_file_and_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = write_secret(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError, match=expected) as error:
        load_keyring(path)
    assert str(path) in str(error.value)


def test_a_key_file_is_read(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "key.toml", f'name = "a"\nsecret = "{SECRET}"\n')
    assert load_key(path).name == "a"
    path.write_text('name = "a"\nsecret = "1234"\n')
    with pytest.raises(ConfigError, match="at least 32"):
        load_key(path)
