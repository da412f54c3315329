#!/usr/bin/env bash
# The demo: from an empty folder to a BLEU score in minutes, on a laptop. Flags: see recipes/README.md.
here=$(cd "$(dirname "$0")" && pwd)
exec bash "$here/../pipeline/run.sh" "$(basename "$here")" "$@"
