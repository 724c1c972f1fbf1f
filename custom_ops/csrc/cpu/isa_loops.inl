// The loops of Isa, included by one file for each instruction set, which defines PICCARD_ISA (the table's name),
// PICCARD_ISA_NAME and PICCARD_LANES (floats in a vector). Everything here has internal linkage and uses no library
// templates: code compiled for a larger instruction set must not be what the linker picks for the others.
#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace piccard {

namespace {

constexpr int kLanes = PICCARD_LANES;
// Rows of x and of a weight that are multiplied together: their sums fill the registers but for room to widen halves.
constexpr int kTileRows = kLanes == 16 ? 6 : 4;
constexpr int kWidthRows = kLanes == 16 ? 4 : 3;
constexpr int kHalvesWidthRows = kLanes == 16 ? 4 : 2;
constexpr int kFewWidthRows = 4;                       // Of a weight, with fewer rows of x.
constexpr int64_t kStripBytes = 1 << 17;               // Of a weight that meets all rows of x before the next.
constexpr int64_t kFewRows = kLanes == 16 ? 24 : 12;   // Rows of x up to which no part of a weight is widened first.
constexpr int kMixRows = kLanes == 16 ? 6 : 3;         // Rows of a mix that share what is read.
constexpr int64_t kTileColumns = kIsaColumns;          // Columns that are widened at once,
constexpr int64_t kTileBatch = 48;                     // and for how many rows of x before the next.

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Uint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
typedef uint8_t Byte __attribute__((vector_size(kLanes)));

// A number that a template takes as the type of an argument.
template <int N>
struct Count {
  static constexpr int value = N;
};

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A difference with 0 is the value itself, whatever its sign, so that the compiler leaves it out.
inline Vec splat(float value) { return value - Vec{}; }

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  // 2^112 brings the exponent's bias from 15 to 127, and makes halves below the normal range right as well.
  const float magnitude = bits<float>(rest << 13) * bits<float>(uint32_t{0x77800000});
  const uint32_t special = rest >= 0x7c00u ? 0x7f800000u | rest << 13 : bits<uint32_t>(magnitude);
  return bits<float>(sign | special);
}

// To nearest, ties to even.
inline uint16_t float_to_half(float value) {
  const uint32_t word = bits<uint32_t>(value);
  const uint32_t sign = word >> 16 & 0x8000u;
  const uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the bits of a half below the normal range at the end of the sum.
    const float sum = bits<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t word = bits<uint32_t>(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(word >> 16 | 0x40u);
  return static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

template <Format F>
struct Stored {
  using Type = uint16_t;
};
template <>
struct Stored<Format::kF32> {
  using Type = float;
};

template <Format F>
inline float one(const uint16_t* p) {
  return F == Format::kF16 ? half_to_float(*p) : bits<float>(static_cast<uint32_t>(*p) << 16);
}
template <Format F>
inline float one(const float* p) {
  return *p;
}

template <Format F>
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// kLanes bytes as words. The compiler would take them apart one by one.
inline Uint load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return bits<Uint>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bits<Uint>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Byte b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, Uint);
#endif
}

// The first `count` bytes, the others 0.
inline Uint load_some_bytes(const uint8_t* p, int64_t count) {
  uint8_t padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(count));
  return load_bytes(padded);
}

template <Format F>
inline Vec load(const uint16_t* p) {
  if constexpr (F == Format::kBf16) {
    Half h;
    std::memcpy(&h, p, sizeof h);
    return bits<Vec>(__builtin_convertvector(h, Uint) << 16);
  }
#if defined(__AVX512F__)
  return bits<Vec>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return bits<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

inline Vec load32(const float* p) { return load<Format::kF32>(p); }

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// The first `count` lanes, the others 0: nothing is read past the end.
template <Format F, typename Element>
inline Vec load_some(const Element* p, int64_t count) {
  Element padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(Element));
  return load<F>(padded);
}

inline void store_some(float* p, Vec v, int64_t count) { std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(float)); }

