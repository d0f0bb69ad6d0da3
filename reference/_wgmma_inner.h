/* Inner loops of _wgmma.pyx: the rules [T1] to [T6] of tensor_core.py over 64 x 64 tiles.
 *
 * Plain C99 whose innermost loops run over the 64 columns of a tile and vectorise by themselves.
 * The arithmetic is integer arithmetic carried by floats where SSE2 has no integer instruction for
 * it (a shift by a different amount in every lane). Each such float operation is exact:
 *
 * e4m3, in float32 (24 bits):
 *   a * b            4 x 4 significant bits, magnitude 2^-18 .. 2^18: exact, normal.
 *   * 2^(13 - Emax)  a power of two, Emax in -12..127, so the factor is 2^-114 .. 2^25: exact while
 *                    the result is normal. A subnormal result is below 1 however it is rounded or
 *                    flushed, and the truncation that follows makes it 0, as it should be.
 *   (int32_t)        C truncates toward zero: [T4]. |addend| < 2^15, |sum| < 2^20: no overflow.
 *   (float)sum       below 2^24: exact. Clearing its low 10 mantissa bits is [T6]: 14 bits.
 *   * 2^(Emax - 13)  14 bits times a power of two, at least 2^-25, below 2^128: exact, normal.
 *   A step without a non-zero product only truncates C. That is done on the bits of C, so that a C
 *   below 2^-114 (whose factor would overflow) and a subnormal C need no float operation.
 *
 * bf16, in float64 (53 bits):
 *   a * b            8 x 8 significant bits, magnitude 2^-266 .. 2^256: exact, normal.
 *   * 2^(25 - Emax)  Emax in -133..255: a normal power of two; product 2^-495 .. 2^27: exact.
 *   (int32_t)        |addend| <= 255 * 255 * 2^11; 16 of them stay below 2^31. C (below 2^26) would
 *                    not fit beside them and is added in float64, where the sum (33 bits) is exact.
 *   clearing 29 mantissa bits of the float64 sum leaves 24: [T6].
 *   * 2^(Emax - 25)  exact. Values from 2^-126 on have 24 bits: exact or infinite as float32;
 *                    smaller ones are truncated to a multiple of 2^-149 through an integer.
 *
 * Since no operation rounds, neither the order of evaluation nor contraction nor the vector width
 * can change a bit. Special operands take part as zeros and are put right afterwards.
 */
#ifndef SNAPMLA_WGMMA_INNER_H
#define SNAPMLA_WGMMA_INNER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One function body, several instruction sets, chosen when the module is loaded. Needs ifunc, that
 * is glibc; elsewhere the baseline (SSE2, NEON) is used. */
#if defined(WG_CLONES) /* -DWG_CLONES= builds the baseline alone */
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#if __GNUC__ >= 12
#define WG_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WG_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WG_CLONES
#endif

#define WG_TILE 64
#define WG_K8 32  /* k of an e4m3 step */
#define WG_K16 16 /* k of a bf16 step */
#define WG_NAN 0x7fffffffu
#define WG_INF 0x7f800000u
#define WG_MIN(x, y) ((x) < (y) ? (x) : (y))
#define WG_MAX(x, y) ((x) > (y) ? (x) : (y))

