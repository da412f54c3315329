#!/usr/bin/env bash
# Multi30k English-German: captions, from raw files to BLEU on two CPU cores. Flags: see recipes/README.md.
here=$(cd "$(dirname "$0")" && pwd)
exec bash "$here/../pipeline/run.sh" "$(basename "$here")" "$@"
