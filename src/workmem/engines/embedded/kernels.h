/* What the compiled sources share: lanes, small arithmetic, and attention over one split of one row. */
#ifndef WORKMEM_KERNELS_H
#define WORKMEM_KERNELS_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define SPLIT_TOKENS 256
#define HEADS_MAX 128
#define DIM_MAX 256
#define BLOCK_MAX 64
#define LANES 8
#define LINE_BYTES 64
#define DOTS_INPUTS 3

#define INTERNAL __attribute__((visibility("hidden")))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t lanes_u32 __attribute__((vector_size(LANES * 4)));
typedef uint16_t lanes_u16 __attribute__((vector_size(LANES * 2), aligned(2)));

/* How the KV of a layer lies in a page. */
typedef struct {
    int64_t k_offset, v_offset;
    int block_tokens, kv_heads, group, dim, is_bf16;
    float scale;
} shape;

static inline float exp_fast(float x) { /* relative error below 2e-7 for x in [-87, 0] */
    float y = x * 1.44269504088896341f;
    y = y < -126.0f ? -126.0f : y;
    float whole = __builtin_floorf(y);
    float f = (y - whole) * 0.693147180559945f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f
            + f * (0.00833333333f + f * (0.00138888889f + f * 0.000198412698f))))));
    union { int32_t i; float f; } scale;
    scale.i = ((int32_t)whole + 127) << 23;
    return p * scale.f;
}

/* Neighbours first: the order that `dots` promises. */
static inline float sum_lanes(lanes v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

static inline float widen_one(const char *source, int is_bf16) {
    if (!is_bf16) return *(const float *)source;
    union { uint32_t i; float f; } bits = {(uint32_t)*(const uint16_t *)source << 16};
    return bits.f;
}

static inline lanes widen_lanes(const char *source, int is_bf16) {
    if (!is_bf16) return *(const lanes *)source;
#ifdef __AVX2__ /* the general form becomes six instructions instead of two */
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)source)), 16);
#endif
    return (lanes)(__builtin_convertvector(*(const lanes_u16 *)source, lanes_u32) << 16);
}

/* a * b + c, rounded in one way wherever it is inlined: left to itself, a compiler fuses some sums and not others. */
static inline lanes fused(lanes a, lanes b, lanes c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* fp32 -> bf16, to nearest, ties to even: what torch does. */
static inline void store_row(const float *from, int is_bf16, int64_t count, char *to) {
    if (!is_bf16) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *out = (uint16_t *)to;
    for (int64_t i = 0; i < count; i++) {
        union { float f; uint32_t i; } bits;
        bits.f = from[i];
        out[i] = (uint16_t)((bits.i + 0x7fffu + ((bits.i >> 16) & 1u)) >> 16);
    }
}

/* out[j][i] = sum over d of w[i][d] * x[j][d], for `count` rows of `width` values and n <= DOTS_INPUTS inputs. What lies
 * `ahead` bytes further on is read next, and fetched already. */
INTERNAL void dots(const char *w, int64_t row_bytes, int64_t ahead, int count, const float *x, int64_t width, int n,
                   int is_bf16, float *out, int64_t out_step);

/* How many of `left` inputs go into the next call of `dots`: three are fastest, and two pairs beat three and one. */
static inline int dots_inputs(int64_t left) {
    return left < DOTS_INPUTS ? (int)left : left == DOTS_INPUTS + 1 ? 2 : DOTS_INPUTS;
}

/* All heads of one query row [heads][dim] over tokens [begin, end), into out[heads][dim + 2]: the weighted sum of
 * values, the largest score, the sum of weights. */
INTERNAL void attend_split(const float *q, const int64_t *pages, int64_t begin, int64_t end, const shape *s, float *out);

/* The union of `splits` parts, `slot` floats apart, for `count` queries of [dim + 2] floats each, into out[count][dim]. */
INTERNAL void merge_splits(const float *parts, int64_t splits, int64_t slot, int count, int dim, float *out);

#endif
