#!/usr/bin/env bash
# One of three short runs on a lent GPU, from a bare copy of the tree; the smallest comes first.
#
#   tests/gpu/day.sh 1    are the tokens right (the first minute), does the engine serve; 210 s at most
#   tests/gpu/day.sh 2    throughput, steps and traces, and the same of the tree in .base; 245 s
#   tests/gpu/day.sh 3    nano-vllm out of .peer, transformers' batching, kernels by themselves; 195 s
#
# More words are the names of steps: these alone run.
# .base is an older tree:   git archive REVISION bench tests worker shared | tar x -C .base
# (628a72f, which the figures of docs/BENCHMARKS.md are of, has its bench in tests.)
# .peer holds what nano-vllm's programs import: nanovllm/ and flash_attn/. Without them their steps
# are "not there" and the others go on. Every step has a bound in seconds and prints its end; all
# that it printed is in $OUT, as are the JSON lines. The status is the number of steps that failed.
set -u
cd "$(dirname "$0")/../.." || exit 2
exec 2>&1
run=${1:?which run: 1, 2 or 3}
shift
wanted=("$@")
OUT=${OUT:-$PWD/.penstock/gpu-day}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
lines=9
failed=0

# step NAME SECONDS COMMAND...: its last lines here, all in $OUT/runN.log.
step() {
    local name=$1 bound=$2 begin=$SECONDS status log
    shift 2
    [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $name "* ]] || return 0
    log=$(mktemp)
    timeout -k 5 "$bound" "$@" >"$log" 2>&1
    status=$?
    echo "== $name: status $status, $((SECONDS - begin)) s of $bound"
    tail -n $lines "$log" | cut -c 1-600
    { echo "== $name: $*"; cat "$log"; } >>"$OUT/run$run.log"
    rm -f "$log"
    [ $status -eq 0 ] || failed=$((failed + 1))
    return $status
}

sampled="--temperature 0.7 --top-p 0.8 --top-k 20"
throughput="$python -m bench.engine_throughput"
nvidia-smi -L || echo "there is no nvidia-smi"
echo "$(nproc) cores, run $run"

case $run in
1)
    "$python" tests/gpu/check.py --minutes "${MINUTES:-3.5}" --out "$OUT"
    failed=$?
    ;;
2)
    # shellcheck disable=SC2086
    step "0.6B" 40 $throughput $sampled
    if [ -d .base ]; then
        [ -d .base/bench ] && bench=bench || bench=tests.bench
        # shellcheck disable=SC2086
        step "0.6B at .base" 40 env -C .base PYTHONPATH="$PWD/.base" \
            "$python" -m $bench.engine_throughput $sampled
    else
        echo "== 0.6B at .base: not there"
    fi
    step "0.6B, one stream" 20 $throughput --requests 1 --seqs 8 --shortest 512 --longest 513
    # shellcheck disable=SC2086
    step "8B" 60 $throughput --shape qwen3-8b $sampled
    steps="$python -m bench.forward_steps --device cuda --seconds 0.4"
    lines=14
    # shellcheck disable=SC2086
    step "8B steps" 55 $steps --shape qwen3-8b --batch 1 64 256 --context 640 \
        --prefill 2048 8192 --mix 1x32768+255x512 256x638 --suffix 8192 32768 131072
    lines=34
    step "8B trace" 30 "$python" -m bench.step_trace --shape qwen3-8b --batch 1 256
    ;;
3)
    if [ -d .peer ]; then
        export PYTHONPATH=$PWD:$PWD/.peer
        # Compiled by torch 2.11 its first eight requests did not end in 90 s.
        step "nano-vllm" 90 env TORCHDYNAMO_DISABLE=1 "$python" -m bench.nano_vllm \
            --out "$OUT" --turns 1 --bound 60
    else
        echo "== nano-vllm: not there"
    fi
    lines=30
    step kernels 45 "$python" -m bench.cuda_kernels --out "$OUT/attention.jsonl"
    step transformers 60 "$python" -m bench.transformers_steps --device cuda --shape qwen3-0.6b \
        --ways native continuous_batching --batch 1 64 --prefill 2048 --seconds 0.5
    ;;
*)
    echo "which run: 1, 2 or 3"
    exit 2
    ;;
esac
echo "run $run: $failed steps failed, $SECONDS s; $OUT/run$run.log"
exit $failed
