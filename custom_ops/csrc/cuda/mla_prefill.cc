#include "mla_prefill.h"

#include <vector>

#include "blas.h"
#include "error.h"

namespace piccard::mla_paged_attention {

namespace {

using cuda::at;
using cuda::Gpu;
using cuda::narrow;

// Entries that are expanded at once (EXPANDED_TOKENS of the engine): what bounds the scratch memory. Tests have fewer.
#ifndef PICCARD_EXPANDED_ENTRIES
#define PICCARD_EXPANDED_ENTRIES 32768
#endif
constexpr int64_t kExpandedEntries = PICCARD_EXPANDED_ENTRIES;

struct Sequence {
  int64_t rows, entries;
};

// Neighbouring sequences that are attended to together.
struct Group {
  int64_t first, first_row;  // Among all sequences and rows.
  std::vector<Sequence> sequences;

  int64_t count() const { return static_cast<int64_t>(sequences.size()); }
  int64_t rows() const {
    int64_t sum = 0;
    for (const Sequence& each : sequences) sum += each.rows;
    return sum;
  }
  int64_t longest() const {
    int64_t most = 0;
    for (const Sequence& each : sequences) most = max(most, each.rows);
    return most;
  }
};

// Keys of a group: `keys[i]` of its i-th sequence from position `first` on.
struct Chunk {
  std::vector<int64_t> keys;
  int64_t first;
  bool causal;
};

std::vector<Group> groups_of(const int32_t* host_batch, int64_t first, int64_t first_row, int64_t R, int64_t T) {
  std::vector<Group> groups;
  int64_t row = first_row, held = 0;
  for (int64_t r = first; r < R; ++r) {
    const Sequence sequence{host_batch[2 * r], host_batch[2 * r + 1]};
    if (sequence.rows > sequence.entries) {
      fail("host_batch[", r, "] is ", sequence.rows, " rows and ", sequence.entries, " entries: it has entries for all its rows");
    }
    if (groups.empty() || held + sequence.entries > kExpandedEntries) {
      groups.push_back({r, row, {}});
      held = 0;
    }
    groups.back().sequences.push_back(sequence);
    held += sequence.entries;
    row += sequence.rows;
  }
  if (row > T) fail("host_batch has ", row, " rows in all; there are ", T);
  return groups;
}

// One chunk of all keys, or for a long sequence, which is a group of its own, the newest keys first.
std::vector<Chunk> chunks_of(const Group& group) {
  std::vector<int64_t> all;
  for (const Sequence& each : group.sequences) all.push_back(each.entries);
  const int64_t entries = group.sequences[0].entries;
  if (group.count() > 1 || entries <= kExpandedEntries) return {{all, 0, true}};
  // Every query sees the older keys whole, so only the newest chunk, which holds the sequence's own, is causal.
  const int64_t newest = min(entries, max(kExpandedEntries, group.sequences[0].rows)), older = entries - newest;
  std::vector<Chunk> chunks{{{newest}, older, true}};
  for (int64_t begin = 0; begin < older; begin += kExpandedEntries) {
    chunks.push_back({{min(kExpandedEntries, older - begin)}, begin, false});
  }
  return chunks;
}

// The attention of a group to one chunk; out and lse are of the first row of all.
void attend(Call& call, Gpu& gpu, const Sizes& sizes, const Group& group, const Chunk& chunk, const void* q, void* out,
            void* lse) {
  using Gather = kernels::gather_entries;
  using Prefill = kernels::mla_prefill;
  std::vector<int32_t> starts{0};
  int64_t longest_keys = 0;
  for (const int64_t keys : chunk.keys) {
    starts.push_back(narrow(starts.back() + keys));
    longest_keys = max(longest_keys, keys);
  }
  const int64_t keys = starts.back(), width = sizes.heads * sizes.both();
  const Tensor& tables = call.input(input::block_tables);
  const int32_t* rows = call.input(input::table_rows).as<int32_t>() + group.first;
  void* const key_starts = gpu.upload(starts);
  void *const entries = gpu.scratch_elements(keys * sizes.entry()), *const kv = gpu.scratch_elements(keys * width);
  const Gather::Dims gathered{.longest = longest_keys, .sequences = group.count(), .width = sizes.entry()};
  gpu.launch<Gather>(gpu.choose<Gather>(gathered), gathered,
                     {.cache_ptr = call.input(input::cache).data,
                      .table_ptr = tables.data,
                      .table_rows_ptr = rows,
                      .key_starts_ptr = key_starts,
                      .out_ptr = entries,
                      .cache_stride = narrow(sizes.entry()),
                      .table_stride = narrow(tables.shape.dims[1]),
                      .first = narrow(chunk.first),
                      .page = narrow(sizes.page),
                      .width = narrow(sizes.entry())});
  cuda::product(gpu, entries, call.input(input::kv_b).data, kv, keys, width, sizes.rank, {.stride = sizes.entry()});
  const Prefill::Dims dims{.causal = chunk.causal,
                           .heads = sizes.heads,
                           .longest = group.longest(),
                           .nope = sizes.nope,
                           .rotary = sizes.rope,
                           .sequences = group.count(),
                           .value = sizes.v};
  gpu.launch<Prefill>(gpu.choose<Prefill>(dims), dims,
                      {.q_ptr = q,
                       .kv_ptr = kv,
                       .k_pe_ptr = at(static_cast<const void*>(entries), sizes.rank),
                       .out_ptr = out,
                       .lse_ptr = lse,
                       .query_starts_ptr = call.input(input::query_starts).as<int32_t>() + group.first,
                       .key_starts_ptr = key_starts,
                       .q_token_stride = narrow(sizes.heads * sizes.q_width()),
                       .q_head_stride = narrow(sizes.q_width()),
                       .kv_token_stride = narrow(width),
                       .kv_head_stride = narrow(sizes.both()),
                       .k_pe_stride = narrow(sizes.entry()),
                       .heads = narrow(sizes.heads),
                       .nope = narrow(sizes.nope),
                       .value_width = narrow(sizes.v),
                       .rotary = narrow(sizes.rope),
                       .scale = call.real(real::scale)});
}

}  // namespace

void prefill(Call& call, Gpu& gpu, const Sizes& sizes, int64_t first, int64_t first_row, const void* q, void* y) {
  using Merge = kernels::merge_attention;
  if (cuda::is_capturing(gpu.stream())) {
    fail("sequences of more rows than the decode kernel takes cannot be captured: run such a step without a graph");
  }
  const int64_t R = call.value(name::R), line = sizes.heads * sizes.v;
  const int32_t* host_batch = call.input(input::host_batch).as<int32_t>();
  constexpr int64_t kFloat = sizeof(float);
  // Scratch memory of a chunk goes back before the next one asks.
  char* const lse = static_cast<char*>(gpu.scratch(sizes.T * sizes.heads * kFloat));
  for (const Group& group : groups_of(host_batch, first, first_row, R, sizes.T)) {
    const std::vector<Chunk> chunks = chunks_of(group);
    void* other = nullptr;
    char* other_lse = nullptr;
    if (chunks.size() > 1) {
      other = gpu.scratch_elements(group.rows() * line);
      other_lse = static_cast<char*>(gpu.scratch(group.rows() * sizes.heads * kFloat));
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Gpu::Mark mark(gpu);
      if (i == 0) {
        attend(call, gpu, sizes, group, chunks[i], q, y, lse);
        continue;
      }
      // The kernel counts rows from the first of all.
      attend(call, gpu, sizes, group, chunks[i], q, at(other, -group.first_row * line),
             other_lse - group.first_row * sizes.heads * kFloat);
      const Merge::Dims dims{.rows = group.rows() * sizes.heads, .width = sizes.v};
      gpu.launch<Merge>(gpu.choose<Merge>(dims), dims,
                        {.out_ptr = at(y, group.first_row * line),
                         .lse_ptr = lse + group.first_row * sizes.heads * kFloat,
                         .other_ptr = other,
                         .other_lse_ptr = other_lse,
                         .rows = narrow(dims.rows),
                         .width = narrow(sizes.v)});
    }
  }
}

}  // namespace piccard::mla_paged_attention
