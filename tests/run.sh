#!/usr/bin/env bash
# Sets up an environment of its own and runs every check: lint, types, import rules, tests.
# Needs Python 3.11 or newer and a package index. VENV names another place for the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-test}
python=${PYTHON:-python3}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet --editable '.[dev]'
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/lint-imports"
"$venv/bin/python" -m pytest "$@"