#if defined(__AVX2__)
// The vector, or the sum of its halves.
inline __m256 folded(Vec v) {
  __m256 halves[kLanes / 8];
  std::memcpy(halves, &v, sizeof halves);
  return kLanes == 16 ? _mm256_add_ps(halves[0], halves[kLanes / 8 - 1]) : halves[0];
}
#endif

inline float total(Vec v) {
#if defined(__AVX2__)
  const __m256 wide = folded(v);
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// The totals of four vectors.
inline void totals(const Vec* v, float* out) {
#if defined(__AVX2__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(folded(v[0]), folded(v[1])), _mm256_hadd_ps(folded(v[2]), folded(v[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = total(v[i]);
#endif
}

// The totals of M rows of W vectors to out, or added to it: four at once where there are four rows or columns.
template <int M, int W>
inline void put_sums(const Vec (*sums)[W], float* out, int64_t out_stride, bool add) {
  float found[M][W];
  if constexpr (W == 4) {
    for (int m = 0; m < M; ++m) totals(sums[m], found[m]);
  } else if constexpr (M == 4) {
    for (int n = 0; n < W; ++n) {
      const Vec column[4] = {sums[0][n], sums[1][n], sums[2][n], sums[3][n]};
      float of_rows[4];
      totals(column, of_rows);
      for (int m = 0; m < 4; ++m) found[m][n] = of_rows[m];
    }
  } else {
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < W; ++n) found[m][n] = total(sums[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < W; ++n) {
      float* place = out + m * out_stride + n;
      *place = add ? *place + found[m][n] : found[m][n];
    }
  }
}

// M rows of x against W rows of w, kept in registers. With few of them the columns are split into U chains of sums, so
// that one does not wait for the other.
template <Format F, int M, int W, int U>
inline void dot_block(const float* x, int64_t x_stride, const typename Stored<F>::Type* w, int64_t w_stride, int64_t K,
                      float* out, int64_t out_stride, bool add) {
  Vec sums[U][M][W] = {};
  int64_t k = 0;
  for (; k + U * kLanes <= K; k += U * kLanes) {
    for (int u = 0; u < U; ++u) {
      Vec rows[M];
      for (int m = 0; m < M; ++m) rows[m] = load32(x + m * x_stride + k + u * kLanes);
      for (int n = 0; n < W; ++n) {
        const Vec weight = load<F>(w + n * w_stride + k + u * kLanes);
        for (int m = 0; m < M; ++m) sums[u][m][n] += rows[m] * weight;
      }
    }
  }
  for (; k < K; k += kLanes) {
    const int64_t left = K - k < kLanes ? K - k : kLanes;
    Vec rows[M];
    for (int m = 0; m < M; ++m) {
      const float* p = x + m * x_stride + k;
      rows[m] = left == kLanes ? load32(p) : load_some<Format::kF32>(p, left);
    }
    for (int n = 0; n < W; ++n) {
      const auto* p = w + n * w_stride + k;
      const Vec weight = left == kLanes ? load<F>(p) : load_some<F>(p, left);
      for (int m = 0; m < M; ++m) sums[0][m][n] += rows[m] * weight;
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int u = 1; u < U; ++u) {
      for (int n = 0; n < W; ++n) sums[0][m][n] += sums[u][m][n];
    }
  }
  put_sums<M, W>(sums[0], out, out_stride, add);
}

// Weight rows of a strip.
inline int64_t strip_rows(int64_t row_bytes) {
  const int64_t groups = kStripBytes / row_bytes / kWeightRows;
  return kWeightRows * (groups < 1 ? 1 : groups);
}

template <Format F, int M, int W>
inline void dot_strip(const float* x, int64_t x_stride, const typename Stored<F>::Type* w, int64_t w_stride, int64_t N,
                      int64_t K, float* out, int64_t out_stride, bool add) {
  constexpr int kChains = M == 1 ? 2 : 1;
  int64_t n = 0;
  for (; n + W <= N; n += W) {
    dot_block<F, M, W, kChains>(x, x_stride, w + n * w_stride, w_stride, K, out + n, out_stride, add);
  }
  for (; n < N; ++n) dot_block<F, M, 1, kChains>(x, x_stride, w + n * w_stride, w_stride, K, out + n, out_stride, add);
}

template <Format F>
void dot_few(const float* x, int64_t x_stride, int64_t M, Matrix w, int64_t N, int64_t K, float* out, int64_t out_stride,
             bool add) {
  const auto* all = static_cast<const typename Stored<F>::Type*>(w.data);
  const int64_t strip = strip_rows(K * bytes_of(F));
  for (int64_t n = 0; n < N; n += strip) {
    const int64_t width = N - n < strip ? N - n : strip;
    const auto* data = all + n * w.stride;
    const auto rows = [&](auto count, auto wide, int64_t m) {
      dot_strip<F, decltype(count)::value, decltype(wide)::value>(x + m * x_stride, x_stride, data, w.stride, width, K,
                                                                 out + m * out_stride + n, out_stride, add);
    };
    int64_t m = 0;
    for (; m + kTileRows <= M; m += kTileRows) rows(Count<kTileRows>{}, Count<kWidthRows>{}, m);
    for (; m + 3 <= M; m += 3) rows(Count<3>{}, Count<kFewWidthRows>{}, m);
    for (; m + 2 <= M; m += 2) rows(Count<2>{}, Count<kFewWidthRows>{}, m);
    if (m < M) rows(Count<1>{}, Count<kFewWidthRows>{}, m);
  }
}

// bfloat16 is the upper half of a float32, so a word of two needs a shift for the even column and a mask for the odd
// one, where widening every column on its own takes twice the work. For that x comes with the even columns of every
// 2 * kLanes before the odd ones, and zeros up to a multiple of that.
inline Vec load_halves(const uint16_t* w, int64_t left, int half) {
  Uint words;
  if (left >= 2 * kLanes) {
    std::memcpy(&words, w, sizeof words);
  } else {
    uint16_t padded[2 * kLanes] = {};
    std::memcpy(padded, w, static_cast<size_t>(left) * sizeof(uint16_t));
    std::memcpy(&words, padded, sizeof words);
  }
  return bits<Vec>(half == 0 ? words << 16 : words & 0xffff0000u);
}

template <int M, int W>
inline void dot_block_halves(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t K, float* out,
                             int64_t out_stride, bool add) {
  constexpr int kChains = M * W <= 4 ? 2 : 1;
  Vec sums[kChains][M][W] = {};
  for (int64_t k = 0; k < K; k += 2 * kLanes) {
    for (int half = 0; half < 2; ++half) {
      Vec rows[M];
      for (int m = 0; m < M; ++m) rows[m] = load32(x + m * x_stride + k + half * kLanes);
      for (int n = 0; n < W; ++n) {
        const Vec weight = load_halves(w + n * w_stride + k, K - k, half);
        for (int m = 0; m < M; ++m) sums[half % kChains][m][n] += rows[m] * weight;
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < W; ++n) {
      if (kChains == 2) sums[0][m][n] += sums[kChains - 1][m][n];
    }
  }
  put_sums<M, W>(sums[0], out, out_stride, add);
}

template <int M, int W>
inline void dot_strip_halves(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t N, int64_t K,
                             float* out, int64_t out_stride, bool add) {
  int64_t n = 0;
  for (; n + W <= N; n += W) {
    dot_block_halves<M, W>(x, x_stride, w + n * w_stride, w_stride, K, out + n, out_stride, add);
  }
  for (; n < N; ++n) dot_block_halves<M, 1>(x, x_stride, w + n * w_stride, w_stride, K, out + n, out_stride, add);
}

inline void split_halves(const float* x, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += 2 * kLanes, out += 2 * kLanes) {
    if (count - k >= 2 * kLanes) {
      for (int i = 0; i < kLanes; ++i) out[i] = x[k + 2 * i];
      for (int i = 0; i < kLanes; ++i) out[kLanes + i] = x[k + 2 * i + 1];
      continue;
    }
    for (int i = 0; i < 2 * kLanes; ++i) out[i / 2 + i % 2 * kLanes] = k + i < count ? x[k + i] : 0.0f;
  }
}

void dot_few_halves(const float* x, int64_t x_stride, int64_t M, Matrix w, int64_t N, int64_t K, float* out,
                    int64_t out_stride, bool add) {
  alignas(64) float split[kFewRows * kTileColumns];
  for (int64_t k = 0; k < K; k += kTileColumns) {
    const int64_t columns = K - k < kTileColumns ? K - k : kTileColumns;
    const int64_t stride = (columns + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    for (int64_t m = 0; m < M; ++m) split_halves(x + m * x_stride + k, columns, split + m * stride);
    const bool more = add || k > 0;
    const int64_t strip = strip_rows(columns * 2);
    for (int64_t n = 0; n < N; n += strip) {
      const int64_t width = N - n < strip ? N - n : strip;
      const auto* data = static_cast<const uint16_t*>(w.data) + n * w.stride + k;
      const auto rows = [&](auto count, auto wide, int64_t m) {
        dot_strip_halves<decltype(count)::value, decltype(wide)::value>(
            split + m * stride, stride, data, w.stride, width, columns, out + m * out_stride + n, out_stride, more);
      };
      int64_t m = 0;
      for (; m + kTileRows <= M; m += kTileRows) rows(Count<kTileRows>{}, Count<kHalvesWidthRows>{}, m);
      for (; m + 3 <= M; m += 3) rows(Count<3>{}, Count<kFewWidthRows>{}, m);
      for (; m + 2 <= M; m += 2) rows(Count<2>{}, Count<kFewWidthRows>{}, m);
      if (m < M) rows(Count<1>{}, Count<kFewWidthRows>{}, m);
    }
  }
}

void widen(Format format, const void* from, float* to, int64_t count);

// Many rows of x: a tile of w is widened once for all of them.
void dot_many(const float* x, int64_t x_stride, int64_t M, Matrix w, int64_t N, int64_t K, float* out,
              int64_t out_stride, bool add) {
  alignas(64) float tile[kWeightRows * kTileColumns];
  for (int64_t k = 0; k < K; k += kTileColumns) {
    const int64_t columns = K - k < kTileColumns ? K - k : kTileColumns;
    for (int64_t m = 0; m < M; m += kTileBatch) {
      const int64_t rows = M - m < kTileBatch ? M - m : kTileBatch;
      for (int64_t n = 0; n < N; n += kWeightRows) {
        const int64_t width = N - n < kWeightRows ? N - n : kWeightRows;
        Matrix part = w.at(n, k);
        if (w.format != Format::kF32) {
          for (int64_t i = 0; i < width; ++i) widen(w.format, part.row(i).data, tile + i * columns, columns);
          part = {Format::kF32, tile, columns};
        }
        dot_few<Format::kF32>(x + m * x_stride + k, x_stride, rows, part, width, columns, out + m * out_stride + n,
                              out_stride, add || k > 0);
      }
    }
  }
}

void dot_rows(const float* x, int64_t x_stride, int64_t M, Matrix w, int64_t N, int64_t K, float* out,
              int64_t out_stride, bool add) {
  if (M > kFewRows) return dot_many(x, x_stride, M, w, N, K, out, out_stride, add);
  switch (w.format) {
    case Format::kF32:
      return dot_few<Format::kF32>(x, x_stride, M, w, N, K, out, out_stride, add);
    case Format::kF16:
      return dot_few<Format::kF16>(x, x_stride, M, w, N, K, out, out_stride, add);
    case Format::kBf16:
      return dot_few_halves(x, x_stride, M, w, N, K, out, out_stride, add);
  }
}

#include "panel_loops.inl"

// M rows of out, V vectors of columns.
template <Format F, int M, int V>
inline void mix_block(const float* p, int64_t p_stride, const typename Stored<F>::Type* rows, int64_t stride, int64_t T,
                      float* out, int64_t out_stride) {
  Vec sums[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) sums[m][v] = load32(out + m * out_stride + v * kLanes);
  }
  for (int64_t t = 0; t < T; ++t) {
    Vec weights[M];
    for (int m = 0; m < M; ++m) weights[m] = splat(p[m * p_stride + t]);
    for (int v = 0; v < V; ++v) {
      const Vec row = load<F>(rows + t * stride + v * kLanes);
      for (int m = 0; m < M; ++m) sums[m][v] += weights[m] * row;
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(out + m * out_stride + v * kLanes, sums[m][v]);
  }
}

template <Format F, int M>
inline void mix_tile(const float* p, int64_t p_stride, const typename Stored<F>::Type* rows, int64_t stride, int64_t T,
                     int64_t C, float* out, int64_t out_stride) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= C; c += 4 * kLanes) mix_block<F, M, 4>(p, p_stride, rows + c, stride, T, out + c, out_stride);
  for (; c + kLanes <= C; c += kLanes) mix_block<F, M, 1>(p, p_stride, rows + c, stride, T, out + c, out_stride);
  if (c == C) return;
  for (int m = 0; m < M; ++m) {
    float* place = out + m * out_stride + c;
    Vec sum = load_some<Format::kF32>(place, C - c);
    for (int64_t t = 0; t < T; ++t) sum += splat(p[m * p_stride + t]) * load_some<F>(rows + t * stride + c, C - c);
    store_some(place, sum, C - c);
  }
}

