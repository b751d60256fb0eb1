#!/usr/bin/env bash
# Submits a training and its merge, which begins when the training has ended, however it ended.
#
#   OUTPUT_DIR=s3://bucket/run launch/slurm/submit.sh [arguments of the script]
#   MERGE=merge_dask.sbatch OUTPUT_DIR=/shared/run launch/slurm/submit.sh
#
# OUTPUT_DIR  a URL, or a folder that all nodes share (runs/<time> of this checkout)
# MERGE       merge.sbatch on one node (default), merge_dask.sbatch on several
# Everything else as in train.sbatch.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
export OUTPUT_DIR="${OUTPUT_DIR:-$PWD/runs/$(date +%Y%m%d-%H%M%S)}"

train=$(sbatch --parsable launch/slurm/train.sbatch "$@")
train=${train%%;*}  # with several clusters the name of one follows
# Not afterok: a training that failed, was cancelled or ran out of time is what one most wants to look into.
merge=$(sbatch --parsable --dependency="afterany:$train" "launch/slurm/${MERGE:-merge.sbatch}")
echo "training ${train}, then merge ${merge%%;*}; telemetry goes to $OUTPUT_DIR"
