#!/usr/bin/env bash
root=$(cd "$(dirname "$0")/../.." && pwd) && PATH="$PATH:$root/.venv/bin" PYTHONPATH="$root" exec python -m recipes wmt14_en_de "$@"