template <Format F, int M = kMixRows>
inline void mix_tile_rows(const float* p, int64_t p_stride, int64_t count, const typename Stored<F>::Type* rows,
                          int64_t stride, int64_t T, int64_t C, float* out, int64_t out_stride) {
  if (count == M) return mix_tile<F, M>(p, p_stride, rows, stride, T, C, out, out_stride);
  if constexpr (M > 1) mix_tile_rows<F, M - 1>(p, p_stride, count, rows, stride, T, C, out, out_stride);
}

template <Format F>
void mix_format(const float* p, int64_t p_stride, int64_t M, Matrix rows, int64_t T, int64_t C, float* out,
                int64_t out_stride) {
  const auto* data = static_cast<const typename Stored<F>::Type*>(rows.data);
  // Tiles of like height: four rows are two of two, not one of three and one of one, whose few sums wait for each other.
  const int64_t tiles = (M + kMixRows - 1) / kMixRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t m = M * tile / tiles, next = M * (tile + 1) / tiles;
    mix_tile_rows<F>(p + m * p_stride, p_stride, next - m, data, rows.stride, T, C, out + m * out_stride, out_stride);
  }
}

void mix_rows(const float* p, int64_t p_stride, int64_t M, Matrix rows, int64_t T, int64_t C, float* out,
              int64_t out_stride) {
  switch (rows.format) {
    case Format::kF32:
      return mix_format<Format::kF32>(p, p_stride, M, rows, T, C, out, out_stride);
    case Format::kF16:
      return mix_format<Format::kF16>(p, p_stride, M, rows, T, C, out, out_stride);
    case Format::kBf16:
      return mix_format<Format::kBf16>(p, p_stride, M, rows, T, C, out, out_stride);
  }
}

