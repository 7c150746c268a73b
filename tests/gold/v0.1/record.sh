#!/bin/sh
# How the files of this folder were made, by ringtap 0.1.0 (commit 593d7cd) as root in an empty folder; `ringtap` is that
# version's. runs.tar.xz holds a job of two ranks on two nodes, a sweep of two points without the generator's precheck,
# and under expected/ what 0.1.0 itself found in them.
set -eu
ringtap lab up --name gold --hosts S0,S1
device=$(ringtap lab exec --lab gold S0 -- ip -4 -o address | awk '/10\.77\.0\.1/ { print $2 }')
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="$device"
job="python -m ringtap.examples.scale_model --iterations 24 --parameters 500000 --layers 8 --compute-s 0.05"
RANK=0 ringtap lab exec --lab gold S0 -- ringtap run --every 200ms -o job --node S0 -- $job &
sleep 3
RANK=1 ringtap lab exec --lab gold S1 -- ringtap run --every 200ms --join job --node S1 -- $job
wait
ringtap lab down gold
cat > small.toml <<END
[sweep]
name = "small"
scale = 200
loads = [0, 0.6]
traffic = ["iperf"]

[window]
warmup_iterations = 2
settle = "200ms"
min_time = "1s"
min_iterations = 5
max_time = "10s"

[[models]]
name = "small"
parameters = 25_000_000
compute = "50ms"
layers = 8
END
ringtap sweep small.toml -o sweep
ringtap analyze job
ringtap report sweep
mkdir expected
mv job/derived/summary.json sweep/report/points.csv expected/
rm -r job/derived sweep/report sweep/series/precheck-*
tar --owner=0 --group=0 --numeric-owner --sort=name -cJf runs.tar.xz expected job sweep
ringtap traffic plan --kind consistent --load 200mbit --duration 2s --to 10.0.0.1:5001 --to 10.0.0.2:5001 --seed 7 \
    -o web-search.plan
ringtap traffic plan --kind incast --load 50mbit --load-counts wire --duration 100ms --period 10ms \
    --from 10.0.0.2 --from 10.0.0.3 --to 10.0.0.1:5001 --seed 7 --dscp 8 --congestion-control cubic -o incast.plan
ringtap traffic plan --kind ring --duration 1s --node 10.0.0.1:5001 --node 10.0.0.2:5001 --node 10.0.0.3:5001 \
    --bytes 1MB --iterations 4 --compute 20ms -o ring.plan
