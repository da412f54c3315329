#!/usr/bin/env bash
# Multi30k English-German: captions, from raw files to BLEU on two CPU cores. Flags: see recipes/README.md.
exec bash "$(dirname "$0")/../pipeline/run.sh" multi30k_en_de "$@"
