// Weights of four bits: a part of isa_loops.inl, inside its namespace.

void int4(const uint8_t* q, float zero, float scale, float* out, int64_t count) {
  // Words of two columns, side by side again.
  const auto convert = [&](Uint pairs, float* to) {
    float halves[2][kLanes];
    for (int half = 0; half < 2; ++half) {
      const Vec values = __builtin_convertvector(Int(half == 0 ? pairs & 15u : pairs >> 4), Vec);
      store(halves[half], (values - splat(zero)) * splat(scale));
    }
    for (int i = 0; i < kLanes; ++i) {
      to[2 * i] = halves[0][i];
      to[2 * i + 1] = halves[1][i];
    }
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) convert(load_bytes(q + i / 2), out + i);
  if (i == count) return;
  float rest[2 * kLanes];
  convert(load_some_bytes(q + i / 2, (count - i + 1) / 2), rest);
  std::memcpy(out + i, rest, static_cast<size_t>(count - i) * sizeof(float));
}

// The even columns of a step of 2 * kLanes, whose values are the low halves of bytes, or the odd ones.
inline Vec step_weight(Uint pairs, int half, Vec scale, Vec offset) {
  return __builtin_convertvector(Int(half == 0 ? pairs & 15u : pairs >> 4), Vec) * scale + offset;
}

// The scales and offsets of groups, row after row: a column's weight is q * scale + offset of its group.
struct Int4Terms {
  const float *scales, *offsets;
  int64_t stride;
};

// M rows of x, as split_halves orders them, against W rows of q. Even and odd columns have sums of their own where there
// are few, so that one sum does not wait for the other.
template <int M, int W>
inline void dot_block_int4(const float* x, int64_t x_stride, const uint8_t* q, int64_t q_stride, Int4Terms terms,
                           int64_t group_size, int64_t K, float* out, int64_t out_stride, bool add) {
  constexpr int kChains = M * W <= 4 ? 2 : 1;
  Vec sums[kChains][M][W] = {};
  int64_t k = 0;
  for (int64_t group = 0; k < K; ++group) {
    const int64_t end = K - k < group_size ? K : k + group_size;
    Vec scale[W], offset[W];
    for (int n = 0; n < W; ++n) {
      scale[n] = splat(terms.scales[n * terms.stride + group]);
      offset[n] = splat(terms.offsets[n * terms.stride + group]);
    }
    const auto step = [&](const Uint(&pairs)[W]) {
      for (int half = 0; half < 2; ++half) {
        Vec weight[W];
        for (int n = 0; n < W; ++n) weight[n] = step_weight(pairs[n], half, scale[n], offset[n]);
        for (int m = 0; m < M; ++m) {
          const Vec row = load32(x + m * x_stride + k + half * kLanes);
          for (int n = 0; n < W; ++n) sums[half % kChains][m][n] += row * weight[n];
        }
      }
    };
    Uint pairs[W];
    for (; k + 2 * kLanes <= end; k += 2 * kLanes) {
      for (int n = 0; n < W; ++n) pairs[n] = load_bytes(q + n * q_stride + (k >> 1));
      step(pairs);
    }
    if (k == end) continue;
    // Only the last group ends within a step; x is 0 from there on.
    for (int n = 0; n < W; ++n) pairs[n] = load_some_bytes(q + n * q_stride + (k >> 1), (end - k + 1) >> 1);
    step(pairs);
    k = end;
  }
  float found[M * W + 3];
  for (int i = 0; i < M * W; ++i) {
    if (kChains == 2) sums[0][i / W][i % W] += sums[kChains - 1][i / W][i % W];
  }
  int i = 0;
  for (; i + 4 <= M * W; i += 4) totals(&sums[0][0][0] + i, found + i);
  for (; i < M * W; ++i) found[i] = total(sums[0][i / W][i % W]);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < W; ++n) {
      float* place = out + m * out_stride + n;
      *place = add ? *place + found[m * W + n] : found[m * W + n];
    }
  }
}

