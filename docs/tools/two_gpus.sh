#!/usr/bin/env bash
# Everything about the guard that needs two GPUs: bash docs/tools/two_gpus.sh FOLDER, from the root of the repository.
# Every part has its own limit, together under nine minutes. A part that fails or is late leaves what it found.
set -u
out=$(realpath -m "${1:?needs a folder for the results}")
mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

part() {  # part LOG SECONDS WORDS...: run it, keep its output, say how it ended
    local log="$out/$1" limit=$2 begin=$SECONDS rc
    shift 2
    echo "# $*" >>"$log"
    timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1
    rc=$?
    echo "$((SECONDS - begin)) s, status $rc: $*" | tee -a "$out/run.log"
    return "$rc"
}

# Compilation, one kernel a GPU at the same time, so that the training below starts with warm caches.
shape=(--heads 16/32 --packed 4x4096 --train)
CUDA_VISIBLE_DEVICES=0 part run.log 125 python3 -m qwenlinear.cli warmup "${shape[@]}" --qwen-gdn-backend flashqla &
CUDA_VISIBLE_DEVICES=1 part run.log 125 python3 -m qwenlinear.cli warmup "${shape[@]}" --qwen-gdn-backend fla &
wait  # a kernel that isn't there is no failure: the table of the training says so

part checks.log 150 python3 -m pytest -m gpu tests/gpu/test_guard_gpu.py -k two_gpus -v -s || status=1
part run.log 140 python3 -m qwenlinear.cli bench train --backend nccl --kernels flashqla fla torch \
    --rounds 10 --steps 2 --limit 130 --out "$out" || status=1
part run.log 120 python3 -m qwenlinear.cli bench guard --backend nccl --world-size 2 --mib 1/1024 1 64 --live 0 4000 \
    --rounds 8 --repeats 20 --limit 112 --out "$out" || status=1
exit "$status"
