#!/bin/bash
# The first run on a machine with a GPU, in calls of at most ten minutes; docs/gpu.md says what to carry there.
#     bash benchmarks/first_run.sh smoke       compile, check every rung, speed at 4096 and 8192
#     bash benchmarks/first_run.sh full 1/2    the whole benchmark of the better rungs; then 2/2
#     bash benchmarks/first_run.sh attention   attention: check every rung, then times beside torch's
#     bash benchmarks/first_run.sh tune        rung 10 with other constants
#     bash benchmarks/first_run.sh profile     rungs 8, 9 and 10 under the profiler; training on CPU and GPU
#     bash benchmarks/first_run.sh faults      twenty broken kernels, and the emulator's counts beside the profiler's
# Run it from the repository's root. Everything is written to $OUT, by default ./first-run; send that folder back.
# Wheels in $WHEELS, by default ./wheels, are installed beside the machine's own packages, without a network.
set -u
export OUT=${OUT:-$PWD/first-run} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export MINIDIST_CACHE_DIR=${MINIDIST_CACHE_DIR:-$OUT/cache}
python=${PYTHON:-python3} wheels=${WHEELS:-$PWD/wheels} what=${1:-smoke} part=${2:-1/2}
mkdir -p "$OUT"
log=$OUT/log-$what-${part/\//-of-}.txt results=$OUT/results.json ladder="s10_hopper s9_tensor_core s8_warp_tile
s7_async_copy s6_vector_loads s5_thread_tile_2d s4_thread_tile_1d s3_shared_tile s2_coalesced s1_naive"
attention="s5_backward s4_tensor_core s3_shared_tiles s2_warp_rows s1_three_kernels"

running=
trap '[ -n "$running" ] && kill "$running" 2>/dev/null; exit 143' INT TERM HUP

say() { echo "[$SECONDS s] $*" | tee -a "$log"; }
# Run a command for at most $1 seconds, and never beyond 580 of this call; a failure ends only that command.
go() {
    local limit=$1 left=$((580 - SECONDS)) code
    shift
    [ "$left" -lt 15 ] && { say "no time for: $*"; return 1; }
    timeout -k 5 "$((limit < left ? limit : left))" "$@" >>"$log" 2>&1 &
    running=$!
    wait "$running"
    code=$?
    [ "$code" = 0 ] || say "exit code $code: $*"
    return "$code"
}

say "first run: $what $part, $(git rev-parse --short HEAD 2>/dev/null || echo 'no commit')"
if [ -d "$wheels" ] && [ ! -d "$OUT/site" ]; then
    go 120 "$python" -m pip install --quiet --no-index --no-deps --target "$OUT/site" "$wheels"/*.whl
fi
export PYTHONPATH=$OUT/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
go 20 nvidia-smi
go 90 "$python" -m minidist doctor --gpu
tail -n 30 "$log"

case $what in
smoke)
    say "compiling"
    go 240 "$python" -m minidist bench cuda --compile
    for rung in $ladder $attention; do
        go 60 "$python" -m minidist.benchmarks.harness.cuda_smoke "$rung"
    done
    say "speed at 4096 and 8192"
    go 560 "$python" -m minidist bench cuda -k "test_rung and (4096 or 8192)" --out "$results" --json
    grep -E "^right|wrong|Error" "$log" | tail -n 40
    ;;
full)
    go 580 "$python" -m minidist bench cuda --full --part "$part" --out "$results" --json
    tail -n 40 "$log"
    ;;
attention)
    for rung in $attention; do
        go 60 "$python" -m minidist.benchmarks.harness.cuda_smoke "$rung"
    done
    go 560 "$python" -m minidist bench cuda -k test_attention --out "$results" --json
    grep -E "^right|wrong|Error" "$log" | tail -n 40
    ;;
tune)
    for buffers in 2 1 4; do
        for cluster in 2 1 4; do
            for group in 8 4 16; do
                go 60 "$python" -m minidist.benchmarks.harness.cuda_tune s10_hopper "COLUMNS=(256,)" \
                    "GROUP=$group" "CLUSTER=$cluster" "BUFFERS=$buffers"
            done
        done
    done
    grep -E "TFLOP/s" "$log" | sort -rn
    ;;
profile)
    for rung in s10_hopper s9_tensor_core s8_warp_tile; do
        if command -v ncu >/dev/null; then
            # Of the kernels of this rung alone: the first is the ragged check's, the second is timed.
            go 120 ncu --set full --kernel-name-base mangled --kernel-name "regex:$rung" --launch-skip 1 \
                --launch-count 1 --export "$OUT/$rung" --force-overwrite \
                "$python" -m minidist.benchmarks.harness.cuda_tune "$rung"
        else
            say "no ncu (Nsight Compute) on this machine"
        fi
    done
    go 240 "$python" -m minidist bench devices --out "$results" --json
    tail -n 30 "$log"
    ;;
faults)
    go 240 "$python" -m minidist.kernels.emulator.mistakes.silicon --compile
    go 400 "$python" -m minidist.kernels.emulator.mistakes.silicon --gpu --out "$OUT/broken-kernels.json"
    tail -n 21 "$log"
    metrics=smsp__inst_executed.sum,l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum
    metrics=$metrics,l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum
    for rung in $ladder; do
        command -v ncu >/dev/null || { say "no ncu (Nsight Compute) on this machine"; break; }
        MINIDIST_CUDA_BACKEND=emulator go 60 "$python" -m minidist.kernels.emulator "$rung" 256
        go 60 ncu --metrics "$metrics" --kernel-name-base mangled --kernel-name "regex:$rung" --launch-count 1 \
            "$python" -m minidist.kernels.emulator "$rung" 256
    done
    ;;
*)
    say "unknown call $what: give smoke, full, attention, tune, profile or faults"
    exit 2
    ;;
esac
say "done: send back $OUT, without cache and site"
