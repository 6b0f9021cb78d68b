#!/usr/bin/env bash
# Run the federation's rounds, or continue with them, and show the server's log:
# ./run.sh, or with other settings: ./run.sh 'rounds=20 lr=0.005' (20 rounds in all)
# Ctrl-C leaves the run going, and ./run.sh shows it again; ./run.sh --stop stops it.
exec python -m fedproto deploy run "$(dirname "$0")" "$@"
