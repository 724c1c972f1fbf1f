#include <cstring>

#include "error.h"
#include "operators.generated.h"
#include "paged_batch.h"
#include "weight.h"

namespace piccard::paged_attention {

namespace {

// Rows that read a key or value once.
constexpr int64_t kTile = 8;

struct Layer {
  int64_t heads, groups, width;  // Query heads, key heads, columns a head.
  float scale;
  Plane keys, values;
};

// The query heads of one key head.
void attend(const Layer& layer, const AttentionTask& task, const float* q, float* y) {
  const int64_t shared = layer.heads / layer.groups, d = layer.width;
  const int64_t rows = task.last - task.first, lines = rows * shared;
  const int64_t length = task.sequence->visible(task.last - 1);
  float* query = thread_floats(lines * (2 * d + length));
  float* out = query + lines * d;
  float* scores = out + lines * d;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(query + r * shared * d, q + ((task.first + r) * layer.heads + task.head * shared) * d,
                static_cast<size_t>(shared * d) * sizeof(float));
  }
  layer.keys.runs(*task.sequence, length, [&](int64_t position, int64_t count, const Matrix& keys) {
    isa().dot_rows(query, d, lines, keys.at(0, task.head * d), count, d, scores + position, length, false);
  });
  causal_softmax(task, scores, length, shared, length, layer.scale, [] {});
  std::memset(out, 0, static_cast<size_t>(lines * d) * sizeof(float));
  layer.values.runs(*task.sequence, length, [&](int64_t position, int64_t count, const Matrix& values) {
    isa().mix_rows(scores + position, length, lines, values.at(0, task.head * d), count, d, out, d);
  });
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(y + ((task.first + r) * layer.heads + task.head * shared) * d, out + r * shared * d,
                static_cast<size_t>(shared * d) * sizeof(float));
  }
}

// Throws Error where what is written to one cache would be written to the other.
void check_apart(const Tensor& keys, const Tensor& values) {
  const auto* k = static_cast<const char*>(keys.data);
  const auto* v = static_cast<const char*>(values.data);
  // Both are of one type and shape.
  const int64_t bytes = keys.shape.count() * bytes_of(format_of(keys.type));
  if (k < v + bytes && v < k + bytes) fail("inputs key_cache and value_cache share memory: bind each to its own");
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), S = call.value(name::S);
  const int64_t heads = call.value(name::num_heads), groups = call.value(name::num_key_value_heads);
  const int64_t width = call.value(name::head_dim);
  const Tensor keys = call.output(output::key_cache_out), values = call.output(output::value_cache_out);
  check_apart(keys, values);
  const std::vector<Sequence> sequences =
      sequences_of(call.input(input::block_tables), call.input(input::query_starts), call.input(input::context_lengths),
                   T, call.value(name::B), S);
  const Floats q(call.input(input::q)), k(call.input(input::k)), v(call.input(input::v));
  const Layer layer{heads,         groups, width, call.real(real::scale), {matrix_of(keys, groups * width), S},
                    {matrix_of(values, groups * width), S}};
  write_entries(sequences, layer.keys, k.data(), groups * width);
  write_entries(sequences, layer.values, v.data(), groups * width);
  Result y(call, output::y);
  const auto tasks = attention_tasks(sequences, kTile, groups, 1);
  call.parallel(static_cast<int64_t>(tasks.size()),
                [&](int64_t i) { attend(layer, tasks[static_cast<size_t>(i)], q.data(), y.data()); });
  y.finish();
}

}  // namespace piccard::paged_attention
