#!/usr/bin/env bash
# Run the federation's rounds, or go on with them: ./run.sh, or ./run.sh 'rounds=20 lr=0.005'. Shows the server's log.
set -e -o pipefail; . "$(dirname "$0")/env.sh"
read_json() { python -c "import json, sys; found = json.load(sys.stdin); $1"; }
id=$(flwr run . federation --format json ${1:+--run-config "$1"} | read_json 'print(found["run-id"]) if "run-id" in found else sys.exit(found.get("error-message"))')
flwr log "$id" federation --stream
# The stream ends alike for runs that failed.
flwr list federation --run-id "$id" --format json | read_json 'end = found["runs"][0]["status"]; print(end); sys.exit(end != "finished:completed")'
