#!/usr/bin/env bash
# Kernel tests, compiled, then the GPU benchmarks: what one session on a CUDA machine runs.
# Usage: benchmarks/gpu_session.sh OUTPUT_FOLDER [quick]
set -uo pipefail
out=$1
export PYTHONPATH=.:kernels:benchmarks PYTHONUNBUFFERED=1 TRITON_INTERPRET=0
timeout 150 python3 -m pytest -c /dev/null -p no:cacheprovider -q --import-mode=importlib \
	--maxfail 12 tests/kernels/test_decode_attention.py tests/kernels/test_packed_phase_attention.py \
	tests/kernels/test_small_operators.py > "$out/tests.log" 2>&1
tail -30 "$out/tests.log" | cut -c1-200
timeout 150 python3 benchmarks/model_prefill.py --parts check ours decode profile baseline --output "$out/model_prefill.json"
timeout 200 python3 benchmarks/kernels.py ${2:+--quick} --output "$out/kernels.json"
