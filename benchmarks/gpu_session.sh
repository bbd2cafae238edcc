#!/usr/bin/env bash
# Kernel tests, compiled, then the GPU benchmarks: what one session on a CUDA machine runs.
# Usage: benchmarks/gpu_session.sh OUTPUT_FOLDER [tests] [model] [kernels]
set -uo pipefail
out=$1
shift
parts=${*:-tests model kernels}
export PYTHONPATH=.:kernels:benchmarks PYTHONUNBUFFERED=1 TRITON_INTERPRET=0

# Compiling takes most of the time: one process for each file of tests.
run_tests() {
	timeout "${TEST_LIMIT_S:-200}" python3 -m pytest -c /dev/null -p no:cacheprovider -q \
		--import-mode=importlib --maxfail 12 "$@"
}
if [[ $parts == *tests* ]]; then
	for file in tests/kernels/test_*.py tests/gpu/test_*.py; do
		run_tests "$file" > "$out/$(basename "$file" .py).log" 2>&1 &
	done
	wait
	for log in "$out"/test_*.log; do
		echo "$(basename "$log"): $(tail -1 "$log")"
		grep -E "^(FAILED|ERROR|E  )" "$log" | head -8 | cut -c1-220
	done
fi
if [[ $parts == *model* ]]; then
	timeout 160 python3 benchmarks/model_prefill.py --parts check ours decode profile baseline \
		--output "$out/model_prefill.json"
fi
if [[ $parts == *kernels* ]]; then
	timeout 160 python3 benchmarks/kernels.py --quick --output "$out/kernels.json"
fi
