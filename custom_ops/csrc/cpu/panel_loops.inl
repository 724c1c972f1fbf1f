// Products with weights in panels, for isa_loops.inl. A panel holds kPanel rows of a weight [N, K] column by column,
// [K][kPanel]: one element of x meets kPanel weights that lie together, so that every sum has a lane of its own, nothing
// is summed up across lanes, and the weight is read from its beginning to its end.
constexpr int64_t kPanel = 2 * kLanes;
constexpr int kPanelRows = kLanes == 16 ? 12 : 6;  // Two registers of sums for each, one broadcast and two weights fit.
constexpr int64_t kPanelBatch = 1 << 16;           // Elements of x that stay in the second-level cache.
constexpr int64_t kAhead = 4096;                   // Bytes that are asked for before they are multiplied.

// Where row i of a panel stands. A word of two bfloat16 is one float32 after a shift, and the other after a mask: the
// word holds the same lane of either vector.
inline int64_t panel_place(Format format, int64_t i) {
  if (format != Format::kBf16) return i;
  return i < kLanes ? 2 * i : 2 * (i - kLanes) + 1;
}

template <typename Element>
void pack_panels_of(Format format, const Element* w, int64_t stride, int64_t N, int64_t K, Element* to) {
  for (int64_t n = 0; n < N; n += kPanel, to += K * kPanel) {
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t place = panel_place(format, i);
      for (int64_t k = 0; k < K; ++k) to[k * kPanel + place] = n + i < N ? w[(n + i) * stride + k] : Element{0};
    }
  }
}

void pack_panels(Matrix w, int64_t N, int64_t K, void* to) {
  if (w.format == Format::kF32) {
    return pack_panels_of(w.format, static_cast<const float*>(w.data), w.stride, N, K, static_cast<float*>(to));
  }
  pack_panels_of(w.format, static_cast<const uint16_t*>(w.data), w.stride, N, K, static_cast<uint16_t*>(to));
}

// Few rows are multiplied faster than a processor looks ahead in memory by itself. What stands past the weight is asked
// for too: often that is the next one, and nothing comes of an address that is none. Into every cache: asked for as what
// is read once, a small model's weights left the caches of a Xeon with each step, which took twice as long.
template <typename Element>
inline void ask_ahead(const Element* p) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + kAhead));
}

template <Format F>
inline void load_pair(const typename Stored<F>::Type* p, Vec* pair) {
  if constexpr (F == Format::kBf16) {
    Uint words;
    std::memcpy(&words, p, sizeof words);
    pair[0] = bits<Vec>(words << 16);
    pair[1] = bits<Vec>(words & 0xffff0000u);
  } else {
    pair[0] = load<F>(p);
    pair[1] = load<F>(p + kLanes);
  }
}

// M rows of x against a panel. With few of them the columns are split into chains of sums, so that one does not wait for
// the other.
template <Format F, int M>
inline void dot_panel(const float* x, int64_t x_stride, const typename Stored<F>::Type* panel, int64_t K,
                      Vec (*sums)[2]) {
  constexpr int kChains = M == 1 ? 4 : M <= 3 ? 2 : 1;
  const float* rows[M];
  for (int m = 0; m < M; ++m) rows[m] = x + m * x_stride;
  Vec chains[kChains][M][2] = {};
  const auto step = [&](int64_t k, Vec(*chain)[2]) {
    Vec pair[2];
    ask_ahead(panel + k * kPanel);
    load_pair<F>(panel + k * kPanel, pair);
    for (int m = 0; m < M; ++m) {
      const Vec value = splat(rows[m][k]);
      chain[m][0] += value * pair[0];
      chain[m][1] += value * pair[1];
    }
  };
  int64_t k = 0;
  for (; k + kChains <= K; k += kChains) {
    for (int c = 0; c < kChains; ++c) step(k + c, chains[c]);
  }
  for (; k < K; ++k) step(k, chains[0]);
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      Vec sum = chains[0][m][half];
      for (int c = 1; c < kChains; ++c) sum += chains[c][m][half];
      sums[m][half] = sum;
    }
  }
}

// The columns from .. to - 1 of a panel, for M rows, to out.
template <Format F, int M>
void dot_panel_to(const float* x, int64_t x_stride, const typename Stored<F>::Type* panel, int64_t K, int64_t from,
                  int64_t to, float* out, int64_t out_stride) {
  Vec sums[M][2];
  dot_panel<F, M>(x, x_stride, panel, K, sums);
  for (int m = 0; m < M; ++m) {
    float* place = out + m * out_stride;
    if (from == 0 && to == kPanel) {
      store(place, sums[m][0]);
      store(place + kLanes, sums[m][1]);
      continue;
    }
    float whole[kPanel];
    std::memcpy(whole, sums[m], sizeof whole);
    std::memcpy(place, whole + from, static_cast<size_t>(to - from) * sizeof(float));
  }
}

template <Format F, int M = kPanelRows>
inline void dot_panel_rows(const float* x, int64_t x_stride, int64_t rows, const typename Stored<F>::Type* panel,
                           int64_t K, int64_t from, int64_t to, float* out, int64_t out_stride) {
  if (rows == M) return dot_panel_to<F, M>(x, x_stride, panel, K, from, to, out, out_stride);
  if constexpr (M > 1) dot_panel_rows<F, M - 1>(x, x_stride, rows, panel, K, from, to, out, out_stride);
}

template <Format F>
void dot_panels_of(const float* x, int64_t x_stride, int64_t M, const void* panels, int64_t first, int64_t last,
                   int64_t K, float* out, int64_t out_stride) {
  const auto* data = static_cast<const typename Stored<F>::Type*>(panels);
  const int64_t fitting = kPanelBatch / K / kPanelRows * kPanelRows;
  const int64_t batch = fitting < kPanelRows ? kPanelRows : fitting;
  for (int64_t start = 0; start < M; start += batch) {
    const int64_t rows = M - start < batch ? M - start : batch;
    // Tiles of like height: eight rows are two of four, not one of six and one of two.
    const int64_t tiles = (rows + kPanelRows - 1) / kPanelRows;
    for (int64_t n = first / kPanel * kPanel; n < last; n += kPanel) {
      const int64_t from = n < first ? first - n : 0, to = last - n < kPanel ? last - n : kPanel;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t m = start + rows * tile / tiles, next = start + rows * (tile + 1) / tiles;
        dot_panel_rows<F>(x + m * x_stride, x_stride, next - m, data + n * K, K, from, to,
                          out + m * out_stride + n + from - first, out_stride);
      }
    }
  }
}

void dot_panels(const float* x, int64_t x_stride, int64_t M, Format format, const void* panels, int64_t first,
                int64_t last, int64_t K, float* out, int64_t out_stride) {
  switch (format) {
    case Format::kF32:
      return dot_panels_of<Format::kF32>(x, x_stride, M, panels, first, last, K, out, out_stride);
    case Format::kF16:
      return dot_panels_of<Format::kF16>(x, x_stride, M, panels, first, last, K, out, out_stride);
    case Format::kBf16:
      return dot_panels_of<Format::kBf16>(x, x_stride, M, panels, first, last, K, out, out_stride);
  }
}