static inline float wg_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t wg_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline double wg_double(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline uint64_t wg_bits64(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }

static inline int wg_is_special(uint32_t bits) { return (bits & WG_INF) == WG_INF; }

/* ------------------------------------------------------------------------------------ e4m3 ---- */

/* Exponents are stored as max(field, 1) + 63, and 0 for a zero (or NaN) operand. Two non-zero
 * operands sum to 128..156 and so stand above every sum with a zero in it. */
#define WG_E8_PRODUCT 128 /* least sum of a non-zero product */
#define WG_E8_BIAS 140    /* sum - this = exponent of the product */

/* [T2] of `count` codes: values, exponents; returns whether there is a NaN among them. */
static inline int wg_decode_e4m3(const uint8_t *restrict code, int count, float *restrict value,
                                 uint8_t *restrict exponent)
{
    int i;
    uint8_t nan = 0;
    for (i = 0; i < count; i++) {
        /* Integer significand times a power of two: no branch around a float operation, which
         * would keep the loop from vectorising. */
        int32_t magnitude = code[i] & 0x7f, field = magnitude >> 3;
        int32_t significand = (magnitude & 7) | (field > 0 ? 8 : 0);
        uint32_t power = (uint32_t)WG_MAX(field, 1) + (127 - 7 - 3);
        significand = magnitude == 0x7f ? 0 : significand;
        significand = code[i] >> 7 ? -significand : significand;
        value[i] = (float)significand * wg_float(power << 23);
    }
    for (i = 0; i < count; i++) {
        uint8_t magnitude = code[i] & 0x7f;
        uint8_t field = magnitude >> 3;
        uint8_t biased = (uint8_t)((field > 1 ? field : 1) + 63);
        nan |= magnitude == 0x7f;
        exponent[i] = magnitude == 0 || magnitude == 0x7f ? 0 : biased;
    }
    return nan;
}

/* One step's operands of a tile. */
typedef struct {
    float a_value[WG_TILE][WG_K8];
    float b_value[WG_K8][WG_TILE];
    uint8_t a_exponent[WG_TILE][WG_K8];
    uint8_t b_exponent[WG_K8][WG_TILE];
} wg_step8;

WG_CLONES
static int wg_load_a8(wg_step8 *s, const uint8_t *a, ptrdiff_t a_row, int m, uint8_t *a_nan)
{
    int i, any = 0;
    for (i = 0; i < m; i++) {
        int nan = wg_decode_e4m3(a + i * a_row, WG_K8, s->a_value[i], s->a_exponent[i]);
        a_nan[i] |= (uint8_t)nan;
        any |= nan;
    }
    return any;
}

WG_CLONES
static int wg_load_b8(wg_step8 *s, const uint8_t *b, ptrdiff_t b_column, ptrdiff_t b_k, int n,
                      uint8_t *b_nan)
{
    uint8_t code[WG_K8][WG_TILE];
    int j, k, any = 0;
    memset(code, 0, sizeof code);
    if (b_column == 1) {
        for (k = 0; k < WG_K8; k++) memcpy(code[k], b + k * b_k, (size_t)n);
    } else {
        for (j = 0; j < n; j++)
            for (k = 0; k < WG_K8; k++) code[k][j] = b[j * b_column + k * b_k];
    }
    for (k = 0; k < WG_K8; k++)
        any |= wg_decode_e4m3(code[k], WG_TILE, s->b_value[k], s->b_exponent[k]);
    if (any)
        for (k = 0; k < WG_K8; k++)
            for (j = 0; j < WG_TILE; j++) b_nan[j] |= (code[k][j] & 0x7f) == 0x7f;
    return any;
}

#define WG_TOP8(q)                                                        \
    sum = (uint8_t)(e[k + q] + s->b_exponent[k + q][j]);                  \
    best = WG_MAX(best, sum);
#define WG_ADD8(q) total += (int32_t)(v[k + q] * s->b_value[k + q][j] * scale[j]);

/* One step of m rows and 64 columns; d holds finite accumulators, as bits. */
WG_CLONES
static void wg_rows8(const wg_step8 *s, int m, uint32_t (*d)[WG_TILE])
{
    int i, j, k;
    for (i = 0; i < m; i++) {
        const float *v = s->a_value[i];
        const uint8_t *e = s->a_exponent[i];
        uint32_t *c = d[i];
        uint8_t top[WG_TILE];
        float scale[WG_TILE], unit[WG_TILE];
        int32_t addends[WG_TILE];

        memset(top, 0, sizeof top);
        for (k = 0; k < WG_K8; k += 8)
            for (j = 0; j < WG_TILE; j++) {
                uint8_t sum, best = top[j];
                WG_TOP8(0) WG_TOP8(1) WG_TOP8(2) WG_TOP8(3)
                WG_TOP8(4) WG_TOP8(5) WG_TOP8(6) WG_TOP8(7)
                top[j] = best;
            }
        /* [T3] with C; a zero C has an exponent below every product's, and -12 is the least of
         * those: where there is no product, the result of this path is not used. */
        for (j = 0; j < WG_TILE; j++) {
            int32_t emax = (int32_t)top[j] - WG_E8_BIAS;
            int32_t c_exponent = (int32_t)((c[j] >> 23) & 0xff) - 127;
            emax = WG_MAX(emax, WG_MAX(c_exponent, -12));
            scale[j] = wg_float((uint32_t)(127 + 13 - emax) << 23);
            unit[j] = wg_float((uint32_t)(127 - 13 + emax) << 23);
            addends[j] = (int32_t)(wg_float(c[j]) * scale[j]);
        }
        /* [T4] [T5] */
        for (k = 0; k < WG_K8; k += 8)
            for (j = 0; j < WG_TILE; j++) {
                int32_t total = addends[j];
                WG_ADD8(0) WG_ADD8(1) WG_ADD8(2) WG_ADD8(3)
                WG_ADD8(4) WG_ADD8(5) WG_ADD8(6) WG_ADD8(7)
                addends[j] = total;
            }
        /* [T6] */
        for (j = 0; j < WG_TILE; j++) {
            float kept = wg_float(wg_bits((float)addends[j]) & 0xfffffc00u);
            uint32_t sum = wg_bits(kept * unit[j]);
            uint32_t only_c = c[j] & 0xfffffc00u;
            only_c = only_c << 1 ? only_c : 0;
            c[j] = top[j] >= WG_E8_PRODUCT ? sum : only_c;
        }
    }
}

/* Replaces special accumulators by 0; returns whether there were any. */
static int wg_clear_specials(uint32_t (*d)[WG_TILE], int m)
{
    int i, j;
    uint32_t any = 0;
    for (i = 0; i < m; i++)
        for (j = 0; j < WG_TILE; j++) any |= (d[i][j] & WG_INF) == WG_INF;
    if (any)
        for (i = 0; i < m; i++)
            for (j = 0; j < WG_TILE; j++)
                if (wg_is_special(d[i][j])) d[i][j] = 0;
    return any != 0;
}

/* [T1] for a finished chain: a NaN stays NaN in later steps, and so does an infinite C. */
static void wg_specials8(uint32_t (*d)[WG_TILE], const uint32_t *c, ptrdiff_t c_row, int m, int n,
                         const uint8_t *a_nan, const uint8_t *b_nan)
{
    int i, j;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            uint32_t before = c[i * c_row + j];
            if (a_nan[i] || b_nan[j] || (before & WG_NAN) > WG_INF)
                d[i][j] = WG_NAN;
            else if (wg_is_special(before))
                d[i][j] = before;
        }
}

