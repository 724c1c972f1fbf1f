#include <cstring>

#include "error.h"
#include "normed_rows.h"
#include "operators.generated.h"
#include "paged_batch.h"
#include "pair_rotation.h"
#include "weight.h"

namespace piccard::mla_paged_attention {

namespace {

constexpr int64_t kAbsorbedTile = 4;    // Rows that read an entry once in the absorbed form,
constexpr int64_t kExpandedTile = 16;   // and in the expanded one.
constexpr int64_t kHeadGroup = 16;      // Heads that read it once,
constexpr int64_t kFewTasks = 16;       // or fewer, where there would be fewer tasks than this,
constexpr int64_t kSmallHeadGroup = 4;  // but not below this.

struct Layer {
  int64_t heads, nope, rope, v, rank;
  float scale;
  Matrix kv_b;  // [heads * (nope + v), rank]
  Plane plane;

  int64_t q_width() const { return nope + rope; }
  int64_t both() const { return nope + v; }
  // Multiplications a head that either form takes.
  bool prefers_expanded(const Sequence& sequence) const {
    const double n = static_cast<double>(sequence.rows), length = static_cast<double>(sequence.length);
    const double product = static_cast<double>(both() * rank);
    const double absorbed = n * product + n * length * static_cast<double>(2 * rank + rope);
    return length * product + n * length * static_cast<double>(both() + rope) < absorbed;
  }
};

// score = (W_UK^T q_nope . c + q_pe . k_pe) * scale,  o = W_UV (sum_t p_t c_t). `next` is read after this one; or null.
void attend_absorbed(const Layer& layer, const AttentionTask& task, const Sequence* next, const float* q, float* y) {
  const int64_t rows = task.last - task.first, heads = task.heads, lines = rows * heads;
  const int64_t width = layer.rank + layer.rope, length = task.sequence->visible(task.last - 1);
  float* query = thread_floats(lines * (width + layer.rank + length));
  float* mixed = query + lines * width;
  float* scores = mixed + lines * layer.rank;
  layer.plane.ask(*task.sequence, 0, length);
  Ahead ahead(layer.plane, next, 3 * heads + ceil_div(length, layer.plane.block_size));
  std::memset(query, 0, static_cast<size_t>(lines * (width + layer.rank)) * sizeof(float));
  for (int64_t h = 0; h < heads; ++h) {
    const float* from = q + (task.first * layer.heads + task.head + h) * layer.q_width();
    isa().mix_rows(from, layer.heads * layer.q_width(), rows, layer.kv_b.row((task.head + h) * layer.both()), layer.nope,
                   layer.rank, query + h * width, heads * width);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(query + (r * heads + h) * width + layer.rank, from + r * layer.heads * layer.q_width() + layer.nope,
                  static_cast<size_t>(layer.rope) * sizeof(float));
    }
    ahead.ask();
  }
  layer.plane.runs(*task.sequence, length, [&](int64_t position, int64_t count, const Matrix& entries) {
    layer.plane.ask(*task.sequence, position + layer.plane.block_size, length);
    isa().dot_rows(query, width, lines, entries, count, width, scores + position, length, false);
  });
  causal_softmax(task, scores, length, heads, length, layer.scale, [&] { ahead.ask(); });
  layer.plane.runs(*task.sequence, length, [&](int64_t position, int64_t count, const Matrix& entries) {
    ahead.ask();
    isa().mix_rows(scores + position, length, lines, entries, count, layer.rank, mixed, layer.rank);
  });
  for (int64_t h = 0; h < heads; ++h) {
    ahead.ask();
    isa().dot_rows(mixed + h * layer.rank, heads * layer.rank, rows,
                   layer.kv_b.row((task.head + h) * layer.both() + layer.nope), layer.v, layer.rank,
                   y + (task.first * layer.heads + task.head + h) * layer.v, layer.heads * layer.v, false);
  }
}

// An odd number of cache lines: with a power of two, one column of many rows would fall on few sets of the cache.
int64_t key_stride(int64_t length) { return ceil_div(length, 16) * 16 | 16; }

// One head's keys as columns, [nope + rope, key_stride], so that a row of scores is a sum of rows, and its values
// [length, v]; made from the latents. `scratch` has room for a block of entries and for W_UK.
void expand(const Layer& layer, const Sequence& sequence, int64_t head, float* scratch, float* keys, float* values) {
  const int64_t width = layer.rank + layer.rope, stride = key_stride(sequence.length);
  const Matrix up = layer.kv_b.row(head * layer.both());
  float* latents = scratch + layer.nope * layer.rank;
  for (int64_t i = 0; i < layer.nope; ++i) {
    isa().widen(up.format, up.row(i).data, scratch + i * layer.rank, layer.rank);
  }
  layer.plane.runs(sequence, sequence.length, [&](int64_t position, int64_t count, const Matrix& entries) {
    isa().widen(entries.format, entries.data, latents, count * width);
    isa().dot_rows(scratch, layer.rank, layer.nope, {Format::kF32, latents, width}, count, layer.rank, keys + position,
                   stride, false);
    for (int64_t i = 0; i < layer.rope; ++i) {
      float* line = keys + (layer.nope + i) * stride + position;
      for (int64_t t = 0; t < count; ++t) line[t] = latents[t * width + layer.rank + i];
    }
    isa().dot_rows(latents, width, count, up.row(layer.nope), layer.v, layer.rank, values + position * layer.v, layer.v,
                   false);
  });
}

// score = (q_nope . W_UK c + q_pe . k_pe) * scale,  o = sum_t p_t W_UV c_t, for all rows of a sequence and one head.
void attend_expanded(const Layer& layer, const Sequence& sequence, int64_t head, const float* q, float* y) {
  const int64_t length = sequence.length, stride = key_stride(length), v = layer.v, width = layer.q_width();
  const int64_t q_stride = layer.heads * width, y_stride = layer.heads * v;
  const int64_t block = layer.plane.block_size * (layer.rank + layer.rope);
  float* keys = thread_floats(stride * width + length * (v + kExpandedTile) + block + layer.nope * layer.rank);
  float* values = keys + stride * width;
  float* scores = values + length * v;
  expand(layer, sequence, head, scores + length * kExpandedTile, keys, values);
  for (int64_t row = sequence.first; row < sequence.first + sequence.rows; row += kExpandedTile) {
    const int64_t last = min(sequence.first + sequence.rows, row + kExpandedTile), rows = last - row;
    const AttentionTask task{&sequence, row, last, head, 1};
    const int64_t seen = sequence.visible(last - 1);
    float* out = y + row * y_stride + head * v;
    std::memset(scores, 0, static_cast<size_t>(rows * length) * sizeof(float));
    isa().mix_rows(q + row * q_stride + head * width, q_stride, rows, {Format::kF32, keys, stride}, width, seen, scores,
                   length);
    causal_softmax(task, scores, length, 1, seen, layer.scale, [] {});
    for (int64_t r = 0; r < rows; ++r) std::memset(out + r * y_stride, 0, static_cast<size_t>(v) * sizeof(float));
    isa().mix_rows(scores, length, rows, {Format::kF32, values, v}, seen, v, out, y_stride);
  }
}

// Queries [T, heads * q_width] and entries [T, rank + rope] as scores and cache take them: as they are given, or made of
// what their products give.
class Rows {
 public:
  Rows(const Call& call, const Layer& layer) : q_(call.input(input::q)), entries_(call.input(input::entries)) {
    const bool raw = call.input(input::rotations).present();
    if (call.input(input::positions).present() != raw || call.input(input::latent_norm).present() != raw) {
      fail("inputs positions, rotations and latent_norm have to be given all or none");
    }
    if (raw) prepare(call, layer);
  }
  const float* q() const { return own_q_ ? own_q_.get() : q_.data(); }
  const float* entries() const { return own_entries_ ? own_entries_.get() : entries_.data(); }

