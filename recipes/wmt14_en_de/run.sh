#!/usr/bin/env bash
# WMT14 English-German: from raw files to the BLEU of RoFormer, section 4.1. Flags: see recipes/README.md.
here=$(cd "$(dirname "$0")" && pwd)
exec bash "$here/../pipeline/run.sh" "$(basename "$here")" "$@"