/* The chain of one tile: m, n <= 64. c holds C and receives D. */
static void wg_tile8(const uint8_t *a, ptrdiff_t a_row, const uint8_t *b, ptrdiff_t b_column,
                     ptrdiff_t b_k, uint32_t *c, ptrdiff_t c_row, int m, int n, ptrdiff_t depth)
{
    wg_step8 step;
    uint32_t d[WG_TILE][WG_TILE];
    uint8_t a_nan[WG_TILE] = {0}, b_nan[WG_TILE] = {0};
    int i, special;
    ptrdiff_t k;
    memset(d, 0, sizeof d);
    for (i = 0; i < m; i++) memcpy(d[i], c + i * c_row, (size_t)n * 4);
    special = wg_clear_specials(d, m);
    for (k = 0; k < depth; k += WG_K8) {
        special |= wg_load_a8(&step, a + k, a_row, m, a_nan);
        special |= wg_load_b8(&step, b + k * b_k, b_column, b_k, n, b_nan);
        wg_rows8(&step, m, d);
    }
    if (special) wg_specials8(d, c, c_row, m, n, a_nan, b_nan);
    for (i = 0; i < m; i++) memcpy(c + i * c_row, d[i], (size_t)n * 4);
}

/* ------------------------------------------------------------------------------------ bf16 ---- */

