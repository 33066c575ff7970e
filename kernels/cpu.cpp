// The engine's operations for CPUs. Every output element is computed in one order of operations that
// depends on nothing but the element's own row: not on the number of rows, their place, or the threads.
//
// Names: M rows, N outputs, K inputs, D head size, Hq query heads, Hkv key/value heads.
// Weights are packed in panels of 32 outputs, [N/32][K][32], so that one pass streams them once and an
// output is a plain chain of multiply-adds over k = 0..K-1 for any M. In bf16, outputs n and n + 16 of a
// panel lie side by side: one load of 32-bit lanes gives both vectors by a shift and a mask.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };

// Threads that take the next piece of work as they get to it, the caller among them: one that the
// system has put aside holds up only the piece it has in hand. OpenMP's static shares and spinning
// barriers made a step several times slower on a busy machine.
class Pool {
  public:
    template <class F>
    void run(long count, int threads, F work) {
        if (threads <= 1 || count <= 1) { for (long i = 0; i < count; ++i) work(i); return; }
        std::lock_guard<std::mutex> one_caller(mutex_);
        while ((int)size_ < threads - 1) { std::thread(&Pool::serve, this).detach(); ++size_; }
        call_.store([](void* f, long i) { (*static_cast<F*>(f))(i); });
        context_.store(&work);
        count_.store(count);
        done_.store(0);
        uint32_t epoch = epoch_.load() + 1;
        ticket_.store((uint64_t)epoch << 32);
        epoch_.store(epoch);
        if (sleeping_.load() > 0) epoch_.notify_all();
        take(epoch);
        while (done_.load(std::memory_order_acquire) < count) pause();
        ticket_.store(((uint64_t)epoch << 32) | kClosed);  // a late thread finds nothing to take
    }

  private:
    static constexpr uint32_t kClosed = 0x7fffffff;
    static constexpr int kSpins = 20000;  // about 1 ms: longer than the host needs between two operations of a step

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::this_thread::yield();
#endif
    }
    void take(uint32_t epoch) {
        auto call = call_.load();
        void* context = context_.load();
        long count = count_.load();
        for (;;) {
            uint64_t ticket = ticket_.load();
            if ((uint32_t)(ticket >> 32) != epoch || (long)(uint32_t)ticket >= count) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            call(context, (long)(uint32_t)ticket);
            done_.fetch_add(1, std::memory_order_release);
        }
    }
    void serve() {
        uint32_t seen = 0;
        for (;;) {
            for (int i = 0; i < kSpins && epoch_.load() == seen; ++i) pause();
            if (epoch_.load() == seen) {
                sleeping_.fetch_add(1);
                epoch_.wait(seen);
                sleeping_.fetch_sub(1);
            }
            seen = epoch_.load();
            take(seen);
        }
    }

    std::mutex mutex_;
    size_t size_ = 0;
    std::atomic<void (*)(void*, long)> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<long> count_{0}, done_{0};
    std::atomic<uint64_t> ticket_{kClosed};
    std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleeping_{0};
};
static Pool& pool() { static Pool* threads = new Pool; return *threads; }  // never destroyed: threads may still wait on it

static constexpr int kPanel = 32;
#ifdef __AVX512F__
static constexpr int kTile = 8;  // 16 accumulators of 32 registers
#else
static constexpr int kTile = 3;  // 12 accumulators of 16 half as wide registers
#endif

