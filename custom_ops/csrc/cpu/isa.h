// The inner loops, compiled once for every instruction set; the best that the processor has is chosen at run time.
#pragma once

#include <cstdint>

#include "spec.h"

namespace piccard {

enum class Format : int { kF32, kF16, kBf16 };

// Of a floating type that can be read an element at a time.
inline Format format_of(ElementType type) {
  return type == kFloat16 ? Format::kF16 : type == kBfloat16 ? Format::kBf16 : Format::kF32;
}

inline int64_t bytes_of(Format format) { return format == Format::kF32 ? 4 : 2; }

// A row-major matrix of some format; `stride` elements from row to row.
struct Matrix {
  Format format;
  const void* data;
  int64_t stride;

  Matrix row(int64_t index) const { return at(index, 0); }
  Matrix at(int64_t index, int64_t column) const {
    return {format, static_cast<const char*>(data) + (index * stride + column) * bytes_of(format), stride};
  }
};

// Rows of a weight are read 2 to 4 at once: in shares of a multiple of this none is left over.
constexpr int64_t kWeightRows = 12;
// Columns that the loops take at once.
constexpr int64_t kIsaColumns = 1024;
// dot_int4 takes groups of a multiple of kInt4Group columns, of which kLargestInt4Group is a multiple too, and at most
// kInt4Rows rows of x: for more it pays to unpack a weight once for all of them.
constexpr int64_t kInt4Group = 32;
constexpr int64_t kLargestInt4Group = kIsaColumns / 2;
constexpr int64_t kInt4Groups = kIsaColumns / kInt4Group;
constexpr int64_t kInt4Rows = 16;

// Weights of four bits, two columns a byte: w = (q - zero) * scale of the column's group.
struct Int4Rows {
  const uint8_t* q;
  int64_t q_stride;      // Bytes from row to row.
  Matrix scales;         // [rows, groups]
  const uint8_t* zeros;  // As scales; null for 8.
  int64_t group_size;
};

struct Isa {
  const char* name;
  // out[m, n] = sum_k x[m, k] w[n, k], or added to out where `add`.
  void (*dot_rows)(const float* x, int64_t x_stride, int64_t M, Matrix w, int64_t N, int64_t K, float* out,
                   int64_t out_stride, bool add);
  // Rows of a weight in one panel; a weight of N takes ceil(N / panel) panels of K columns each, whole ones.
  int64_t panel;
  void (*pack_panels)(Matrix w, int64_t N, int64_t K, void* to);
  // out[m, n - first] = sum_k x[m, k] w[n, k], first <= n < last, for the w that was packed; K is not 0.
  void (*dot_panels)(const float* x, int64_t x_stride, int64_t M, Format format, const void* panels, int64_t first,
                     int64_t last, int64_t K, float* out, int64_t out_stride);
  // out[m, c] += sum_t p[m, t] rows[t, c]
  void (*mix_rows)(const float* p, int64_t p_stride, int64_t M, Matrix rows, int64_t T, int64_t C, float* out,
                   int64_t out_stride);
  void (*widen)(Format format, const void* from, float* to, int64_t count);
  void (*narrow)(Format format, const float* from, void* to, int64_t count);
  // x = softmax(scale * x)
  void (*softmax)(float* x, int64_t count, float scale);
  void (*sigmoid)(const float* x, float* out, int64_t count);
  // out = silu(gate) * up * weight
  void (*swiglu)(const float* gate, const float* up, float weight, float* out, int64_t count);
  float (*sum_of_squares)(const float* x, int64_t count);
  // out = x * scale
  void (*scaled)(const float* x, float scale, float* out, int64_t count);
  // out = x * y
  void (*product)(const float* x, const float* y, float* out, int64_t count);
  // out += x
  void (*added)(const float* x, float* out, int64_t count);
  // out = (q - zero) * scale for `count` packed values of 4 bits, the first in the low half
  void (*int4)(const uint8_t* q, float zero, float scale, float* out, int64_t count);
  // dot_rows with packed weights.
  void (*dot_int4)(const float* x, int64_t x_stride, int64_t M, const Int4Rows& w, int64_t N, int64_t K, float* out,
                   int64_t out_stride);
  // out = e4m3(bytes) * scale
  void (*fp8)(const uint8_t* bytes, float scale, float* out, int64_t count);
};

extern const Isa kGenericIsa;
#if defined(__x86_64__)
extern const Isa kAvx2Isa;
extern const Isa kAvx512Isa;
#endif

// The one that serves. The variable PICCARD_OPS_ISA (generic, avx2, avx512) asks for a lower one.
const Isa& isa();

}  // namespace piccard
