#!/usr/bin/env bash
# Admit members by their public keys, once: ./admit.sh NAME...
set -e
. "$(dirname "$0")/env.sh"
for name in "$@"; do
  flwr supernode register "keys/$name.pub" federation --name "$name"
done