static inline f32x16 load(const float* p) { f32x16 v; std::memcpy(&v, p, 64); return v; }
static inline f32x16 load(const bf16* p) {
#ifdef __AVX512F__  // the compiler makes five instructions of the general form
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    u16x16 half; std::memcpy(&half, p, 32);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}
static inline void load_panel_row(const float* p, f32x16& low, f32x16& high) { low = load(p); high = load(p + 16); }
static inline void load_panel_row(const bf16* p, f32x16& low, f32x16& high) {
    u32x16 pairs; std::memcpy(&pairs, p, 64);
    low = (f32x16)(pairs << 16);
    high = (f32x16)(pairs & 0xffff0000u);
}
static constexpr int kAhead = 4096;  // bytes: rows of weights asked for before their turn
static inline float get(const float* p) { return *p; }
static inline float get(const bf16* p) {
    uint32_t bits = (uint32_t)p->bits << 16; float v; std::memcpy(&v, &bits, 4); return v;
}
static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, 64); }
static inline void store(bf16* p, f32x16 v) {  // to nearest even; NaN stays NaN
    u32x16 u = (u32x16)v;
    u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    i32x16 nan = v != v;
    rounded = (rounded & ~(u32x16)nan) | ((u32x16)nan & 0x7fc0u);
    u16x16 half = __builtin_convertvector(rounded, u16x16); std::memcpy(p, &half, 32);
}
static inline void put(float* p, float v) { *p = v; }
static inline void put(bf16* p, float v) {
    uint32_t u; std::memcpy(&u, &v, 4);
    p->bits = v != v ? 0x7fc0 : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float sum16(f32x16 v) {
    f32x8 lo, hi; std::memcpy(&lo, &v, 32); std::memcpy(&hi, (char*)&v + 32, 32); lo += hi;
    f32x4 a, b; std::memcpy(&a, &lo, 16); std::memcpy(&b, (char*)&lo + 16, 16); a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
}
// e^x by range reduction to |r| <= ln2/2 and a degree 6 polynomial (Cephes' coefficients); x <= 88.
static inline f32x16 exp16(f32x16 x) {
    x = x < -87.0f ? (f32x16{} - 87.0f) : x;
    f32x16 n = x * 1.44269504088896341f;
    n = (n + 12582912.0f) - 12582912.0f;  // round to an integer: 1.5 * 2^23 leaves no room for a fraction
    f32x16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i32x16 scale = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return p * (f32x16)scale;
}

template <class W, int R>
static inline void multiply(const float* x_KR, const W* w, long K, float* out) {
    f32x16 acc[R][2] = {};
    for (long k = 0; k < K; ++k) {
        f32x16 w0, w1;
        __builtin_prefetch((const char*)(w + k * kPanel) + kAhead);
        load_panel_row(w + k * kPanel, w0, w1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float x = x_KR[k * R + r];
            acc[r][0] += w0 * x;
            acc[r][1] += w1 * x;
        }
    }
    for (int r = 0; r < R; ++r) { store(out + r * kPanel, acc[r][0]); store(out + r * kPanel + 16, acc[r][1]); }
}
template <class W>
static void multiply(int rows, const float* x, const W* w, long K, float* out) {
    switch (rows) {
        case 1: return multiply<W, 1>(x, w, K, out);
        case 2: return multiply<W, 2>(x, w, K, out);
        case 3: return multiply<W, 3>(x, w, K, out);
#ifdef __AVX512F__
        case 4: return multiply<W, 4>(x, w, K, out);
        case 5: return multiply<W, 5>(x, w, K, out);
        case 6: return multiply<W, 6>(x, w, K, out);
        case 7: return multiply<W, 7>(x, w, K, out);
        case 8: return multiply<W, 8>(x, w, K, out);
#endif
    }
}

template <class T, class O>
static void linear(const T* x, const T* w, const T* bias, O* out, long M, long N, long K, int threads) {
    static thread_local std::vector<float> x_tiles;  // [tile][K][rows of the tile]
    x_tiles.resize((size_t)M * K);
    float* tiles = x_tiles.data();
    long panels = (N + kPanel - 1) / kPanel;
    for (long m = 0; m < M; m += kTile) {
        long rows = std::min<long>(kTile, M - m);
        for (long r = 0; r < rows; ++r)
            for (long k = 0; k < K; ++k) tiles[m * K + k * rows + r] = get(x + (m + r) * K + k);
    }
    bool widen = sizeof(T) == 2 && M > kTile;  // many tiles: turn the panel into floats once
    long grain = std::clamp<long>(panels / (32 * threads), 1, 8), pieces = (panels + grain - 1) / grain;
    pool().run(pieces, threads, [&](long piece) {
        static thread_local std::vector<float> wide;
        for (long p = piece * grain; p < std::min(panels, (piece + 1) * grain); ++p) {
            const T* panel = w + p * K * kPanel;
            if (widen) {
                wide.resize(K * kPanel);
                for (long i = 0; i < K * kPanel; i += kPanel) {
                    f32x16 low, high;
                    load_panel_row(panel + i, low, high);
                    store(wide.data() + i, low);
                    store(wide.data() + i + 16, high);
                }
            }
            long width = std::min<long>(kPanel, N - p * kPanel);
            for (long m = 0; m < M; m += kTile) {
                int rows = (int)std::min<long>(kTile, M - m);
                float acc[kTile * kPanel];
                if (widen) multiply<float>(rows, tiles + m * K, wide.data(), K, acc);
                else multiply<T>(rows, tiles + m * K, panel, K, acc);
                for (int r = 0; r < rows; ++r) {
                    O* to = out + (m + r) * N + p * kPanel;
                    if (width == kPanel && !bias) {
                        store(to, load(acc + r * kPanel));
                        store(to + 16, load(acc + r * kPanel + 16));
                        continue;
                    }
                    for (long n = 0; n < width; ++n)
                        put(to + n, acc[r * kPanel + n] + (bias ? get(bias + p * kPanel + n) : 0.0f));
                }
            }
        }
    });
}

// Calls work(m) for every row, `grain` rows a piece.
template <class F>
static void each_row(long M, long grain, int threads, F work) {
    pool().run((M + grain - 1) / grain, threads, [&](long piece) {
        for (long m = piece * grain; m < std::min(M, (piece + 1) * grain); ++m) work(m);
    });
}

// Norm of one row of `n` floats in place: row * rsqrt(mean(row^2) + eps) * weight.
template <class T>
static inline void normalise(float* row, const T* weight, long n, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < n; i += 16) { f32x16 v = load(row + i); squares += v * v; }
    float scale = 1.0f / std::sqrt(sum16(squares) / (float)n + eps);
    for (long i = 0; i < n; i += 16) store(row + i, load(row + i) * scale * load(weight + i));
}