template <Format F>
void widen_format(const void* from, float* to, int64_t count) {
  const auto* data = static_cast<const typename Stored<F>::Type*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load<F>(data + i));
  for (; i < count; ++i) to[i] = one<F>(data + i);
}

void widen(Format format, const void* from, float* to, int64_t count) {
  switch (format) {
    case Format::kF32:
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      return;
    case Format::kF16:
      return widen_format<Format::kF16>(from, to, count);
    case Format::kBf16:
      return widen_format<Format::kBf16>(from, to, count);
  }
}

void narrow(Format format, const float* from, void* to, int64_t count) {
  if (format == Format::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = format == Format::kF16 ? float_to_half(from[i]) : float_to_bfloat(from[i]);
  }
}

// e^x to about 1 ulp: 2^n times a Taylor polynomial on [-ln 2 / 2, ln 2 / 2], whose first term left out is below 5e-9.
inline Vec exponential(Vec x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  x = x > splat(88.0f) ? splat(88.0f) : x;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const Vec shifter = splat(12582912.0f);
  const Vec shifted = x * splat(1.44269504088896341f) + shifter;
  const Vec n = shifted - shifter;
  Vec r = x - n * splat(0.693359375f);
  r = r + n * splat(2.12194440054690583e-4f);
  Vec y = splat(1.0f / 5040.0f);
  y = y * r + splat(1.0f / 720.0f);
  y = y * r + splat(1.0f / 120.0f);
  y = y * r + splat(1.0f / 24.0f);
  y = y * r + splat(1.0f / 6.0f);
  y = y * r + splat(0.5f);
  y = y * r + splat(1.0f);
  y = y * r + splat(1.0f);
  return y * bits<Vec>((bits<Uint>(shifted) + 127u) << 23);
}

