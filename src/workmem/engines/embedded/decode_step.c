/* A whole decode step of a few rows, one per request: embedding, all layers, final norm and logits, in one parallel
 * region. Between operations there is a barrier and nothing else: a token passes ten operations a layer, and calling
 * each of them costs more than its arithmetic.
 *
 * Weights are row-major [out][in], bf16 or fp32; activations are fp32 throughout. A step reads every weight once, for
 * all its rows: its speed is that of memory. A row's result depends on neither its neighbours nor the number of
 * threads: every sum has one order (see dots.c).
 */
#include <omp.h>

#include "kernels.h"

#define ROWS_MAX 64
#define CHUNK 32 /* weight rows a thread takes at a time */
#define BLOCK 8 /* weight rows that are read ahead together */
#define AHEAD_BYTES_MAX 16384

typedef struct {
    const char *weight; /* [out][in] */
    const float *bias;  /* [out], or null */
} product;

typedef struct {
    product q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm; /* [hidden] */
    const float *q_norm, *k_norm;        /* [dim] each, or null */
    int64_t rotates;                     /* whether positions turn q and k in this layer */
} layer;

typedef struct {
    int64_t layers, hidden, inner, vocabulary, heads, kv_heads, dim;
    int64_t is_bf16, embedding_is_bf16; /* how weights are stored */
    int64_t kv_is_bf16, block_tokens, layer_bytes; /* how pages are: layer i's K begins at i * layer_bytes */
    double epsilon, scale;
    const char *embedding; /* [vocabulary][hidden] */
    const layer *layer;
    const float *norm; /* [hidden] */
    product head;
} model;

typedef struct {
    int64_t rows, threads, splits_total;
    const int64_t *tokens;     /* [rows] */
    const float *const *rotations; /* per row: cosines [dim], then sines [dim] */
    const int64_t *pages, *first_page, *lengths, *first_split; /* as for workmem_paged_attention */
    float *x;      /* [rows][hidden], kept from call to call */
    float *normed; /* [threads][rows][hidden] */
    float *q;      /* [rows][heads][dim] */
    float *k, *v;  /* [rows][kv heads][dim] */
    float *out;    /* [rows][heads][dim] */
    float *act;    /* [rows][inner] */
    float *parts;  /* [splits_total][heads][dim + 2] */
    float *logits; /* [rows][vocabulary] */
} step;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* out[r][i - begin] (+)= w[i] . x[r] + bias[i] for weight rows i in [begin, end). */
static void multiply(const product *p, int is_bf16, const float *x, int64_t width, int64_t rows, int64_t begin,
                     int64_t end, int adds, float *out, int64_t out_step) {
    int64_t row_bytes = width * (is_bf16 ? 2 : 4);
    int64_t ahead = BLOCK * row_bytes <= AHEAD_BYTES_MAX ? BLOCK * row_bytes : AHEAD_BYTES_MAX / BLOCK;
    float found[ROWS_MAX * BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        int count = (int)least(end - at, BLOCK);
        const char *w = p->weight + at * row_bytes;
        for (int64_t r = 0, n; r < rows; r += n) {
            n = dots_inputs(rows - r);
            dots(w, row_bytes, ahead, count, x + r * width, width, (int)n, is_bf16, found + r * BLOCK, BLOCK);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < count; i++) {
                float value = found[r * BLOCK + i] + (p->bias ? p->bias[at + i] : 0.0f);
                float *to = out + r * out_step + at - begin + i;
                *to = adds ? *to + value : value;
            }
    }
}

/* Called by all threads together, which share the weight rows; no barrier at the end. */
static void multiply_together(const product *p, int is_bf16, const float *x, int64_t width, int64_t rows, int64_t count,
                              int adds, float *out) {
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t at = 0; at < count; at += CHUNK)
        multiply(p, is_bf16, x, width, rows, at, least(at + CHUNK, count), adds, out + at, count);
}

static void rms_norm(const float *x, const float *weight, int64_t width, float epsilon, float *out) {
    lanes sums = {0};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) sums = fused(*(const lanes *)(x + d), *(const lanes *)(x + d), sums);
    float total = sum_lanes(sums);
    for (; d < width; d++) total += x[d] * x[d];
    float scale = 1.0f / __builtin_sqrtf(total / (float)width + epsilon);
    for (d = 0; d < width; d++) out[d] = x[d] * scale * weight[d];
}

/* Every thread makes its own copy: that is cheaper than to wait for somebody else's. */
static const float *normed(const model *m, const step *s, const float *weight) {
    float *own = s->normed + omp_get_thread_num() * s->rows * m->hidden;
    for (int64_t r = 0; r < s->rows; r++)
        rms_norm(s->x + r * m->hidden, weight, m->hidden, (float)m->epsilon, own + r * m->hidden);
    return own;
}

static void rotate_head(float *head, const float *rotation, int64_t dim) {
    int64_t half = dim / 2;
    const float *cosine = rotation, *sine = rotation + dim;
    for (int64_t d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        head[d] = a * cosine[d] - b * sine[d];
        head[d + half] = b * cosine[d + half] + a * sine[d + half];
    }
}

