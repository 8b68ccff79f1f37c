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
 * A run of rows of one request (the end of a prompt behind a hit) goes together: K is widened once, turned so that
 * lanes are tokens, and scored against all of them.
 *
 * Where new K and V are given (fp32 [rows][kv heads][dim], else null), they are first stored as each row's last
 * token: small torch operators cost more than the work they do here.
 */
#include "kernels.h"

#define TILE_TOKENS 16
#define TILE_QUERIES 6
#define RUN_QUERIES_MAX 512 /* rows x group of a run */

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

/* Rows become columns: 8 tokens of 8 dims each, `step` bytes apart, into out[dim][TILE_TOKENS]. */
static inline void turn(const char *source, int64_t step, int is_bf16, float *out) {
    lanes a[LANES], b[LANES];
    for (int t = 0; t < LANES; t++) a[t] = widen_lanes(source + t * step, is_bf16);
    for (int t = 0; t < LANES; t += 2) {
        b[t] = __builtin_shufflevector(a[t], a[t + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[t + 1] = __builtin_shufflevector(a[t], a[t + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int t = 0; t < LANES; t++) {
        int low = t / 4 * 4 + t % 2, upper = t % 4 / 2;
        a[t] = upper ? __builtin_shufflevector(b[low], b[low + 2], 2, 3, 10, 11, 6, 7, 14, 15)
                     : __builtin_shufflevector(b[low], b[low + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    }
    for (int d = 0; d < LANES; d++) {
        lanes column = d < 4 ? __builtin_shufflevector(a[d % 4], a[d % 4 + 4], 0, 1, 2, 3, 8, 9, 10, 11)
                             : __builtin_shufflevector(a[d % 4], a[d % 4 + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        *(lanes *)(out + d * TILE_TOKENS) = column;
    }
}

/* out[g][dim] = out[g][dim] * shrink[g] + sum over tokens of weight[g][t] * value[t][dim] for n heads that share their
 * values; n and is_bf16 are constants where this is inlined. */
static inline __attribute__((always_inline)) void weigh_of(const float *weight, const float *shrink, const char *value,
                                                           int64_t row_bytes, int64_t ahead, int count, int dim, int n,
                                                           int is_bf16, float *out) {
    const int size = is_bf16 ? 2 : 4, wide = n == 1 ? 8 : 4; /* vectors of a head held at once */
    int d = 0;
    for (; d + wide * LANES <= dim; d += wide * LANES) {
        lanes total[12];
        for (int g = 0; g < n; g++)
            for (int i = 0; i < wide; i++)
                total[g * wide + i] = *(lanes *)(out + g * (dim + 2) + d + i * LANES) * shrink[g];
        for (int t = 0; t < count; t++) {
            const char *from = value + t * row_bytes + d * size;
            for (int at = 0; at < wide * LANES * size; at += LINE_BYTES) __builtin_prefetch(from + ahead + at);
            for (int i = 0; i < wide; i++) {
                lanes v = widen_lanes(from + i * LANES * size, is_bf16);
                for (int g = 0; g < n; g++) total[g * wide + i] += v * weight[g * BLOCK_MAX + t];
            }
        }
        for (int g = 0; g < n; g++)
            for (int i = 0; i < wide; i++) *(lanes *)(out + g * (dim + 2) + d + i * LANES) = total[g * wide + i];
    }
    for (; d < dim; d += LANES)
        for (int g = 0; g < n; g++) {
            lanes total = *(lanes *)(out + g * (dim + 2) + d) * shrink[g];
            for (int t = 0; t < count; t++)
                total += widen_lanes(value + t * row_bytes + d * size, is_bf16) * weight[g * BLOCK_MAX + t];
            *(lanes *)(out + g * (dim + 2) + d) = total;
        }
}

static void weigh(const float *weight, const float *shrink, const char *value, int64_t row_bytes, int64_t ahead,
                  int count, int dim, int n, int is_bf16, float *out) {
    switch (n * 2 + is_bf16) {
    case 2: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 1, 0, out); break;
    case 3: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 1, 1, out); break;
    case 4: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 2, 0, out); break;
    case 5: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 2, 1, out); break;
    case 6: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 3, 0, out); break;
    default: weigh_of(weight, shrink, value, row_bytes, ahead, count, dim, 3, 1, out);
    }
}

/* Scores become weights relative to the new peak; returns what earlier sums shrink by. */
static float soften(float *score, int count, float scale, float *peak, float *total) {
    float top = *peak, sum = 0.0f;
    for (int t = 0; t < count; t++) {
        score[t] *= scale;
        top = score[t] > top ? score[t] : top;
    }
    float shrink = exp_fast(*peak - top);
    for (int t = 0; t < count; t++) {
        score[t] = exp_fast(score[t] - top);
        sum += score[t];
    }
    *total = *total * shrink + sum;
    *peak = top;
    return shrink;
}

void attend_split(const float *q, const int64_t *pages, int64_t begin, int64_t end, const shape *s, float *out) {
    float score[DOTS_INPUTS * BLOCK_MAX], shrink[DOTS_INPUTS];
    int heads = s->kv_heads * s->group, dim = s->dim;
    int64_t slot = dim + 2, head_bytes = dim * (s->is_bf16 ? 2 : 4), row_bytes = s->kv_heads * head_bytes;
    for (int h = 0; h < heads; h++) {
        memset(out + h * slot, 0, (size_t)dim * sizeof(float));
        out[h * slot + dim] = -3.0e38f;
        out[h * slot + dim + 1] = 0.0f;
    }
    for (int64_t at = begin; at < end; at += s->block_tokens) {
        const int64_t *this = pages + at / s->block_tokens;
        int count = (int)(end - at < s->block_tokens ? end - at : s->block_tokens);
        /* Each page's neighbour is fetched while it is read: pages lie anywhere, which no processor foresees. */
        int64_t ahead = at + s->block_tokens < end ? this[1] - this[0] : 0;
        for (int kv = 0; kv < s->kv_heads; kv++) {
            const char *head = (const char *)(intptr_t)this[0] + kv * head_bytes;
            for (int g = 0, n; g < s->group; g += n) {
                int h = kv * s->group + g;
                n = dots_inputs(s->group - g);
                float *to = out + h * slot;
                dots(head + s->k_offset, row_bytes, ahead, count, q + (int64_t)h * dim, dim, n, s->is_bf16, score, BLOCK_MAX);
                for (int i = 0; i < n; i++)
                    shrink[i] = soften(score + i * BLOCK_MAX, count, s->scale, to + i * slot + dim, to + i * slot + dim + 1);
                weigh(score, shrink, head + s->v_offset, row_bytes, ahead, count, dim, n, s->is_bf16, to);
            }
        }
    }
}

/* score[query][token] of up to TILE_QUERIES queries over a tile of keys [dim][TILE_TOKENS]; n is a constant where inlined. */
static inline __attribute__((always_inline)) void score_tile(const float *const *q, const float *key, int dim, int n,
                                                             float scale, float *score) {
    lanes low[TILE_QUERIES], high[TILE_QUERIES];
    for (int i = 0; i < n; i++) low[i] = high[i] = (lanes){0};
    for (int d = 0; d < dim; d++) {
        lanes a = *(const lanes *)(key + d * TILE_TOKENS), b = *(const lanes *)(key + d * TILE_TOKENS + LANES);
        for (int i = 0; i < n; i++) {
            low[i] += a * q[i][d];
            high[i] += b * q[i][d];
        }
    }
    for (int i = 0; i < n; i++) {
        *(lanes *)(score + i * TILE_TOKENS) = low[i] * scale;
        *(lanes *)(score + i * TILE_TOKENS + LANES) = high[i] * scale;
    }
}

/* out[query] = out[query] * shrink[query] + weight[query] x value [count][dim] */
static inline __attribute__((always_inline)) void value_tile(const float *weight, const float *value, int count, int dim,
                                                             int n, const float *shrink, float *const *out) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        int two = d + 2 * LANES <= dim;
        lanes low[TILE_QUERIES], high[TILE_QUERIES];
        for (int i = 0; i < n; i++) {
            low[i] = *(lanes *)(out[i] + d) * shrink[i];
            high[i] = two ? *(lanes *)(out[i] + d + LANES) * shrink[i] : (lanes){0};
        }
        for (int t = 0; t < count; t++) {
            lanes a = *(const lanes *)(value + t * dim + d);
            lanes b = two ? *(const lanes *)(value + t * dim + d + LANES) : a;
            for (int i = 0; i < n; i++) {
                low[i] += a * weight[i * TILE_TOKENS + t];
                high[i] += b * weight[i * TILE_TOKENS + t];
            }
        }
        for (int i = 0; i < n; i++) {
            *(lanes *)(out[i] + d) = low[i];
            if (two) *(lanes *)(out[i] + d + LANES) = high[i];
        }
    }
}

/* One kv head of a run of rows over tokens [begin, end): row j, at position context + j, sees what is before it
 * and itself. Into out[row][head][dim + 2]. */
static void attend_run(const float *q, const int64_t *pages, int64_t begin, int64_t end, int64_t context, int64_t rows,
                       int kv, const shape *s, float *out) {
    float score[TILE_QUERIES * TILE_TOKENS], shrink[TILE_QUERIES];
    float key[DIM_MAX * TILE_TOKENS], value[DIM_MAX * TILE_TOKENS];
    int heads = s->kv_heads * s->group, dim = s->dim, queries = (int)rows * s->group;
    int64_t value_bytes = s->is_bf16 ? 2 : 4, token_bytes = s->kv_heads * dim * value_bytes, head = kv * dim * value_bytes;
    for (int i = 0; i < queries; i++) {
        float *slot = out + ((int64_t)(i / s->group) * heads + kv * s->group + i % s->group) * (dim + 2);
        memset(slot, 0, (size_t)dim * sizeof(float));
        slot[dim] = -3.0e38f;
        slot[dim + 1] = 0.0f;
    }
    for (int64_t at = begin; at < end; at += TILE_TOKENS) {
        const char *page = (const char *)(intptr_t)pages[at / s->block_tokens] + at % s->block_tokens * token_bytes + head;
        int count = (int)(end - at < TILE_TOKENS ? end - at : TILE_TOKENS);
        /* Tokens past `count` lie in the same page; whatever they hold is masked below. */
        for (int t = 0; t < TILE_TOKENS; t += LANES)
            for (int d = 0; d < dim; d += LANES)
                turn(page + s->k_offset + t * token_bytes + d * value_bytes, token_bytes, s->is_bf16,
                     key + d * TILE_TOKENS + t);
        for (int t = 0; t < count; t++) widen(page + s->v_offset + t * token_bytes, s->is_bf16, dim, value + t * dim);
        for (int first = 0; first < queries; first += TILE_QUERIES) {
            const float *query[TILE_QUERIES];
            float *to[TILE_QUERIES];
            int n = queries - first < TILE_QUERIES ? queries - first : TILE_QUERIES;
            for (int i = 0; i < TILE_QUERIES; i++) {
                int j = first + (i < n ? i : n - 1);
                int64_t place = (int64_t)(j / s->group) * heads + kv * s->group + j % s->group;
                query[i] = q + place * dim;
                to[i] = out + place * (dim + 2);
            }
            if (n == TILE_QUERIES) score_tile(query, key, dim, TILE_QUERIES, s->scale, score);
            else for (int i = 0; i < n; i++) score_tile(query + i, key, dim, 1, s->scale, score + i * TILE_TOKENS);
            for (int i = 0; i < n; i++) {
                float *mine = score + i * TILE_TOKENS;
                int64_t sees = context + (first + i) / s->group + 1 - at;
                int seen = (int)(sees < count ? (sees < 0 ? 0 : sees) : count);
                float top = to[i][dim], sum = 0.0f;
                for (int t = 0; t < TILE_TOKENS; t++) mine[t] = t < seen ? mine[t] : -3.0e38f;
                for (int t = 0; t < TILE_TOKENS; t++) top = mine[t] > top ? mine[t] : top;
                for (int t = 0; t < TILE_TOKENS; t++) {
                    mine[t] = t < seen ? exp_fast(mine[t] - top) : 0.0f;
                    sum += mine[t];
                }
                shrink[i] = exp_fast(to[i][dim] - top);
                to[i][dim] = top;
                to[i][dim + 1] = to[i][dim + 1] * shrink[i] + sum;
            }
            if (n == TILE_QUERIES) value_tile(score, value, count, dim, TILE_QUERIES, shrink, to);
            else for (int i = 0; i < n; i++) value_tile(score + i * TILE_TOKENS, value, count, dim, 1, shrink + i, to + i);
        }
    }
}

void merge_splits(const float *parts, int64_t splits, int64_t slot, int count, int dim, float *out) {
    for (int i = 0; i < count; i++) {
        float peak = -3.0e38f, total = 0.0f;
        float *result = out + (int64_t)i * dim;
        memset(result, 0, (size_t)dim * sizeof(float));
        for (int64_t split = 0; split < splits; split++) {
            const float *part = parts + split * slot + (int64_t)i * (dim + 2);
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
    if (heads > HEADS_MAX || dim > DIM_MAX || dim % LANES) return -1;
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
        merge_splits(scratch + first_split[row] * slot, last - first_split[row], slot, heads, dim, out + row * heads * dim);
    }
    return 0;
}

/* `rows` queries of one request at positions context, context + 1, ..., whose own K and V are already in their
 * pages. `scratch` has splits * rows * q heads * (dim + 2) floats. Returns 0, or -1 as above. */
int workmem_paged_attention_run(const float *q, float *out, const int64_t *pages, float *scratch, int64_t rows,
                                int64_t context, int64_t k_offset, int64_t v_offset, int block_tokens,
                                int kv_heads, int group, int dim, int is_bf16, float scale, int threads) {
    shape s = {k_offset, v_offset, block_tokens, kv_heads, group, dim, is_bf16, scale};
    int heads = kv_heads * group;
    if (rows * group > RUN_QUERIES_MAX || dim > DIM_MAX || dim % LANES) return -1;
    if (block_tokens > BLOCK_MAX || SPLIT_TOKENS % block_tokens || block_tokens % TILE_TOKENS) return -1;
    int64_t total = context + rows, splits = (total + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    int64_t slot = rows * heads * (dim + 2);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t job = 0; job < splits * kv_heads; job++) {
        int64_t begin = job / kv_heads * SPLIT_TOKENS;
        int64_t end = begin + SPLIT_TOKENS < total ? begin + SPLIT_TOKENS : total;
        attend_run(q, pages, begin, end, context, rows, (int)(job % kv_heads), &s, scratch + job / kv_heads * slot);
    }
    merge_splits(scratch, splits, slot, (int)rows * heads, dim, out);
    return 0;
}
