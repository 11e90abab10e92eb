//! CPU compute on quantised blocks: GEMV and GEMM by format and instruction set, expert blocks, a thread pool.