#define WG_E16_FLOOR (-133)
#define WG_E16_ZERO (-300) /* exponent of a zero (or special) operand: every sum is below the floor */

/* [T2] of `count` bf16; returns whether there is a NaN or infinity among them. */
static inline int wg_decode_bf16(const uint16_t *restrict bits, int count, double *restrict value,
                                 int16_t *restrict exponent)
{
    int i;
    uint16_t special = 0;
    for (i = 0; i < count; i++) {
        /* The magnitude as an integer times a power of two, so that nothing depends on how the
         * machine treats subnormal float32. */
        int32_t word = bits[i], field = (word >> 7) & 0xff;
        int32_t significand = (word & 0x7f) | (field > 0 ? 0x80 : 0);
        int32_t power = WG_MAX(field, 1) - 127 - 7;
        double scale = wg_double((uint64_t)(uint32_t)(1023 + power) << 52);
        significand = field == 0xff ? 0 : significand;
        significand = word >> 15 ? -significand : significand;
        value[i] = (double)significand * scale;
    }
    for (i = 0; i < count; i++) {
        int16_t field = (int16_t)((bits[i] >> 7) & 0xff);
        int16_t e = (int16_t)((field > 1 ? field : 1) - 127);
        int zero = (bits[i] & 0x7fff) == 0 || field == 0xff;
        special |= field == 0xff;
        exponent[i] = zero ? WG_E16_ZERO : e;
    }
    return special;
}

typedef struct {
    double a_value[WG_TILE][WG_K16];
    double b_value[WG_K16][WG_TILE];
    int16_t a_exponent[WG_TILE][WG_K16];
    int16_t b_exponent[WG_K16][WG_TILE];
    uint16_t a_bits[WG_TILE][WG_K16];
    uint16_t b_bits[WG_K16][WG_TILE];
    uint8_t a_special[WG_TILE], b_special[WG_TILE];
} wg_step16;

/* Loads one step's operands; returns whether there is a special operand. */
WG_CLONES
static int wg_load16(wg_step16 *s, const uint16_t *a, ptrdiff_t a_row, const uint16_t *b,
                     ptrdiff_t b_column, int m, int n)
{
    int i, j, k, any = 0;
    memset(s->b_bits, 0, sizeof s->b_bits);
    memset(s->b_special, 0, sizeof s->b_special);
    for (i = 0; i < m; i++) {
        memcpy(s->a_bits[i], a + i * a_row, sizeof s->a_bits[i]);
        s->a_special[i] =
            (uint8_t)wg_decode_bf16(s->a_bits[i], WG_K16, s->a_value[i], s->a_exponent[i]);
        any |= s->a_special[i];
    }
    for (j = 0; j < n; j++)
        for (k = 0; k < WG_K16; k++) {
            uint16_t bits = b[j * b_column + k];
            s->b_bits[k][j] = bits;
            s->b_special[j] |= (bits & 0x7f80) == 0x7f80;
        }
    for (k = 0; k < WG_K16; k++)
        any |= wg_decode_bf16(s->b_bits[k], WG_TILE, s->b_value[k], s->b_exponent[k]);
    return any;
}

#define WG_TOP16(q)                                               \
    sum = (int16_t)(e[k + q] + s->b_exponent[k + q][j]);          \
    best = WG_MAX(best, sum);
#define WG_ADD16(q) total += (int32_t)(v[k + q] * s->b_value[k + q][j] * scale[j]);

