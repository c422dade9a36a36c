from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct, field

from hear.app.config import load_toml
from hear.errors import ConfigError


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_seqs: int = 64
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5


class Role(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: str
    limits: Limits | None = None


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    block_size: int = 16
    limits: Limits = Limits()
    profiles: list[Role] = []
    roles: dict[str, Role] = field(default_factory=dict)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def refused(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_toml(path, Config)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_file_is_read_into_its_struct(config: Path) -> None:
    text = 'name = "x"\n[limits]\nshare = 1\n[roles.coder]\nmode = "dense"\n'
    config.write_text(text, encoding="utf-8")
    assert load_toml(config, Config) == Config(
        name="x", limits=Limits(share=1.0), roles={"coder": Role(mode="dense")}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nblok_size = 1\n', ":2: unknown key 'blok_size': did you mean 'block_size'?"),
        (
            'name = "x"\n# colour = 1\ncolour = 1\n',
            ":3: unknown key 'colour': expected one of name, block_size, limits, profiles, roles",
        ),
        (
            'name = "x"\n\n[limits]\n"max_seq" = 1\n',
            ":4: unknown key 'max_seq': did you mean 'max_seqs'?",
        ),
        (
            'name = "x"\n[[profiles]]\nmode = "a"\n[[profiles]] # 2nd\nmode = "a"\nmod = "b"\n',
            ":6: unknown key 'mod': did you mean 'mode'?",
        ),
        (
            'name = "x"\n[roles.a]\nmode = "a"\n[roles.b]\nmode = "b"\nmod = 1\n',
            ":6: unknown key 'mod': did you mean 'mode'?",
        ),
        (
            'name = "x"\n[roles.a]\nmode = "a"\n[roles.a.limits]\nshares = 1\n',
            ":5: unknown key 'shares': did you mean 'share'?",
        ),
        ('name = "x"\n[extras]\na = 1\n', ":2: unknown key 'extras': expected one of name, "),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(
    config: Path, text: str, message: str
) -> None:
    assert refused(config, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3\n", ":1: name: Expected `str`, got `int`"),
        (
            'name = "x"\n[limits]\nmax_seqs = 1\nshare = 2.0\n',
            ":4: limits.share: Expected `float` <= 1.0",
        ),
        ('name = "x"\n\nlimits = 3\n', ":3: limits: Expected `object`, got `int`"),
        (
            'name = "x"\n[[profiles]]\nmode = "a"\n[[profiles]]\nmode = 1\n',
            ":5: profiles[1].mode: Expected `str`, got `int`",
        ),
        (
            'name = "x"\n[roles.a]\nmode = 1\n',
            ":3: roles[...].mode: Expected `str`, got `int`",
        ),
        ("", ": Object missing required field `name`"),
        (
            'name = "x"\n[roles.a]\n',
            ":1: roles[...]: Object missing required field `mode`",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_line(
    config: Path, text: str, message: str
) -> None:
    assert refused(config, text) == message


def test_what_is_not_toml_is_refused_with_its_line(config: Path) -> None:
    assert "not TOML" in (message := refused(config, 'name = "x"\nname = \n'))
    assert "line 2" in message


def test_a_file_that_cannot_be_read_is_named(config: Path) -> None:
    with pytest.raises(ConfigError, match=f"{config}: cannot be read"):
        load_toml(config, Config)
    config.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{config}: cannot be read"):
        load_toml(config, Config)
