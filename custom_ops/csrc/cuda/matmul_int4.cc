#include "int4_weight.h"
#include "operators.generated.h"
#include "unpacked_product.h"

namespace piccard::matmul_int4 {

namespace {

// GEMV_ROWS and GEMM_ROWS of packed_product.py.
constexpr int64_t kVectorRows = 2, kTileRows = 64;

struct Product {
  cuda::Gpu& gpu;
  const cuda::Int4Weight& weight;
  const void* x;
  cuda::Added added;
  void* y;
  int64_t M, N;

  // One or two, whose weight is asked for before the launch ahead of it has ended.
  void vectors() const {
    using Gemv = kernels::int4_gemv;
    const Gemv::Dims dims{.columns = N, .rows = M};
    gpu.launch<Gemv>(gpu.choose<Gemv>(dims), dims,
                     {.x_ptr = x,
                      .weight_ptr = weight.q,
                      .scales_ptr = weight.scales,
                      .zeros_ptr = weight.zeros,
                      .bias_ptr = added.bias_or(x),
                      .residual_ptr = added.residual_or(x),
                      .out_ptr = y,
                      .columns = cuda::narrow(N),
                      .blocks = weight.blocks(),
                      .groups = cuda::narrow(weight.groups),
                      .group_shift = weight.group_shift(),
                      .zero_row = weight.zero_row,
                      .zero_step = weight.zero_step,
                      .with_bias = added.with_bias(),
                      .with_residual = added.with_residual()},
                     weight.constant);
  }

  // Some, where the device has the kernel that keeps unpacked weights in registers; false where it has not.
  bool in_registers() const {
    using Rows = kernels::int4_rows;
    const Rows::Dims dims{.blocks = weight.blocks(), .columns = N, .rows = M};
    const Row* const row = gpu.seek<Rows>(dims);
    if (row == nullptr) return false;
    gpu.launch<Rows>(*row, dims,
                     {.x_ptr = x,
                      .weight_ptr = weight.q,
                      .scales_ptr = weight.scales,
                      .zeros_ptr = weight.zeros,
                      .bias_ptr = added.bias_or(x),
                      .residual_ptr = added.residual_or(x),
                      .out_ptr = y,
                      .rows = cuda::narrow(M),
                      .columns = cuda::narrow(N),
                      .blocks = weight.blocks(),
                      .groups = cuda::narrow(weight.groups),
                      .group_shift = weight.group_shift(),
                      .zero_row = weight.zero_row,
                      .zero_step = weight.zero_step,
                      .with_bias = added.with_bias(),
                      .with_residual = added.with_residual()},
                     weight.constant);
    return true;
  }

  // Some.
  void tiles() const {
    using Gemm = kernels::int4_gemm;
    const Gemm::Dims dims{.columns = N, .rows = M, .tiles64 = ceil_div(N, 64)};
    const Row& row = gpu.choose<Gemm>(dims);
    const int64_t splits = row.constants[Gemm::SPLITS];
    const kernels::int4_gemm_workspace workspace{.SPLITS = splits, .columns = N, .rows = M};
    void* const parts = splits > 1 ? gpu.scratch(workspace.parts_bytes()) : nullptr;
    gpu.launch<Gemm>(row, dims,
                     {.x_ptr = x,
                      .weight_ptr = weight.q,
                      .scales_ptr = weight.scales,
                      .zeros_ptr = weight.zeros,
                      .bias_ptr = added.bias_or(x),
                      .residual_ptr = added.residual_or(x),
                      .out_ptr = y,
                      .part_ptr = parts,
                      .rows = cuda::narrow(M),
                      .columns = cuda::narrow(N),
                      .blocks = weight.blocks(),
                      .groups = cuda::narrow(weight.groups),
                      .group_size = cuda::narrow(weight.group_size),
                      .zero_row = weight.zero_row,
                      .zero_step = weight.zero_step,
                      .with_bias = added.with_bias(),
                      .with_residual = added.with_residual()});
    if (splits > 1) cuda::sum_parts(gpu, parts, splits, M, N, added, y);
  }

  // Many.
  void unpacked() const {
    using Unpack = kernels::int4_unpack;
    cuda::unpacked_product(gpu, x, M, N, weight.depth, added, y, [&](int64_t first, int64_t rows, void* part) {
      const Unpack::Dims dims{.blocks = weight.blocks(), .part = rows};
      gpu.launch<Unpack>(gpu.choose<Unpack>(dims), dims,
                         {.weight_ptr = weight.q,
                          .scales_ptr = weight.scales,
                          .zeros_ptr = weight.zeros,
                          .out_ptr = part,
                          .first = cuda::narrow(first),
                          .blocks = weight.blocks(),
                          .groups = cuda::narrow(weight.groups),
                          .group_size = cuda::narrow(weight.group_size),
                          .zero_row = weight.zero_row,
                          .zero_step = weight.zero_step});
    });
  }

  // Any depth and any group.
  void any() const {
    using Any = kernels::int4_any;
    const Any::Dims dims{.columns = N, .rows = M};
    gpu.launch<Any>(gpu.choose<Any>(dims), dims,
                    {.x_ptr = x,
                     .weight_ptr = weight.q,
                     .scales_ptr = weight.scales,
                     .zeros_ptr = weight.zeros,
                     .bias_ptr = added.bias_or(x),
                     .residual_ptr = added.residual_or(x),
                     .out_ptr = y,
                     .rows = cuda::narrow(M),
                     .columns = cuda::narrow(N),
                     .depth = cuda::narrow(weight.depth),
                     .groups = cuda::narrow(weight.groups),
                     .group_size = cuda::narrow(weight.group_size),
                     .zero_row = weight.zero_row,
                     .zero_step = weight.zero_step,
                     .with_bias = added.with_bias(),
                     .with_residual = added.with_residual()});
  }
};

}  // namespace

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const cuda::Int4Weight weight(gpu, call, input::weight, call.value(name::K), call.value(name::group_size));
  const Product product{gpu,
                        weight,
                        call.input(input::x).data,
                        {call.input(input::bias).data, call.input(input::residual).data},
                        call.output(output::y).data,
                        call.value(name::T),
                        call.value(name::N)};
  if (!weight.blocked()) return product.any();
  if (product.in_registers()) return;
  if (product.M <= kVectorRows) return product.vectors();
  if (product.M <= kTileRows) return product.tiles();
  product.unpacked();
}

}  // namespace piccard::matmul_int4