/* [T6] of one bf16 sum: float32 bits of the magnitude-truncated total * unit. */
static inline uint32_t wg_pack16(double total, double unit)
{
    double value = wg_double(wg_bits64(total) & 0xffffffffe0000000ull) * unit;
    double magnitude = value < 0 ? -value : value;
    int32_t tiny = magnitude < 0x1p-126 ? 1 : 0;
    uint32_t subnormal = (uint32_t)(int32_t)(tiny ? magnitude * 0x1p149 : 0.0);
    uint32_t normal = wg_bits((float)(tiny ? 0.0 : magnitude));
    uint32_t bits = tiny ? subnormal : normal;
    uint32_t sign = value < 0 && bits != 0 ? 0x80000000u : 0; /* what vanishes is +0 */
    return bits | sign;
}

/* One step of m rows and 64 columns; d holds finite accumulators, as bits. */
WG_CLONES
static void wg_rows16(const wg_step16 *s, int m, uint32_t (*d)[WG_TILE])
{
    int i, j, k;
    for (i = 0; i < m; i++) {
        const double *v = s->a_value[i];
        const int16_t *e = s->a_exponent[i];
        uint32_t *c = d[i];
        int16_t top[WG_TILE];
        double scale[WG_TILE], unit[WG_TILE], c_addend[WG_TILE];
        int32_t products[WG_TILE];

        for (j = 0; j < WG_TILE; j++) top[j] = WG_E16_FLOOR;
        for (k = 0; k < WG_K16; k += 8)
            for (j = 0; j < WG_TILE; j++) {
                int16_t sum, best = top[j];
                WG_TOP16(0) WG_TOP16(1) WG_TOP16(2) WG_TOP16(3)
                WG_TOP16(4) WG_TOP16(5) WG_TOP16(6) WG_TOP16(7)
                top[j] = best;
            }
        for (j = 0; j < WG_TILE; j++) {
            int32_t field = (int32_t)((c[j] >> 23) & 0xff);
            int32_t mantissa = (int32_t)(c[j] & 0x7fffff);
            int32_t significand = field ? mantissa | 0x800000 : mantissa;
            int32_t c_exponent = WG_MAX(field, 1) - 127;
            int32_t emax = top[j];
            emax = significand && c_exponent > emax ? c_exponent : emax;
            scale[j] = wg_double((uint64_t)(uint32_t)(1023 + 25 - emax) << 52);
            unit[j] = wg_double((uint64_t)(uint32_t)(1023 - 25 + emax) << 52);
            significand = c[j] >> 31 ? -significand : significand;
            /* C = significand * 2^(c_exponent - 23) in units of 2^(emax - 25), truncated. */
            c_addend[j] = (double)(int32_t)(
                (double)significand *
                wg_double((uint64_t)(uint32_t)(1023 - 23 + c_exponent) << 52) * scale[j]);
            products[j] = 0;
        }
        for (k = 0; k < WG_K16; k += 8)
            for (j = 0; j < WG_TILE; j++) {
                int32_t total = products[j];
                WG_ADD16(0) WG_ADD16(1) WG_ADD16(2) WG_ADD16(3)
                WG_ADD16(4) WG_ADD16(5) WG_ADD16(6) WG_ADD16(7)
                products[j] = total;
            }
        for (j = 0; j < WG_TILE; j++)
            c[j] = wg_pack16((double)products[j] + c_addend[j], unit[j]);
    }
}

/* [T1] of one output: the value that specials decide, or `finite` where there is none. */
static uint32_t wg_special16(const wg_step16 *s, int i, int j, uint32_t before, uint32_t finite)
{
    int k, nan = (before & WG_NAN) > WG_INF;
    int plus = before == WG_INF, minus = before == (WG_INF | 0x80000000u);
    for (k = 0; k < WG_K16; k++) {
        uint16_t a = s->a_bits[i][k], b = s->b_bits[k][j];
        uint16_t a_magnitude = a & 0x7fff, b_magnitude = b & 0x7fff;
        if (a_magnitude < 0x7f80 && b_magnitude < 0x7f80) continue;
        if (a_magnitude > 0x7f80 || b_magnitude > 0x7f80 || !a_magnitude || !b_magnitude)
            nan = 1;
        else if ((a ^ b) & 0x8000)
            minus = 1;
        else
            plus = 1;
    }
    if (nan || (plus && minus)) return WG_NAN;
    if (plus) return WG_INF;
    return minus ? (WG_INF | 0x80000000u) : finite;
}