template <class T>
static void rms_norm(const T* x, const T* weight, T* out, long M, long H, float eps, int threads) {
    each_row(M, 16, threads, [&](long m) {
        std::vector<float> row(H);
        for (long i = 0; i < H; i += 16) store(row.data() + i, load(x + m * H + i));
        normalise(row.data(), weight, H, eps);
        for (long i = 0; i < H; i += 16) store(out + m * H + i, load(row.data() + i));
    });
}

template <class T>
static void silu_mul(const T* gate_up, T* out, long M, long I, int threads) {
    each_row(M, 4, threads, [&](long m) {
        for (long i = 0; i < I; i += 16) {
            f32x16 gate = load(gate_up + m * 2 * I + i), up = load(gate_up + m * 2 * I + I + i);
            f32x16 negated = -gate;
            negated = negated > 88.0f ? (f32x16{} + 88.0f) : negated;
            store(out + m * I + i, gate / (1.0f + exp16(negated)) * up);
        }
    });
}

template <class T>
static inline void turn(const T* from, const T* norm, float eps, const float* cos, const float* sin, long D, T* to) {
    float head[512], turned[512];
    for (long i = 0; i < D; i += 16) store(head + i, load(from + i));
    if (norm) normalise(head, norm, D, eps);
    long half = D / 2;
    for (long i = 0; i < half; ++i) {
        turned[i] = head[i] * cos[i] - head[i + half] * sin[i];
        turned[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
    }
    for (long i = 0; i < D; i += 16) store(to + i, load(turned + i));
}

template <class T>
static void rope_store(const T* qkv, long stride, long Hq, long Hkv, long D, const T* q_norm, const T* k_norm, float eps,
                       const float* cos, const float* sin, const int32_t* positions, const int64_t* slots, T* q_out,
                       T* k_cache, T* v_cache, long M, int threads) {
    each_row(M, 4, threads, [&](long m) {
        const float *c = cos + (long)positions[m] * (D / 2), *s = sin + (long)positions[m] * (D / 2);
        const T *q = qkv + m * stride, *k = q + Hq * D, *v = k + Hkv * D;
        for (long h = 0; h < Hq; ++h) turn(q + h * D, q_norm, eps, c, s, D, q_out + (m * Hq + h) * D);
        for (long h = 0; h < Hkv; ++h) turn(k + h * D, k_norm, eps, c, s, D, k_cache + (slots[m] * Hkv + h) * D);
        std::memcpy(v_cache + slots[m] * Hkv * D, v, sizeof(T) * Hkv * D);
    });
}

// Calls work(j, row) for the cache rows of positions begin + j in order, block by block.
template <class F>
static inline void each_position(const int32_t* table, long block, long begin, long length, F work) {
    for (long j = 0; j < length;) {
        long at = begin + j, inside = at % block, run = std::min(block - inside, length - j);
        long row = (long)table[at / block] * block + inside;
        for (long end = j + run; j < end; ++j, ++row) work(j, row);
    }
}

// out[g] = sum over positions of weights[g] * value, for B heads at once: a value is read once for all.
template <class T, int ND, int B>
static inline void mix(const T* v_cache, const int32_t* table, long block, long begin, long length, long stride,
                       const float* weights, long padded, const float* scales, T* out) {
    f32x16 acc[B][ND] = {};
    each_position(table, block, begin, length, [&](long j, long row) {
        const T* v = v_cache + row * stride;
#pragma GCC unroll 16
        for (int d = 0; d < ND; ++d) {
            f32x16 value = load(v + d * 16);
#pragma GCC unroll 4
            for (int g = 0; g < B; ++g) acc[g][d] += value * weights[g * padded + j];
        }
    });
    for (int g = 0; g < B; ++g)
        for (int d = 0; d < ND; ++d) store(out + (g * ND + d) * 16, acc[g][d] * scales[g]);
}

template <class T, int ND>
static void attend(const T* q, const T* k_cache, const T* v_cache, const int32_t* table, long block, long begin, long end,
                   long G, long Hkv, float scale, std::vector<float>& scratch, T* out) {
    constexpr long D = ND * 16;
    long length = end - begin, padded = (length + 15) / 16 * 16, stride = Hkv * D;
    scratch.resize((size_t)G * (padded + D + 1));
    float *scores = scratch.data(), *query = scores + G * padded, *scales = query + G * D;
    for (long i = 0; i < G * D; i += 16) store(query + i, load(q + i));
    each_position(table, block, begin, length, [&](long j, long row) {
        f32x16 key[ND];
#pragma GCC unroll 16
        for (int d = 0; d < ND; ++d) key[d] = load(k_cache + row * stride + d * 16);
        for (long g = 0; g < G; ++g) {
            f32x16 dot = load(query + g * D) * key[0];
#pragma GCC unroll 16
            for (int d = 1; d < ND; ++d) dot += load(query + g * D + d * 16) * key[d];
            scores[g * padded + j] = sum16(dot) * scale;
        }
    });
    for (long g = 0; g < G; ++g) {
        float* row = scores + g * padded;
        float top = row[0];
        for (long j = 1; j < length; ++j) top = std::max(top, row[j]);
        for (long j = length; j < padded; ++j) row[j] = top;
        for (long j = 0; j < padded; j += 16) store(row + j, exp16(load(row + j) - top));
        for (long j = length; j < padded; ++j) row[j] = 0.0f;
        f32x16 total = {};
        for (long j = 0; j < padded; j += 16) total += load(row + j);
        scales[g] = 1.0f / sum16(total);
    }
    constexpr int B = ND <= 4 ? 3 : 1;  // B * ND accumulators stay in registers
    long g = 0;
    for (; g + B <= G; g += B)
        mix<T, ND, B>(v_cache, table, block, begin, length, stride, scores + g * padded, padded, scales + g, out + g * D);
    for (; g < G; ++g)
        mix<T, ND, 1>(v_cache, table, block, begin, length, stride, scores + g * padded, padded, scales + g, out + g * D);
}

template <class T>
static void attention(const T* q, const T* k_cache, const T* v_cache, const int32_t* tables, long table_stride, long block,
                      const int32_t* row_seq, const int32_t* begin, const int32_t* end, float scale, T* out, long M, long Hq,
                      long Hkv, long D, int threads) {
    long G = Hq / Hkv;
    pool().run(M * Hkv, threads, [&](long i) {
        static thread_local std::vector<float> scores;
        long m = i / Hkv, h = i % Hkv;
        const T *q_head = q + (m * Hq + h * G) * D, *k = k_cache + h * D, *v = v_cache + h * D;
        T* o = out + (m * Hq + h * G) * D;
        const int32_t* table = tables + (long)row_seq[m] * table_stride;
        switch (D) {
            case 16: attend<T, 1>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
            case 32: attend<T, 2>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
            case 64: attend<T, 4>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
            case 96: attend<T, 6>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
            case 128: attend<T, 8>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
            case 256: attend<T, 16>(q_head, k, v, table, block, begin[m], end[m], G, Hkv, scale, scores, o); break;
        }
    });
}

#define EXPORT(T, SUFFIX)                                                                                                  \
    extern "C" void linear_##SUFFIX(const T* x, const T* w, const T* bias, T* out, long M, long N, long K, int threads) {  \
        linear(x, w, bias, out, M, N, K, threads);                                                                         \
    }                                                                                                                      \
    extern "C" void logits_##SUFFIX(const T* x, const T* w, const T* bias, float* out, long M, long N, long K,             \
                                    int threads) {                                                                         \
        linear(x, w, bias, out, M, N, K, threads);                                                                         \
    }                                                                                                                      \
    extern "C" void rms_norm_##SUFFIX(const T* x, const T* weight, T* out, long M, long H, float eps, int threads) {       \
        rms_norm(x, weight, out, M, H, eps, threads);                                                                      \
    }                                                                                                                      \
    extern "C" void silu_mul_##SUFFIX(const T* gate_up, T* out, long M, long I, int threads) {                             \
        silu_mul(gate_up, out, M, I, threads);                                                                             \
    }                                                                                                                      \
    extern "C" void rope_store_##SUFFIX(const T* qkv, long stride, long Hq, long Hkv, long D, const T* q_norm,             \
                                        const T* k_norm, float eps, const float* cos, const float* sin,                    \
                                        const int32_t* positions, const int64_t* slots, T* q_out, T* k_cache, T* v_cache,  \
                                        long M, int threads) {                                                             \
        rope_store(qkv, stride, Hq, Hkv, D, q_norm, k_norm, eps, cos, sin, positions, slots, q_out, k_cache, v_cache, M,   \
                   threads);                                                                                               \
    }                                                                                                                      \
    extern "C" void attention_##SUFFIX(const T* q, const T* k_cache, const T* v_cache, const int32_t* tables,              \
                                       long table_stride, long block, const int32_t* row_seq, const int32_t* begin,        \
                                       const int32_t* end, float scale, T* out, long M, long Hq, long Hkv, long D,         \
                                       int threads) {                                                                      \
        attention(q, k_cache, v_cache, tables, table_stride, block, row_seq, begin, end, scale, out, M, Hq, Hkv, D,        \
                  threads);                                                                                                \
    }
EXPORT(float, f32)
EXPORT(bf16, bf16)
