/* Dot products of rows in memory with a few inputs: the one loop that both products with weights and scores of keys
 * are made of. Rows are read once, from front to back, bf16 widened in registers.
 *
 * Each sum runs in one vector of LANES partial sums that are added up in one order, however many rows and inputs are
 * computed together. (This file is compiled without the flags that would let the compiler choose.)
 */
#include "kernels.h"

/* Four sums at once, each in the order of `sum_lanes`. */
static inline void sum_four(lanes a, lanes b, lanes c, lanes d, float *out) {
    typedef float half __attribute__((vector_size(LANES * 2)));
    lanes ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    lanes cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    lanes all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    half sum = __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
    for (int i = 0; i < 4; i++) out[i] = sum[i];
}

/* What is left of a row behind the last whole vector. */
static __attribute__((noinline)) float dot_rest(const char *w, const float *x, int64_t count, int is_bf16) {
    float sum = 0.0f;
    for (int64_t t = 0; t < count; t++) sum += widen_one(w + t * (is_bf16 ? 2 : 4), is_bf16) * x[t];
    return sum;
}

/* m rows times n inputs; m, n and is_bf16 are constants where this is inlined, and m * n is 1 or a multiple of 4. */
static inline __attribute__((always_inline)) void dots_of(const char *w, int64_t row_bytes, int64_t ahead, const float *x,
                                                          int64_t width, int m, int n, int is_bf16, float *out,
                                                          int64_t out_step) {
    const int size = is_bf16 ? 2 : 4, line = LINE_BYTES / size;
    lanes total[12];
#pragma GCC unroll 12
    for (int i = 0; i < m * n; i++) total[i] = (lanes){0};
    int64_t d = 0;
    for (; d + line <= width; d += line) {
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) __builtin_prefetch(w + i * row_bytes + d * size + ahead);
#pragma GCC unroll 4
        for (int at = 0; at < line; at += LANES) {
            lanes in[DOTS_INPUTS];
#pragma GCC unroll 3
            for (int j = 0; j < n; j++) {
                in[j] = *(const lanes *)(x + j * width + d + at);
#ifdef __AVX2__ /* kept in its register: read again for every row, inputs would cost more than the products */
                __asm__("" : "+x"(in[j]));
#endif
            }
#pragma GCC unroll 8
            for (int i = 0; i < m; i++) {
                lanes wide = widen_lanes(w + i * row_bytes + (d + at) * size, is_bf16);
#pragma GCC unroll 3
                for (int j = 0; j < n; j++) total[i * n + j] = fused(wide, in[j], total[i * n + j]);
            }
        }
    }
    for (; d + LANES <= width; d += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            lanes wide = widen_lanes(w + i * row_bytes + d * size, is_bf16);
#pragma GCC unroll 3
            for (int j = 0; j < n; j++) total[i * n + j] = fused(wide, *(const lanes *)(x + j * width + d), total[i * n + j]);
        }
    float sum[12];
    if (m * n == 1) sum[0] = sum_lanes(total[0]);
#pragma GCC unroll 3
    for (int i = 0; i + 4 <= m * n; i += 4) sum_four(total[i], total[i + 1], total[i + 2], total[i + 3], sum + i);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 3
        for (int j = 0; j < n; j++) {
            float rest = d < width ? dot_rest(w + i * row_bytes + d * size, x + j * width + d, width - d, is_bf16) : 0.0f;
            out[j * out_step + i] = sum[i * n + j] + rest;
        }
}

#define DOTS(name, m, n, is_bf16)                                                                                \
    static __attribute__((noinline)) void name(const char *w, int64_t row_bytes, int64_t ahead, const float *x,  \
                                               int64_t width, float *out, int64_t out_step) {                    \
        dots_of(w, row_bytes, ahead, x, width, m, n, is_bf16, out, out_step);                                    \
    }
DOTS(dots_1_1_bf16, 1, 1, 1)
DOTS(dots_8_1_bf16, 8, 1, 1)
DOTS(dots_4_2_bf16, 4, 2, 1)
DOTS(dots_4_3_bf16, 4, 3, 1)
DOTS(dots_1_1_fp32, 1, 1, 0)
DOTS(dots_8_1_fp32, 8, 1, 0)
DOTS(dots_4_2_fp32, 4, 2, 0)
DOTS(dots_4_3_fp32, 4, 3, 0)

typedef void kernel(const char *w, int64_t row_bytes, int64_t ahead, const float *x, int64_t width, float *out,
                    int64_t out_step);

/* By the number of inputs; how many rows each takes keeps the multipliers busy and fits the registers. */
static const int ROWS_AT_ONCE[DOTS_INPUTS + 1] = {1, 8, 4, 4};
static kernel *const KERNELS[2][DOTS_INPUTS + 1] = {
    {dots_1_1_fp32, dots_8_1_fp32, dots_4_2_fp32, dots_4_3_fp32},
    {dots_1_1_bf16, dots_8_1_bf16, dots_4_2_bf16, dots_4_3_bf16},
};

void dots(const char *w, int64_t row_bytes, int64_t ahead, int count, const float *x, int64_t width, int n, int is_bf16,
          float *out, int64_t out_step) {
    int i = 0, many = ROWS_AT_ONCE[n];
    for (; i + many <= count; i += many)
        KERNELS[is_bf16][n](w + i * row_bytes, row_bytes, ahead, x, width, out + i, out_step);
    for (; i < count; i++)
        for (int j = 0; j < n; j++)
            KERNELS[is_bf16][0](w + i * row_bytes, row_bytes, ahead, x + j * width, width, out + j * out_step + i, out_step);
}