/* One step where an operand or an accumulator is special. */
static void wg_special_step16(const wg_step16 *s, int m, int n, uint32_t (*d)[WG_TILE])
{
    uint32_t before[WG_TILE][WG_TILE];
    int i, j;
    memcpy(before, d, sizeof before);
    wg_clear_specials(d, m);
    wg_rows16(s, m, d);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++)
            if (s->a_special[i] || s->b_special[j] || wg_is_special(before[i][j]))
                d[i][j] = wg_special16(s, i, j, before[i][j], d[i][j]);
}

static int wg_has_special(uint32_t (*d)[WG_TILE], int m)
{
    int i, j;
    uint32_t any = 0;
    for (i = 0; i < m; i++)
        for (j = 0; j < WG_TILE; j++) any |= (d[i][j] & WG_INF) == WG_INF;
    return any != 0;
}

static void wg_tile16(const uint16_t *a, ptrdiff_t a_row, const uint16_t *b, ptrdiff_t b_column,
                      uint32_t *c, ptrdiff_t c_row, int m, int n, ptrdiff_t depth)
{
    wg_step16 step;
    uint32_t d[WG_TILE][WG_TILE];
    int i;
    ptrdiff_t k;
    memset(d, 0, sizeof d);
    for (i = 0; i < m; i++) memcpy(d[i], c + i * c_row, (size_t)n * 4);
    for (k = 0; k < depth; k += WG_K16) {
        int special = wg_load16(&step, a + k, a_row, b + k, b_column, m, n);
        if (special || wg_has_special(d, m))
            wg_special_step16(&step, m, n, d);
        else
            wg_rows16(&step, m, d);
    }
    for (i = 0; i < m; i++) memcpy(c + i * c_row, d[i], (size_t)n * 4);
}

/* ---------------------------------------------------------------------------- whole matrices ---- */

/* a[m][depth] (rows a_row apart), b(j, k) at b[j * b_column + k * b_k], c[m][n] (rows c_row apart)
 * in and out; depth a multiple of 32. All strides in elements. */
static void wg_chain_e4m3(const uint8_t *a, ptrdiff_t a_row, const uint8_t *b, ptrdiff_t b_column,
                          ptrdiff_t b_k, uint32_t *c, ptrdiff_t c_row, ptrdiff_t m, ptrdiff_t n,
                          ptrdiff_t depth)
{
    ptrdiff_t i, j;
    for (j = 0; j < n; j += WG_TILE)
        for (i = 0; i < m; i += WG_TILE)
            wg_tile8(a + i * a_row, a_row, b + j * b_column, b_column, b_k, c + i * c_row + j,
                     c_row, (int)WG_MIN(m - i, WG_TILE), (int)WG_MIN(n - j, WG_TILE), depth);
}

/* The same for bf16, b[n][depth] with rows b_column apart; depth a multiple of 16. */
static void wg_chain_bf16(const uint16_t *a, ptrdiff_t a_row, const uint16_t *b,
                          ptrdiff_t b_column, uint32_t *c, ptrdiff_t c_row, ptrdiff_t m,
                          ptrdiff_t n, ptrdiff_t depth)
{
    ptrdiff_t i, j;
    for (j = 0; j < n; j += WG_TILE)
        for (i = 0; i < m; i += WG_TILE)
            wg_tile16(a + i * a_row, a_row, b + j * b_column, b_column, c + i * c_row + j, c_row,
                      (int)WG_MIN(m - i, WG_TILE), (int)WG_MIN(n - j, WG_TILE), depth);
}

#endif
