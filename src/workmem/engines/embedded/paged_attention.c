/* Attention of single query rows over paged KV, read in place: no gather, no copy, bf16 widened in registers.
 *
 * A page holds [layer][K|V][token][kv head][dim]; `k_offset` and `v_offset` are the byte offsets of this
 * layer's K and V inside a page. Row r attends to `lengths[r]` tokens in the pages whose addresses start at
 * `pages[first_page[r]]`. Query and output are fp32 [rows][q heads][dim]; `dim` is a multiple of LANES.
 *
 * Work is cut by (row, split of SPLIT_TOKENS tokens) and a job takes all heads of a page at once, so memory
 * is read from front to back and each byte once. The cut is fixed: a row's result depends on neither its
 * neighbours nor the number of threads. Splits are merged in order afterwards.
 *
 * Where new K and V are given (fp32 [rows][kv heads][dim], else null), they are first stored as each row's last
 * token: small torch operators cost more than the work they do here.
 */
#include <stdint.h>
#include <string.h>

#define SPLIT_TOKENS 256
#define HEADS_MAX 128
#define DIM_MAX 256
#define WIDE_FLOATS 16384 /* K or V widened at a time: kv heads x dim x tokens */
#define BLOCK_MAX 64
#define LANES 8
#define LINE_BYTES 64

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t lanes_u32 __attribute__((vector_size(LANES * 4)));
typedef uint16_t lanes_u16 __attribute__((vector_size(LANES * 2), aligned(2)));

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

static inline float sum_lanes(lanes v) {
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* `count` values of K or V as fp32. */
static inline void widen(const char *source, int is_bf16, int64_t count, float *out) {
    if (!is_bf16) {
        memcpy(out, source, (size_t)count * sizeof(float));
        return;
    }
    for (int64_t at = 0; at < count; at += LANES) {
        lanes_u16 in = *(const lanes_u16 *)(source + 2 * at);
        lanes_u32 bits = __builtin_convertvector(in, lanes_u32) << 16;
        *(lanes *)(out + at) = (lanes)bits;
    }
}

static inline void prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(from + at);
}

/* Scores of `n` queries that share a key; n is a constant where this is inlined. */
static inline __attribute__((always_inline)) void score_group(const float *q, const float *key, int dim, int n,
                                                              float scale, float *out, int out_step) {
    lanes total[4];
    for (int g = 0; g < n; g++) total[g] = (lanes){0};
    for (int d = 0; d < dim; d += LANES) {
        lanes k = *(const lanes *)(key + d);
        for (int g = 0; g < n; g++) total[g] += *(const lanes *)(q + g * dim + d) * k;
    }
    for (int g = 0; g < n; g++) out[g * out_step] = sum_lanes(total[g]) * scale;
}

/* out[dim] += sum over tokens of weight[t] * value[t][dim], values `stride` floats apart. */
static inline void accumulate(const float *weight, const float *value, int64_t stride, int count, int dim, float *out) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        lanes a = *(lanes *)(out + d), b = *(lanes *)(out + d + LANES);
        lanes c = *(lanes *)(out + d + 2 * LANES), e = *(lanes *)(out + d + 3 * LANES);
        for (int t = 0; t < count; t++) {
            const float *v = value + t * stride + d;
            a += *(const lanes *)v * weight[t];
            b += *(const lanes *)(v + LANES) * weight[t];
            c += *(const lanes *)(v + 2 * LANES) * weight[t];
            e += *(const lanes *)(v + 3 * LANES) * weight[t];
        }
        *(lanes *)(out + d) = a;
        *(lanes *)(out + d + LANES) = b;
        *(lanes *)(out + d + 2 * LANES) = c;
        *(lanes *)(out + d + 3 * LANES) = e;
    }
    for (; d < dim; d += LANES) {
        lanes a = *(lanes *)(out + d);
        for (int t = 0; t < count; t++) a += *(const lanes *)(value + t * stride + d) * weight[t];
        *(lanes *)(out + d) = a;
    }
}

typedef struct {
    int64_t k_offset, v_offset;
    int block_tokens, kv_heads, group, dim, is_bf16;
    float scale;
} shape;