/* Norm and rotate the heads of q and k; K and V go to their pages as each row's last token. */
static void place_heads(const model *m, const step *s, const layer *l, const shape *place) {
    int64_t per_row = m->heads + 2 * m->kv_heads, dim = m->dim, value_bytes = m->kv_is_bf16 ? 2 : 4;
#pragma omp for schedule(static)
    for (int64_t job = 0; job < s->rows * per_row; job++) {
        int64_t row = job / per_row, h = job % per_row, last = s->lengths[row] - 1;
        int is_q = h < m->heads, is_k = !is_q && h < m->heads + m->kv_heads;
        int64_t kv = is_q ? 0 : is_k ? h - m->heads : h - m->heads - m->kv_heads;
        float *head = is_q ? s->q + (row * m->heads + h) * dim
                           : (is_k ? s->k : s->v) + (row * m->kv_heads + kv) * dim;
        const float *norm = is_q ? l->q_norm : is_k ? l->k_norm : 0;
        if (norm) rms_norm(head, norm, dim, (float)m->epsilon, head);
        if (l->rotates && (is_q || is_k)) rotate_head(head, s->rotations[row], dim);
        if (is_q) continue;
        char *page = (char *)(intptr_t)s->pages[s->first_page[row] + last / m->block_tokens];
        int64_t at = (last % m->block_tokens * m->kv_heads + kv) * dim * value_bytes;
        store_row(head, (int)m->kv_is_bf16, dim, page + (is_k ? place->k_offset : place->v_offset) + at);
    }
}

static void attend(const model *m, const step *s, const shape *place) {
    int64_t slot = m->heads * (m->dim + 2);
#pragma omp for schedule(dynamic, 1)
    for (int64_t split = 0; split < s->splits_total; split++) {
        int64_t row = 0;
        while (row + 1 < s->rows && s->first_split[row + 1] <= split) row++;
        int64_t begin = (split - s->first_split[row]) * SPLIT_TOKENS;
        int64_t end = least(begin + SPLIT_TOKENS, s->lengths[row]);
        attend_split(s->q + row * m->heads * m->dim, s->pages + s->first_page[row], begin, end, place, s->parts + split * slot);
    }
#pragma omp for schedule(static)
    for (int64_t job = 0; job < s->rows * m->heads; job++) {
        int64_t row = job / m->heads, head = job % m->heads, first = s->first_split[row];
        int64_t last = row + 1 < s->rows ? s->first_split[row + 1] : s->splits_total;
        merge_splits(s->parts + first * slot + head * (m->dim + 2), last - first, slot, 1, (int)m->dim, s->out + job * m->dim);
    }
}

static inline float silu(float x) {
    float e = exp_fast(x < 0 ? x : -x);
    return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* act = silu(gate(x)) * up(x) */
static void feed(const model *m, const step *s, const layer *l, const float *x) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t begin = 0; begin < m->inner; begin += CHUNK) {
        float gate[ROWS_MAX * CHUNK], up[ROWS_MAX * CHUNK];
        int64_t end = least(begin + CHUNK, m->inner);
        multiply(&l->gate, (int)m->is_bf16, x, m->hidden, s->rows, begin, end, 0, gate, CHUNK);
        multiply(&l->up, (int)m->is_bf16, x, m->hidden, s->rows, begin, end, 0, up, CHUNK);
        for (int64_t r = 0; r < s->rows; r++)
            for (int64_t i = 0; i < end - begin; i++)
                s->act[r * m->inner + begin + i] = silu(gate[r * CHUNK + i]) * up[r * CHUNK + i];
    }
}

static void run_layer(const model *m, const step *s, int64_t index) {
    const layer *l = m->layer + index;
    int is_bf16 = (int)m->is_bf16;
    int64_t k_offset = index * m->layer_bytes, width = m->heads * m->dim, kv_width = m->kv_heads * m->dim;
    shape place = {k_offset, k_offset + m->layer_bytes / 2, (int)m->block_tokens, (int)m->kv_heads,
                   (int)(m->heads / m->kv_heads), (int)m->dim, (int)m->kv_is_bf16, (float)m->scale};
    const float *x = normed(m, s, l->input_norm);
    multiply_together(&l->q, is_bf16, x, m->hidden, s->rows, width, 0, s->q);
    multiply_together(&l->k, is_bf16, x, m->hidden, s->rows, kv_width, 0, s->k);
    multiply_together(&l->v, is_bf16, x, m->hidden, s->rows, kv_width, 0, s->v);
#pragma omp barrier
    place_heads(m, s, l, &place);
    attend(m, s, &place);
    multiply_together(&l->o, is_bf16, s->out, width, s->rows, m->hidden, 1, s->x);
#pragma omp barrier
    feed(m, s, l, normed(m, s, l->post_norm));
    multiply_together(&l->down, is_bf16, s->act, m->inner, s->rows, m->hidden, 1, s->x);
#pragma omp barrier
}

/* Layers [first, last) of a step. The first call of a step begins at layer 0 and embeds the tokens; the last one ends
 * at m->layers and makes the logits. Returns 0, or -1 where a size exceeds what was compiled in. */
int workmem_decode(const model *m, const step *s, int64_t first, int64_t last) {
    if (s->rows < 1 || s->rows > ROWS_MAX) return -1;
    if (m->heads > HEADS_MAX || m->dim > DIM_MAX || m->dim % LANES) return -1;
    if (m->block_tokens > BLOCK_MAX || SPLIT_TOKENS % m->block_tokens || m->heads % m->kv_heads) return -1;
    if (first == 0) {
        int embedding_is_bf16 = (int)m->embedding_is_bf16;
        int64_t size = embedding_is_bf16 ? 2 : 4;
        for (int64_t r = 0; r < s->rows; r++)
            for (int64_t d = 0; d < m->hidden; d++)
                s->x[r * m->hidden + d] =
                    widen_one(m->embedding + (s->tokens[r] * m->hidden + d) * size, embedding_is_bf16);
    }
#pragma omp parallel num_threads((int)s->threads)
    {
        for (int64_t index = first; index < last; index++) run_layer(m, s, index);
        if (last == m->layers)
            multiply_together(&m->head, (int)m->is_bf16, normed(m, s, m->norm), m->hidden, s->rows, m->vocabulary, 0, s->logits);
    }
    return 0;
}
