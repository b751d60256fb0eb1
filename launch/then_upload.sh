#!/usr/bin/env bash
# Runs a command, and then brings to the store what it left in this host's spool.
#
#   launch/then_upload.sh torchrun ... train.py
#
# For Slurm and Kubernetes, which end every process of a job with its last task, and so the uploader that outlives
# a job elsewhere. SIGTERM goes on to the command: its ranks write within 5 s what they measured, torchrun waits for
# them for at most 30 s, and the upload has what is left of the time that the launcher grants.
#
# UPLOAD_S  for how many seconds to try where the store does not answer (60)
#
# The exit code is the command's own: telemetry that could not be brought stays in the spool and fails no job.
set -uo pipefail

"$@" &
command=$!
trap 'kill -TERM "$command" 2>/dev/null' TERM
# A signal ends a wait, and not what is waited for.
while true; do
    wait "$command"
    code=$?
    kill -0 "$command" 2>/dev/null || break
done

if ! torchinstruments upload --give-up-after-s "${UPLOAD_S:-60}" >&2; then
    echo "$0: not all is uploaded; run this here later: torchinstruments upload" >&2
fi
exit "$code"