static void attend_split(const float *q, const int64_t *pages, int64_t begin, int64_t end, const shape *s, float *out) {
    float score[HEADS_MAX][BLOCK_MAX], peak[HEADS_MAX], total[HEADS_MAX];
    float wide[WIDE_FLOATS];
    int heads = s->kv_heads * s->group, dim = s->dim;
    int64_t width = (int64_t)s->kv_heads * dim, row_bytes = width * (s->is_bf16 ? 2 : 4);
    int step = (int)(WIDE_FLOATS / width < 16 ? WIDE_FLOATS / width : 16); /* tokens widened at a time */
    for (int h = 0; h < heads; h++) {
        peak[h] = -3.0e38f;
        total[h] = 0.0f;
        memset(out + (int64_t)h * (dim + 2), 0, (size_t)dim * sizeof(float));
    }
    for (int64_t at = begin; at < end; at += s->block_tokens) {
        const char *page = (const char *)(intptr_t)pages[at / s->block_tokens];
        int count = (int)(end - at < s->block_tokens ? end - at : s->block_tokens);
        if (at + s->block_tokens < end) {
            const char *next = (const char *)(intptr_t)pages[at / s->block_tokens + 1];
            prefetch(next + s->k_offset, s->block_tokens * row_bytes);
            prefetch(next + s->v_offset, s->block_tokens * row_bytes);
        }
        for (int from = 0; from < count; from += step) {
            int many = count - from < step ? count - from : step;
            widen(page + s->k_offset + from * row_bytes, s->is_bf16, many * width, wide);
            for (int t = 0; t < many; t++) {
                for (int kv = 0; kv < s->kv_heads; kv++) {
                    const float *key = wide + t * width + kv * dim;
                    for (int g = 0; g < s->group; g += 4) {
                        int h = kv * s->group + g;
                        const float *query = q + (int64_t)h * dim;
                        float *to = &score[h][from + t];
                        switch (s->group - g) {
                        case 1: score_group(query, key, dim, 1, s->scale, to, BLOCK_MAX); break;
                        case 2: score_group(query, key, dim, 2, s->scale, to, BLOCK_MAX); break;
                        case 3: score_group(query, key, dim, 3, s->scale, to, BLOCK_MAX); break;
                        default: score_group(query, key, dim, 4, s->scale, to, BLOCK_MAX);
                        }
                    }
                }
            }
        }
        for (int h = 0; h < heads; h++) {
            float top = peak[h], sum = 0.0f;
            for (int t = 0; t < count; t++) top = score[h][t] > top ? score[h][t] : top;
            float shrink = exp_fast(peak[h] - top);
            for (int t = 0; t < count; t++) {
                score[h][t] = exp_fast(score[h][t] - top);
                sum += score[h][t];
            }
            total[h] = total[h] * shrink + sum;
            if (top != peak[h]) {
                float *acc = out + (int64_t)h * (dim + 2);
                for (int d = 0; d < dim; d++) acc[d] *= shrink;
            }
            peak[h] = top;
        }
        for (int from = 0; from < count; from += step) {
            int many = count - from < step ? count - from : step;
            widen(page + s->v_offset + from * row_bytes, s->is_bf16, many * width, wide);
            for (int h = 0; h < heads; h++) {
                const float *value = wide + (int64_t)(h / s->group) * dim;
                accumulate(&score[h][from], value, width, many, dim, out + (int64_t)h * (dim + 2));
            }
        }
    }
    for (int h = 0; h < heads; h++) {
        out[(int64_t)h * (dim + 2) + dim] = peak[h];
        out[(int64_t)h * (dim + 2) + dim + 1] = total[h];
    }
}

/* fp32 -> bf16, to nearest, ties to even: what torch does. */
static void store_row(const float *from, int is_bf16, int64_t count, char *to) {
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

/* out[r] = x[r] / sqrt(mean(x[r]^2) + epsilon) * weight, all fp32. */
void workmem_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float epsilon) {
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * width;
        float *to = out + r * width;
        float total = 0.0f;
        for (int64_t i = 0; i < width; i++) total += in[i] * in[i];
        float scale = 1.0f / __builtin_sqrtf(total / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) to[i] = in[i] * scale * weight[i];
    }
}

/* Returns 0, or -1 where a size exceeds what was compiled in. `scratch` has
 * splits_total * q heads * (dim + 2) floats; first_split[r] is the first split of row r. */
int workmem_paged_attention(const float *q, const float *new_k, const float *new_v, float *out, const int64_t *pages, const int64_t *first_page,
                            const int64_t *lengths, const int64_t *first_split, float *scratch, int64_t rows,
                            int64_t splits_total, int64_t k_offset, int64_t v_offset, int block_tokens,
                            int kv_heads, int group, int dim, int is_bf16, float scale, int threads) {
    shape s = {k_offset, v_offset, block_tokens, kv_heads, group, dim, is_bf16, scale};
    int heads = kv_heads * group;
    if (heads > HEADS_MAX || dim > DIM_MAX || dim % LANES || kv_heads * dim > WIDE_FLOATS) return -1;
    if (block_tokens > BLOCK_MAX || SPLIT_TOKENS % block_tokens) return -1;
    int64_t slot = (int64_t)heads * (dim + 2);
    if (new_k) {
        int64_t width = (int64_t)kv_heads * dim, row_bytes = width * (is_bf16 ? 2 : 4);
        for (int64_t row = 0; row < rows; row++) {
            int64_t last = lengths[row] - 1;
            char *page = (char *)(intptr_t)pages[first_page[row] + last / block_tokens];
            int64_t at = (last % block_tokens) * row_bytes;
            store_row(new_k + row * width, is_bf16, width, page + k_offset + at);
            store_row(new_v + row * width, is_bf16, width, page + v_offset + at);
        }
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t split = 0; split < splits_total; split++) {
        int64_t low = 0, high = rows - 1; /* the row this split belongs to */
        while (low < high) {
            int64_t middle = (low + high + 1) / 2;
            if (first_split[middle] <= split) low = middle; else high = middle - 1;
        }
        int64_t begin = (split - first_split[low]) * SPLIT_TOKENS;
        int64_t end = begin + SPLIT_TOKENS < lengths[low] ? begin + SPLIT_TOKENS : lengths[low];
        attend_split(q + low * heads * dim, pages + first_page[low], begin, end, &s, scratch + split * slot);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t last = row + 1 < rows ? first_split[row + 1] : splits_total;
        for (int h = 0; h < heads; h++) {
            float peak = -3.0e38f, total = 0.0f;
            float *result = out + (row * heads + h) * dim;
            memset(result, 0, (size_t)dim * sizeof(float));
            for (int64_t split = first_split[row]; split < last; split++) {
                const float *part = scratch + split * slot + (int64_t)h * (dim + 2);
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
    return 0;
}
