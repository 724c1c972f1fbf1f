// What the host knows of a step's sequences: rows and entries of each, which launches are planned for.
#pragma once

#include <cstdint>

namespace piccard::cuda {

// Rows of a sequence up to which the decode kernels attend to it (MAX_QUERIES of mla_decode_triton.py).
constexpr int64_t kMostQueries = 8;

// The leading sequences of few rows, which are decoded.
struct Leading {
  int64_t sequences = 0;
  int64_t rows = 0;     // That they have together.
  int64_t queries = 1;  // The most that one has.
};

// host_batch [R, 2]; T rows in all, padding among them. Throws Error.
Leading leading(const int32_t* host_batch, int64_t R, int64_t T);

// The rows of all.
int64_t rows_of(const int32_t* host_batch, int64_t R);

}  // namespace piccard::cuda
