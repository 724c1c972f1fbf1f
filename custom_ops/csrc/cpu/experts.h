// A layer of experts, whatever the format of their weights.
#pragma once

#include <memory>
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
  std::vector<int64_t> rows;    // Of x.
  std::vector<float> weights;   // One a row.
  std::vector<float> gathered;  // Its rows of x one after the other; empty where it has all of them.
  std::vector<float> inner;     // [rows, inner]
};

void run_loads(Call& call, const float* x, int64_t T, int64_t D, std::vector<Load>& loads, const float* residual,
               float* y);

void check_experts(const Routing& routing, int64_t T, int64_t count);

template <typename Make>
void run_experts(Call& call, const float* x, int64_t T, int64_t D, const Routing& routing, int64_t count,
                 const Make& make, std::unique_ptr<Expert> shared, const float* residual, float* y) {
  check_experts(routing, T, count);
  std::vector<Load> loads;
  std::vector<int64_t> place(static_cast<size_t>(count), -1);
  for (int64_t i = 0; i < T * routing.K; ++i) {
    if (routing.experts[i] < 0) continue;
    int64_t& found = place[static_cast<size_t>(routing.experts[i])];
    if (found < 0) {
      found = static_cast<int64_t>(loads.size());
      loads.push_back({make(routing.experts[i]), {}, {}, {}, {}});
    }
    Load& load = loads[static_cast<size_t>(found)];
    load.rows.push_back(i / routing.K);
    load.weights.push_back(routing.weights[i]);
  }
  if (shared) {
    Load load{std::move(*shared), {}, std::vector<float>(static_cast<size_t>(T), 1.0f), {}, {}};
    for (int64_t t = 0; t < T; ++t) load.rows.push_back(t);
    loads.push_back(std::move(load));
  }
  run_loads(call, x, T, D, loads, residual, y);
}

}  // namespace piccard