 private:
  void prepare(const Call& call, const Layer& layer) {
    const int64_t T = call.value(name::T), P = call.value(name::P), width = layer.rank + layer.rope, F = layer.rope / 2;
    const int64_t q_width = layer.heads * layer.q_width();
    const auto* positions = call.input(input::positions).as<int64_t>();
    const auto* rotations = call.input(input::rotations).as<float>();
    const bool interleaved = call.value(name::interleaved) != 0;
    const ElementType type = call.input(input::entries).type;
    const Floats norm(call.input(input::latent_norm));
    own_q_.reset(new float[static_cast<size_t>(T * q_width)]);
    own_entries_.reset(new float[static_cast<size_t>(T * width)]);
    std::memcpy(own_q_.get(), q_.data(), static_cast<size_t>(T * q_width) * sizeof(float));
    for (int64_t t = 0; t < T; ++t) {
      if (positions[t] < 0 || positions[t] >= P) {
        fail("positions[", t, "] is ", positions[t], "; rotations has ", P, " rows");
      }
      const float* cosines = rotations + positions[t] * layer.rope;
      const float* from = entries_.data() + t * width;
      float* entry = own_entries_.get() + t * width;
      normalise(from, norm.data(), layer.rank, call.real(real::latent_epsilon), type, entry);
      rotate_pairs(cosines, cosines + F, F, interleaved, from + layer.rank, entry + layer.rank);
      for (int64_t h = 0; h < layer.heads; ++h) {
        float* rope = own_q_.get() + t * q_width + h * layer.q_width() + layer.nope;
        rotate_pairs(cosines, cosines + F, F, interleaved, rope, rope);
      }
    }
  }

