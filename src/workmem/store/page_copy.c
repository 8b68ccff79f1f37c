/* Copies a page and takes the XXH3-64 checksum of each of its slices on the way, in one pass over the bytes.
 *
 * Every byte is read once, so the checksum is that of what was written to the target, whoever writes to the
 * source meanwhile. On AVX2 the target is written past the caches: it is not read from memory first, and what
 * the caller had in its cache stays there. Slices are longer than 240 bytes: XXH3 treats shorter ones otherwise. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only"
#endif

#define STRIPE 64
#define STRIPES_PER_BLOCK 16
#define SECRET_BYTES 192
/* How far ahead memory is asked for. The processor's own prefetch stops at each 4 KiB. */
#define AHEAD 1024

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

/* The default secret of XXH3. */
static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                  PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

static uint64_t load(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t lanes[8], size_t bytes)
{
    uint64_t sum = (uint64_t)bytes * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = SECRET + 11 + 16 * i;
        sum += fold(lanes[2 * i] ^ load(secret), lanes[2 * i + 1] ^ load(secret + 8));
    }
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9ull;
    return sum ^ sum >> 32;
}

#if defined(__AVX2__)

static inline __m256i mixed(__m256i lanes, __m256i data, const uint8_t *secret)
{
    __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(_mm256_add_epi64(lanes, swapped), product);
}

static inline __m256i scrambled(__m256i lanes, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

static uint64_t copy_slice(uint8_t *to, const uint8_t *from, size_t bytes)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)START);
    __m256i high = _mm256_loadu_si256((const __m256i *)(START + 4));
    const size_t stripes = (bytes - 1) / STRIPE;
    const int is_aligned = ((uintptr_t)to & 31) == 0;
    __m256i first = low, second = high;
    for (size_t i = 0, in_block = 0; i < stripes; i++) {
        const uint8_t *at = from + i * STRIPE;
        __m256i *into = (__m256i *)(to + i * STRIPE);
        _mm_prefetch((const char *)at + AHEAD, _MM_HINT_NTA);
        first = _mm256_loadu_si256((const __m256i *)at);
        second = _mm256_loadu_si256((const __m256i *)(at + 32));
        if (is_aligned) {
            _mm256_stream_si256(into, first);
            _mm256_stream_si256(into + 1, second);
        } else {
            _mm256_storeu_si256(into, first);
            _mm256_storeu_si256(into + 1, second);
        }
        low = mixed(low, first, SECRET + 8 * in_block);
        high = mixed(high, second, SECRET + 8 * in_block + 32);
        if (++in_block == STRIPES_PER_BLOCK) {
            in_block = 0;
            low = scrambled(low, SECRET + SECRET_BYTES - STRIPE);
            high = scrambled(high, SECRET + SECRET_BYTES - STRIPE + 32);
        }
    }
    /* The last 64 bytes overlap the last whole stripe, which is still at hand: nothing is read twice. */
    uint8_t last[2 * STRIPE];
    const size_t done = stripes * STRIPE, left = bytes - done;
    _mm256_storeu_si256((__m256i *)last, first);
    _mm256_storeu_si256((__m256i *)(last + 32), second);
    memcpy(last + STRIPE, from + done, left);
    memcpy(to + done, last + STRIPE, left);
    const uint8_t *end = last + left;
    low = mixed(low, _mm256_loadu_si256((const __m256i *)end), SECRET + SECRET_BYTES - STRIPE - 7);
    high = mixed(high, _mm256_loadu_si256((const __m256i *)(end + 32)), SECRET + SECRET_BYTES - STRIPE - 7 + 32);
    uint64_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
    return merged(lanes, bytes);
}

#else

static void mix(uint64_t lanes[8], const uint8_t *data, const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = load(data + 8 * i), keyed = value ^ load(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

static uint64_t copy_slice(uint8_t *to, const uint8_t *from, size_t bytes)
{
    uint64_t lanes[8];
    memcpy(lanes, START, sizeof lanes);
    const size_t stripes = (bytes - 1) / STRIPE;
    for (size_t i = 0, in_block = 0; i < stripes; i++) {
        uint8_t stripe[STRIPE];
        memcpy(stripe, from + i * STRIPE, STRIPE);
        memcpy(to + i * STRIPE, stripe, STRIPE);
        mix(lanes, stripe, SECRET + 8 * in_block);
        if (++in_block == STRIPES_PER_BLOCK) {
            in_block = 0;
            for (int k = 0; k < 8; k++) {
                lanes[k] ^= lanes[k] >> 47;
                lanes[k] = (lanes[k] ^ load(SECRET + SECRET_BYTES - STRIPE + 8 * k)) * PRIME32_1;
            }
        }
    }
    memcpy(to + stripes * STRIPE, from + stripes * STRIPE, bytes - stripes * STRIPE);
    mix(lanes, to + bytes - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
    return merged(lanes, bytes);
}

#endif

/* Writes past the caches become visible to other processors before anything that follows. */
static void make_visible(void)
{
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

/* `to` and `from` are whole pages. Of their slices those from bounds[0] to bounds[1], bounds[1] to bounds[2], ... are
 * copied, `count` of them; `sums` has a place for each. */
void workmem_copy_page(uint8_t *to, const uint8_t *from, const uint64_t *bounds, uint64_t *sums, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sums[i] = copy_slice(to + bounds[i], from + bounds[i], bounds[i + 1] - bounds[i]);
    make_visible();
}

/* The same for slices of `bytes` each that lie anywhere. */
void workmem_copy_slices(uint8_t *const *to, const uint8_t *const *from, int64_t bytes, uint64_t *sums, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        sums[i] = copy_slice(to[i], from[i], bytes);
    make_visible();
}
