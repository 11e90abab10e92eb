#!/usr/bin/env bash
# What is for macOS, checked on Debian 12: lints for aarch64-apple-darwin against the real bindings, and programs that
# are linked against the symbols that macOS has. Nothing of it runs: there is no Mac here, and no emulator of one.
#
# Needs root (once), rustup and pip; installs the rest (Debian's Rust for browsers, which comes with the sources of its
# standard library; lld; a list of libSystem's symbols from the package ziglang). What that leaves open:
# docs/design/metal-host.md.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never
target=aarch64-apple-darwin
# A folder of its own: another compiler than that of the other checks.
work=$(mkdir -p "${CARGO_TARGET_DIR:-target}/darwin" && cd "${CARGO_TARGET_DIR:-target}/darwin" && pwd)
say() { printf -- '-- %s (%s s)\n' "$1" "$SECONDS"; }

say "toolchain"
packages="rustc-web cargo-web rust-web-clippy rust-web-src rust-web-llvm libstd-rust-web-dev lld-19"
# shellcheck disable=SC2086
if ! dpkg -s $packages >"$work/packages" 2>/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "packages are missing and only root can install them: $packages"; exit 1; }
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends $packages
fi
# Debian's rustc lands in /usr/bin, behind rustup's in PATH; it works offline and under a name of its own.
rustup toolchain list | grep -q '^debian' || rustup toolchain link debian /usr

# The standard library for the target is built once and put where rustc looks for it, so that no unstable flag is
# needed after. Unoptimised: these programs are for the linker alone.
want="$(/usr/bin/rustc -V)"
lib=$(/usr/bin/rustc --print sysroot)/lib/rustlib/$target/lib
if [ "$(cat "$lib/.made-by" 2>/dev/null)" != "$want" ]; then
    say "standard library of $want"
    rm -rf "$work/std" && mkdir -p "$work/std/src" && : > "$work/std/src/lib.rs"
    printf '[package]\nname = "stdfor"\nedition = "2024"\n[workspace]\n[profile.release]\nopt-level = 0\n' \
        > "$work/std/Cargo.toml"
    (cd "$work/std" && env -u CARGO_BUILD_TARGET -u RUSTUP_TOOLCHAIN RUSTFLAGS=-Cembed-bitcode=yes RUSTC_BOOTSTRAP=1 \
        RUSTC=/usr/bin/rustc CARGO_TARGET_DIR="$work/std/target" CARGO_INCREMENTAL=0 \
        /usr/bin/cargo build -q --release -Zbuild-std=std,panic_abort,test --target $target)
    rm -rf "$lib" && mkdir -p "$lib"
    cp "$work/std/target/$target/release/deps/"lib*.rlib "$lib/"
    rm -f "$lib"/libstdfor-*
    echo "$want" > "$lib/.made-by"
    # Rust objects to what was compiled against another standard library (E0460).
    rm -rf "$work/std" "${work:?}/$target" "$work/debug" "$work/release"
fi

say "workflow"
python3 -c 'import yaml' 2>/dev/null || [ -d "$work/pyyaml/yaml" ] \
    || python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --target "$work/pyyaml" pyyaml
python3 .ci/workflows.py "$work/pyyaml"

say "lints"
export CARGO_TARGET_DIR="$work" CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=none
cargo +debian clippy --workspace --all-targets --locked --target $target -- -D warnings

say "stub SDK"
# Lists of symbols: no code, no headers.
python3 .ci/darwin_sdk.py "$work/MacOSX.sdk"

say "link"
# As unoptimised as the standard library: then nothing that a program calls is left out before the linker sees it.
SDKROOT="$work/MacOSX.sdk" MACOSX_DEPLOYMENT_TARGET=13.0 CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=ld64.lld-19 \
    CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS=-Clinker-flavor=ld64.lld \
    cargo +debian build --locked --target $target -p metaltail-metal --example metal_check -p metaltail --bin metaltail
python3 .ci/darwin_sdk.py --program "$work/$target/debug/examples/metal_check" Metal CoreGraphics Foundation
python3 .ci/darwin_sdk.py --program "$work/$target/debug/metaltail"
say "done"
