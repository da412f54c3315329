#!/usr/bin/env bash
# The demo: from an empty folder to a BLEU score in minutes, on a laptop. Flags: see recipes/README.md.
exec bash "$(dirname "$0")/../pipeline/run.sh" demo "$@"