  Floats q_, entries_;
  std::unique_ptr<float[]> own_q_, own_entries_;
};

int64_t head_group(const std::vector<Sequence>& sequences, int64_t heads) {
  int64_t tiles = 0;
  for (const Sequence& sequence : sequences) tiles += ceil_div(sequence.rows, kAbsorbedTile);
  return max(kSmallHeadGroup, min(kHeadGroup, heads * tiles / kFewTasks));
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), S = call.value(name::S), rank = call.value(name::C);
  const Tensor cache = call.output(output::cache_out);
  const std::vector<Sequence> sequences =
      sequences_of(call.input(input::block_tables), call.input(input::query_starts), call.input(input::context_lengths),
                   T, call.value(name::B), S);
  const int64_t heads = call.value(name::num_heads), rope = call.value(name::qk_rope_head_dim);
  const Layer layer{heads,
                    call.value(name::qk_nope_head_dim),
                    rope,
                    call.value(name::v_head_dim),
                    rank,
                    call.real(real::scale),
                    matrix_of(call.input(input::kv_b), rank),
                    {matrix_of(cache, rank + rope), S}};
  const Rows rows(call, layer);
  const float* q = rows.q();
  write_entries(sequences, layer.plane, rows.entries(), rank + rope);
  Result y(call, output::y);
  std::vector<Sequence> few, many;
  for (const Sequence& sequence : sequences) (layer.prefers_expanded(sequence) ? many : few).push_back(sequence);
  const auto absorbed = attention_tasks(few, kAbsorbedTile, heads, head_group(few, heads));
  const int64_t expanded = static_cast<int64_t>(many.size()) * heads;
  // The long ones first, so that no thread is left with one at the end.
  call.parallel(expanded + static_cast<int64_t>(absorbed.size()), [&](int64_t i) {
    if (i < expanded) {
      attend_expanded(layer, many[static_cast<size_t>(i / heads)], i % heads, q, y.data());
    } else {
      const auto place = static_cast<size_t>(i - expanded);
      const AttentionTask& task = absorbed[place];
      const Sequence* next = place + 1 < absorbed.size() ? absorbed[place + 1].sequence : nullptr;
      attend_absorbed(layer, task, next == task.sequence ? nullptr : next, q, y.data());
    }
  });
  y.finish();
}

}  // namespace piccard::mla_paged_attention
