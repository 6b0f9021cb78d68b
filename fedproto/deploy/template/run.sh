#!/usr/bin/env bash
# Run the federation's rounds, or continue with them, and show the server's log:
# ./run.sh, or with other settings: ./run.sh 'rounds=20 lr=0.005' (20 rounds in all)
set -e -o pipefail
. "$(dirname "$0")/env.sh"

read_json() { python -c "import json, sys; found = json.load(sys.stdin); $1"; }
print_id='print(found["run-id"]) if "run-id" in found else sys.exit(found.get("error-message"))'
print_status='status = found["runs"][0]["status"]; print(status)'
exit_by_status='sys.exit(status != "finished:completed")'

id=$(flwr run . federation --format json ${1:+--run-config "$1"} | read_json "$print_id")
flwr log "$id" federation --stream
# The log ends in the same way if the run failed.
flwr list federation --run-id "$id" --format json | read_json "$print_status; $exit_by_status"
