#!/usr/bin/env bash
# One of three short runs on a lent GPU, from a bare copy of the tree; the smallest comes first.
#
#   tests/gpu/day.sh 1    are the tokens right (the first minute), does the engine serve; 195 s at most
#   tests/gpu/day.sh 2    throughput, steps and traces, and the same of the tree in .base; 245 s
#   tests/gpu/day.sh 3    nano-vllm out of .peer, transformers' batching, kernels by themselves; 240 s
#
# .base is an older tree:   git archive 628a72f tests worker shared | tar x -C .base
# .peer holds what nano-vllm's programs import: nanovllm/ and flash_attn/. Without them their steps
# are "not there" and the others go on. Every step has a bound in seconds and prints its end; all
# that it printed is in $OUT, as are the JSON lines. The status is the number of steps that failed.
set -u
cd "$(dirname "$0")/../.." || exit 2
exec 2>&1
run=${1:?which run: 1, 2 or 3}
OUT=${OUT:-$PWD/.penstock/gpu-day}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD HF_HUB_OFFLINE=1
export PENSTOCK_TEST_DEVICE=${PENSTOCK_TEST_DEVICE:-cuda} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
python=${PYTHON:-python3}
lines=9
failed=0

# step NAME SECONDS COMMAND...: its last lines here, all in $OUT/runN.log.
step() {
    local name=$1 bound=$2 begin=$SECONDS status log
    shift 2
    log=$(mktemp)
    timeout -s INT -k 4 "$bound" "$@" >"$log" 2>&1
    status=$?
    echo "== $name: status $status, $((SECONDS - begin)) s of $bound"
    tail -n $lines "$log" | cut -c 1-600
    { echo "== $name: $*"; cat "$log"; } >>"$OUT/run$run.log"
    rm -f "$log"
    [ $status -eq 0 ] || failed=$((failed + 1))
    return $status
}

tests() { # NAME SECONDS FILES...
    local name=$1 bound=$2
    shift 2
    step "$name" "$bound" "$python" -m pytest -q --noconftest --import-mode=importlib \
        -c /dev/null --rootdir=. -p no:cacheprovider -p xdist -n "${WORKERS:-14}" --dist worksteal \
        --maxfail=8 --tb=short -rf -W ignore --durations=3 "$@"
}

model=tests/contract/worker/model
cuda=$model/cuda
unit=tests/unit/worker/model
sampled="--temperature 0.7 --top-p 0.8 --top-k 20"
throughput="$python -m bench.engine_throughput"
nvidia-smi -L || echo "there is no nvidia-smi"
echo "$(nproc) cores, run $run"

case $run in
1)
    tests tokens 55 $cuda/test_engine_equality.py $cuda/test_gemv.py $cuda/test_stack.py \
        $cuda/test_graphs.py
    # shellcheck disable=SC2086 # words
    step engine 45 $throughput --requests 32 $sampled
    tests attention 50 $model/test_attention_backend.py $cuda/test_transformers.py \
        $cuda/test_fp8_kernels.py
    tests sampling 45 $cuda/test_sampling.py $unit/test_runner.py $unit/test_loader.py
    ;;
2)
    # shellcheck disable=SC2086
    step "0.6B" 40 $throughput $sampled
    if [ -d .base ]; then
        # shellcheck disable=SC2086
        step "0.6B at .base" 40 env -C .base PYTHONPATH="$PWD/.base" \
            "$python" -m tests.bench.engine_throughput $sampled
    else
        echo "== 0.6B at .base: not there"
    fi
    step "0.6B, one stream" 20 $throughput --requests 1 --seqs 8 --shortest 512 --longest 513
    # shellcheck disable=SC2086
    step "8B" 60 $throughput --shape qwen3-8b $sampled
    steps="$python -m bench.forward_steps --device cuda --seconds 0.4"
    step "8B steps" 55 $steps --shape qwen3-8b --batch 1 64 256 --prefill 2048 8192 \
        --mix 1x32768+255x512 256x638 --suffix 8192 32768 131072
    lines=34
    step "8B trace" 30 "$python" -m bench.step_trace --shape qwen3-8b --batch 1 256
    ;;
3)
    if [ -d .peer ]; then
        export PYTHONPATH=$PWD:$PWD/.peer
        peer="$python -m bench.nano_vllm --out $OUT"
        step "nano-vllm, 16 requests" 75 $peer --turns 1 --requests 16 --bound 50 ||
            export TORCHDYNAMO_DISABLE=1
        step "nano-vllm" 75 $peer --turns 1 --bound 40
    else
        echo "== nano-vllm: not there"
    fi
    lines=30
    step kernels 55 "$python" -m bench.cuda_kernels --out "$OUT/attention.jsonl"
    step transformers 35 "$python" -m bench.transformers_steps --device cuda --shape qwen3-0.6b \
        --ways native continuous_batching --batch 1 64 --prefill 2048 --seconds 0.5
    ;;
*)
    echo "which run: 1, 2 or 3"
    exit 2
    ;;
esac
echo "run $run: $failed steps failed, $SECONDS s; $OUT/run$run.log"
exit $failed
