#!/usr/bin/env bash
# The paper's eight methods on real MNIST: 20 clients, n = 3, stdev 2, k = 100, 100 rounds, 3 seeds.
# Usage: results/eight_methods.sh OUT     (a run folder each; PYTHON, DATA and JOBS may be set)
# One single-threaded process a run, as many at a time as there are cores; a finished run is not run again.
set -euo pipefail
out=$1
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 FEDPROTO_DATA=${DATA:-../shared/data}
common="--dataset mnist --clients 20 --ways 3 --stdev 2 --shots 100 --rounds 100 --eval-every 10 --checkpoint-every 0 --device cpu"
{
  for seed in 0 1 2; do
    for method in 'fedrep(personal="fc1,fc2")' 'fedrep' 'fesem' 'fedprox' 'fedavg' 'fedper(personal="fc1,fc2")' 'fedper' \
                  'fedproto' 'fedproto-mh' 'local'; do
      name=$(tr -c 'a-z0-9\n' '-' <<<"$method")
      echo "$out/$name-seed$seed --algorithm '$method' --seed $seed"
    done
    echo "$out/fedproto-released-seed$seed --algorithm fedproto --profile released --seed $seed"
  done
} | while read -r folder rest; do
  [ -e "$folder/result.json" ] || { rm -rf "$folder"; echo "$python -m fedproto run $common --out $folder $rest > $folder.log 2>&1"; }
done | { mkdir -p "$out"; xargs -d '\n' -P "${JOBS:-$(nproc)}" -I{} bash -c '{}'; }
