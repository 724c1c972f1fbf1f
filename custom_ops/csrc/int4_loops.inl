// Products with weights of four bits, unpacked in registers: a part of isa_loops.inl, inside its namespace.

// Pairs of columns as words, the even one in the lowest four bits and the odd one above it; zeros past `left` columns.
inline Uint load_pairs(const uint8_t* q, int64_t left) {
  Byte bytes = {};
  std::memcpy(&bytes, q, left >= 2 * kLanes ? sizeof bytes : static_cast<size_t>((left + 1) / 2));
  return __builtin_convertvector(bytes, Uint);
}

// M rows of x, as split_halves orders them, against W rows of q. A column's weight is q * scale + offset of its group,
// of which [row][group] come. Even and odd columns have sums of their own where there are few, so that one sum does not
// wait for the other.
template <int M, int W>
inline void dot_block_int4(const float* x, int64_t x_stride, const uint8_t* q, int64_t q_stride,
                           const float (*scales)[kInt4Groups], const float (*offsets)[kInt4Groups], int64_t group_size,
                           int64_t K, float* out, int64_t out_stride, bool add) {
  constexpr int kChains = M * W <= 4 ? 2 : 1;
  Vec sums[kChains][M][W] = {};
  int64_t k = 0;
  for (int64_t group = 0; k < K; ++group) {
    const int64_t end = K - k < group_size ? K : k + group_size;
    Vec scale[W], offset[W];
    for (int n = 0; n < W; ++n) {
      scale[n] = splat(scales[n][group]);
      offset[n] = splat(offsets[n][group]);
    }
    for (; k < end; k += 2 * kLanes) {
      Uint pairs[W];
      for (int n = 0; n < W; ++n) pairs[n] = load_pairs(q + n * q_stride + k / 2, end - k);
      for (int half = 0; half < 2; ++half) {
        Vec weight[W];
        for (int n = 0; n < W; ++n) {
          const Uint value = half == 0 ? pairs[n] & 15u : pairs[n] >> 4;
          weight[n] = __builtin_convertvector(Int(value), Vec) * scale[n] + offset[n];
        }
        for (int m = 0; m < M; ++m) {
          const Vec row = load32(x + m * x_stride + k + half * kLanes);
          for (int n = 0; n < W; ++n) sums[half % kChains][m][n] += row * weight[n];
        }
      }
    }
    k = end;
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < W; ++n) {
      if (kChains == 2) sums[0][m][n] += sums[kChains - 1][m][n];
      float* place = out + m * out_stride + n;
      const float found = total(sums[0][m][n]);
      *place = add ? *place + found : found;
    }
  }
}

// The terms of `count` groups of a row, from `first` on.
inline void group_terms(const Int4Rows& w, int64_t row, int64_t first, int64_t count, float* scales, float* offsets) {
  widen(w.scales.format, w.scales.at(row, first).data, scales, count);
  const uint8_t* zeros = w.zeros == nullptr ? nullptr : w.zeros + row * w.scales.stride + first;
  for (int64_t g = 0; g < count; ++g) {
    const float zero = zeros == nullptr ? 8.0f : static_cast<float>(zeros[g]);
    offsets[g] = -zero * scales[g];
  }
}

// M rows of x against all rows of w, for columns k .. k + columns - 1.
template <int M>
void dot_tile_int4(const float* x, int64_t x_stride, const Int4Rows& w, int64_t N, int64_t k, int64_t columns,
                   float* out, int64_t out_stride) {
  constexpr int kRows = M <= 4 ? 2 : 1;
  const int64_t first = k / w.group_size, groups = (columns + w.group_size - 1) / w.group_size;
  float scales[kRows][kInt4Groups], offsets[kRows][kInt4Groups];
  for (int64_t n = 0; n < N; n += kRows) {
    const int64_t rows = N - n < kRows ? N - n : kRows;
    for (int64_t i = 0; i < rows; ++i) group_terms(w, n + i, first, groups, scales[i], offsets[i]);
    const uint8_t* q = w.q + n * w.q_stride + k / 2;
    if (rows == kRows) {
      dot_block_int4<M, kRows>(x, x_stride, q, w.q_stride, scales, offsets, w.group_size, columns, out + n, out_stride,
                               k > 0);
    } else {
      dot_block_int4<M, 1>(x, x_stride, q, w.q_stride, scales, offsets, w.group_size, columns, out + n, out_stride,
                           k > 0);
    }
  }
}

void dot_int4(const float* x, int64_t x_stride, int64_t M, const Int4Rows& w, int64_t N, int64_t K, float* out,
              int64_t out_stride) {
  using Tile = void (*)(const float*, int64_t, const Int4Rows&, int64_t, int64_t, int64_t, float*, int64_t);
  static constexpr Tile kTiles[] = {dot_tile_int4<1>, dot_tile_int4<2>, dot_tile_int4<3>, dot_tile_int4<4>,
                                    dot_tile_int4<5>, dot_tile_int4<6>, dot_tile_int4<7>, dot_tile_int4<8>};
  alignas(64) float split[kInt4Rows * kTileColumns];
  for (int64_t k = 0; k < K; k += kTileColumns) {
    const int64_t columns = K - k < kTileColumns ? K - k : kTileColumns;
    const int64_t stride = (columns + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    for (int64_t m = 0; m < M; ++m) split_halves(x + m * x_stride + k, columns, split + m * stride);
    for (int64_t m = 0; m < M; m += 8) {
      const int64_t rows = M - m < 8 ? M - m : 8;
      kTiles[rows - 1](split + m * stride, stride, w, N, k, columns, out + m * out_stride, out_stride);
    }
  }
}
