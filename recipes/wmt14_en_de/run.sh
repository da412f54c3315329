#!/usr/bin/env bash
# WMT14 English-German: from raw files to the BLEU of RoFormer, section 4.1. Flags: see recipes/README.md.
exec bash "$(dirname "$0")/../pipeline/run.sh" wmt14_en_de "$@"
