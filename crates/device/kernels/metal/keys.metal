// Floats in an order without exceptions.

static constant constexpr const uint MINUS_INFINITY = 0xFF800000;

// Unsigned numbers in the total order of floats. Comparing these is exact where GPUs compare subnormals as zeros.
// 0 stands for one NaN, which no choice is: it marks experts that are not allowed.
inline uint key_of(float x) {
    const uint bits = as_type<uint>(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

inline float of_key(uint key) { return as_type<float>(key >> 31 ? key & 0x7FFFFFFF : ~key); }

// By bits: fast math takes every number to be finite.
inline bool finite_bits(float x) { return (as_type<uint>(x) & 0x7F800000) != 0x7F800000; }
