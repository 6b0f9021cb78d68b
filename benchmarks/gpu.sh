#!/bin/sh
# Measures all GPU numbers of RESULTS.md, in about six minutes on an H200:
#   sh benchmarks/gpu.sh OUT    with MNIST in $FEDPROTO_DATA
set -e
out=${1:?name a folder for the results}
mkdir -p "$out"
bench="python3 -m fedproto bench --device cuda --rounds 3"
$bench --clients 20 --precision float32,tf32,bf16 --json "$out/cnn-20.json"
$bench --clients 100 --json "$out/cnn-100.json"
$bench --clients 1000 --json "$out/cnn-1000.json"
$bench --clients 20 --model resnet18 --precision tf32 --json "$out/resnet18.json"
$bench --clients '' --seeds 5 --json "$out/seeds.json"
$bench --clients '' --huge 1000000 --json "$out/huge.json"
python3 -m fedproto sweep benchmarks/precision.toml --out "$out/precision" | tee "$out/precision.txt"
