"""Files that hold secrets, for tests: readable by this user alone, whatever the umask is."""

from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Write a keyring or a key file as docs/security.md says; returns its path."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path
