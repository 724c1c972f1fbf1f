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

// Rows that lie one after the other, a single one or all, need no copy.
bool is_gathered(const Load& load) {
  for (int64_t i = 1; i < load.count; ++i) {
    if (load.rows[i] != load.rows[0] + i) return true;
  }
  return false;
}

void gather(const Load& load, const float* x, int64_t D) {
  for (int64_t i = 0; i < load.count; ++i) {
    std::memcpy(load.gathered + i * D, x + load.rows[i] * D, static_cast<size_t>(D) * sizeof(float));
  }
}

// inner[:, first:last] = silu(gate) * up * weight
void activate(const Task& task, const float* x, int64_t D) {
  const Load& load = *task.load;
  const int64_t rows = load.count, width = task.last - task.first, I = load.expert.inner;
  const float* from = load.gathered == nullptr ? x + load.rows[0] * D : load.gathered;
  float* gate = thread_floats(2 * rows * width);
  float* up = gate + rows * width;
  load.expert.gate_up->dot(from, D, rows, task.first, task.last, gate, width);
  load.expert.gate_up->dot(from, D, rows, I + task.first, I + task.last, up, width);
  for (int64_t r = 0; r < rows; ++r) {
    isa().swiglu(gate + r * width, up + r * width, load.weights[r], load.inner + r * I + task.first, width);
  }
}

// y[:, first:last] = residual + the experts' outputs, in the order of the loads whatever the threads.
void combine(const std::vector<Load>& loads, int64_t T, int64_t D, int64_t first, int64_t last, const float* residual,
             float* y) {
  const int64_t width = last - first;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = first; i < last; ++i) y[t * D + i] = residual == nullptr ? 0.0f : residual[t * D + i];
  }
  for (const Load& load : loads) {
    float* out = thread_floats(load.count * width);
    load.expert.down->dot(load.inner, load.expert.inner, load.count, first, last, out, width);
    for (int64_t r = 0; r < load.count; ++r) isa().added(out + r * width, y + load.rows[r] * D + first, width);
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

Choices::Choices(const Routing& routing, int64_t T, int64_t experts) : starts(static_cast<size_t>(experts) + 1) {
  const int64_t count = T * routing.K;
  for (int64_t i = 0; i < count; ++i) {
    if (routing.experts[i] >= 0) ++starts[static_cast<size_t>(routing.experts[i]) + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  rows.resize(static_cast<size_t>(starts.back()));
  weights.resize(rows.size());
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    if (routing.experts[i] < 0) continue;
    const size_t place = static_cast<size_t>(next[static_cast<size_t>(routing.experts[i])]++);
    rows[place] = i / routing.K;
    weights[place] = routing.weights[i];
  }
}

void run_loads(Call& call, const float* x, int64_t T, int64_t D, std::vector<Load>& loads, const float* residual,
               float* y) {
  int64_t multiplications = 0, gathered = 0, inner = 0;
  for (const Load& load : loads) {
    if (is_gathered(load)) gathered += load.count * D;
    inner += load.count * load.expert.inner;
  }
  const std::unique_ptr<float[]> buffer(new float[static_cast<size_t>(gathered + inner)]);
  float* next = buffer.get();
  std::vector<Task> tasks;
  for (Load& load : loads) {
    const int64_t I = load.expert.inner;
    if (is_gathered(load)) {
      load.gathered = next;
      next += load.count * D;
      gather(load, x, D);
    }
    load.inner = next;
    next += load.count * I;
    multiplications += 3 * load.count * D * I;
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
