#!/usr/bin/env bash
# Builds llama.cpp (libraries for the processor alone) and the driver beside this script into DIR, which stays outside
# the repository: tools/peers/build.sh DIR. Needs Python 3, a C++ compiler and make or what CMake finds.
#
# The source is the one that the source distribution of llama-cpp-python carries; pip fetches it from its own index.
# Build back ends come first, without isolation: pip then only asks for the distribution's metadata and builds nothing.
# DIR/llama-peer is the driver; DIR/build/bin has libggml for fixtures/gguf/quantise.py. JOBS is 2 unless it is set.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }

version=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)

if [ ! -x "$dir/venv/bin/cmake" ]; then
    python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet cmake ninja scikit-build-core gguf==0.19.0 numpy
fi
export PATH="$dir/venv/bin:$PATH"

archive="$dir/sdist/llama_cpp_python-$version.tar.gz"
if [ ! -f "$archive" ]; then
    pip download --no-deps --no-binary llama-cpp-python --no-build-isolation --dest "$dir/sdist" \
        "llama-cpp-python==$version"
fi
source="$dir/llama_cpp_python-$version/vendor/llama.cpp"
if [ ! -f "$source/CMakeLists.txt" ]; then
    tar -xzf "$archive" -C "$dir"
fi

cmake -G Ninja -S "$source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DGGML_OPENMP=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT=sdist
nice -n 5 cmake --build "$dir/build" -j "${JOBS:-2}"

"${CXX:-c++}" -std=c++17 -O2 -Wall -Wextra -DMETALTAIL_PEER_VERSION="\"llama-cpp-python $version\"" \
    -I "$source/include" -I "$source/ggml/include" "$here/driver.cpp" -o "$dir/llama-peer" \
    -L "$dir/build/bin" -Wl,-rpath,"$dir/build/bin" -lllama -lggml -lggml-base
echo "$dir/llama-peer"
