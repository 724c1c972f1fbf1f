#include "experts.h"

#include <cstring>

#include "error.h"

namespace piccard {

namespace {

// Columns of the inner activation that one task makes, and of the output.
int64_t part_of(const Weight& weight) { return 4 * weight.together(); }
// Few multiplications are done sooner by one thread.
constexpr int64_t kAlone = 1 << 18;

struct Task {
  Load* load;
  int64_t first, last;
};

void gather(Load& load, const float* x, int64_t D) {
  load.gathered.resize(load.rows.size() * static_cast<size_t>(D));
  for (size_t i = 0; i < load.rows.size(); ++i) {
    std::memcpy(&load.gathered[i * static_cast<size_t>(D)], x + load.rows[i] * D, static_cast<size_t>(D) * sizeof(float));
  }
}

// inner[:, first:last] = silu(gate) * up * weight
void activate(const Task& task, const float* x, int64_t D) {
  Load& load = *task.load;
  const int64_t rows = static_cast<int64_t>(load.rows.size()), width = task.last - task.first, I = load.expert.inner;
  const float* from = load.gathered.empty() ? x + load.rows[0] * D : load.gathered.data();
  float* gate = thread_floats(2 * rows * width);
  float* up = gate + rows * width;
  load.expert.gate_up->dot(from, D, rows, task.first, task.last, gate, width);
  load.expert.gate_up->dot(from, D, rows, I + task.first, I + task.last, up, width);
  for (int64_t r = 0; r < rows; ++r) {
    isa().swiglu(gate + r * width, up + r * width, load.weights[static_cast<size_t>(r)],
                 &load.inner[static_cast<size_t>(r * I + task.first)], width);
  }
}

// y[:, first:last] = residual + the experts' outputs, in the order of the loads whatever the threads.
void combine(std::vector<Load>& loads, int64_t T, int64_t D, int64_t first, int64_t last, const float* residual,
             float* y) {
  const int64_t width = last - first;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = first; i < last; ++i) y[t * D + i] = residual == nullptr ? 0.0f : residual[t * D + i];
  }
  for (Load& load : loads) {
    const int64_t rows = static_cast<int64_t>(load.rows.size());
    float* out = thread_floats(rows * width);
    load.expert.down->dot(load.inner.data(), load.expert.inner, rows, first, last, out, width);
    for (int64_t r = 0; r < rows; ++r) {
      isa().added(out + r * width, y + load.rows[static_cast<size_t>(r)] * D + first, width);
    }
  }
}

}  // namespace

void check_experts(const Routing& routing, int64_t T, int64_t count) {
  for (int64_t i = 0; i < T * routing.K; ++i) {
    if (routing.experts[i] >= count) {
      fail("experts[", i / routing.K, ", ", i % routing.K, "] is ", routing.experts[i], "; there are ", count,
           " experts, and a choice below 0 is none");
    }
  }
}

void run_loads(Call& call, const float* x, int64_t T, int64_t D, std::vector<Load>& loads, const float* residual,
               float* y) {
  int64_t multiplications = 0;
  std::vector<Task> tasks;
  for (Load& load : loads) {
    const int64_t rows = static_cast<int64_t>(load.rows.size()), I = load.expert.inner;
    // Rows that lie one after the other, a single one or all, need no copy.
    if (rows > 1 && rows != T) gather(load, x, D);
    load.inner.resize(static_cast<size_t>(rows * I));
    multiplications += 3 * rows * D * I;
    const int64_t part = part_of(*load.expert.gate_up);
    for (int64_t first = 0; first < I; first += part) tasks.push_back({&load, first, min(I, first + part)});
  }
  if (multiplications < kAlone) {
    for (const Task& task : tasks) activate(task, x, D);
    return combine(loads, T, D, 0, D, residual, y);
  }
  call.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t i) { activate(tasks[static_cast<size_t>(i)], x, D); });
  const int64_t width = part_of(*loads.front().expert.down), parts = ceil_div(D, width);
  call.parallel(parts, [&](int64_t part) {
    combine(loads, T, D, part * width, min(D, (part + 1) * width), residual, y);
  });
}

}  // namespace piccard