// Run `step` on vectors of inputs, the last one padded with zeros.
template <typename Step>
inline void each(int64_t count, float* out, const Step& step) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, step(i, int64_t{kLanes}));
  if (i < count) store_some(out + i, step(i, count - i), count - i);
}

inline Vec load_up_to(const float* p, int64_t count) {
  return count == kLanes ? load32(p) : load_some<Format::kF32>(p, count);
}

float largest_of(const float* x, int64_t count, float scale) {
  Vec most = splat(x[0] * scale);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec values = load32(x + i) * splat(scale);
    most = values > most ? values : most;
  }
  float largest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  for (; i < count; ++i) largest = x[i] * scale > largest ? x[i] * scale : largest;
  return largest;
}

void softmax(float* x, int64_t count, float scale) {
  const Vec largest = splat(largest_of(x, count, scale));
  Vec sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec values = exponential(load32(x + i) * splat(scale) - largest);
    sums += values;
    store(x + i, values);
  }
  if (i < count) {
    store_some(x + i, exponential(load_some<Format::kF32>(x + i, count - i) * splat(scale) - largest), count - i);
    sums += load_some<Format::kF32>(x + i, count - i);
  }
  const Vec factor = splat(1.0f / total(sums));
  each(count, x, [&](int64_t j, int64_t n) { return load_up_to(x + j, n) * factor; });
}

