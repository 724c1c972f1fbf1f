// A layer of experts, whatever the format of their weights.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "weight.h"

namespace piccard {

struct Expert {
  std::unique_ptr<Weight> gate_up;  // [2 * inner, D]
  std::unique_ptr<Weight> down;     // [D, inner]
  int64_t inner;
};

struct Routing {
  const float* weights;    // [T, K]
  const int32_t* experts;  // [T, K]
  int64_t K;
};

// y = residual + the experts' sum, for x [T, D]; `make(e)` gives the e-th of `count` experts and `shared` may be null.
// A choice below 0 is none. Throws Error where an expert's number is too high.
template <typename Make>
void run_experts(Call& call, const float* x, int64_t T, int64_t D, const Routing& routing, int64_t count,
                 const Make& make, std::unique_ptr<Expert> shared, const float* residual, float* y);

// One expert's rows.
struct Load {
  Expert expert;
  int64_t count;
  const int64_t* rows;   // Of x.
  const float* weights;  // One a row.
  float* gathered;       // Its rows of x one after the other; null where they lie so in x.
  float* inner;          // [count, inner]
};

void run_loads(Call& call, const float* x, int64_t T, int64_t D, std::vector<Load>& loads, const float* residual,
               float* y);

void check_experts(const Routing& routing, int64_t T, int64_t count);

// The choices of a routing in the order of the experts, and of each in that of the rows: weights that lie one after the
// other are read so, and what is added to a row is in the same order whatever the other rows are.
struct Choices {
  std::vector<int64_t> starts;  // [experts + 1]
  std::vector<int64_t> rows;
  std::vector<float> weights;

  Choices(const Routing& routing, int64_t T, int64_t experts);
};

template <typename Make>
void run_experts(Call& call, const float* x, int64_t T, int64_t D, const Routing& routing, int64_t count,
                 const Make& make, std::unique_ptr<Expert> shared, const float* residual, float* y) {
  check_experts(routing, T, count);
  const Choices choices(routing, T, count);
  std::vector<Load> loads;
  for (int64_t e = 0; e < count; ++e) {
    const size_t first = static_cast<size_t>(choices.starts[static_cast<size_t>(e)]);
    const int64_t rows = choices.starts[static_cast<size_t>(e) + 1] - choices.starts[static_cast<size_t>(e)];
    if (rows == 0) continue;
    loads.push_back({make(e), rows, choices.rows.data() + first, choices.weights.data() + first, nullptr, nullptr});
  }
  std::vector<int64_t> all;
  std::vector<float> ones;
  if (shared) {
    all.resize(static_cast<size_t>(T));
    std::iota(all.begin(), all.end(), int64_t{0});
    ones.assign(static_cast<size_t>(T), 1.0f);
    loads.push_back({std::move(*shared), T, all.data(), ones.data(), nullptr, nullptr});
  }
  run_loads(call, x, T, D, loads, residual, y);
}

}  // namespace piccard
