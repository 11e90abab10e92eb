#!/usr/bin/env bash
# The Metal kernels, compiled for the processor and run there in several orders of threads, against the reference.
# Needs clang 19 and ar, and installs them where it may (Debian, as root). x86-64 Linux only.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never

if ! command -v "${MSL_CXX:-clang++-19}" >/dev/null || ! command -v ar >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-19 binutils
fi

cargo clippy --locked -p metaltail-device -p metaltail-mslcpu -p metaltail-engine \
    --features metaltail-device/msl-cpu,metaltail-engine/msl-cpu --all-targets -- -D warnings

# Orders, odd addresses, the launch limit, declared memory and planted mistakes: the tests ask for each themselves.
cargo test --release --locked -p metaltail-device -p metaltail-mslcpu --features metaltail-device/msl-cpu

# The kernels once more where undefined behaviour (an index past an array, a shift too far) stops the kernel.
MSL_SANITIZE=undefined cargo test --release --locked -p metaltail-device --features metaltail-device/msl-cpu \
    --test kernels -- on_metal::metal_passes_in_shuffled_orders --exact