void sigmoid(const float* x, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) {
    return splat(1.0f) / (splat(1.0f) + exponential(-load_up_to(x + i, n)));
  });
}

void swiglu(const float* gate, const float* up, float weight, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) {
    const Vec g = load_up_to(gate + i, n);
    return g / (splat(1.0f) + exponential(-g)) * load_up_to(up + i, n) * splat(weight);
  });
}

float sum_of_squares(const float* x, int64_t count) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec v = load32(x + i);
    sums += v * v;
  }
  if (i < count) {
    const Vec v = load_some<Format::kF32>(x + i, count - i);
    sums += v * v;
  }
  return total(sums);
}

void scaled(const float* x, float scale, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return load_up_to(x + i, n) * splat(scale); });
}

void product(const float* x, const float* y, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return load_up_to(x + i, n) * load_up_to(y + i, n); });
}

void added(const float* x, float* out, int64_t count) {
  each(count, out, [&](int64_t i, int64_t n) { return load_up_to(out + i, n) + load_up_to(x + i, n); });
}

#include "int4_loops.inl"

void fp8(const uint8_t* bytes, float scale, float* out, int64_t count) {
  // Exponent and mantissa move to their places in a float, whose bias is 120 larger: 2^120, in two exact steps.
  const Vec rebias = splat(bits<float>(uint32_t{0x7b800000}));
  const auto convert = [&](Uint word) {
    const Vec magnitude = bits<Vec>((word & 0x7fu) << 20) * rebias;
    const Uint nan = bits<Uint>(Int((word & 0x7fu) == 0x7fu)) & 0x7fc00000u;
    return bits<Vec>(bits<Uint>(magnitude) | nan | (word & 0x80u) << 24) * splat(scale);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, convert(load_bytes(bytes + i)));
  if (i < count) store_some(out + i, convert(load_some_bytes(bytes + i, count - i)), count - i);
}

}  // namespace

extern const Isa PICCARD_ISA;
const Isa PICCARD_ISA = {PICCARD_ISA_NAME, dot_rows, kPanel,         pack_panels, dot_panels, mix_rows, widen,    narrow,
                         softmax,          sigmoid,  swiglu, sum_of_squares, scaled,  product,  added, int4, dot_int4, fp8};

}  // namespace piccard