// The terms of `count` groups: whole vectors are written.
template <Format F>
inline void group_terms(const void* from, const uint8_t* zeros, int64_t count, float* scales, float* offsets) {
  const auto* data = static_cast<const typename Stored<F>::Type*>(from);
  for (int64_t g = 0; g < count; g += kLanes) {
    const bool whole = g + kLanes <= count;
    const Vec scale = whole ? load<F>(data + g) : load_some<F>(data + g, count - g);
    Vec zero = splat(8.0f);
    if (zeros != nullptr) {
      zero = __builtin_convertvector(Int(whole ? load_bytes(zeros + g) : load_some_bytes(zeros + g, count - g)), Vec);
    }
    store(scales + g, scale);
    store(offsets + g, -zero * scale);
  }
}

inline void group_terms(const Int4Rows& w, int64_t row, int64_t first, int64_t count, float* scales, float* offsets) {
  const void* from = w.scales.at(row, first).data;
  const uint8_t* zeros = w.zeros == nullptr ? nullptr : w.zeros + row * w.scales.stride + first;
  switch (w.scales.format) {
    case Format::kF32:
      return group_terms<Format::kF32>(from, zeros, count, scales, offsets);
    case Format::kF16:
      return group_terms<Format::kF16>(from, zeros, count, scales, offsets);
    case Format::kBf16:
      return group_terms<Format::kBf16>(from, zeros, count, scales, offsets);
  }
}

// Rows of w whose terms are made at once: short rows' lie one after the other, and fill vectors together.
constexpr int64_t kTermRows = 16;

// M rows of x against all rows of w, for columns k .. k + columns - 1.
template <int M>
void dot_tile_int4(const float* x, int64_t x_stride, const Int4Rows& w, int64_t N, int64_t k, int64_t columns,
                   float* out, int64_t out_stride) {
  constexpr int kRows = M <= 4 ? 2 : 1;
  const int64_t first = k / w.group_size, groups = (columns + w.group_size - 1) / w.group_size;
  alignas(64) float scales[kTermRows * kInt4Groups + kLanes], offsets[kTermRows * kInt4Groups + kLanes];
  for (int64_t n = 0; n < N; n += kTermRows) {
    const int64_t rows = N - n < kTermRows ? N - n : kTermRows;
    const bool together = groups == w.scales.stride;
    for (int64_t i = 0; i < (together ? 1 : rows); ++i) {
      group_terms(w, n + i, first, together ? rows * groups : groups, scales + i * groups, offsets + i * groups);
    }
    const auto block = [&](auto width, int64_t i) {
      const Int4Terms terms{scales + i * groups, offsets + i * groups, groups};
      dot_block_int4<M, decltype(width)::value>(x, x_stride, w.q + (n + i) * w.q_stride + k / 2, w.q_stride, terms,
                                               w.group_size, columns, out + n + i, out_stride, k > 0);
    };
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) block(Count<kRows>{}, i);
    for (; i < rows; ++i) block(Count<1>{}, i);
  }
}

void dot_int4(const float* x, int64_t x_stride, int64_t M, const Int4Rows& w, int64_t N, int64_t K, float* out,
              int64_t out_stride) {
  using Tile = void (*)(const float*, int64_t, const Int4Rows&, int64_t, int64_t, int64_t, float*, int64_t);
  static constexpr Tile kTiles[] = {dot_tile_int4<1>, dot_tile_int4<2>, dot_tile_int4<3>, dot_tile_int4<4>,
                                    dot_tile_int4<5>, dot_tile_int4<6>, dot_tile_int4<7>, dot_tile_int4<8>};
  alignas(64) float split[kInt4Rows * kTileColumns];
  // Eight rows of x stay in half of a first-level cache.
  const int64_t width = M <= 4 ? kTileColumns : kTileColumns / 2;
  for (int64_t k = 0; k < K; k += width) {
    const int64_t columns = K - k < width ? K - k : width;
    const int64_t stride = (columns + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    for (int64_t m = 0; m < M; ++m) split_halves(x + m * x_stride + k, columns, split + m * stride);
    for (int64_t m = 0; m < M; m += 8) {
      const int64_t rows = M - m < 8 ? M - m : 8;
      kTiles[rows - 1](split + m * stride, stride, w, N, k, columns, out + m * out_stride, out_stride);
    }
  }
}
