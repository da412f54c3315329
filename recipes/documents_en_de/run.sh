#!/usr/bin/env bash
root=$(cd "$(dirname "$0")/../.." && pwd) && PATH="$root/.venv/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python -m recipes documents_en_de "$@"
