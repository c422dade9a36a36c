"""Text to tokens, by the ``tokenizer.json`` of a model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hear.errors import ConfigError

Encode = Callable[[str], Sequence[int]]

FILE = "tokenizer.json"


def load(path: Path) -> Encode:
    """The tokenizer of a file, or of a model's folder. Nothing is fetched from anywhere.

    Raises:
        ConfigError: there is none, or the package ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer: the package tokenizers is not installed: "
            "pip install 'hear-protocol[tokenizer]'"
        ) from None
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer {path}: got no file, expected {FILE} or a folder with one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises bare exceptions
        raise ConfigError(f"{file}: got no tokenizer ({error}), expected one") from error

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode
