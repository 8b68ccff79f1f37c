/* Attention of single query rows over paged KV, read in place: no gather, no copy, bf16 widened in registers.
 *
 * A page holds [layer][K|V][token][kv head][dim]; `k_offset` and `v_offset` are the byte offsets of this
 * layer's K and V inside a page. Row r attends to `lengths[r]` tokens in the pages whose addresses start at
 * `pages[first_page[r]]`. Query and output are fp32 [rows][q heads][dim].
 *
 * Work is cut by (row, kv head, split of SPLIT_TOKENS tokens): a fixed cut, so a row's result depends on
 * neither its neighbours nor the number of threads. Splits are merged in order afterwards.
 */
#include <stdint.h>
#include <string.h>

#define SPLIT_TOKENS 512
#define GROUP_MAX 16
#define DIM_MAX 256
#define BLOCK_MAX 64

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

static inline void widen(const void *source, int is_bf16, int dim, float *restrict out) {
    if (is_bf16) {
        const uint16_t *in = (const uint16_t *)source;
        for (int d = 0; d < dim; d++) {
            union { uint32_t i; float f; } bits;
            bits.i = (uint32_t)in[d] << 16;
            out[d] = bits.f;
        }
    } else {
        memcpy(out, source, (size_t)dim * sizeof(float));
    }
}

static void attend_split(const float *restrict q, const int64_t *pages, int64_t begin, int64_t end,
                         int64_t k_offset, int64_t v_offset, int block_tokens, int kv_heads, int kv_head,
                         int group, int dim, int is_bf16, float scale, float *restrict out) {
    float acc[GROUP_MAX][DIM_MAX], peak[GROUP_MAX], total[GROUP_MAX];
    float score[GROUP_MAX][BLOCK_MAX], wide[DIM_MAX];
    int64_t row_bytes = (int64_t)kv_heads * dim * (is_bf16 ? 2 : 4);
    int64_t head_bytes = (int64_t)kv_head * dim * (is_bf16 ? 2 : 4);
    for (int g = 0; g < group; g++) {
        peak[g] = -3.0e38f;
        total[g] = 0.0f;
        memset(acc[g], 0, (size_t)dim * sizeof(float));
    }
    for (int64_t at = begin; at < end; at += block_tokens) {
        const char *page = (const char *)(intptr_t)pages[at / block_tokens];
        int count = (int)(end - at < block_tokens ? end - at : block_tokens);
        for (int t = 0; t < count; t++) {
            widen(page + k_offset + t * row_bytes + head_bytes, is_bf16, dim, wide);
            for (int g = 0; g < group; g++) {
                float dot = 0.0f;
                for (int d = 0; d < dim; d++) dot += q[g * dim + d] * wide[d];
                score[g][t] = dot * scale;
            }
        }
        for (int g = 0; g < group; g++) {
            float top = peak[g];
            for (int t = 0; t < count; t++) top = score[g][t] > top ? score[g][t] : top;
            float shrink = exp_fast(peak[g] - top), sum = 0.0f;
            for (int t = 0; t < count; t++) { score[g][t] = exp_fast(score[g][t] - top); sum += score[g][t]; }
            total[g] = total[g] * shrink + sum;
            peak[g] = top;
            for (int d = 0; d < dim; d++) acc[g][d] *= shrink;
        }
        for (int t = 0; t < count; t++) {
            widen(page + v_offset + t * row_bytes + head_bytes, is_bf16, dim, wide);
            for (int g = 0; g < group; g++) {
                float weight = score[g][t];
                for (int d = 0; d < dim; d++) acc[g][d] += weight * wide[d];
            }
        }
    }
    for (int g = 0; g < group; g++) {
        float *slot = out + (int64_t)g * (dim + 2);
        memcpy(slot, acc[g], (size_t)dim * sizeof(float));
        slot[dim] = peak[g];
        slot[dim + 1] = total[g];
    }
}

/* Returns 0, or -1 where a size exceeds what was compiled in. `scratch` has
 * splits_total * kv_heads * group * (dim + 2) floats; first_split[r] is the first split of row r. */
int workmem_paged_attention(const float *q, float *out, const int64_t *pages, const int64_t *first_page,
                            const int64_t *lengths, const int64_t *first_split, float *scratch, int64_t rows,
                            int64_t splits_total, int64_t k_offset, int64_t v_offset, int block_tokens,
                            int kv_heads, int group, int dim, int is_bf16, float scale, int threads) {
    if (group > GROUP_MAX || dim > DIM_MAX || block_tokens > BLOCK_MAX || SPLIT_TOKENS % block_tokens) return -1;
    int64_t slot = (int64_t)group * (dim + 2);
    int64_t jobs = splits_total * kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t job = 0; job < jobs; job++) {
        int64_t split = job / kv_heads, row = 0;
        int head = (int)(job % kv_heads);
        while (row + 1 < rows && first_split[row + 1] <= split) row++;
        int64_t begin = (split - first_split[row]) * SPLIT_TOKENS;
        int64_t end = begin + SPLIT_TOKENS < lengths[row] ? begin + SPLIT_TOKENS : lengths[row];
        attend_split(q + (row * kv_heads + head) * group * dim, pages + first_page[row], begin, end, k_offset,
                     v_offset, block_tokens, kv_heads, head, group, dim, is_bf16, scale, scratch + job * slot);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t last = row + 1 < rows ? first_split[row + 1] : splits_total;
        for (int head = 0; head < kv_heads; head++) {
            for (int g = 0; g < group; g++) {
                float peak = -3.0e38f, total = 0.0f;
                float *result = out + ((row * kv_heads + head) * group + g) * dim;
                memset(result, 0, (size_t)dim * sizeof(float));
                for (int64_t split = first_split[row]; split < last; split++) {
                    const float *part = scratch + (split * kv_heads + head) * slot + (int64_t)g * (dim + 2);
                    float top = part[dim] > peak ? part[dim] : peak;
                    float old = exp_fast(peak - top), new = exp_fast(part[dim] - top);
                    for (int d = 0; d < dim; d++) result[d] = result[d] * old + part[d] * new;
                    total = total * old + part[dim + 1] * new;
                    peak = top;
                }
                float inverse = 1.0f / total;
                for (int d = 0; d < dim; d++) result[d] *= inverse;
            }
        }
    }
    return 0;
}
