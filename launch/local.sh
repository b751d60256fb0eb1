#!/usr/bin/env bash
# Trains an example on several ranks of this machine.
#
#   NPROC=2 OUTPUT_DIR=/some/dir launch/local.sh [arguments of the script]
#   EXAMPLE=fsdp_language_model launch/local.sh
#
# EXAMPLE     name of a script in examples/ (ddp_language_model)
# NPROC       ranks (2)
# OUTPUT_DIR  folder, relative to where you are, or a URL such as s3://bucket/run (runs/<time>)
# PYTHON      interpreter for torchrun where no `torchrun` is on the PATH (python3)
set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
source "$project/launch/settings.sh"

say_where
exec "${torchrun[@]}" --standalone --nproc-per-node="${NPROC:-2}" "$script" "$@"
